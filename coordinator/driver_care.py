"""What becomes of a run whose driver ended by a fault of this program, or whose row cannot be read, or is gone.

Rules of this file:
1. A driver that fell is made anew from the journal, as after a crash of the coordinator: what it had not written down
   was not done. Whoever waited for it was told, and repeats itself.
2. It may fall `FALLS_MAX` times in a row, each `HEALTHY_S` at most after the one before. Then its run has failed, and
   is salvaged: whatever it holds is swept and given back (`coordinator.salvage`).
3. A row that cannot be read stops nothing but its run, which is salvaged too.
4. A run that holds machines and has no row (the journal was damaged, or replaced) can be named, shown and stopped by
   nobody. Everything of it is swept, its machines are given back, and the status says so. What it has saved stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from coordinator.core.effects import Announcement
from coordinator.core.events import CoordinatorRecovered, Now
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Gang
from coordinator.fleet import Fleet
from coordinator.gang_driver import GangDriver
from coordinator.journal import Journal, RunRow
from coordinator.salvage import log_unreadable, salvaged_gang
from mesh.errors import MeshError
from mesh.ids import RunUid
from mesh.reasons import Reason

FALLS_MAX = 3
HEALTHY_S = 600.0
REVIVE_FIRST_S = 0.1
"""Before a driver is made anew; ten times as long after each fall."""
RETRY_S = 1.0
TAKE_UP_LIMIT_S = 5.0
"""How long a start waits for what it salvages."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Falls:
    count: int
    last_at: float
    fault: str


class DriverCare:
    """Adopts runs from their rows, and takes up again whose driver fell.

    Args:
        adopt: makes a driver for the gang, in place of any other of its run.
        is_current: whether this driver is still the run's; False once the run is deleted, or the coordinator stops.
        knows: whether there is such a run, now.
        spawn: runs something in the background, under a name, until the coordinator stops.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        fleet: Fleet,
        now: Callable[[], Now],
        adopt: Callable[[Gang, dict[str, Any]], GangDriver],
        is_current: Callable[[GangDriver], bool],
        knows: Callable[[RunUid], bool],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._journal = journal
        self._fleet = fleet
        self._now = now
        self._adopt = adopt
        self._is_current = is_current
        self._knows = knows
        self._spawn = spawn
        self._falls: dict[RunUid, _Falls] = {}
        self._strays: dict[RunUid, str] = {}
        """What is told of each."""

    def details(self, name_of: Callable[[RunUid], str]) -> dict[str, str]:
        """For `status`: whose drivers fell, and how often; runs that have no row."""
        falls = [f"run {name_of(uid)} ({f.fault}, {f.count} times)" for uid, f in self._falls.items()]
        told = {"faults": "; ".join(falls), "strays": "; ".join(self._strays.values())}
        return {key: text for key, text in told.items() if text}

    async def take_up(self, rows: Iterable[RunRow]) -> None:
        """Every run that the journal has, when the coordinator starts; and those that it should have."""
        salvages, uids = [], set()
        for row in rows:
            uids.add(row.uid)
            try:
                gang = gang_of(row.record)
            except Exception as error:  # noqa: BLE001 - the guard of rule 3
                log_unreadable(row, error)
                work = self._salvage(row, Reason.UNREADABLE, _unreadable(error))
                salvages.append(self._spawn(work, f"salvage {row.name}"))
            else:
                self._resume(gang, row)
        self._spawn(self._end_strays(uids), "end what the journal does not know")
        if salvages:  # so that a run that is asked for is there; its fate does not hang on it
            await asyncio.wait(salvages, timeout=TAKE_UP_LIMIT_S)

    async def _end_strays(self, uids: set[RunUid]) -> None:
        holders = await _insist(self._fleet.holders)
        for uid in sorted(uid for uid in holders if uid not in uids and not self._knows(uid)):
            self._spawn(self._end_stray(uid), f"end {uid}")

    async def _end_stray(self, uid: RunUid) -> None:
        held = await _insist(lambda: self._fleet.held_by(uid))
        told = f"run {uid} is not in the journal: everything of it on {', '.join(m.name for m in held)} is"
        self._strays[uid] = f"{told} being ended"
        _log.critical("%s", self._strays[uid])
        for one in held:
            giving_back = partial(self._fleet.release, uid, one.reservation, one.name, is_clean=False)
            await _insist(giving_back)
        self._strays[uid] = f"{told} ended"
        _log.critical("%s", self._strays[uid])

    def fell(self, driver: GangDriver, fault: BaseException) -> None:
        """The driver's task ended by this exception."""
        name = driver.core.gang.plan.name
        _log.critical("the driver of run %s failed", name, exc_info=fault)
        now, before = self._now().mono, self._falls.get(driver.uid)
        is_in_a_row = before is not None and now - before.last_at < HEALTHY_S
        count = before.count + 1 if before is not None and is_in_a_row else 1
        self._falls[driver.uid] = falls = _Falls(count, now, repr(fault))
        self._spawn(self._revive(driver, falls), f"revive {name}")

    def forget(self, uid: RunUid) -> None:
        """The run is deleted."""
        self._falls.pop(uid, None)

    async def _revive(self, driver: GangDriver, falls: _Falls) -> None:
        await asyncio.sleep(REVIVE_FIRST_S * 10.0 ** (falls.count - 1))
        rows = await _insist(self._journal.runs)
        row = next((row for row in rows if row.uid == driver.uid), None)
        if row is None or not self._is_current(driver):
            return
        if falls.count > FALLS_MAX:
            message = f"This coordinator failed at this run {falls.count} times in a row: {falls.fault}."
            await self._salvage(row, Reason.INTERNAL, message, instead_of=driver)
            return
        try:
            gang = gang_of(row.record)
        except Exception as error:  # noqa: BLE001 - the guard of rule 3
            log_unreadable(row, error)
            await self._salvage(row, Reason.UNREADABLE, _unreadable(error), instead_of=driver)
            return
        self._resume(gang, row)

    def _resume(self, gang: Gang, row: RunRow) -> None:
        self._adopt(gang, row.job).post(CoordinatorRecovered())

    async def _salvage(
        self, row: RunRow, reason: Reason, message: str, *, instead_of: GangDriver | None = None
    ) -> None:
        held = await _insist(lambda: self._fleet.held_by(row.uid))
        now = self._now().wall
        message += " Its machines go to nobody before everything of it there has been ended."
        gang = salvaged_gang(row, held, reason=reason, message=message, now=now)
        told = Announcement(kind="Failed", message=message, reason=reason, epoch=gang.epoch)
        await _insist(lambda: self._journal.commit(row.uid, record_of(gang), [told], now))
        if instead_of is None or self._is_current(instead_of):
            self._resume(gang, row)


def _unreadable(error: Exception) -> str:
    return (
        f"The journal's entry of this run cannot be read ({type(error).__name__}: {error}); the coordinator's log has "
        "a copy. Submit it again under another name, or after `mesh delete`."
    )


async def _insist(call: Callable[[], Awaitable[T]]) -> T:
    """Again until it is done; the coordinator's stop ends it."""
    while True:
        try:
            return await call()
        except MeshError as error:
            _log.warning("trying again in %g s: %s", RETRY_S, error)
        await asyncio.sleep(RETRY_S)
