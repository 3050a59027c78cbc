"""The keeper of spare workers over raylets that a test plays: who is asked, and what a raylet that is broken costs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from coordinator.ray_workers import NoAnswerError, WorkerKeeper
from coordinator.warm_workers import WorkerNode

LIMIT_S = 5.0


class PlayedRaylets:
    """Each starts what it is told to, at once."""

    def __init__(self) -> None:
        self.waiting = {"a": 0, "b": 0}
        self.held = threading.Event()
        self.held.set()

    def idle(self, raylet: str) -> frozenset[bytes]:
        if raylet == "broken":
            raise NoAnswerError("connection refused")
        assert self.held.wait(LIMIT_S)
        return frozenset(b"%d" % number for number in range(self.waiting[raylet]))

    def start(self, raylet: str, count: int) -> None:
        self.waiting[raylet] += count


def nodes(*raylets: str) -> list[WorkerNode]:
    return [WorkerNode(node_id=f"node-{raylet}", raylet=raylet, wanted=2) for raylet in raylets]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest_asyncio.fixture
async def raylets() -> PlayedRaylets:
    return PlayedRaylets()


@pytest_asyncio.fixture
async def keeper(raylets: PlayedRaylets) -> AsyncIterator[WorkerKeeper]:
    keeper = WorkerKeeper(raylets)
    yield keeper
    raylets.held.set()
    await keeper.close()


async def test_every_node_has_its_workers_also_beside_a_broken_one(
    keeper: WorkerKeeper, raylets: PlayedRaylets
) -> None:
    keeper.seen(nodes("broken", "a", "b"))
    await until(lambda: raylets.waiting == {"a": 2, "b": 2})


async def test_a_use_is_made_up_for_when_the_machine_is_given_back(
    keeper: WorkerKeeper, raylets: PlayedRaylets
) -> None:
    raylets.waiting["a"] = 2
    keeper.seen(nodes("a"))
    keeper.used("node-a", "member")
    raylets.waiting["a"] = 0
    keeper.look_at("node-a")
    await until(lambda: raylets.waiting["a"] == 2)


async def test_what_changes_during_a_look_is_looked_at_after_it(
    keeper: WorkerKeeper, raylets: PlayedRaylets
) -> None:
    raylets.waiting["a"] = 2
    raylets.held.clear()
    keeper.seen(nodes("a"))
    await until(lambda: "node-a" in keeper._looks)
    keeper.look_at("node-a")
    raylets.held.set()
    await until(lambda: not keeper._looks)
    raylets.waiting["a"] = 0
    keeper.look_at("node-a")
    await until(lambda: raylets.waiting["a"] == 2)


async def test_closed_it_asks_nobody(raylets: PlayedRaylets) -> None:
    keeper = WorkerKeeper(raylets)
    keeper.seen(nodes("a"))
    await keeper.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("turns", range(4))
async def test_it_is_closed_however_lately_something_has_changed(raylets: PlayedRaylets, turns: int) -> None:
    keeper = WorkerKeeper(raylets)
    keeper.seen(nodes("a"))
    await until(lambda: raylets.waiting["a"] == 2 and not keeper._looks)
    keeper.seen(nodes("a"))
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        await keeper.close()
