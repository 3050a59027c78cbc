"""The life of one gang, decided.

Theory of operation. A run waits in Pending until every machine it needs is held (all or none). Then a new
epoch begins: members are ordered to their machines, take leases, prepare, and arrive at the epoch's barrier
in the store; the store opens it for all at once (Starting), the commands start (Running), and end. The first
thing that decides the epoch's end becomes its `outcome`, once; from there on the epoch only ends: its barrier
is closed, every member is fenced, and when each is proven unable to act (`Settlement`) the outcome takes
effect: a terminal state, or another assembly.

Rules of this file:
1. `handle(event, now)` is total: nothing that a peer, a machine or a user does raises.
2. One gate before any handler: what is of another epoch, incarnation or reservation changes nothing.
3. `_enter` is the only writer of the state, along `TRANSITIONS`.
4. What changed is persisted before anything else of the batch happens (`Persist` comes first).
5. A command can only have started when the epoch's barrier opened; so a barrier that was closed without
   having opened settles every member at once, heard of or not.
6. Once set, an outcome changes only away from "try again": a wish to cancel turns that into "cancelled", a member
   that could not be fenced into "failed", since no epoch begins while something of an older one may act.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from coordinator.core import blame
from coordinator.core.effects import (
    Announcement,
    CloseBarrier,
    DismissMember,
    FenceMember,
    ForgetGang,
    GangEffect,
    OpenEpoch,
    OrderMember,
    Persist,
    ReleaseMachines,
    ReserveMachines,
)
from coordinator.core.events import (
    BarrierClosed,
    BarrierOpened,
    CancelRequested,
    CoordinatorRecovered,
    GangEvent,
    LeaseGone,
    LeaseLapsed,
    MachinesReleased,
    MachinesReserved,
    MemberSuspected,
    MemberVanished,
    Now,
    ReservationWaiting,
    RunAccepted,
    TimePassed,
)
from coordinator.core.gang_state import (
    Failure,
    Gang,
    Holding,
    MemberPhase,
    MemberRecord,
    Outcome,
    OutcomeKind,
    Settlement,
    incarnation_for,
)
from coordinator.core.invariants import check_invariants
from mesh.ids import Epoch, Incarnation, Rank
from mesh.messages import (
    MemberArrived,
    MemberExited,
    MemberFenced,
    MemberFenceFailed,
    MemberPreparationFailed,
    MemberRegistered,
    MemberStarted,
    MemberStartFailed,
)
from mesh.reasons import Reason
from mesh.states import RunState

TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.ASSEMBLING, RunState.CANCELLED, RunState.FAILED}),
    RunState.ASSEMBLING: frozenset({RunState.STARTING, RunState.FENCING}),
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.FENCING}),
    RunState.RUNNING: frozenset({RunState.SUCCEEDED, RunState.FENCING}),
    RunState.FENCING: frozenset(
        {
            RunState.PENDING,
            RunState.ASSEMBLING,
            RunState.SUSPENDED,
            RunState.FAILED,
            RunState.CANCELLED,
        }
    ),
    RunState.SUSPENDED: frozenset({RunState.PENDING, RunState.CANCELLED}),
    RunState.SUCCEEDED: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.CANCELLED: frozenset(),
}

_END_OF = {
    OutcomeKind.SUCCEED: RunState.SUCCEEDED,
    OutcomeKind.FAIL: RunState.FAILED,
    OutcomeKind.CANCEL: RunState.CANCELLED,
}

LAST_WORD_WINDOW_S = 5.0
"""How long the reports of a member whose lease is gone are waited for: they say how its command ended."""

_ASSEMBLY_STATES = frozenset({RunState.ASSEMBLING, RunState.STARTING})


class GangCore:
    """Decides for one gang. Not thread-safe; the shell calls it from one task.

    Args:
        gang: the state, fresh or read back from the journal (then `CoordinatorRecovered` comes first).
        validate: check every invariant after every event (tests and simulation).
    """

    def __init__(self, gang: Gang, *, validate: bool = False) -> None:
        self.gang = gang
        self._checked = gang.snapshot() if validate else None
        """The state after the last event that changed it, for the check of the next one."""
        self._now = Now(mono=0.0, wall=0.0)
        self._assembly_deadline: float | None = None
        self._judgement_deadline: float | None = None
        self._last_word_deadlines: dict[Rank, float] = {}
        """When to stop waiting for the report of a member whose lease is gone."""
        self._dirty = False
        self._announcements: list[Announcement] = []
        self._effects: list[GangEffect] = []

    def handle(self, event: GangEvent, now: Now) -> list[GangEffect]:
        """Takes one event; returns what is to be done, `Persist` first when anything changed."""
        before = self._checked
        self._now = now
        self._dirty = False
        self._announcements = []
        self._effects = []
        _HANDLERS[type(event)](self, event)
        self._judge()
        self._conclude_if_settled()
        if self._dirty:
            self._note_time_left()
            self._effects.insert(0, Persist(announcements=tuple(self._announcements)))
        if before is not None and self._dirty:
            check_invariants(before, self.gang)
            self._checked = self.gang.snapshot()
        return self._effects

    def next_deadline(self) -> float | None:
        """Monotonic time at which `TimePassed` is due, or None."""
        single = (self._assembly_deadline, self._judgement_deadline)
        deadlines = [d for d in single if d is not None]
        return min([*deadlines, *self._last_word_deadlines.values()], default=None)

    # ---- the one door for state -------------------------------------------------------------------

    def _enter(self, state: RunState) -> None:
        gang = self.gang
        assert state in TRANSITIONS[gang.state], f"{gang.state} -> {state}"
        gang.state = state
        self._dirty = True
        if state is not RunState.STARTING and state is not RunState.ASSEMBLING:
            self._assembly_deadline = None
        if state.is_terminal:
            gang.ended_at = self._now.wall
            self._judgement_deadline = None
            self._last_word_deadlines = {}

    def _announce(
        self, kind: str, message: str, *, reason: Reason | None = None, rank: Rank | None = None
    ) -> None:
        self._dirty = True
        self._announcements.append(
            Announcement(kind=kind, message=message, reason=reason, epoch=self.gang.epoch, rank=rank)
        )

    def _update(self, member: MemberRecord) -> None:
        self.gang.members[member.rank] = member
        self._dirty = True

    def _note_time_left(self) -> None:
        if self._assembly_deadline is not None:
            self.gang.assembly_left_s = max(0.0, self._assembly_deadline - self._now.mono)

    # ---- the gate ---------------------------------------------------------------------------------

    def _current(self, incarnation: Incarnation) -> MemberRecord | None:
        """The member that this is about, unless it is of another life or already settled."""
        if self.gang.state.is_terminal:
            return None
        member = self.gang.members.get(incarnation.rank)
        if member is None or member.incarnation != incarnation or member.settlement is not None:
            return None
        return member

    def _is_current_epoch(self, epoch: Epoch) -> bool:
        return epoch == self.gang.epoch and not self.gang.state.is_terminal

    # ---- getting machines -------------------------------------------------------------------------

    def _on_run_accepted(self, event: RunAccepted) -> None:
        if self.gang.reservation:
            return
        nodes = self.gang.plan.nodes
        self._announce(
            "Submitted", f"The run was accepted: {nodes} machine{'s' if nodes > 1 else ''} wanted."
        )
        self._request_machines()

    def _request_machines(self) -> None:
        gang = self.gang
        gang.reservation += 1
        gang.message = "Waiting for machines."
        self._dirty = True
        self._effects.append(self._reservation_effect())

    def _reservation_effect(self) -> ReserveMachines:
        plan = self.gang.plan
        return ReserveMachines(
            reservation=self.gang.reservation,
            nodes=plan.nodes,
            gpus_per_node=plan.gpus_per_node,
            gpu_types=plan.gpu_types,
        )

    def _on_reservation_waiting(self, event: ReservationWaiting) -> None:
        gang = self.gang
        if gang.state is not RunState.PENDING or event.reservation != gang.reservation:
            return
        first_time = gang.reason is not Reason.NO_CAPACITY
        gang.reason = Reason.NO_CAPACITY
        gang.message = event.why
        if first_time:  # later wordings are for whoever looks; a hundred waiting runs must not write each one
            self._announce("Waiting", event.why, reason=Reason.NO_CAPACITY)

    def _on_machines_reserved(self, event: MachinesReserved) -> None:
        gang = self.gang
        wanted = (
            gang.state is RunState.PENDING
            and not gang.release_pending
            and not gang.machines_held
            and event.reservation == gang.reservation
        )
        if not wanted:
            is_held = gang.machines_held and event.reservation == gang.reservation
            if not is_held:
                self._effects.append(ReleaseMachines(reservation=event.reservation))
            return
        gang.machines_held = True
        gang.holdings.extend(
            Holding(machine=p.machine, reservation=event.reservation, since=self._now.wall)
            for p in event.placements
        )
        self._begin_epoch(event)

    def _begin_epoch(self, event: MachinesReserved) -> None:
        gang = self.gang
        gang.attempts.extend(gang.members[rank] for rank in sorted(gang.members))
        gang.epoch = Epoch(gang.epoch + 1)
        gang.assemblies += 1
        gang.barrier_open = gang.barrier_closed = False
        gang.outcome = None
        gang.failures = []
        gang.reason = None
        gang.members = {}
        self._last_word_deadlines = {}
        for index, (placement, token) in enumerate(zip(event.placements, event.tokens, strict=True)):
            rank = Rank(index)
            gang.members[rank] = MemberRecord(
                incarnation=incarnation_for(gang.uid, gang.epoch, rank, token),
                machine=placement.machine,
                address=placement.address,
                ordered_at=self._now.wall,
            )
        self._assembly_deadline = self._now.mono + gang.plan.startup_timeout_s
        self._enter(RunState.ASSEMBLING)
        machines = ", ".join(p.machine for p in event.placements)
        self._announce("Assembling", f"Epoch {gang.epoch} assembles on {machines}.")
        self._tell_arrivals()
        self._effects.append(OpenEpoch(epoch=gang.epoch, size=gang.plan.nodes, is_new=True))
        self._effects.extend(self._order(m) for m in gang.members.values())

    def _order(self, member: MemberRecord) -> OrderMember:
        return OrderMember(
            incarnation=member.incarnation, machine=member.machine, reservation=self.gang.reservation
        )

    def _on_machines_released(self, event: MachinesReleased) -> None:
        gang = self.gang
        if event.reservation != gang.reservation or not gang.release_pending:
            return
        gang.release_pending = gang.machines_held = False
        gang.holdings = [replace(h, until=self._now.wall) if h.until is None else h for h in gang.holdings]
        self._dirty = True
        if gang.state is RunState.PENDING:
            self._request_machines()

    def _release_machines(self) -> None:
        self.gang.release_pending = True
        self._dirty = True
        self._effects.append(ReleaseMachines(reservation=self.gang.reservation))

    # ---- assembling and starting ------------------------------------------------------------------

    def _on_member_registered(self, event: MemberRegistered) -> None:
        member = self._current(event.incarnation)
        if member is None or member.phase is not MemberPhase.ORDERED:
            return
        self._update(
            replace(member, phase=MemberPhase.REGISTERED, address=event.address, registered_at=event.at)
        )

    def _on_member_arrived(self, event: MemberArrived) -> None:
        member = self._current(event.incarnation)
        if member is not None:
            self._note_arrival(member, event.at)

    def _note_arrival(self, member: MemberRecord, at: float) -> None:
        if member.phase.has_reached(MemberPhase.ARRIVED):
            return
        self._update(replace(member, phase=MemberPhase.ARRIVED, arrived_at=at))
        self._tell_arrivals()
        self._announce("Arrived", f"Rank {member.rank} is at the barrier.", rank=member.rank)

    def _tell_arrivals(self) -> None:
        gang = self.gang
        if gang.state is RunState.ASSEMBLING:
            gang.message = f"At the barrier: {gang.arrived_count()} of {gang.plan.nodes}."

    def _on_member_preparation_failed(self, event: MemberPreparationFailed) -> None:
        if self._current(event.incarnation) is not None and self.gang.outcome is None:
            rank = event.incarnation.rank
            self._assembly_failed(event.reason, f"Rank {rank} could not be prepared: {event.message}")

    def _on_barrier_opened(self, event: BarrierOpened) -> None:
        if self._is_current_epoch(event.epoch):
            self._note_barrier_open()

    def _beyond_barrier(self, member: MemberRecord) -> MemberRecord:
        """The member as it is known once it is clear that its barrier has opened."""
        self._note_barrier_open()
        return self.gang.members[member.rank]

    def _note_barrier_open(self) -> None:
        gang = self.gang
        if not gang.barrier_open:
            gang.barrier_open = True
            self._dirty = True
            for member in list(gang.members.values()):  # it opened: whatever is heard later, all had arrived
                self._note_arrival(member, self._now.wall)
        if gang.state is RunState.ASSEMBLING and gang.outcome is None:
            self._enter(RunState.STARTING)
            gang.message = "The barrier is open; the commands are being started."
            self._announce("Starting", "Every rank is at the barrier: all commands start.")

    def _on_barrier_closed(self, event: BarrierClosed) -> None:
        gang = self.gang
        if not self._is_current_epoch(event.epoch) or gang.barrier_closed:
            return
        gang.barrier_closed = True
        gang.barrier_open = gang.barrier_open or event.was_open
        self._dirty = True
        if gang.barrier_open:
            return
        for member in list(gang.members.values()):
            if member.settlement is None:
                self._update(replace(member, settlement=Settlement.NEVER_STARTED))

    def _on_member_started(self, event: MemberStarted) -> None:
        member = self._current(event.incarnation)
        if member is None or member.phase.has_reached(MemberPhase.STARTED):
            return
        member = self._beyond_barrier(member)
        self._update(replace(member, phase=MemberPhase.STARTED, pid=event.pid, started_at=event.at))
        self._announce("Started", f"Rank {member.rank} runs as process {event.pid}.", rank=member.rank)
        self._run_if_all_started()

    def _run_if_all_started(self) -> None:
        gang = self.gang
        if gang.state is not RunState.STARTING or gang.outcome is not None:
            return
        if all(m.phase.has_reached(MemberPhase.STARTED) for m in gang.members.values()):
            self._enter(RunState.RUNNING)
            gang.started_at = gang.started_at or self._now.wall
            gang.message = self._progress()
            self._announce("Running", "Every rank runs.")

    def _progress(self) -> str:
        """Who has finished, also when that was before the last one had started."""
        nodes = self.gang.plan.nodes
        done = sum(m.succeeded for m in self.gang.members.values())
        return f"{done} of {nodes} ranks finished." if done else f"{nodes} of {nodes} ranks running."

    # ---- ends -------------------------------------------------------------------------------------

    def _on_member_start_failed(self, event: MemberStartFailed) -> None:
        member = self._current(event.incarnation)
        if member is None:
            return
        member = self._beyond_barrier(member)
        message = f"Rank {member.rank} on {member.machine} could not start its command: {event.message}"
        self._note_failure(Failure(rank=member.rank, at=event.at, reason=event.reason, message=message))

    def _on_member_exited(self, event: MemberExited) -> None:
        member = self._current(event.incarnation)
        if member is None or member.phase is MemberPhase.EXITED:
            return
        member = self._beyond_barrier(member)
        member = replace(member, phase=MemberPhase.EXITED, exit=event.exit, ended_at=event.at)
        self._update(member)
        ended = blame.describe_exit(event.exit)
        self._announce("Exited", f"Rank {member.rank} ended with {ended}.", rank=member.rank)
        self._run_if_all_started()
        if not event.exit.ok:
            self._note_failure(
                Failure(
                    rank=member.rank,
                    at=event.at,
                    reason=blame.failure_reason(event.exit, event.evidence),
                    message=blame.exit_failure_message(member, event.exit, event.evidence),
                    exit=event.exit,
                    evidence=event.evidence,
                    last_lines=event.last_lines,
                )
            )
        elif self.gang.outcome is None:
            self.gang.message = self._progress()

    def _note_failure(self, failure: Failure) -> None:
        """Keeps a failure as evidence; one that our own fence may have caused is none."""
        gang = self.gang
        if any(f.rank == failure.rank for f in gang.failures):
            return
        if gang.outcome is not None and failure.exit is not None and failure.exit.signal in (9, 15):
            return
        gang.failures.append(failure)
        self._announce("RankFailed", failure.message, reason=failure.reason, rank=failure.rank)
        if self._judgement_deadline is None and gang.outcome is None:
            self._judgement_deadline = self._now.mono + blame.JUDGEMENT_WINDOW_S

    def _judge(self) -> None:
        """Decides the epoch's end from what its ranks did, when it can be decided."""
        gang = self.gang
        if gang.outcome is not None or not gang.members or gang.state.is_terminal:
            return
        members = gang.members.values()
        if gang.failures:
            failed = {f.rank for f in gang.failures}
            waited = self._judgement_deadline is not None and self._now.mono >= self._judgement_deadline
            all_ended = all(m.exit is not None or m.rank in failed for m in members)
            if waited or all_ended or blame.may_be_judged(gang.failures):
                cause = blame.first_cause(gang.failures)
                self._decide(Outcome(kind=OutcomeKind.FAIL, reason=cause.reason, message=cause.message))
        elif gang.state is RunState.RUNNING and all(m.succeeded for m in members):
            self._decide(
                Outcome(
                    kind=OutcomeKind.SUCCEED, reason=Reason.COMPLETED, message="Every rank exited with 0."
                )
            )

    def _on_lease_lapsed(self, event: LeaseLapsed) -> None:
        member = self._current(event.incarnation)
        if member is None:
            return
        failure = self._settle_lost(member)
        outcome = self.gang.outcome
        if outcome is not None and outcome.kind is OutcomeKind.FAIL and self.gang.failures:
            # A lost machine makes the other ranks complain seconds before its lease runs out: better evidence.
            self._note_failure(failure)

    def _settle_lost(self, member: MemberRecord) -> Failure:
        """Counts the member as lost. Returns what that says, should it not be the first to fail."""
        self._update(replace(member, settlement=Settlement.LEASE_LAPSED))
        message = f"Rank {member.rank}: {member.machine} was lost (its lease ran out)."
        self._announce("MemberLost", message, reason=Reason.MACHINE_LOST, rank=member.rank)
        failure = Failure(rank=member.rank, at=self._now.wall, reason=Reason.MACHINE_LOST, message=message)
        if self.gang.outcome is None and not member.succeeded:
            if self.gang.barrier_open:
                self._note_failure(failure)
            else:
                self._assembly_failed(Reason.MACHINE_LOST, message)
        return failure

    def _on_lease_gone(self, event: LeaseGone) -> None:
        member = self._current(event.incarnation)
        if member is not None:
            self._last_word_deadlines.setdefault(member.rank, self._now.mono + LAST_WORD_WINDOW_S)

    def _on_member_suspected(self, event: MemberSuspected) -> None:
        """Nothing is decided by it: the lease tells, one way or the other."""

    def _on_member_vanished(self, event: MemberVanished) -> None:
        member = self._current(event.incarnation)
        if member is None or member.phase is not MemberPhase.ORDERED or self.gang.outcome is not None:
            return  # a member that has registered holds a lease: its lapse will tell
        self._assembly_failed(Reason.MACHINE_REFUSED, f"Rank {member.rank}: {event.message}")

    def _on_cancel_requested(self, event: CancelRequested) -> None:
        gang = self.gang
        if gang.state.is_terminal:
            return
        outcome = Outcome(kind=OutcomeKind.CANCEL, reason=event.reason, message=event.message)
        if gang.outcome is not None and gang.outcome.kind is not OutcomeKind.RETRY_ASSEMBLY:
            return  # how the epoch ends has been decided, and it will not begin another
        self._announce("CancelRequested", event.message, reason=event.reason)
        if gang.state is RunState.PENDING:
            gang.outcome = outcome
            self._end(outcome)
        elif gang.outcome is not None:
            gang.outcome = outcome
        else:
            self._decide(outcome)

    def _on_time_passed(self, event: TimePassed) -> None:
        for rank in [r for r, due in self._last_word_deadlines.items() if self._now.mono >= due]:
            del self._last_word_deadlines[rank]
            member = self._current(self.gang.members[rank].incarnation)
            if member is not None:
                self._settle_lost(member)
        overdue = self._assembly_deadline is not None and self._now.mono >= self._assembly_deadline
        if overdue and self.gang.outcome is None and self.gang.state in _ASSEMBLY_STATES:
            missing = sorted(
                m.rank for m in self.gang.members.values() if not m.phase.has_reached(MemberPhase.ARRIVED)
            )
            who = (
                f"rank {', '.join(map(str, missing))} never arrived"
                if missing
                else "not every command started"
            )
            limit = self.gang.plan.startup_timeout_s
            self._assembly_failed(
                Reason.GANG_ASSEMBLY_TIMEOUT, f"Assembly took longer than {limit:g} s: {who}."
            )

    def _assembly_failed(self, reason: Reason, message: str) -> None:
        gang = self.gang
        tries = gang.plan.max_assembly_retries + 1
        self._announce("AssemblyFailed", f"Try {gang.assemblies} of {tries}: {message}", reason=reason)
        if gang.assemblies < tries:
            self._decide(Outcome(kind=OutcomeKind.RETRY_ASSEMBLY, reason=reason, message=message))
        else:
            self._decide(
                Outcome(
                    kind=OutcomeKind.FAIL,
                    reason=Reason.GANG_ASSEMBLY_TIMEOUT,
                    message=f"The gang did not assemble in {tries} tries. The last one: {message}",
                )
            )

    # ---- fencing and the end of an epoch ----------------------------------------------------------

    def _decide(self, outcome: Outcome) -> None:
        gang = self.gang
        assert gang.outcome is None, "an epoch ends once"
        gang.outcome = outcome
        self._dirty = True
        self._judgement_deadline = None
        if outcome.kind is not OutcomeKind.SUCCEED:
            self._enter(RunState.FENCING)
            gang.message = f"Stopping every rank: {outcome.message}"
            self._announce("Fencing", f"Epoch {gang.epoch} is being fenced.", reason=outcome.reason)
        self._effects.extend(self._fence_effects())

    def _fence_effects(self) -> list[GangEffect]:
        gang = self.gang
        effects: list[GangEffect] = []
        if (
            not gang.barrier_closed
            and gang.outcome is not None
            and gang.outcome.kind is not OutcomeKind.SUCCEED
        ):
            effects.append(CloseBarrier(epoch=gang.epoch))
        effects.extend(
            FenceMember(incarnation=m.incarnation, grace_s=gang.plan.grace_period_s)
            for m in gang.members.values()
            if m.settlement is None
        )
        return effects

    def _on_member_fenced(self, event: MemberFenced) -> None:
        member = self._current(event.incarnation)
        if member is None:
            return
        ended_at = member.ended_at if member.exit is not None else event.at
        self._update(
            replace(member, settlement=Settlement.CONFIRMED, fenced_exit=event.exit, ended_at=ended_at)
        )
        if self.gang.outcome is None and not member.succeeded:
            # It fenced itself before anybody asked.
            why = event.message or "it had lost its lease."
            message = f"Rank {member.rank} on {member.machine} stopped itself: {why}"
            if not self.gang.barrier_open:
                self._assembly_failed(Reason.LEASE_LOST, message)
            else:
                self._note_failure(
                    Failure(rank=member.rank, at=event.at, reason=Reason.LEASE_LOST, message=message)
                )

    def _on_member_fence_failed(self, event: MemberFenceFailed) -> None:
        member = self._current(event.incarnation)
        if member is None:
            return
        self._update(replace(member, settlement=Settlement.FENCE_FAILED, ended_at=event.at))
        message = f"Rank {member.rank} on {member.machine} could not be fenced: {event.message}"
        self._announce("FenceFailed", message, reason=Reason.FENCE_FAILED, rank=member.rank)
        if self.gang.outcome is None:
            self._note_failure(
                Failure(rank=member.rank, at=event.at, reason=Reason.FENCE_FAILED, message=message)
            )

    def _conclude_if_settled(self) -> None:
        gang = self.gang
        if gang.outcome is None or gang.state.is_terminal or gang.state is RunState.PENDING:
            return
        if any(m.settlement is None for m in gang.members.values()):
            return
        unfenced = [m for m in gang.members.values() if m.settlement is Settlement.FENCE_FAILED]
        if unfenced and gang.outcome.kind is OutcomeKind.RETRY_ASSEMBLY:
            machines = ", ".join(m.machine for m in unfenced)
            gang.outcome = Outcome(
                kind=OutcomeKind.FAIL,
                reason=Reason.FENCE_FAILED,
                message=f"Not assembled again, since processes on {machines} cannot be killed. The last try: "
                f"{gang.outcome.message}",
            )
        self._effects.extend(DismissMember(incarnation=m.incarnation) for m in gang.members.values())
        if gang.outcome.kind is OutcomeKind.RETRY_ASSEMBLY:
            self._enter(RunState.PENDING)
            gang.reason = gang.outcome.reason
            gang.message = f"Assembling again: {gang.outcome.message}"
            self._release_machines()
        else:
            self._end(gang.outcome)

    def _end(self, outcome: Outcome) -> None:
        gang = self.gang
        gang.reason, gang.message = outcome.reason, outcome.message
        if outcome.kind is OutcomeKind.FAIL and gang.failures:
            gang.cause = blame.first_cause(gang.failures)
            gang.reason = gang.cause.reason
            gang.message = gang.cause.message + blame.note_on_early_finishers(
                gang.members.values(), gang.cause
            )
        self._enter(_END_OF[outcome.kind])
        self._announce(str(gang.state), gang.message, reason=gang.reason)
        self._effects.append(ForgetGang(epoch=gang.epoch))
        self._release_machines()

    # ---- after a crash ----------------------------------------------------------------------------

    def _on_coordinator_recovered(self, event: CoordinatorRecovered) -> None:
        """Asks again for everything that may not have happened; all of it is idempotent."""
        gang = self.gang
        if gang.release_pending:
            self._effects.append(ReleaseMachines(reservation=gang.reservation))
        if gang.state.is_terminal:
            if gang.release_pending:
                self._effects.extend(DismissMember(incarnation=m.incarnation) for m in gang.members.values())
                self._effects.append(ForgetGang(epoch=gang.epoch))
        elif gang.state is RunState.PENDING:
            if gang.reservation == 0:
                self._on_run_accepted(RunAccepted())
            elif not gang.release_pending:
                self._effects.append(self._reservation_effect())
        else:
            self._resume_epoch()

    def _resume_epoch(self) -> None:
        gang = self.gang
        self._effects.append(OpenEpoch(epoch=gang.epoch, size=gang.plan.nodes, is_new=False))
        if gang.outcome is not None:
            self._effects.extend(self._fence_effects())
            return
        if gang.state in _ASSEMBLY_STATES:
            self._assembly_deadline = self._now.mono + gang.assembly_left_s
        if gang.failures:
            self._judgement_deadline = self._now.mono + blame.JUDGEMENT_WINDOW_S
        self._effects.extend(self._order(m) for m in gang.members.values() if m.phase is MemberPhase.ORDERED)


