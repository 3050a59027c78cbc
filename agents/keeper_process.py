"""The member's side of its keeper: starts it, hears it, and notices when it is gone or does not run.

Rules of this file:
1. A keeper that ends without a word has lost the lease: it was killed, and nobody renews.
2. A keeper that says nothing for the length of a lease has lost it as well: it was stopped. Silence is counted in
   this process's own ticks, so that a machine that slept as a whole hears its keeper first (which then asks the
   store) and does not kill because time has passed for nobody.
3. The keeper is detached: it is what is left to end the command when this process is killed, and with it (by Ray)
   every child that it has.
4. Exactly one of granted and refused comes first; after granted, lost comes at most once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

import agents.keeper
import mesh
from agents.core import events as ev
from agents.line_process import LineProcess
from agents.signing_in import SERVES_VARIABLE
from mesh.errors import RemoteProtocolError
from mesh.messages import JoinOrder
from mesh.reasons import Reason

RELEASE_LIMIT_S = 3.0

_log = logging.getLogger(__name__)


def keeper_command() -> list[str]:
    """By path, without site-packages' start-up work: a keeper must be there in a tenth of a second."""
    return [sys.executable, "-S", "-P", str(Path(agents.keeper.__file__))]


def keeper_environment() -> dict[str, str]:
    """Where the keeper finds our packages and msgpack; nothing else of this process's environment."""
    roots = [Path(str(module.__file__)).resolve().parents[1] for module in (mesh, agents, msgpack)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(map(str, roots)))}


def keeper_config(order: JoinOrder) -> dict[str, Any]:
    """What a keeper is told first."""
    store = order.store
    return {
        "store": {"host": store.host, "port": store.port, "secret": store.secret, "source": store.source},
        "incarnation": str(order.incarnation),
        "ttl_s": order.lease_ttl_s,
        "guard_s": order.lease_guard_s,
        "heartbeat_s": order.heartbeat_s,
    }


class KeeperProcess:
    """One keeper. `start` it; it tells `tell` what becomes of the lease; `release` or `close` it.

    Args:
        order: whose lease, and its terms.
        tell: called on the loop with LeaseGranted, LeaseRefused or LeaseLost.
        watches_silence: rule 2; off only to see the keeper's own part of it.
    """

    def __init__(
        self,
        order: JoinOrder,
        *,
        tell: Callable[[ev.MemberEvent], None],
        watches_silence: bool = True,
    ) -> None:
        self._order = order
        self._watches_silence = watches_silence
        self._tell = tell
        self._process: LineProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._was_granted = False
        self._is_over = False
        self._silent_ticks = 0

    @property
    def pid(self) -> int | None:
        """Of the running keeper."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts it. A keeper that cannot be started is a refused lease."""
        order = self._order
        try:
            env = {**keeper_environment(), SERVES_VARIABLE: str(order.incarnation)}
            self._process = await LineProcess.start_detached(keeper_command(), env=env)
        except OSError as error:
            self._end(Reason.PREPARATION_FAILED, f"The keeper could not be started: {error}.")
            return
        self._process.send(keeper_config(order))
        name = str(order.incarnation)
        self._tasks = [asyncio.create_task(self._read(self._process), name=f"keeper {name}")]
        if self._watches_silence:
            self._tasks.append(asyncio.create_task(self._watch(), name=f"keeper watch {name}"))

    async def release(self) -> None:
        """Gives the lease back and ends the keeper. Idempotent."""
        self._is_over = True
        if self._process is not None:
            self._process.send({"op": "release"})
            await asyncio.wait(self._tasks[:1], timeout=RELEASE_LIMIT_S)
        await self.close()

    async def close(self) -> None:
        """Ends the keeper without giving the lease back. Idempotent."""
        self._is_over = True
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await process.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, process: LineProcess) -> None:
        try:
            while (message := await process.receive()) is not None:
                self._silent_ticks = 0
                self._on_message(message)
        except (RemoteProtocolError, KeyError, ValueError) as error:
            _log.exception("The keeper of %s said something else.", self._order.incarnation)
            self._end(Reason.LEASE_LOST, f"The keeper is not to be understood: {error}")
        self._end(Reason.LEASE_LOST, "The keeper process ended on its own.")

    def _on_message(self, message: Mapping[str, Any]) -> None:
        match message["ev"]:
            case "granted":
                self._was_granted = True
                self._tell(ev.LeaseGranted(incarnation=self._order.incarnation))
            case "refused" | "lost":
                self._end(Reason(message["reason"]), str(message["message"]))
            case "frozen" | "thawed":
                _log.warning("%s %s: %s", self._order.incarnation, message["ev"], message["message"])
            case "released":
                self._is_over = True

    def _end(self, reason: Reason, message: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        kind = ev.LeaseLost if self._was_granted else ev.LeaseRefused
        self._tell(kind(incarnation=self._order.incarnation, reason=reason, message=message))

    async def _watch(self) -> None:
        order = self._order
        ticks_max = max(2, math.floor((order.lease_ttl_s - order.lease_guard_s) / order.heartbeat_s))
        while not self._is_over:
            await asyncio.sleep(order.heartbeat_s)
            self._silent_ticks += 1
            if self._silent_ticks > ticks_max and self._was_granted:
                self._end(
                    Reason.LEASE_LOST,
                    f"The keeper has said nothing for {ticks_max} heartbeats.",
                )
