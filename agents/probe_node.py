"""ProbeNode: the Ray actor of one machine's end of a network check. The end itself is `agents.probing`.

It lives for one check, and dies with whoever made it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray

from agents.probing import Prober
from mesh.netcheck.measurements import MemberFacts, Reach

CONCURRENT_CALLS_MAX = 16


class ProbeNodeActor:
    """See `Prober`, whose arguments `config` has."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._prober = Prober(**config)

    async def start(self) -> MemberFacts:
        return await self._prober.start()

    async def reach(self, others: list[MemberFacts], is_patient: bool) -> dict[int, Reach]:
        return await self._prober.reach(others, is_patient=is_patient)

    async def heard(self) -> list[int]:
        return sorted(self._prober.heard)

    async def push(
        self, other: MemberFacts, seconds: float, limit_s: float, segment_bytes: int | None
    ) -> float | None:
        return await self._prober.push(other, seconds=seconds, limit_s=limit_s, segment_bytes=segment_bytes)

    async def stop(self) -> None:
        """Its ports are free when this returns: whoever comes next finds the one that it asks for."""
        await self._prober.stop()


ProbeNode: Any = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=CONCURRENT_CALLS_MAX)(ProbeNodeActor)