_HANDLERS: Mapping[type[Any], Callable[[GangCore, Any], None]] = {
    RunAccepted: GangCore._on_run_accepted,
    ReservationWaiting: GangCore._on_reservation_waiting,
    MachinesReserved: GangCore._on_machines_reserved,
    MachinesReleased: GangCore._on_machines_released,
    MemberRegistered: GangCore._on_member_registered,
    MemberArrived: GangCore._on_member_arrived,
    MemberPreparationFailed: GangCore._on_member_preparation_failed,
    BarrierOpened: GangCore._on_barrier_opened,
    BarrierClosed: GangCore._on_barrier_closed,
    MemberStarted: GangCore._on_member_started,
    MemberStartFailed: GangCore._on_member_start_failed,
    MemberExited: GangCore._on_member_exited,
    LeaseLapsed: GangCore._on_lease_lapsed,
    LeaseGone: GangCore._on_lease_gone,
    MemberSuspected: GangCore._on_member_suspected,
    MemberVanished: GangCore._on_member_vanished,
    CancelRequested: GangCore._on_cancel_requested,
    TimePassed: GangCore._on_time_passed,
    MemberFenced: GangCore._on_member_fenced,
    MemberFenceFailed: GangCore._on_member_fence_failed,
    CoordinatorRecovered: GangCore._on_coordinator_recovered,
}
