"""The coordinator's shell with a real journal, and machines and store that do what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.chaos import HarmOrder
from coordinator import driver_care, harm_watch
from coordinator.coordinator import Coordinator
from coordinator.core import recovery
from coordinator.core.effects import GangEffect, OrderMember
from coordinator.core.events import BarrierOpened, GangEvent, Now
from coordinator.core.gang import GangCore
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Gang
from coordinator.journal import SqlJournal
from mesh.errors import ConflictError, MeshError, NotFoundError, StorageError, TransportError
from mesh.ids import Epoch, Incarnation, MachineName, Rank, RunName, RunUid, new_token
from mesh.messages import (
    CauseEvidence,
    JoinOrder,
    MemberArrived,
    MemberExited,
    MemberFenced,
    MemberStarted,
    ProcessExit,
)
from mesh.plan import Endpoint, RunPlan
from mesh.resources import Run
from mesh.states import FailurePolicy, RunState
from tests.fakes.fleet import FakeFleet, FakeStore

NOWHERE = Endpoint(host="127.0.0.1", port=1, secret="s")


def _plan(name: str, nodes: int = 2) -> RunPlan:
    return RunPlan(name=RunName(name), command=("true",), nodes=nodes)


def _join_order(plan: RunPlan, effect: OrderMember) -> JoinOrder:
    return JoinOrder(
        incarnation=effect.incarnation, plan=plan, machine=effect.machine, store=NOWHERE, logs=NOWHERE,
    )  # fmt: skip


class Bench:
    """One coordinator at a time over one journal file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fleet = FakeFleet()
        self.store = FakeStore()
        self.coordinator = self._make()

    def _make(self) -> Coordinator:
        self.journal = SqlJournal(f"sqlite:///{self.folder}/journal.db")
        return Coordinator(
            journal=self.journal, fleet=self.fleet, store=self.store, join_order=_join_order,
            deployment={"version": "0", "local": True},
        )  # fmt: skip

    async def restart(self) -> None:
        """What a crash leaves: the journal, and the machines as they are."""
        await self.coordinator.stop()
        self.coordinator = self._make()
        await self.coordinator.start()

    async def submit(self, name: str, request_id: str | None = None) -> Run:
        return await self.coordinator.submit({"spec": {}}, _plan(name).to_record(), request_id)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for a condition; its deadline is far beyond what anything here takes."""
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.001)

    async def until_state(self, name: str, state: RunState) -> Run:
        async with asyncio.timeout(10):
            while (run := await self.coordinator.get_run(name))["status"]["state"] != state:
                await asyncio.sleep(0.001)
            return run

    async def until_cancelled(self, name: str) -> None:
        """Asked again until somebody looks after the run; its members confirm their fences."""
        async with asyncio.timeout(10):
            while True:
                try:
                    await self.coordinator.cancel(name, "")
                    break
                except TransportError:
                    await asyncio.sleep(0.001)
        await self.until(lambda: bool(self.fleet.fences))
        await self.fenced()
        await self.until_state(name, RunState.CANCELLED)

    def incarnations(self) -> list[Incarnation]:
        return [order.incarnation for order in self.fleet.orders]

    async def start_all(self) -> None:
        await self.until(lambda: len(self.fleet.orders) >= 2)
        uid, epoch = self.incarnations()[-1].run_uid, self.incarnations()[-1].epoch
        for member in self.incarnations():
            await self.coordinator.report(MemberArrived(incarnation=member, at=time.time()))
        self.store.opened.add((uid, epoch))
        self.coordinator.post(uid, BarrierOpened(epoch=epoch))
        for member in self.incarnations():
            await self.coordinator.report(
                MemberStarted(incarnation=member, at=time.time(), pid=1, master_port=29500)
            )

    async def end(self, member: Incarnation, code: int) -> None:
        await self.coordinator.report(
            MemberExited(
                incarnation=member, at=time.time(), exit=ProcessExit(code=code), evidence=CauseEvidence()
            )
        )

    async def fenced(self) -> None:
        for member in self.incarnations():
            await self.coordinator.report(MemberFenced(incarnation=member, at=time.time()))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    await bench.coordinator.start()
    yield bench
    await bench.coordinator.stop()


async def test_a_run_goes_from_submit_to_success_and_gives_its_machines_back(bench: Bench) -> None:
    run = await bench.submit("good")
    assert run["status"]["state"] == "Pending"
    await bench.start_all()
    run = await bench.until_state("good", RunState.RUNNING)
    assert [r["state"] for r in run["status"]["ranks"]] == ["Running", "Running"]
    assert (await bench.coordinator.status())["machines"] == {"Ready": 0, "InUse": 2, "Leaving": 0, "Lost": 0}
    for member in bench.incarnations():
        await bench.end(member, 0)
    await bench.fenced()
    run = await bench.until_state("good", RunState.SUCCEEDED)
    assert run["status"]["exitCode"] == 0
    await bench.until(lambda: not bench.fleet.held)
    assert {i.rank for i in bench.fleet.dismissed} == {0, 1}
    attempts = await bench.coordinator.list_attempts({"nodus.dev/job": "good", "nodus.dev/rank": "1"})
    assert [(a["rank"], a["epoch"], a["exit"]) for a in attempts] == [(1, 1, {"code": 0, "signal": None})]


async def test_a_failure_is_fenced_and_its_exit_code_is_the_runs(bench: Bench) -> None:
    await bench.submit("bad")
    await bench.start_all()
    await bench.end(bench.incarnations()[1], 42)
    await bench.until(lambda: len(bench.fleet.fences) == 2)
    await bench.fenced()
    run = await bench.until_state("bad", RunState.FAILED)
    assert run["status"]["exitCode"] == 42
    assert run["status"]["cause"] is not None and run["status"]["cause"]["rank"] == 1


async def test_a_rank_starts_again_alone_once_the_store_has_admitted_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "LONE_WINDOW_S", 0.05)
    plan = replace(_plan("lone"), on_process_failure=FailurePolicy.RESTART_RANK)
    await bench.coordinator.submit({"spec": {}}, plan.to_record(), None)
    await bench.start_all()
    first = bench.incarnations()[1]
    await bench.end(first, 42)
    await bench.until(lambda: [f.incarnation for f in bench.fleet.fences] == [first])
    await bench.coordinator.report(MemberFenced(incarnation=first, at=time.time()))
    await bench.until(lambda: len(bench.fleet.orders) == 3)
    again = bench.incarnations()[2]
    assert bench.store.admitted == [(again, first.token)] and again.rank == first.rank
    assert bench.fleet.dismissed == [first]
    status = (await bench.coordinator.get_run("lone"))["status"]
    assert status["state"] == "Running" and [rank["lives"] for rank in status["ranks"]] == [1, 2]
    attempts = await bench.coordinator.list_attempts({"nodus.dev/job": "lone", "nodus.dev/rank": "1"})
    assert [(a["epoch"], a["state"]) for a in attempts] == [(1, "Exited"), (1, "Ordered")]


async def test_a_name_is_taken_until_its_run_is_deleted(bench: Bench) -> None:
    await bench.submit("twin")
    with pytest.raises(ConflictError):
        await bench.submit("twin")
    with pytest.raises(ConflictError, match="mesh cancel twin"):
        await bench.coordinator.delete("twin")
    await bench.coordinator.cancel("twin", "")
    await bench.until_state("twin", RunState.CANCELLED)
    await bench.until(lambda: not bench.fleet.held)
    async with asyncio.timeout(10):
        while True:
            try:
                await bench.coordinator.delete("twin")
                break
            except ConflictError:
                await asyncio.sleep(0.001)
    with pytest.raises(NotFoundError):
        await bench.coordinator.get_run("twin")
    assert len(bench.fleet.forgotten) == 1
    await bench.submit("twin")


async def test_four_twins_at_once_are_one_run(bench: Bench) -> None:
    answers = await asyncio.gather(*(bench.submit("twin") for _ in range(4)), return_exceptions=True)
    assert sum(isinstance(a, dict) for a in answers) == 1
    assert sum(isinstance(a, ConflictError) for a in answers) == 3


async def test_a_repeated_request_is_the_same_run(bench: Bench) -> None:
    first = await bench.submit("once", "request-1")
    again = await bench.submit("once", "request-1")
    assert first["metadata"]["uid"] == again["metadata"]["uid"]
    assert len(await bench.coordinator.list_runs({})) == 1


async def test_a_second_gang_waits_until_all_its_machines_are_free_and_says_why(bench: Bench) -> None:
    await bench.submit("first")
    await bench.start_all()
    await bench.submit("second")
    await bench.until(lambda: len(bench.fleet.held) == 1)
    async with asyncio.timeout(10):
        while "all at once" not in ((await bench.coordinator.get_run("second"))["status"]["message"] or ""):
            await asyncio.sleep(0.001)
    for member in bench.incarnations():
        await bench.end(member, 0)
    await bench.fenced()
    await bench.until_state("second", RunState.ASSEMBLING)


async def test_a_coordinator_that_comes_back_knows_everything_and_restarts_nobody(bench: Bench) -> None:
    await bench.submit("going")
    await bench.start_all()
    before = await bench.until_state("going", RunState.RUNNING)
    await bench.restart()
    after = await bench.until_state("going", RunState.RUNNING)
    for run in (before, after):
        del run["status"]["productive"]  # grows with the time
    assert after == before
    assert len(bench.fleet.orders) == 2
    for member in bench.incarnations():
        await bench.end(member, 0)
    await bench.restart()
    await bench.fenced()
    await bench.until_state("going", RunState.SUCCEEDED)
    await bench.until(lambda: not bench.fleet.held)


async def test_a_report_of_a_run_that_is_not_known_needs_no_repeating(bench: Bench) -> None:
    stranger = Incarnation(
        run_uid=RunUid("ffffffffffffffff"), epoch=Epoch(1), rank=Rank(0), token=new_token()
    )
    assert await bench.coordinator.report(MemberArrived(incarnation=stranger, at=0.0))


async def test_events_are_waited_for_and_come_once(bench: Bench) -> None:
    await bench.submit("told")
    events = await bench.coordinator.events(0, "told", 100, 5.0)
    assert events[0]["kind"] == "Submitted"
    waiting = asyncio.create_task(bench.coordinator.events(10_000, None, 10, 0.05))
    assert await waiting == []
    last = max(e["seq"] for e in await bench.coordinator.events(0, None, 100, 0))
    later = asyncio.create_task(bench.coordinator.events(last, "told", 100, 10.0))
    await asyncio.sleep(0)
    await bench.coordinator.cancel("told", "enough")
    assert (await later)[0]["message"] == "enough"


async def test_unreachable_members_are_asked_again(bench: Bench) -> None:
    bench.fleet.unreachable = 3
    await bench.submit("patient")
    await bench.until(lambda: len(bench.fleet.orders) == 2)


async def test_a_full_disk_refuses_new_work_keeps_what_runs_and_ends_when_there_is_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.submit("running")
    await bench.start_all()
    is_full = True
    commit = SqlJournal.commit

    async def commit_if_there_is_room(self: SqlJournal, *args: object) -> None:
        if is_full:
            raise StorageError("The journal cannot be written: database or disk is full.")
        await commit(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SqlJournal, "commit", commit_if_there_is_room)
    report = asyncio.create_task(bench.end(bench.incarnations()[0], 0))
    await bench.until(lambda: bench.coordinator._storage_trouble() is not None)
    with pytest.raises(StorageError, match="New work is refused"):
        await bench.submit("more")
    assert (await bench.coordinator.get_run("running"))["status"]["state"] == "Running"
    assert "journal" in (await bench.coordinator.status())["details"]
    assert not bench.fleet.fences and not report.done()
    is_full = False
    await report
    await bench.submit("more")


async def test_a_machine_that_has_gone_already_may_be_wanted_back_once_more(bench: Bench) -> None:
    """It is not listed any more, and that is what is told."""
    for _ in range(2):
        await bench.coordinator.reclaim("m1", 30.0, "")
        bench.fleet.lost.add(MachineName("m1"))
    machine = await bench.coordinator.reclaim("m1", 30.0, "")
    assert (machine["state"], machine["run"]) == ("Lost", None)
    assert [m["name"] for m in await bench.coordinator.list_machines()] == ["m0"]


async def test_a_machine_that_is_wanted_back_says_what_it_waits_for_and_is_not_listed_once_it_left(
    bench: Bench,
) -> None:
    async def listed(name: str) -> dict[str, Any] | None:
        return next((dict(m) for m in await bench.coordinator.list_machines() if m["name"] == name), None)

    await bench.submit("moves")
    await bench.start_all()
    machine = await bench.coordinator.reclaim("m1", 30.0, "")
    assert (machine["state"], machine["waitsFor"]) == ("Leaving", "run moves to leave it")
    bench.fleet.lost.add(MachineName("m1"))
    held = await listed("m1")
    assert held is not None and (held["state"], held["run"], held["waitsFor"]) == ("Lost", "moves", None)
    bench.fleet.lost.clear()
    await bench.coordinator.cancel("moves", "")
    await bench.until(lambda: len(bench.fleet.fences) == 2)
    await bench.fenced()
    await bench.until(lambda: not bench.fleet.held)
    await bench.until_state("moves", RunState.CANCELLED)
    async with asyncio.timeout(10):
        while (free := await listed("m1")) is None or free["run"] is not None:
            await asyncio.sleep(0.001)
    assert free["waitsFor"] == "its agent to be stopped there"
    bench.fleet.lost |= {MachineName("m0"), MachineName("m1")}
    assert await listed("m1") is None
    lost = await listed("m0")
    assert lost is not None and lost["state"] == "Lost", "nobody wanted that one back"


@pytest.mark.parametrize("was_slow", [False, True])
async def test_harm_that_is_not_undone_in_time_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, was_slow: bool
) -> None:
    monkeypatch.setattr(harm_watch, "LOOK_AFTER_S", 0.001)
    bench.coordinator._deployment["chaos"] = True
    await bench.submit("rehearsed")
    await bench.start_all()
    answers: list[str | MeshError | None] = (
        [TransportError("it is busy."), None] if was_slow else ["is still cut off."]
    )

    async def left_of_harm(order: HarmOrder) -> str | None:
        answer = answers.pop(0)
        if isinstance(answer, MeshError):
            raise answer
        return answer

    monkeypatch.setattr(bench.fleet, "left_of_harm", left_of_harm)
    await bench.coordinator.chaos("rehearsed", "Cut", 1, 0.001, True)
    await bench.until(lambda: not answers and not bench.coordinator._background)
    events = await bench.coordinator.events(0, "rehearsed", 100, 0.0)
    told = [event["message"] for event in events if event["kind"] == "NotUndone"]
    assert told == ([] if was_slow else ["A rehearsed fault was to be over: m1 (rank 1) is still cut off."])


# ---- faults of our own, and rows that cannot be read --------------------------------------------------


async def test_a_driver_that_fell_is_made_anew_from_the_journal_and_told_by_status(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_care, "REVIVE_FIRST_S", 0.001)
    await bench.submit("unlucky")
    await bench.start_all()
    with monkeypatch.context() as patch:
        patch.setattr(GangCore, "handle", lambda *_: 1 / 0)
        with pytest.raises(TransportError):
            await bench.coordinator.cancel("unlucky", "")
    await bench.until_cancelled("unlucky")
    assert bench.fleet.unclean == [], "its members were stopped as ever"
    assert "ZeroDivisionError" in (await bench.coordinator.status())["details"]["faults"]


async def test_a_run_at_which_the_coordinator_fails_again_and_again_has_failed_and_is_swept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_care, "REVIVE_FIRST_S", 0.001)
    await bench.submit("doomed")
    await bench.start_all()
    handle, handled = GangCore.handle, []

    def fail(core: GangCore, event: GangEvent, now: Now) -> list[GangEffect]:
        handled.append(event)
        if core.gang.state is not RunState.FAILED:
            raise RuntimeError("a fault of the core")
        return handle(core, event, now)

    monkeypatch.setattr(GangCore, "handle", fail)
    with pytest.raises(TransportError):
        await bench.coordinator.cancel("doomed", "")
    run = await bench.until_state("doomed", RunState.FAILED)
    assert run["status"]["reason"] == "InternalError"
    assert "4 times in a row: RuntimeError('a fault of the core')" in run["status"]["message"]
    await bench.until(lambda: not bench.fleet.held)
    assert sorted(bench.fleet.unclean) == bench.fleet.names
    assert [e["kind"] for e in await bench.coordinator.events(0, "doomed", 100, 0.0)][-1] == "Failed"
    monkeypatch.undo()
    await bench.restart()
    assert (await bench.coordinator.get_run("doomed"))["status"]["state"] == RunState.FAILED


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE runs SET record = '{\"state\": \"Run' WHERE name = 'broken'",
        "UPDATE runs SET record = '[]' WHERE name = 'broken'",
        "UPDATE runs SET record = json_set(record, '$.state', 'Flying') WHERE name = 'broken'",
        "UPDATE runs SET record = json_remove(record, '$.holdings') WHERE name = 'broken'",
        "UPDATE submitted SET plan = 'null', job = 'x' WHERE uid IN (SELECT uid FROM runs WHERE name = 'broken')",
        "DELETE FROM submitted WHERE uid IN (SELECT uid FROM runs WHERE name = 'broken')",
    ],
    ids=["torn", "no object", "an unknown state", "a part is missing", "plan and job", "no plan and job"],
)
async def test_a_row_that_cannot_be_read_fails_its_run_and_stops_nothing_else(
    bench: Bench, damage: str
) -> None:
    await bench.submit("broken")
    await bench.start_all()
    await bench.coordinator.submit({"spec": {}}, _plan("waits", nodes=1).to_record(), None)
    await bench.coordinator.stop()
    with contextlib.closing(sqlite3.connect(bench.folder / "journal.db")) as database:
        database.execute(damage)
        database.commit()
    await bench.restart()
    run = await bench.until_state("broken", RunState.FAILED)
    assert run["status"]["reason"] == "Unreadable"
    assert "cannot be read" in run["status"]["message"] and "mesh delete" in run["status"]["message"]
    await bench.until(lambda: len(bench.fleet.unclean) == 2)
    await bench.until(lambda: bench.fleet.orders[-1].plan.name == "waits")
    uid = bench.fleet.orders[0].incarnation.run_uid
    await bench.until(lambda: uid in {uid for uid, _ in bench.store.forgotten})
    await bench.restart()
    assert (await bench.until_state("broken", RunState.FAILED))["status"]["reason"] == "Unreadable"
    await bench.coordinator.delete("broken")
    with pytest.raises(NotFoundError):
        await bench.coordinator.get_run("broken")


async def test_shutdown_cancels_what_runs_and_waits_for_its_fence(bench: Bench) -> None:
    await bench.submit("running")
    await bench.start_all()
    stopping = asyncio.create_task(bench.coordinator.shutdown(10.0))
    await bench.until(lambda: len(bench.fleet.fences) == 2)
    await bench.fenced()
    assert await stopping == []
    with pytest.raises(ConflictError, match="being stopped"):
        await bench.submit("late")


async def test_a_suspended_run_stays_when_the_deployment_is_stopped_and_goes_on_in_the_next(
    bench: Bench,
) -> None:
    await bench.submit("paused")
    await bench.start_all()
    await bench.coordinator.suspend("paused")
    await bench.until(lambda: len(bench.fleet.fences) == 2)
    await bench.fenced()
    await bench.until_state("paused", RunState.SUSPENDED)
    await bench.until(lambda: not bench.fleet.held)
    assert await bench.coordinator.shutdown(10.0) == []
    await bench.restart()
    assert (await bench.coordinator.get_run("paused"))["status"]["state"] == RunState.SUSPENDED
    orders = len(bench.fleet.orders)
    await bench.coordinator.resume("paused")
    await bench.until(lambda: len(bench.fleet.orders) == orders + 2)
    assert {incarnation.epoch for incarnation in bench.incarnations()[orders:]} == {2}


def test_a_record_is_read_back_as_it_was() -> None:
    gang = Gang(uid=RunUid("00000000000000aa"), plan=_plan("x"), created_at=1.5)
    assert gang_of(record_of(gang)) == gang


async def test_an_effect_that_fails_in_a_way_nobody_thought_of_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, faults = (
        bench.fleet.reserve,
        [RuntimeError("not foreseen"), NotFoundError("never to be retried")],
    )

    async def reserve_later(*args: Any, **options: Any) -> Any:
        if faults:
            raise faults.pop()
        return await reserve(*args, **options)

    monkeypatch.setattr(bench.fleet, "reserve", reserve_later)
    await bench.submit("stubborn")
    await bench.until(lambda: len(bench.fleet.orders) == 2)


async def test_whoever_waits_for_a_driver_that_ended_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.submit("doomed")
    driver = next(iter(bench.coordinator._drivers.values()))

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of the core")

    monkeypatch.setattr(driver.core, "handle", fail)
    for _ in range(2):  # while it fails, and afterwards
        with pytest.raises(TransportError, match="does not look after this run"):
            await bench.coordinator.cancel("doomed", "")


async def test_a_second_delete_leaves_alone_the_next_run_of_that_name(bench: Bench) -> None:
    await bench.submit("twin")
    await bench.coordinator.cancel("twin", "")
    driver = next(iter(bench.coordinator._drivers.values()))
    await bench.until(lambda: driver.is_finished)
    delete_run, is_first, may_go_on = bench.journal.delete_run, asyncio.Event(), asyncio.Event()

    async def delete_slowly(uid: RunUid, at: float) -> None:
        await delete_run(uid, at)
        if not is_first.is_set():
            is_first.set()
            await may_go_on.wait()

    bench.journal.delete_run = delete_slowly  # type: ignore[method-assign]
    slow = asyncio.create_task(bench.coordinator.delete("twin"))
    await is_first.wait()
    await bench.coordinator.delete("twin")
    await bench.submit("twin")
    may_go_on.set()
    await slow
    assert (await bench.coordinator.get_run("twin"))["status"]["state"] != "Cancelled"


async def test_what_is_still_to_be_forgotten_does_not_take_the_next_epoch_along(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away while a run is suspended and resumed; what comes late would drop the epoch that is open."""

    async def forget(uid: RunUid, epoch: Epoch) -> None:
        raise TransportError("The rendezvous store cannot be reached now.")

    monkeypatch.setattr(bench.store, "forget", forget)
    await bench.submit("train")
    await bench.start_all()
    await bench.coordinator.suspend("train")
    await bench.fenced()
    await bench.until_state("train", RunState.SUSPENDED)
    await bench.coordinator.resume("train")
    await bench.until(lambda: [epoch for _, epoch, _ in bench.store.epochs] == [1, 2])
    await bench.until(lambda: not any(": forget" in task.get_name() for task in asyncio.all_tasks()))
