"""A member's life: the story in order, each race once, and every phase against every event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from agents.core import effects as do
from agents.core import events as ev
from agents.core.member import Member
from agents.core.member_state import (
    KILL_MARGIN_S,
    KILL_REPEAT_S,
    LOGS_LIMIT_S,
    REPORT_ANSWER_S,
    REPORT_REPEAT_FIRST_S,
    REPORT_REPEAT_MAX_S,
    TRANSITIONS,
    Phase,
)
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.messages import (
    CauseEvidence,
    JoinOrder,
    MemberArrived,
    MemberExited,
    MemberFenced,
    MemberFenceFailed,
    MemberPreparationFailed,
    MemberRegistered,
    MemberReport,
    MemberStarted,
    MemberStartFailed,
    ProcessExit,
)
from mesh.plan import Endpoint, RunPlan
from mesh.reasons import Reason

ME = Incarnation(run_uid=RunUid("ab" * 8), epoch=Epoch(3), rank=Rank(1), token=IncarnationToken("cd" * 8))
GHOST = replace(ME, epoch=Epoch(2))
ARRIVALS = (
    ev.Arrival(address="127.0.0.2", master_port=29501),
    ev.Arrival(address="127.0.0.3"),
)
ORDER = JoinOrder(
    incarnation=ME,
    plan=RunPlan(name=RunName("job"), command=("true",), nodes=2),
    machine=MachineName("m1"),
    store=Endpoint(host="127.0.0.1", port=1, secret="s"),
    logs=Endpoint(host="127.0.0.1", port=2, secret="s"),
)


class Story:
    """A member, a clock, and every effect so far."""

    def __init__(self) -> None:
        self.member = Member(address="127.0.0.3", wall_offset_s=1_000_000.0, validate=True)
        self.now = 100.0
        self.effects: list[do.MemberEffect] = []

    def tell(self, event: ev.MemberEvent) -> list[do.MemberEffect]:
        effects = self.member.handle(event, self.now)
        self.effects += effects
        return effects

    def wait(self, seconds: float) -> list[do.MemberEffect]:
        self.now += seconds
        return self.tell(ev.DeadlinePassed(incarnation=ME))

    def acknowledge_all(self) -> list[MemberReport]:
        taken = []
        while self.member.state.reports:
            report_id, report = self.member.state.reports[0]
            taken.append(report)
            self.tell(ev.ReportAcknowledged(incarnation=ME, report_id=report_id))
        return taken

    @property
    def phase(self) -> Phase:
        return self.member.state.phase

    def kinds(self, effects: list[do.MemberEffect] | None = None) -> list[type]:
        return [type(e) for e in (self.effects if effects is None else effects)]


JOIN = ev.JoinOrdered(incarnation=ME, order=ORDER)
GRANT = ev.LeaseGranted(incarnation=ME)
LOSE = ev.LeaseLost(incarnation=ME, reason=Reason.LEASE_LOST, message="no answer")
PREPARED = ev.Prepared(incarnation=ME, arrival=ARRIVALS[1])
OPEN = ev.BarrierOpened(incarnation=ME, arrivals=ARRIVALS)
STARTED = ev.CommandStarted(incarnation=ME, pid=77)
EXITED = ev.CommandExited(incarnation=ME, exit=ProcessExit(code=3))
EMPTY = ev.TreeEmpty(incarnation=ME, evidence=CauseEvidence(message="x"), last_lines=("bye",))
FENCE = ev.FenceOrdered(incarnation=ME, grace_s=10.0)
HANDED = ev.LogsHandedOver(incarnation=ME)
LEAVE = ev.LeaveOrdered(incarnation=ME)

WAY: dict[Phase, tuple[ev.MemberEvent, ...]] = {
    Phase.IDLE: (),
    Phase.LEASING: (JOIN,),
    Phase.PREPARING: (JOIN, GRANT),
    Phase.ARRIVED: (JOIN, GRANT, PREPARED),
    Phase.LAUNCHING: (JOIN, GRANT, PREPARED, OPEN),
    Phase.RUNNING: (JOIN, GRANT, PREPARED, OPEN, STARTED),
    Phase.EXITED: (JOIN, GRANT, PREPARED, OPEN, STARTED, EXITED, EMPTY),
    Phase.FENCING: (JOIN, GRANT, PREPARED, OPEN, STARTED, FENCE),
    Phase.FENCED: (JOIN, GRANT, PREPARED, OPEN, STARTED, FENCE, EXITED, EMPTY, HANDED),
    Phase.GONE: (JOIN, GRANT, PREPARED, OPEN, STARTED, FENCE, EXITED, EMPTY, HANDED, LEAVE),
}


def at(phase: Phase) -> Story:
    story = Story()
    for event in WAY[phase]:
        story.tell(event)
    assert story.phase is phase
    return story


EVENTS: tuple[ev.MemberEvent, ...] = (
    JOIN,
    FENCE,
    LEAVE,
    GRANT,
    ev.LeaseRefused(incarnation=ME, reason=Reason.UNREACHABLE, message="no"),
    LOSE,
    PREPARED,
    ev.PreparationFailed(incarnation=ME, reason=Reason.PORT_TAKEN, message="no"),
    OPEN,
    ev.BarrierRefused(incarnation=ME, reason=Reason.STALE_EPOCH, message="old"),
    STARTED,
    ev.CommandStartFailed(incarnation=ME, reason=Reason.COMMAND_NOT_FOUND, message="no"),
    EXITED,
    EMPTY,
    ev.KillFailed(incarnation=ME, pids=(5,), message="stuck"),
    HANDED,
    ev.ReportAcknowledged(incarnation=ME, report_id=999),
    ev.ReportUndelivered(incarnation=ME, report_id=999),
    ev.DeadlinePassed(incarnation=ME),
)

LIVE_ORDERS = {ev.FenceOrdered, ev.LeaveOrdered}
EXPECTED: dict[Phase, set[type[ev.MemberEvent]]] = {
    Phase.IDLE: {ev.JoinOrdered, ev.FenceOrdered, ev.LeaveOrdered},
    Phase.LEASING: {ev.LeaseGranted, ev.LeaseRefused, *LIVE_ORDERS},
    Phase.PREPARING: {ev.Prepared, ev.PreparationFailed, ev.LeaseLost, *LIVE_ORDERS},
    Phase.ARRIVED: {ev.BarrierOpened, ev.BarrierRefused, ev.LeaseLost, *LIVE_ORDERS},
    Phase.LAUNCHING: {ev.CommandStarted, ev.CommandStartFailed, ev.LeaseLost, *LIVE_ORDERS},
    Phase.RUNNING: {ev.CommandExited, ev.LeaseLost, *LIVE_ORDERS},
    Phase.EXITED: {ev.LeaseLost, *LIVE_ORDERS},
    Phase.FENCING: {
        ev.CommandExited,
        ev.CommandStartFailed,
        ev.TreeEmpty,
        ev.KillFailed,
        ev.LeaseLost,
        ev.LeaveOrdered,
    },
    Phase.FENCED: {ev.LeaveOrdered},
    Phase.GONE: set(),
}
"""What moves a member on from each phase; everything else changes nothing."""


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", Phase, ids=str)
def test_an_event_that_the_phase_does_not_expect_changes_nothing(phase: Phase, event: ev.MemberEvent) -> None:
    story = at(phase)
    before = story.member.snapshot()
    effects = story.tell(event)
    changed = story.member.snapshot() != before or bool(effects)
    assert changed == (type(event) in EXPECTED[phase])


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", [p for p in Phase if p is not Phase.IDLE], ids=str)
def test_an_event_of_another_incarnation_changes_nothing(phase: Phase, event: ev.MemberEvent) -> None:
    story = at(phase)
    before = story.member.snapshot()
    assert story.tell(replace(event, incarnation=GHOST)) == []
    assert story.member.snapshot() == before


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", Phase, ids=str)
def test_a_phase_moves_only_along_the_table(phase: Phase, event: ev.MemberEvent) -> None:
    story = at(phase)
    story.tell(event)
    reachable = {phase}
    while more := {q for p in reachable for q in TRANSITIONS[p]} - reachable:
        reachable |= more
    assert story.phase in reachable


@pytest.mark.parametrize("events", [(e, f) for e in EVENTS for f in EVENTS], ids=lambda p: "")
def test_any_two_events_in_a_row_keep_the_invariants(events: tuple[ev.MemberEvent, ...]) -> None:
    for phase in Phase:
        story = at(phase)
        for event in events:
            story.tell(event)  # validate=True checks
            story.now += 1.0


def test_the_whole_life_in_order() -> None:
    story = Story()
    assert story.kinds(story.tell(JOIN)) == [do.TakeLease, do.WarmLauncher]
    assert story.kinds(story.tell(GRANT)) == [do.Prepare, do.SendReport]
    assert story.kinds(story.tell(PREPARED)) == [do.ArriveAtBarrier]
    (launch,) = story.tell(OPEN)
    assert isinstance(launch, do.LaunchCommand)
    assert launch.arrivals == ARRIVALS
    story.tell(STARTED)
    story.tell(EXITED)
    assert story.phase is Phase.EXITED
    story.tell(EMPTY)
    assert story.kinds(story.tell(FENCE)) == [do.HandOverLogs]
    assert story.kinds(story.tell(HANDED)) == [do.AbandonPreparation, do.FreeResources, do.ReleaseLease]
    reports = story.acknowledge_all()
    assert [type(r) for r in reports] == [
        MemberRegistered,
        MemberArrived,
        MemberStarted,
        MemberExited,
        MemberFenced,
    ]
    assert all(r.incarnation == ME and r.at == 1_000_100.0 for r in reports)
    started = reports[2]
    assert isinstance(started, MemberStarted)
    assert (started.pid, started.master_port) == (77, 29501)
    exited = reports[3]
    assert isinstance(exited, MemberExited)
    assert (exited.exit, exited.evidence.message, exited.last_lines) == (ProcessExit(code=3), "x", ("bye",))
    fenced = reports[4]
    assert isinstance(fenced, MemberFenced)
    assert (fenced.exit, fenced.reason) == (ProcessExit(code=3), None)
    assert story.member.next_deadline() is None
    assert story.kinds(story.tell(LEAVE)) == [do.Finish]
    assert story.phase is Phase.GONE


@pytest.mark.parametrize("phase", [Phase.LEASING, Phase.PREPARING, Phase.ARRIVED])
def test_a_fence_before_the_barrier_opens_means_that_the_command_never_starts(phase: Phase) -> None:
    story = at(phase)
    story.tell(FENCE)
    assert story.phase is Phase.FENCED
    for late in (GRANT, PREPARED, OPEN):
        story.tell(late)
    assert do.LaunchCommand not in story.kinds()
    assert story.kinds()[-1] is not do.LaunchCommand
    assert isinstance(story.acknowledge_all()[-1], MemberFenced)


def test_a_fence_that_overtakes_the_order_to_join_wins() -> None:
    story = Story()
    story.tell(FENCE)
    assert story.phase is Phase.FENCED
    assert story.tell(JOIN) == []
    assert [type(r) for r in story.acknowledge_all()] == [MemberFenced]


def test_a_fence_while_the_command_is_being_launched_stops_it_and_waits_for_the_proof() -> None:
    story = at(Phase.LAUNCHING)
    (stop,) = [e for e in story.tell(FENCE) if isinstance(e, do.StopCommand)]
    assert stop.grace_s == 10.0
    story.tell(STARTED)
    assert story.phase is Phase.FENCING
    story.tell(ev.CommandExited(incarnation=ME, exit=ProcessExit(signal=15)))
    assert story.phase is Phase.FENCING
    story.tell(EMPTY)
    story.tell(HANDED)
    assert story.phase is Phase.FENCED
    reports = story.acknowledge_all()
    assert MemberExited not in [type(r) for r in reports]
    fenced = reports[-1]
    assert isinstance(fenced, MemberFenced)
    assert fenced.exit == ProcessExit(signal=15)


def test_a_lost_lease_kills_at_once_whatever_grace_was_promised() -> None:
    story = at(Phase.RUNNING)
    story.tell(FENCE)
    (kill,) = [e for e in story.tell(LOSE) if isinstance(e, do.KillEverything)]
    assert "no answer" in kill.why


@pytest.mark.parametrize("phase", [Phase.LAUNCHING, Phase.RUNNING])
def test_a_lost_lease_ends_in_fenced_with_its_reason(phase: Phase) -> None:
    story = at(phase)
    assert do.KillEverything in story.kinds(story.tell(LOSE))
    story.tell(ev.CommandExited(incarnation=ME, exit=ProcessExit(signal=9)))
    story.tell(EMPTY)
    story.tell(HANDED)
    fenced = story.acknowledge_all()[-1]
    assert isinstance(fenced, MemberFenced)
    assert (fenced.reason, fenced.message, fenced.exit) == (
        Reason.LEASE_LOST,
        "no answer",
        ProcessExit(signal=9),
    )


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.ARRIVED])
def test_a_lost_lease_before_the_launch_fences_without_a_kill(phase: Phase) -> None:
    story = at(phase)
    story.tell(LOSE)
    assert story.phase is Phase.FENCED
    assert do.KillEverything not in story.kinds()
    assert story.tell(OPEN) == []


def test_an_exit_before_the_fence_is_still_reported_with_its_cause() -> None:
    story = at(Phase.RUNNING)
    story.tell(EXITED)
    story.tell(FENCE)
    story.tell(EMPTY)
    story.tell(HANDED)
    assert [type(r) for r in story.acknowledge_all()][-2:] == [MemberExited, MemberFenced]


def test_a_member_that_finished_keeps_its_lease_until_it_is_fenced() -> None:
    story = at(Phase.EXITED)
    assert story.member.state.lease_held
    assert do.ReleaseLease not in story.kinds()


def test_an_order_that_is_repeated_changes_nothing() -> None:
    story = at(Phase.RUNNING)
    story.tell(FENCE)
    before = story.member.snapshot()
    assert story.tell(FENCE) == []
    assert story.tell(replace(FENCE, grace_s=99.0)) == []
    assert story.member.snapshot() == before


def test_a_shorter_grace_shortens_and_a_longer_one_does_not_prolong() -> None:
    story = at(Phase.RUNNING)
    story.tell(FENCE)
    story.now += 4.0
    assert story.tell(replace(FENCE, grace_s=6.5)) == []
    (stop,) = story.tell(replace(FENCE, grace_s=1.0))
    assert isinstance(stop, do.StopCommand)
    assert stop.grace_s == 1.0
    assert story.member.state.kill_at == story.now + 1.0 + KILL_MARGIN_S


def test_a_tree_that_outlives_its_grace_period_is_killed_again_and_again_and_told_once() -> None:
    story = at(Phase.RUNNING)
    story.tell(FENCE)
    story.acknowledge_all()
    assert story.kinds(story.wait(10.0 + KILL_MARGIN_S)) == [do.KillEverything]
    assert story.kinds(story.wait(KILL_REPEAT_S)) == [do.KillEverything, do.SendReport]
    assert isinstance(story.acknowledge_all()[-1], MemberFenceFailed)
    assert story.kinds(story.wait(KILL_REPEAT_S)) == [do.KillEverything]
    assert story.phase is Phase.FENCING
    story.tell(EMPTY)
    story.tell(HANDED)
    assert story.phase is Phase.FENCED


def test_a_kill_that_failed_is_told_once_with_its_pids() -> None:
    story = at(Phase.FENCING)
    for _ in range(2):
        story.tell(ev.KillFailed(incarnation=ME, pids=(5, 6), message="stuck"))
    told = [r for r in story.acknowledge_all() if isinstance(r, MemberFenceFailed)]
    assert [(r.pids, r.message) for r in told] == [((5, 6), "stuck")]


def test_a_head_that_takes_no_logs_does_not_hold_the_fence_up() -> None:
    story = at(Phase.EXITED)
    story.tell(FENCE)
    assert story.phase is Phase.FENCING
    story.wait(LOGS_LIMIT_S)
    assert story.phase is Phase.FENCED


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (Phase.LEASING, ev.LeaseRefused(incarnation=ME, reason=Reason.UNREACHABLE, message="away")),
        (Phase.PREPARING, ev.PreparationFailed(incarnation=ME, reason=Reason.STORAGE_FULL, message="full")),
        (Phase.ARRIVED, ev.BarrierRefused(incarnation=ME, reason=Reason.LIMIT_EXCEEDED, message="big")),
        (Phase.ARRIVED, replace(OPEN, arrivals=ARRIVALS[:1])),
    ],
)
def test_a_member_that_cannot_take_part_says_why_and_waits_for_the_fence(
    phase: Phase, event: ev.MemberEvent
) -> None:
    story = at(phase)
    story.tell(event)
    assert story.phase is Phase.EXITED
    assert isinstance(story.acknowledge_all()[-1], MemberPreparationFailed)
    story.tell(FENCE)
    assert story.phase is Phase.FENCED


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (Phase.LEASING, ev.LeaseRefused(incarnation=ME, reason=Reason.STALE_EPOCH, message="old")),
        (Phase.ARRIVED, ev.BarrierRefused(incarnation=ME, reason=Reason.STALE_EPOCH, message="old")),
    ],
)
def test_a_member_of_an_older_epoch_fences_itself(phase: Phase, event: ev.MemberEvent) -> None:
    story = at(phase)
    story.tell(event)
    assert story.phase is Phase.FENCED
    fenced = story.acknowledge_all()[-1]
    assert isinstance(fenced, MemberFenced)
    assert fenced.reason is Reason.STALE_EPOCH


def test_a_command_that_cannot_start_is_reported_and_the_member_waits() -> None:
    story = at(Phase.LAUNCHING)
    story.tell(
        ev.CommandStartFailed(incarnation=ME, reason=Reason.COMMAND_NOT_FOUND, message="no such command")
    )
    assert story.phase is Phase.EXITED
    report = story.acknowledge_all()[-1]
    assert isinstance(report, MemberStartFailed)
    assert report.reason is Reason.COMMAND_NOT_FOUND
    story.tell(FENCE)
    story.tell(HANDED)
    assert story.phase is Phase.FENCED


def test_a_launch_that_was_killed_before_it_began_is_no_failure_of_the_command() -> None:
    story = at(Phase.LAUNCHING)
    story.tell(LOSE)
    story.tell(
        ev.CommandStartFailed(incarnation=ME, reason=Reason.COMMAND_START_FAILED, message="supervisor lost")
    )
    story.tell(HANDED)
    assert story.phase is Phase.FENCED
    assert MemberStartFailed not in [type(r) for r in story.acknowledge_all()]


def test_a_launch_that_our_fence_stopped_is_no_failure_of_the_command() -> None:
    story = at(Phase.LAUNCHING)
    story.tell(FENCE)
    story.tell(ev.CommandStartFailed(incarnation=ME, reason=Reason.EPOCH_ENDED, message="stopped before"))
    story.tell(HANDED)
    assert story.phase is Phase.FENCED
    assert MemberStartFailed not in [type(r) for r in story.acknowledge_all()]


def test_a_command_that_cannot_start_is_reported_under_a_fence_too() -> None:
    story = at(Phase.LAUNCHING)
    story.tell(FENCE)
    story.tell(ev.CommandStartFailed(incarnation=ME, reason=Reason.COMMAND_NOT_FOUND, message="no"))
    assert MemberStartFailed in [type(r) for r in story.acknowledge_all()]


def test_reports_go_one_at_a_time_in_order_and_wait_longer_after_each_failure() -> None:
    story = at(Phase.ARRIVED)
    sent = [e for e in story.effects if isinstance(e, do.SendReport)]
    assert [type(e.report) for e in sent] == [MemberRegistered]
    pauses = []
    for _ in range(6):
        assert story.tell(ev.ReportUndelivered(incarnation=ME, report_id=1)) == []
        due = story.member.next_deadline()
        assert due is not None
        pauses.append(round(due - story.now, 6))
        assert story.kinds(story.wait(due - story.now)) == [do.SendReport]
    assert pauses[0] == REPORT_REPEAT_FIRST_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == REPORT_REPEAT_MAX_S
    (next_one,) = story.tell(ev.ReportAcknowledged(incarnation=ME, report_id=1))
    assert isinstance(next_one, do.SendReport)
    assert isinstance(next_one.report, MemberArrived)


def test_a_report_without_any_answer_is_sent_again() -> None:
    story = at(Phase.PREPARING)
    assert story.wait(REPORT_ANSWER_S - 0.1) == []
    assert story.kinds(story.wait(0.2)) == [do.SendReport]


def test_an_acknowledgement_that_comes_twice_takes_only_one_report() -> None:
    story = at(Phase.ARRIVED)
    story.tell(ev.ReportAcknowledged(incarnation=ME, report_id=1))
    assert story.tell(ev.ReportAcknowledged(incarnation=ME, report_id=1)) == []
    assert [type(r) for _, r in story.member.state.reports] == [MemberArrived]


def test_a_coordinator_that_forgot_the_answer_gets_it_again() -> None:
    story = at(Phase.FENCED)
    story.acknowledge_all()
    assert story.kinds(story.tell(FENCE)) == [do.SendReport]
    assert story.tell(FENCE) == []
    assert [type(r) for r in story.acknowledge_all()] == [MemberFenced]


def test_whoever_is_sent_away_while_running_kills_first_and_is_gone_after_the_proof() -> None:
    story = at(Phase.RUNNING)
    effects = story.tell(LEAVE)
    (stop,) = [e for e in effects if isinstance(e, do.StopCommand)]
    assert stop.grace_s == 0.0
    story.tell(ev.CommandExited(incarnation=ME, exit=ProcessExit(signal=9)))
    story.tell(EMPTY)
    effects = story.tell(HANDED)
    assert story.phase is Phase.GONE
    assert story.kinds(effects)[-2:] == [do.ReleaseLease, do.Finish]


def test_the_same_events_lead_to_the_same_effects() -> None:
    def play() -> list[do.MemberEffect]:
        return at(Phase.GONE).effects

    assert play() == play()


def test_an_arrival_survives_the_store() -> None:
    arrival = ev.Arrival(address="127.0.0.2", master_port=29500)
    assert ev.Arrival.from_payload(arrival.to_payload()) == arrival


def test_validation_finds_a_member_that_lost_track_of_its_lease() -> None:
    story = at(Phase.RUNNING)
    story.member.state.lease_held = False
    check: Callable[[], None] = story.member.check
    with pytest.raises(AssertionError):
        check()


def test_a_member_without_validation_does_the_same() -> None:
    plain = Member(address="127.0.0.3", wall_offset_s=1_000_000.0)
    checked = at(Phase.GONE)
    effects = [e for event in WAY[Phase.GONE] for e in plain.handle(event, checked.now)]
    assert effects == checked.effects


def test_a_tree_that_is_empty_already_is_not_killed_again_while_its_logs_go() -> None:
    story = at(Phase.EXITED)
    story.tell(FENCE)
    assert story.phase is Phase.FENCING
    assert story.tell(LOSE) == []
    assert story.tell(FENCE) == []
    story.tell(HANDED)
    assert story.phase is Phase.FENCED
