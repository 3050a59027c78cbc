"""What every fleet promises about machines, on the fake one and on the real one over Ray."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from coordinator.fleet import HeldMachine, Shape, Waiting
from mesh.errors import NotFoundError
from mesh.ids import Incarnation, MachineName, RunUid, new_run_uid
from tests.contract.fleet_stages import FakeStage, RayStage, Stage

LIMIT_S = 30.0
A_WHILE_S = 0.5
"""For what must not happen: long enough to be seen if it did."""
MACHINES = 3

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ray_stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RayStage]:
    stage = await RayStage.start(tmp_path_factory.mktemp("f"), machines=MACHINES)
    yield stage
    await stage.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def real(ray_stage: RayStage) -> AsyncIterator[RayStage]:
    """With all of its machines free, whatever the test before did."""
    before = await ray_stage.names()
    if len(before) < MACHINES:
        cordoned = sum(f.is_cordoned and f.is_alive for f in await ray_stage.fleet.machines())
        await ray_stage.host("ensure", MACHINES + cordoned)
    yield ray_stage


@pytest.fixture(params=["fake", pytest.param("ray", marks=pytest.mark.ray)])
def stage(request: pytest.FixtureRequest) -> Stage:
    if request.param == "fake":
        return FakeStage()
    found: RayStage = request.getfixturevalue("real")
    return found


class Asker:
    """One run that asks for machines."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.uid = new_run_uid()
        self.heard: list[Waiting] = []

    async def reserve(
        self, nodes: int, *, reservation: int = 1, avoid: tuple[MachineName, ...] = ()
    ) -> list[MachineName]:
        shape = Shape(nodes=nodes, gpus_per_node=0, gpu_types=(), avoid=avoid)
        async with asyncio.timeout(LIMIT_S):
            found = await self.stage.fleet.reserve(self.uid, reservation, shape, on_waiting=self.heard.append)
        return [placement.machine for placement in found]

    async def release(self, machine: MachineName, *, is_clean: bool = True, reservation: int = 1) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.stage.fleet.release(self.uid, reservation, machine, is_clean=is_clean)

    async def withdraw(self, *, reservation: int = 1) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.stage.fleet.withdraw(self.uid, reservation)

    async def until_heard(self, condition: Callable[[Waiting], bool] = lambda _: True) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not any(map(condition, self.heard)):
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture(loop_scope="module")
async def asker(stage: Stage) -> AsyncIterator[Callable[[], Asker]]:
    made: list[Asker] = []

    def make() -> Asker:
        made.append(Asker(stage))
        return made[-1]

    yield make
    for one in made:
        for reservation in (1, 2):
            await one.withdraw(reservation=reservation)


MakeAsker = Callable[[], Asker]


def _begin(work: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(work)


async def test_two_gangs_of_two_on_three_machines_never_hold_half_each(
    stage: Stage, asker: MakeAsker
) -> None:
    """Case 11."""
    first, second = asker(), asker()
    tasks = {_begin(first.reserve(2)): first, _begin(second.reserve(2)): second}
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT_S)
    assert len(done) == 1
    winner, loser = tasks[done.pop()], tasks[next(iter(waiting))]
    await loser.until_heard(lambda w: (w.is_possible and "in use" in w.why) or not stage.is_real)
    if isinstance(stage, RayStage):
        used = await stage.host("used_slots")
        assert sum(used.values()) == 2
    await winner.withdraw()
    assert len(await waiting.pop()) == 2


async def test_what_is_to_be_avoided_is_not_given(stage: Stage, asker: MakeAsker) -> None:
    one, two, three = (await stage.names())[:3]
    assert await asker().reserve(1, avoid=(one, two)) == [three]
    hopeless = asker()
    task = _begin(hopeless.reserve(1, avoid=(one, two, three)))
    await hopeless.until_heard(lambda w: not w.is_possible)
    task.cancel()
    await asyncio.wait([task])


