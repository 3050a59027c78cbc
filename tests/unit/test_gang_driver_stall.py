"""A coordinator that stood still while a deadline passed hears what was said meanwhile before it lets time count."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any, cast

import pytest

from coordinator.core.effects import FenceMember
from coordinator.core.events import BarrierOpened, GangEvent, Now, TimePassed
from coordinator.core.gang import GangCore
from coordinator.core.gang_state import Gang
from coordinator.core.pace import STALLED_S
from coordinator.gang_driver import INBOX_MAX, GangDriver, real_now
from mesh.errors import TransportError
from mesh.ids import Epoch, Incarnation, Rank, RunName, RunUid, new_token
from mesh.messages import FenceOrder
from mesh.plan import RunPlan

LIMIT_S = 20.0


class Core(GangCore):
    """One deadline; remembers what it was told, and in which order."""

    def __init__(self, deadline: float) -> None:
        plan = RunPlan(name=RunName("r"), command=("true",), nodes=2)
        super().__init__(Gang(uid=RunUid("run"), plan=plan, created_at=0.0), new_token=new_token)
        self.deadline: float | None = deadline
        self.told: list[GangEvent] = []

    def next_deadline(self) -> float | None:
        return self.deadline

    def handle(self, event: GangEvent, now: Now) -> list[Any]:
        self.told.append(event)
        if isinstance(event, TimePassed):
            self.deadline = None
        return []


def driver_of(core: Core) -> GangDriver:
    unused = cast(Any, None)
    return GangDriver(
        core, journal=unused, fleet=unused, store=unused, join_order=unused, on_events=lambda: None
    )


@pytest.mark.parametrize("stands_still", [True, False])
async def test_what_lies_in_the_sockets_comes_before_the_deadline_that_was_slept_through(
    stands_still: bool,
) -> None:
    core = Core(real_now().mono + 0.05)
    driver = driver_of(core)
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()

    def read() -> None:
        """As the line to the store does: bytes become an event."""
        for number in ours.recv(16):
            driver.post(BarrierOpened(epoch=Epoch(number)))

    loop.add_reader(ours, read)
    running = asyncio.create_task(driver.run())
    await asyncio.sleep(0)
    if stands_still:
        theirs.send(b"\x01\x02")
        time.sleep(STALLED_S + 0.3)
    async with asyncio.timeout(LIMIT_S):
        while core.deadline is not None:
            await asyncio.sleep(0.01)
    opened = [BarrierOpened(epoch=Epoch(1)), BarrierOpened(epoch=Epoch(2))] if stands_still else []
    assert core.told == [*opened, TimePassed()]
    loop.remove_reader(ours)
    await driver.stop()
    await running
    ours.close()
    theirs.close()


async def test_who_found_the_inbox_full_is_told_when_the_driver_ends() -> None:
    class FailingCore(Core):
        def handle(self, event: GangEvent, now: Now) -> list[Any]:
            raise AssertionError("a bug")

    driver = driver_of(FailingCore(real_now().mono + LIMIT_S))
    for _ in range(INBOX_MAX):
        driver.post(TimePassed())
    waiting = asyncio.create_task(driver.post_durably(TimePassed()))
    await asyncio.sleep(0)
    with pytest.raises(AssertionError):
        await driver.run()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TransportError):
            await waiting


async def test_a_shorter_grace_overtakes_a_fence_that_is_not_taken_yet() -> None:
    """A machine is wanted back in two seconds, while a member that had thirty has not answered."""
    asked: list[float] = []

    class Fleet:
        async def fence(self, order: FenceOrder) -> None:
            asked.append(order.grace_s)
            await asyncio.Event().wait()

    driver = driver_of(Core(real_now().mono + LIMIT_S))
    driver._fleet = cast(Any, Fleet())
    me = Incarnation(run_uid=RunUid("run"), epoch=Epoch(1), rank=Rank(0), token=new_token())
    for grace_s in (30.0, 2.0):
        driver._perform(FenceMember(incarnation=me, grace_s=grace_s))
        await asyncio.sleep(0)
    assert asked == [30.0, 2.0]
    await driver.stop()
    await driver.run()
