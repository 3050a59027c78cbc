"""A rank that starts again while the others go on: of which failures that is true, what it costs, what is kept of it.

The lives as a whole are in tests/scenarios (`one_rank_*`, `a_rank_that_cannot_begin_again`), and in tests/sim.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import recovery
from coordinator.core.effects import AdmitMember, ExpireLease, FenceMember, GangEffect, OrderMember
from coordinator.core.ending import LAST_WORD_WINDOW_S
from coordinator.core.events import (
    BarrierOpened,
    CoordinatorRecovered,
    GangEvent,
    LeaseGone,
    MachinesReserved,
    MemberAdmitted,
    MemberRevoked,
    MemberVanished,
    Now,
    Placement,
    RunAccepted,
    TimePassed,
)
from coordinator.core.gang import GangCore
from coordinator.core.gang_base import FENCE_TAKEN_LIMIT_S
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Failure, Gang, MemberRecord, Restarts, Settlement
from coordinator.core.recovery import HEALTHY_S, LONE_WINDOW_S
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid, new_token
from mesh.messages import (
    CauseEvidence,
    CheckpointPartStored,
    MemberExited,
    MemberFenced,
    MemberPreparationFailed,
    MemberStarted,
    ProcessExit,
)
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import FailurePolicy, LauncherKind, RunState

UID = RunUid("run")
PLAN = RunPlan(
    name=RunName("demo"), command=("true",), nodes=2, on_process_failure=FailurePolicy.RESTART_RANK
)
BAD = ProcessExit(code=42)


class Life:
    """Two ranks that run."""

    def __init__(self, plan: RunPlan = PLAN) -> None:
        self.now = Now(mono=100.0, wall=5000.0)
        self.core = GangCore(Gang(uid=UID, plan=plan, created_at=0.0), new_token=new_token, validate=True)
        self.tell(RunAccepted())
        placements = tuple(
            Placement(machine=MachineName(f"m{i}"), address=f"10.0.0.{i}") for i in range(plan.nodes)
        )
        self.tell(MachinesReserved(reservation=1, placements=placements))
        self.tell(BarrierOpened(epoch=Epoch(1)))
        for rank in range(plan.nodes):
            self.start(rank)
        assert self.core.gang.state is RunState.RUNNING

    def tell(self, event: GangEvent) -> list[GangEffect]:
        return self.core.handle(event, self.now)

    def member(self, rank: int) -> MemberRecord:
        return self.core.gang.members[Rank(rank)]

    def start(self, rank: int) -> None:
        me = self.member(rank).incarnation
        self.tell(MemberStarted(incarnation=me, at=0.0, pid=7, master_port=29500))

    def fail(self, rank: int) -> list[GangEffect]:
        me = self.member(rank).incarnation
        return self.tell(MemberExited(incarnation=me, at=0.0, exit=BAD, evidence=CauseEvidence()))

    def fenced(self, rank: int) -> list[GangEffect]:
        return self.tell(MemberFenced(incarnation=self.member(rank).incarnation, at=0.0))

    def after(self, seconds: float) -> list[GangEffect]:
        self.now = Now(mono=self.now.mono + seconds, wall=self.now.wall + seconds)
        return self.tell(TimePassed())

    def admit(self, rank: int) -> list[GangEffect]:
        return self.tell(MemberAdmitted(incarnation=self.member(rank).incarnation, is_admitted=True))

    def crash(self) -> list[GangEffect]:
        gang = gang_of(record_of(self.core.gang))
        self.core = GangCore(gang, new_token=new_token, validate=True)
        return self.tell(CoordinatorRecovered())

    def begin_again(self, rank: int) -> list[GangEffect]:
        """Up to its order."""
        self.fail(rank)
        self.fenced(rank)
        self.after(recovery.lone_delay_s(self.core.gang.restarts))
        return self.admit(rank)


def kinds(effects: list[GangEffect]) -> set[type]:
    return {type(effect) for effect in effects}


# ---- of which failures it is true ---------------------------------------------------------------------


def failed_gang(rank: int = 1, *, plan: RunPlan = PLAN, **evidence: bool) -> Gang:
    """Running, and one rank has failed."""
    me = Incarnation(run_uid=UID, epoch=Epoch(1), rank=Rank(rank), token=IncarnationToken("t"))
    member = MemberRecord(
        incarnation=me, machine=MachineName("m"), address="", ordered_at=0.0, exit=BAD
    )  # fmt: skip
    failure = Failure(
        rank=Rank(rank), at=0.0, reason=Reason.COMMAND_FAILED, message="", exit=BAD,
        evidence=CauseEvidence(**evidence),
    )  # fmt: skip
    return Gang(
        uid=UID, plan=plan, created_at=0.0, state=RunState.RUNNING, members={Rank(rank): member},
        failures=[failure],
    )  # fmt: skip


def test_a_commands_own_failure_is_its_ranks_alone() -> None:
    assert len(recovery.lone_failures(failed_gang())) == 1


@pytest.mark.parametrize(
    "gang",
    [
        pytest.param(failed_gang(0), id="rank 0 hosts the rendezvous"),
        pytest.param(failed_gang(blames_peer=True), id="it complains about a peer"),
        pytest.param(failed_gang(by_infrastructure=True), id="it was taken down with its machine"),
        pytest.param(failed_gang(plan=replace(PLAN, launcher=LauncherKind.TORCHRUN)), id="torchrun"),
        pytest.param(
            failed_gang(plan=replace(PLAN, on_process_failure=FailurePolicy.RESTART_GANG)), id="policy"
        ),
        pytest.param(failed_gang(plan=replace(PLAN, max_restarts=0)), id="no restarts"),
    ],
)
def test_what_may_be_more_than_one_ranks_is_the_gangs(gang: Gang) -> None:
    assert recovery.lone_failures(gang) == ()


def test_one_that_is_the_gangs_makes_all_the_gangs() -> None:
    gang = failed_gang()
    other = failed_gang(2, blames_peer=True)
    gang.members |= other.members
    gang.failures += other.failures
    assert recovery.lone_failures(gang) == ()


@pytest.mark.parametrize("settlement", [Settlement.LEASE_LAPSED, Settlement.FENCE_FAILED])
def test_a_failed_rank_that_is_not_proven_gone_is_a_lost_one(settlement: Settlement) -> None:
    gang = failed_gang()
    gang.members[Rank(1)] = replace(gang.members[Rank(1)], settlement=settlement)
    assert recovery.lone_failures(gang) == ()


def test_a_spent_budget_ends_the_run_as_for_the_gang() -> None:
    gang = failed_gang()
    for failure, is_lone in ((2, True), (3, False)):
        gang.restarts = Restarts(failure=failure)
        assert bool(recovery.lone_failures(gang)) is is_lone


def test_the_pauses_are_those_of_the_gang_but_never_shorter_than_a_lease() -> None:
    delays = [recovery.lone_delay_s(Restarts(failure=count)) for count in range(4)]
    assert delays == [LONE_WINDOW_S, 10.0, 20.0, 40.0]


# ---- one life after the other -------------------------------------------------------------------------


def test_the_others_are_not_touched_and_the_rank_keeps_its_machine_and_its_folder() -> None:
    life = Life()
    first, other = life.member(1), life.member(0)
    assert kinds(life.fail(1)) >= {FenceMember} and life.core.gang.state is RunState.RUNNING
    life.fenced(1)
    (admission,) = [e for e in life.after(LONE_WINDOW_S) if isinstance(e, AdmitMember)]
    assert admission.instead_of == first.incarnation.token
    (order,) = [e for e in life.admit(1) if isinstance(e, OrderMember)]
    assert order.incarnation == admission.incarnation and order.machine == first.machine
    assert not order.is_clean_start, "the state directory is left as it is"
    assert order.is_left_behind, "and may be half-written"
    life.start(1)
    gang = life.core.gang
    assert gang.members[Rank(0)] == other and gang.epoch == 1 and gang.state is RunState.RUNNING
    assert [m.incarnation for m in gang.attempts] == [first.incarnation]
    assert gang.restarts == Restarts(failure=1, total=1)


def test_it_waits_for_the_proof_however_long_its_pause_is_over() -> None:
    life = Life()
    life.fail(1)
    assert AdmitMember not in kinds(life.after(LONE_WINDOW_S + 10.0))
    assert AdmitMember in kinds(life.fenced(1))


def test_an_agent_that_never_confirms_loses_its_lease() -> None:
    life = Life()
    life.fail(1)
    assert ExpireLease in kinds(life.after(FENCE_TAKEN_LIMIT_S))
    assert ExpireLease in kinds(life.crash()), "and a coordinator that comes back sees to it"


def test_ten_minutes_in_which_every_rank_runs_earn_the_budget_back() -> None:
    life = Life()
    life.begin_again(1)
    life.after(HEALTHY_S)
    assert life.core.gang.restarts.failure == 1, "it did not run"
    life = Life()
    life.begin_again(1)
    life.start(1)
    life.after(HEALTHY_S - 1)
    assert life.core.gang.restarts.failure == 1
    life.after(1)
    assert life.core.gang.restarts == Restarts(total=1)


def test_what_failed_in_between_was_not_healthy() -> None:
    life = Life()
    life.begin_again(1)
    life.start(1)
    life.after(HEALTHY_S - 20)
    life.begin_again(1)
    life.start(1)
    life.after(20)
    assert life.core.gang.restarts.failure == 2
    life.after(HEALTHY_S - 20)
    assert life.core.gang.restarts == Restarts(total=2)


def test_while_another_machine_may_be_lost_nobody_starts_again_alone() -> None:
    life = Life(replace(PLAN, nodes=3))
    life.fail(1)
    life.fenced(1)
    life.after(LONE_WINDOW_S - 1)
    life.tell(LeaseGone(incarnation=life.member(2).incarnation))
    assert AdmitMember not in kinds(life.after(1))
    life.after(LAST_WORD_WINDOW_S - 1)
    assert life.core.gang.state is RunState.FENCING, "it was, and is the cause"


def test_an_opening_that_is_heard_late_names_a_life_that_is_over_and_changes_nothing() -> None:
    life = Life()
    tokens = tuple(life.member(rank).incarnation.token for rank in (0, 1))
    life.begin_again(1)
    assert life.tell(BarrierOpened(epoch=Epoch(1), tokens=tokens)) == []
    assert life.core.gang.state is RunState.RUNNING


def test_one_that_does_not_begin_within_the_time_of_an_assembly_is_given_up() -> None:
    life = Life()
    life.begin_again(1)
    life.crash()
    life.after(PLAN.startup_timeout_s - 1)
    assert life.core.gang.state is RunState.FENCING, "it has not even appeared"
    assert "did not appear" in life.core.gang.failures[0].message


def test_one_whose_agent_dies_before_it_begins_was_lost_and_not_refused_and_who_is_replaced_was_not_kept() -> (
    None
):
    life = Life()
    life.begin_again(1)
    gone = life.member(1).incarnation
    life.tell(MemberVanished(incarnation=gone, message="its agent died."))
    assert life.core.gang.failures[0].reason is Reason.MACHINE_LOST, "it had taken this rank before"
    life.tell(MemberRevoked(incarnation=gone, has_passed=False))
    life.fenced(0)
    assert life.core.gang.history[-1].kept == (0, 1), "what became of m1 is not known yet"
    again = life.member(1).incarnation
    life.tell(MemberVanished(incarnation=again, message="m1 is lost."))
    life.tell(MemberRevoked(incarnation=again, has_passed=False))
    placement = Placement(machine=MachineName("m2"), address="10.0.0.2")
    life.tell(MachinesReserved(reservation=life.core.gang.reservation, placements=(placement,)))
    chapter = life.core.gang.history[-1]
    assert (chapter.epoch, chapter.kept, chapter.replaced) == (2, (0,), (1,))


def test_one_whom_a_restarted_store_does_not_let_in_is_neither_its_machines_fault_nor_its_commands() -> None:
    """The store that had admitted it is gone: the new one has not seen the opening, and has its barrier closed."""
    life = Life()
    life.begin_again(1)
    before = life.core.gang.restarts
    refused = MemberPreparationFailed(
        incarnation=life.member(1).incarnation, at=0.0, reason=Reason.CANCELLED, message="It was closed."
    )
    life.tell(refused)
    life.fenced(0)
    life.fenced(1)
    gang = life.core.gang
    assert gang.epoch == 2 and gang.restarts == replace(
        before, ours=before.ours + 1, total=before.total + 1, fruitless=1
    )
    assert gang.history[0].cause is not None and gang.history[0].cause.reason is Reason.STORE_UNREACHABLE
    assert "the store has been restarted since" in gang.history[0].cause.message
    assert gang.history[-1].kept == (0, 1)


def test_one_whom_its_machine_cannot_prepare_is_its_machines_fault() -> None:
    life = Life()
    life.begin_again(1)
    failed = MemberPreparationFailed(
        incarnation=life.member(1).incarnation, at=0.0, reason=Reason.PREPARATION_FAILED, message="No disk."
    )
    life.tell(failed)
    life.fenced(0)
    life.fenced(1)
    assert life.core.gang.restarts.loss == 1


def test_its_parts_of_checkpoints_count_from_one_again() -> None:
    life = Life()

    def store(rank: int, number: int) -> None:
        life.tell(
            CheckpointPartStored(
                incarnation=life.member(rank).incarnation, at=0.0, number=number, digest=f"d{rank}{number}",
                content=f"c{rank}{number}", steps=(number,), files=1, size_bytes=1,
            )
        )  # fmt: skip

    store(1, 5)
    life.begin_again(1)
    life.start(1)
    store(1, 1)
    store(0, 1)
    wish = life.core.gang.checkpoints.wish
    assert wish is not None and wish.parts == ("d01", "d11")


def test_two_ranks_that_fail_at_once_start_again_each_alone() -> None:
    life = Life(replace(PLAN, nodes=3))
    for rank in (1, 2):
        life.fail(rank)
        life.fenced(rank)
    admissions = [e for e in life.after(LONE_WINDOW_S) if isinstance(e, AdmitMember)]
    assert sorted(e.incarnation.rank for e in admissions) == [1, 2]
    for rank in (1, 2):
        life.admit(rank)
        life.start(rank)
    assert life.core.gang.restarts.failure == 2 and life.core.gang.epoch == 1