async def test_one_of_two_is_given_back_and_the_other_kept(stage: Stage, asker: MakeAsker) -> None:
    holder, other, third = asker(), asker(), asker()
    first, second = await holder.reserve(2)
    await asker().reserve(1)
    await holder.release(first)
    assert await other.reserve(1) == [first]
    task = _begin(third.reserve(1))
    await third.until_heard()
    assert not task.done()
    await holder.release(second)
    assert await task == [second]


async def test_asking_again_finds_what_is_held_also_after_a_crash(stage: Stage, asker: MakeAsker) -> None:
    one = asker()
    held = await one.reserve(2)
    assert await one.reserve(2) == held
    await stage.crash_coordinator()
    assert await one.reserve(2) == held
    await stage.crash_coordinator()
    known = [HeldMachine(name=machine, reservation=1) for machine in held]
    assert await stage.fleet.held_by(one.uid) == known
    assert await stage.fleet.held_by(asker().uid) == []
    assert await stage.fleet.holders() == {one.uid}
    await one.withdraw()
    assert await stage.fleet.holders() == set()
    assert len(await asker().reserve(3)) == 3


async def test_withdrawing_while_waiting_leaves_nothing(stage: Stage, asker: MakeAsker) -> None:
    holder, waiter = asker(), asker()
    await holder.reserve(2)
    task = _begin(waiter.reserve(2))
    await waiter.until_heard()
    task.cancel()
    await asyncio.wait([task])
    await waiter.withdraw()
    await holder.withdraw()
    assert len(await asker().reserve(3)) == 3


async def test_everything_may_be_done_twice(stage: Stage, asker: MakeAsker) -> None:
    one = asker()
    await one.withdraw()
    first, second = await one.reserve(2)
    for _ in range(2):
        await one.release(first)
        await one.release(second, is_clean=False)
        await one.withdraw()
    assert len(await asker().reserve(3)) == 3


async def test_a_late_release_does_not_take_the_machine_from_who_has_it_now(
    stage: Stage, asker: MakeAsker
) -> None:
    one, other = asker(), asker()
    held = await one.reserve(3)
    for machine in held:
        await one.release(machine)
    assert await other.reserve(3) == held
    await one.release(held[0])
    task = _begin(asker().reserve(1))
    await asyncio.wait([task], timeout=A_WHILE_S)
    assert not task.done()
    await other.release(held[1])
    assert await task == [held[1]]


async def test_a_machine_that_is_lost_while_it_is_held_is_given_back_and_not_given_again(
    stage: Stage, asker: MakeAsker
) -> None:
    holder, other = asker(), asker()
    first, second = await holder.reserve(2)
    await stage.lose(first)
    await holder.release(first, is_clean=False)
    facts = {f.name: f for f in await stage.fleet.machines()}
    assert not facts[first].is_alive
    got = await other.reserve(1, avoid=(second,))
    assert got and got[0] not in (first, second)


async def test_a_look_measures_every_way_of_the_new_ones_and_names_who_is_not_there(stage: Stage) -> None:
    one, two, three = await stage.names()
    async with asyncio.timeout(LIMIT_S):
        looked = await stage.fleet.look({0: one, 2: two, 5: three}, fresh=[2])
        nobody = await stage.fleet.look({0: MachineName("nobody"), 1: one}, fresh=[0, 1])
    seen = looked.seen
    assert looked.absent == {}
    assert {rank: facts.machine for rank, facts in seen.members.items()} == {0: one, 2: two, 5: three}
    assert seen.asked == seen.reach.keys() == seen.push.keys() == {(0, 2), (2, 0), (5, 2), (2, 5)}
    assert all(reach.is_open for reach in seen.reach.values())
    assert all(push.bytes_per_s for push in seen.push.values())
    assert nobody.absent == {0: "nobody is lost."}
    assert nobody.seen.reach == {}


async def test_nobody_gets_a_machine_that_is_wanted_back(stage: Stage, asker: MakeAsker) -> None:
    one, two, three = (await stage.names())[:3]
    with pytest.raises(NotFoundError):
        await stage.fleet.cordon(MachineName("nowhere"))
    holder = asker()
    assert await holder.reserve(1, avoid=(two, three)) == [one]
    await stage.fleet.cordon(one)
    await stage.crash_coordinator()
    facts = {f.name: f for f in await stage.fleet.machines()}
    assert facts[one].is_cordoned
    await holder.release(one)
    waiter = asker()
    task = _begin(waiter.reserve(3))
    await waiter.until_heard(lambda w: "wanted back" in w.why)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


