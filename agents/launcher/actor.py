"""The Launcher as a Ray actor: a process of its own, so that what it starts inherits nothing of the member's.

All that is Ray lies in this file; what a launcher does is `agents.launcher.launcher`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agents.core import events as ev
from agents.launcher.base import LaunchSpec
from agents.launcher.launcher import Launcher, own_this_process
from mesh.errors import TransportError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

CONCURRENT_CALLS_MAX = 16


class LauncherActor:
    """See `Launcher`."""

    def __init__(self) -> None:
        self._launcher = Launcher(owns_process=own_this_process())

    async def warm(self) -> None:
        await self._launcher.warm()

    async def launch(self, spec: LaunchSpec) -> None:
        await self._launcher.launch(spec)

    async def next_event(self) -> ev.MemberEvent:
        return await self._launcher.next_event()

    async def stop(self, grace_s: float) -> None:
        await self._launcher.stop(grace_s)

    async def kill(self) -> None:
        await self._launcher.kill()

    async def hand_over_logs(self, stall_s: float) -> bool:
        return await self._launcher.hand_over_logs(stall_s=stall_s)

    async def close(self) -> None:
        await self._launcher.close()


_RemoteLauncher: Any = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=CONCURRENT_CALLS_MAX)(
    LauncherActor
)


class RayLauncher:
    """The handle to a LauncherActor on this machine, made by `begin` or the first call."""

    def __init__(self) -> None:
        self._actor: Any = None

    def begin(self) -> None:
        """Asks for the actor, so that it comes up while its member waits for the order. Does not wait."""
        self._handle()

    async def warm(self) -> None:
        await _answer(self._handle().warm.remote())

    async def launch(self, spec: LaunchSpec) -> None:
        await _answer(self._handle().launch.remote(spec))

    async def next_event(self) -> ev.MemberEvent:
        event: ev.MemberEvent = await _answer(self._handle().next_event.remote())
        return event

    async def stop(self, grace_s: float) -> None:
        await _answer(self._handle().stop.remote(grace_s))

    async def kill(self) -> None:
        await _answer(self._handle().kill.remote())

    async def hand_over_logs(self, *, stall_s: float) -> bool:
        return bool(await _answer(self._handle().hand_over_logs.remote(stall_s)))

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            await _answer(actor.close.remote())
        finally:
            ray.kill(actor)

    def _handle(self) -> Any:
        if self._actor is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self._actor = _RemoteLauncher.options(scheduling_strategy=here).remote()
        return self._actor


async def _answer(reference: Awaitable[_T]) -> _T:
    """Ray's errors become ours: whatever it was, this launcher cannot be spoken to."""
    try:
        return await reference
    except RayError as error:
        _log.warning("The launcher cannot be spoken to: %s", error)
        raise TransportError("The launcher's process is gone, and the command with it.") from error
