"""A launcher: one command and the shipping of its output, behind a handle that may lie in another process.

Rules of this file:
1. `Launcher` is the plain class; `agents.launcher.actor` puts it into a Ray actor and gives the same handle.
2. The supervisor is told what the head has (`acked`), so that the spool on the machine's disk stays small.
3. A launcher that has a process of its own makes that the reaper of its orphans: without control groups (whoever is
   not root) a daemon with an environment of its own can be found in no other way once its supervisor is dead.
"""

from __future__ import annotations

import logging
from typing import Protocol

from agents.core import events as ev
from agents.launcher.base import LaunchSpec, SupervisedCommand
from agents.logs import LogShipper
from agents.process_option import PR_SET_CHILD_SUBREAPER, set_process_option

_log = logging.getLogger(__name__)


class LauncherHandle(Protocol):
    """What a member needs from a launcher, in this process or in an actor's."""

    async def warm(self) -> None:
        """Returns when a command can be launched without waiting for this side."""

    async def launch(self, spec: LaunchSpec) -> None:
        """Begins. What comes of it is told by `next_event`. Raises TransportError when the launcher is gone."""

    async def next_event(self) -> ev.MemberEvent:
        """The next news of the command, in order. Raises TransportError when the launcher is gone."""

    async def stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL of the tree after `grace_s`; a later one may only shorten it.

        It may overtake `launch`: then nothing will be started, and CommandStartFailed says so.
        """

    async def kill(self) -> None:
        """SIGKILL of the tree, now. It may overtake `launch` as `stop` may."""

    async def hand_over_logs(self, *, stall_s: float) -> bool:
        """True when the head has all output; False when nothing more arrived for `stall_s`."""

    async def close(self) -> None:
        """Ends everything that is left, at once. Idempotent."""


def own_this_process() -> bool:
    """Makes this process the reaper of its orphans, for a Launcher that is all it is for. False where it cannot be."""
    return set_process_option(PR_SET_CHILD_SUBREAPER, 1)


class Launcher:
    """One command. See `LauncherHandle` for what each method promises, `SupervisedCommand` for `owns_process`."""

    def __init__(self, *, owns_process: bool = False) -> None:
        self._owns_process = owns_process
        self._command: SupervisedCommand | None = None
        self._shipper: LogShipper | None = None
        self._is_stopped = False
        """A stop or a kill came, perhaps before the launch."""

    async def warm(self) -> None:
        """Importing this module was all that had to be done."""

    async def launch(self, spec: LaunchSpec) -> None:
        assert self._command is None, "a launcher is for one command"
        command = SupervisedCommand(spec, owns_process=self._owns_process)
        self._command = command
        if self._is_stopped:
            command.stop(0)
        if spec.logs is not None:
            self._shipper = LogShipper(
                spec.spool_dir, spec.logs, spec.incarnation, on_acked=command.acknowledge
            )
            self._shipper.start()
        await command.start()

    async def next_event(self) -> ev.MemberEvent:
        event = await self._running().next_event()
        if self._shipper is not None:
            self._shipper.wake()
        return event

    async def stop(self, grace_s: float) -> None:
        self._is_stopped = True
        if self._command is not None:
            self._command.stop(grace_s)

    async def kill(self) -> None:
        self._is_stopped = True
        if self._command is not None:
            await self._command.kill()

    async def hand_over_logs(self, *, stall_s: float) -> bool:
        if self._shipper is None:
            return True
        is_delivered = await self._shipper.drain(stall_s)
        if not is_delivered:
            _log.warning("The last output was not delivered: %s", self._shipper.refusal or "no answer")
        return is_delivered

    async def close(self) -> None:
        if self._shipper is not None:
            await self._shipper.stop()
        if self._command is not None:
            await self._command.close()

    def _running(self) -> SupervisedCommand:
        assert self._command is not None, "nothing was launched"
        return self._command