# ---- the real one alone -----------------------------------------------------------------------------


@pytest.mark.ray
async def test_half_of_a_reservation_is_made_whole_after_a_crash(real: RayStage) -> None:
    one = Asker(real)
    names = await real.names()
    await real.host("reserve_half", one.uid, 1, names[1])
    await real.crash_coordinator()
    held = await one.reserve(2)
    assert len(held) == 2
    used = await real.host("used_slots")
    assert {name for name, share in used.items() if share} == set(held)
    await one.withdraw()
    assert not any((await real.host("used_slots")).values())


@pytest.mark.ray
@pytest.mark.slow
async def test_what_somebody_else_has_is_not_waited_for_with_half_in_hand(real: RayStage) -> None:
    names = (await real.names())[:3]
    await real.host("take_slot", names[0])
    big, small = Asker(real), Asker(real)
    task = _begin(big.reserve(3))
    await big.until_heard()
    assert await small.reserve(2) == names[1:]
    await small.withdraw()
    await real.host("free_slot", names[0])
    assert await task == names
    await big.withdraw()


def _stray(real_dir: Path, uid: RunUid, rank: int) -> tuple[Incarnation, subprocess.Popen[bytes]]:
    """A process of a rank's life whose agent, keeper and supervisor are dead, with a child that hides."""
    incarnation = Incarnation.parse(f"{uid}.1.{rank}.0123456789abcdef")
    rank_dir = real_dir / "runs" / uid / str(rank)
    life = rank_dir / "epochs" / "1-0123456789abcdef"
    life.mkdir(parents=True)
    (rank_dir / "state").mkdir()
    process = subprocess.Popen(
        ["/bin/sh", "-c", "trap '' TERM; env -i sleep 600 & wait"],
        env={
            **os.environ,
            "NODUS_INCARNATION": str(incarnation),
            "NODUS_STATE_DIR": str(rank_dir / "state"),
        },
        start_new_session=True,
    )
    return incarnation, process


@pytest.mark.ray
async def test_what_still_runs_on_an_unclean_machine_is_ended_before_anybody_gets_it(real: RayStage) -> None:
    one, other = Asker(real), Asker(real)
    first, second, *_ = await one.reserve(3)
    dirs = {name: Path(await real.host("machine_dir", name)) for name in (first, second)}
    _, stray = _stray(dirs[first], one.uid, 0)
    _, healthy = _stray(dirs[second], one.uid, 1)
    neighbour = _stray(dirs[first], other.uid, 0)[1]
    try:
        child = psutil.Process(stray.pid).children()
        task = _begin(other.reserve(1))
        await other.until_heard()
        await one.release(first, is_clean=False)
        assert stray.wait(0) == -9
        assert not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in child)
        assert await task == [first]
        assert healthy.poll() is None, "the same run's rank on another machine of this host"
        assert neighbour.poll() is None
    finally:
        for process in (stray, healthy, neighbour):
            if process.poll() is None:
                for below in psutil.Process(process.pid).children():
                    below.kill()
                process.kill()
                process.wait()
        await one.withdraw()
        await other.withdraw()


@pytest.mark.ray
async def test_a_machine_that_does_not_answer_is_kept_until_it_does(real: RayStage) -> None:
    one, other = Asker(real), Asker(real)
    first, *_ = await one.reserve(3)
    await real.host("freeze_machine", first)
    try:
        release = _begin(one.release(first, is_clean=False))
        task = _begin(other.reserve(1))
        await other.until_heard()
        assert not release.done()
        await real.crash_coordinator()
        await asyncio.wait([release, task])
        again = _begin(one.release(first, is_clean=False))
        task = _begin(other.reserve(1))
        await asyncio.wait([again, task], timeout=A_WHILE_S)
        assert not again.done()
        assert not task.done()
    finally:
        await real.host("thaw_machine", first)
    await again
    assert await task == [first]
    await one.withdraw()
    await other.withdraw()
