"""MemberNode: the Ray actor of one member, pinned to its machine. The member itself is `agents.member`.

All that is Ray lies in this file and in `agents.launcher.actor`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayError

from agents.launcher.actor import RayLauncher
from agents.machine_folder import GATEWAY_VARIABLE, machine_folder, owner_environment
from agents.member import Member, MemberConfig
from agents.network import MemberNetwork
from mesh.errors import MeshError, TransportError
from mesh.ids import Incarnation, MachineName
from mesh.messages import (
    COORDINATOR_NAME,
    RAY_NAMESPACE,
    CheckpointOrder,
    FenceOrder,
    JoinOrder,
    MemberCertificate,
    MemberReport,
)
from mesh.net.paths import NetworkFacts

CONCURRENT_CALLS_MAX = 32
_asking = ThreadPoolExecutor(1, thread_name_prefix="ask ray")
"""A head that has vanished holds each look at its directory up for a minute: that must take no thread from a kill."""


class MemberNodeActor:
    """See `Member`.

    Args:
        config: `machine` (its name); `machines_dir` (folder with one folder per machine) and `environment` (the
            snapshot that was taken before Ray was started), unless the machine has its own (`agents.machine_folder`);
            optional `address` (default: Ray's node address), `network` (where the machine stands, as
            `NetworkFacts.to_payload` says it) and `namespace`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        launcher = RayLauncher()
        launcher.begin()
        self._coordinator = CoordinatorHandle(namespace=config.get("namespace", RAY_NAMESPACE))
        self._member = Member(
            MemberConfig(
                address=config.get("address") or ray.util.get_node_ip_address(),
                machine_dir=machine_folder(config["machines_dir"], config["machine"]),
                base_environment=owner_environment(config["environment"]),
            ),
            send_report=self._coordinator.report,
            launcher=launcher,
            network=_network(config.get("network"), sign=self._coordinator.sign),
        )
        self._is_started = False

    async def join(self, order: JoinOrder) -> None:
        self._start()
        await self._member.join(order)

    async def fence(self, order: FenceOrder) -> None:
        self._start()
        await self._member.fence(order)

    async def about_part(self, order: CheckpointOrder) -> None:
        await self._member.about_part(order)

    async def leave(self) -> None:
        self._start()
        await self._member.leave()
        await self._member.close()

    def _start(self) -> None:
        """In the actor's own loop, which does not run yet while it is constructed."""
        if not self._is_started:
            self._is_started = True
            self._member.start()


def _network(payload: Mapping[str, Any] | None, *, sign: Any) -> MemberNetwork | None:
    """None on a machine that is not on the mesh: there nothing of it is imported."""
    facts = None if payload is None else NetworkFacts.from_payload(payload)
    if facts is None or not facts.is_on_mesh:
        return None
    from agents.mesh_network import MeshNetwork

    return MeshNetwork(facts, gateway=Path(os.environ.get(GATEWAY_VARIABLE, "")), sign=sign)


class CoordinatorHandle:
    """Asks the coordinator, wherever it runs now: it may have been restarted."""

    def __init__(self, *, namespace: str) -> None:
        self._namespace = namespace
        self._handle: Any = None

    async def report(self, report: MemberReport) -> bool:
        """True when it was taken. Raises TransportError when the coordinator cannot be reached now."""
        return bool(await self._ask("report", report))

    async def sign(
        self, incarnation: Incarnation, machine: MachineName, request_pem: bytes
    ) -> MemberCertificate:
        """The member's certificate. Raises what the coordinator raised, TransportError."""
        ok, value = await self._ask("sign_member", incarnation, machine, request_pem)
        if not ok:
            raise MeshError.from_wire(value)
        return cast(MemberCertificate, value)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            if self._handle is None:
                look = functools.partial(ray.get_actor, COORDINATOR_NAME, namespace=self._namespace)
                self._handle = await asyncio.get_running_loop().run_in_executor(_asking, look)
            return await getattr(self._handle, method).remote(*arguments)
        except (RayError, ValueError) as error:
            self._handle = None
            raise TransportError(f"The coordinator cannot be reached: {error}.") from error


MemberNode: Any = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=CONCURRENT_CALLS_MAX)(
    MemberNodeActor
)
