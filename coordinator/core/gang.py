"""The life of one gang, decided.

Theory of operation. A run waits in Pending until every machine it needs is held (all or none). Then a new
epoch begins: members are ordered to their machines, take leases, prepare, and arrive at the epoch's barrier
in the store; the store opens it for all at once (Starting), the commands start (Running), and end. The first
thing that the epoch cannot go on from becomes its `outcome`, once; from there on the epoch only ends: its barrier
is closed, every member is fenced, and when each is proven unable to act (`Settlement`) the outcome takes
effect: a terminal state, a suspension, another try to assemble, or the next epoch, in which the ranks that were not
lost have the machines that they had.

The rooms: `gang_base`, `saving` (checkpoints), `seats` (machines), `assembling`, `ending`, `lone_ranks` (a rank that
starts again while the others go on), and this one (what users want, what comes after an epoch, crashes). `blame` names
causes, `recovery` keeps the budgets.

Rules of the whole:
1. `handle(event, now)` is total: nothing that a peer, a machine or a user does raises.
2. One gate before any handler: what is of another epoch, incarnation or reservation changes nothing.
3. `_enter` is the only writer of the state, along `TRANSITIONS`.
4. What changed is persisted before anything else of the batch happens (`Persist` comes first).
5. Once set, an outcome changes only away from going on: a wish to cancel or suspend takes the place of a restart or
   another try; a member that could not be fenced turns them into a failure, since no epoch begins while something
   of an older one may act.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coordinator.core import blame, recovery
from coordinator.core.effects import DismissMember, ForgetGang, GangEffect, OpenEpoch, Persist, RevokeMember
from coordinator.core.events import (
    BarrierClosed,
    BarrierOpened,
    CancelRequested,
    CheckpointLacking,
    CheckpointWritten,
    CoordinatorRecovered,
    FaultRehearsed,
    FenceTaken,
    GangEvent,
    LeaseExpiring,
    LeaseGone,
    LeaseLapsed,
    MachineReclaimed,
    MachineReleased,
    MachinesReserved,
    MemberAdmitted,
    MemberRevoked,
    MemberSuspected,
    MemberVanished,
    NetworkChecked,
    Now,
    RehearsalLeft,
    ReservationWaiting,
    ReservationWithdrawn,
    ResumeRequested,
    RunAccepted,
    StoreHeard,
    StoreSilent,
    SuspendRequested,
    TimePassed,
)
from coordinator.core.gang_base import ASSEMBLY_STATES, RESTING_STATES, TRANSITIONS
from coordinator.core.gang_state import (
    Gang,
    MemberPhase,
    Outcome,
    OutcomeKind,
    Settlement,
)
from coordinator.core.invariants import check_invariants
from coordinator.core.lone_ranks import LoneRanks
from mesh.ids import IncarnationToken, Rank
from mesh.messages import (
    CheckpointPartAnswered,
    CheckpointPartStored,
    CheckpointTroubled,
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

__all__ = ["TRANSITIONS", "GangCore"]

_END_OF = {
    OutcomeKind.SUCCEED: RunState.SUCCEEDED,
    OutcomeKind.FAIL: RunState.FAILED,
    OutcomeKind.CANCEL: RunState.CANCELLED,
    OutcomeKind.SUSPEND: RunState.SUSPENDED,
}
_GOES_ON = frozenset({OutcomeKind.JUDGE, OutcomeKind.RETRY_ASSEMBLY})
"""Outcomes after which there may be another epoch: a wish comes in time."""


class GangCore(LoneRanks):
    """Decides for one gang. Not thread-safe; the shell calls it from one task.

    Args:
        gang: the state, fresh or read back from the journal (then `CoordinatorRecovered` comes first).
        new_token: gives the random part of each new incarnation; the core has no randomness of its own.
        checks_network: have the network between machines checked before members are ordered there.
        validate: check every invariant after every event (tests and simulation).
    """

    def __init__(
        self,
        gang: Gang,
        *,
        new_token: Callable[[], IncarnationToken],
        checks_network: bool = False,
        validate: bool = False,
    ) -> None:
        super().__init__(gang, new_token=new_token, checks_network=checks_network)
        self._checked = gang.snapshot() if validate else None
        """The state after the last event that changed it, for the check of the next one."""

    def handle(self, event: GangEvent, now: Now) -> list[GangEffect]:
        """Takes one event; returns what is to be done, `Persist` first when anything changed."""
        before = self._checked
        self._now = now
        self._dirty = False
        self._announcements = []
        self._effects = []
        _HANDLERS[type(event)](self, event)
        self._stop_if_over()
        self._restart_lone_ranks()
        self._conclude_if_settled()
        if self._due.commit is not None:
            self._begin_if_seated()
        self._watch_health()
        if self._dirty:
            self._note_time_left()
            self._effects.insert(0, Persist(announcements=tuple(self._announcements)))
        if before is not None and self._dirty:
            check_invariants(before, self.gang)
            self._checked = self.gang.snapshot()
        return self._effects

    def next_deadline(self) -> float | None:
        """Monotonic time at which `TimePassed` is due, or None."""
        return self._due.next()

    def _note_time_left(self) -> None:
        gang, due, now = self.gang, self._due, self._now.mono
        if due.assembly is not None:
            gang.assembly_left_s = max(0.0, due.assembly - now)
        gang.backoff_left_s = 0.0 if due.backoff is None else max(0.0, due.backoff - now)

    def _on_time_passed(self, event: TimePassed) -> None:
        due, now = self._due, self._now.mono
        self._settle_silent()
        self._end_overdue_fences()
        self._give_up_unproven()
        self._give_up_absent()
        self._pass_overdue_check()
        self._fail_overdue_assembly()
        self._note_lone_deadlines()
        if due.backoff is not None and now >= due.backoff:
            due.backoff = None
            self._dirty = True
            self._begin_if_seated()
        if due.healthy is not None and now >= due.healthy:
            due.healthy = None
            self._earn_back()

    # ---- health -----------------------------------------------------------------------------------

    def _watch_health(self) -> None:
        gang = self.gang
        if gang.state is not RunState.RUNNING or self._due.healthy is not None or self._has_rank_away():
            return
        if gang.restarts != recovery.earned_back(gang.restarts):
            self._due.healthy = self._now.mono + recovery.HEALTHY_S

    def _earn_back(self) -> None:
        if self.gang.state is not RunState.RUNNING or self.gang.outcome is not None:
            return
        self.gang.restarts = recovery.earned_back(self.gang.restarts)
        minutes = recovery.HEALTHY_S / 60
        self._announce("Healthy", f"{minutes:g} minutes without a fault: the restarts are earned back.")

    # ---- what users want --------------------------------------------------------------------------

    def _on_run_accepted(self, event: RunAccepted) -> None:
        if self.gang.reservation:
            return
        nodes = self.gang.plan.nodes
        self._announce(
            "Submitted", f"The run was accepted: {nodes} machine{'s' if nodes > 1 else ''} wanted."
        )
        self._want_all()

    def _want_all(self) -> None:
        self.gang.message = "Waiting for machines."
        self._want(Rank(r) for r in range(self.gang.plan.nodes))

    def _on_cancel_requested(self, event: CancelRequested) -> None:
        outcome = Outcome(kind=OutcomeKind.CANCEL, reason=event.reason, message=event.message)
        if self._may_wish(outcome):
            self._announce("CancelRequested", event.message, reason=event.reason)
            self._wish(outcome)

    def _on_suspend_requested(self, event: SuspendRequested) -> None:
        outcome = Outcome(kind=OutcomeKind.SUSPEND, reason=Reason.SUSPENDED, message=event.message)
        if self.gang.state is not RunState.SUSPENDED and self._may_wish(outcome):
            self._announce("SuspendRequested", event.message, reason=Reason.SUSPENDED)
            self._wish(outcome)

    def _may_wish(self, outcome: Outcome) -> bool:
        """False when how the run stops has been decided, or is this already."""
        gang = self.gang
        if gang.state.is_terminal:
            return False
        if gang.outcome is None or gang.state in RESTING_STATES:
            return True
        decided = gang.outcome if gang.wish is None else gang.wish
        if decided.kind is OutcomeKind.SUSPEND:
            return outcome.kind is OutcomeKind.CANCEL
        return decided.kind in _GOES_ON

    def _wish(self, outcome: Outcome) -> None:
        """A user wants the run to stop."""
        gang = self.gang
        if gang.state in RESTING_STATES:
            gang.outcome = outcome
            self._end(outcome)
        elif gang.outcome is None:
            self._decide(outcome)
        elif gang.outcome.kind in _GOES_ON:
            gang.wish = outcome
        else:
            gang.outcome = outcome

    def _on_resume_requested(self, event: ResumeRequested) -> None:
        gang = self.gang
        if gang.state is not RunState.SUSPENDED:
            return
        self._enter(RunState.PENDING)
        gang.outcome = gang.wish = gang.reason = None
        gang.assemblies = 0
        self._announce("Resumed", event.message)
        self._want_all()

    def _on_fault_rehearsed(self, event: FaultRehearsed) -> None:
        """So that the story tells a rehearsed fault from a real one."""
        if not self.gang.state.is_terminal:
            self._announce("Rehearsed", event.message, rank=event.rank)

    def _on_rehearsal_left(self, event: RehearsalLeft) -> None:
        """Also when the run has ended: somebody has to mend it."""
        self._announce("NotUndone", event.message, rank=event.rank)

    # ---- what comes after an epoch ----------------------------------------------------------------

    def _conclude_if_settled(self) -> None:
        gang = self.gang
        if gang.outcome is None or gang.state not in (RunState.FENCING, RunState.RUNNING):
            return
        if any(m.settlement is None for m in gang.members.values()):
            return
        if gang.state is RunState.FENCING and not gang.barrier_closed and not gang.barrier_open:
            return  # a rank without a member could still be let in
        if gang.outcome.kind in _GOES_ON and self._awaits_commit():
            return
        self._effects.extend(DismissMember(incarnation=m.incarnation) for m in gang.members.values())
        self._tell_chapter(ended_at=self._now.wall, reason=gang.outcome.reason)
        match gang.outcome.kind:
            case OutcomeKind.JUDGE:
                self._conclude_judged()
            case OutcomeKind.RETRY_ASSEMBLY:
                self._conclude_retry()
            case _:
                self._end(gang.outcome)

    def _unfenced(self) -> Outcome | None:
        """The end of a run of which something could not be killed: nothing may begin beside it."""
        gang = self.gang
        unfenced = [m for m in gang.members.values() if m.settlement is Settlement.FENCE_FAILED]
        if not unfenced:
            return None
        machines = ", ".join(m.machine for m in unfenced)
        assert gang.outcome is not None
        return Outcome(
            kind=OutcomeKind.FAIL,
            reason=Reason.FENCE_FAILED,
            message=f"Not started again, since processes on {machines} cannot be killed. Before that: "
            f"{gang.outcome.message}",
        )

    def _conclude_judged(self) -> None:
        gang = self.gang
        verdict = blame.judge(gang)
        gang.cause = verdict.cause
        self._tell_chapter(reason=verdict.cause.reason, cause=verdict.cause, victims=verdict.victims)
        decision = recovery.decide(gang, verdict)
        if isinstance(decision, recovery.NoRestart):
            message = verdict.cause.message + verdict.notes
            if decision.why:
                message += f" {decision.why}"
            reason = decision.reason or verdict.cause.reason
            self._end(Outcome(kind=OutcomeKind.FAIL, reason=reason, message=message))
        elif (end := self._unfenced() or gang.wish) is not None:
            self._end(end)
        else:
            self._restart(verdict, decision)

    def _restart(self, verdict: blame.Verdict, decision: recovery.Restart) -> None:
        gang = self.gang
        gang.restarts = decision.restarts
        gang.assemblies = 0
        gang.outcome = None
        self._tell_chapter(charged=verdict.kind)
        avoid = []
        for rank in sorted(verdict.lost):
            is_clean = gang.members[rank].settlement is Settlement.CONFIRMED
            if (machine := self._vacate(rank, is_clean=is_clean)) is not None:
                avoid.append(machine)
        charge = recovery.describe(decision.restarts, verdict.kind, gang.plan)
        sentence = f"{charge}: {verdict.cause.message}{verdict.notes}"
        if decision.delay_s:
            self._due.backoff = self._now.mono + decision.delay_s
            sentence += f" It starts again in {decision.delay_s:g} s."
        self._announce("Restarting", sentence, reason=verdict.cause.reason, rank=verdict.cause.rank)
        if decision.delay_s or not gang.seats:
            self._enter(RunState.PENDING)
            gang.reason, gang.message = verdict.cause.reason, sentence
        else:
            self._begin_epoch()
        if vacant := self._unasked_vacant():
            self._want(vacant, avoid=avoid)

    def _conclude_retry(self) -> None:
        gang = self.gang
        assert gang.outcome is not None
        if (end := self._unfenced() or gang.wish) is not None:
            self._end(end)
            return
        outcome, gang.outcome = gang.outcome, None
        if outcome.reason is Reason.CHECKPOINT_CORRUPT:
            self._assemble_from_earlier()
            return
        self._enter(RunState.PENDING)
        gang.reason = outcome.reason
        gang.message = f"Assembling again: {outcome.message}"
        self._vacate_all(unclean=self._unclean_ranks())
        self._want(Rank(r) for r in range(gang.plan.nodes))

    def _assemble_from_earlier(self) -> None:
        """The checkpoint was damaged: again, on the same machines, from the one before."""
        gang = self.gang
        gang.assemblies -= 1  # it was not the assembly's fault, and there are only so many checkpoints
        avoid = []
        for rank, member in list(gang.members.items()):
            is_lost = member.settlement is Settlement.LEASE_LAPSED
            if is_lost or member.machine in gang.reclaimed:
                machine = self._vacate(rank, is_clean=not is_lost)
                avoid += [] if machine is None else [machine]
        if gang.seats:
            self._begin_epoch()
        else:
            self._enter(RunState.PENDING)
        if vacant := self._unasked_vacant():
            self._want(vacant, avoid=avoid)

    def _unclean_ranks(self) -> frozenset[Rank]:
        """Ranks on whose machines something may still run."""
        proofs = (Settlement.CONFIRMED, Settlement.NEVER_STARTED)
        return frozenset(m.rank for m in self.gang.members.values() if m.settlement not in proofs)

    def _end(self, outcome: Outcome) -> None:
        gang = self.gang
        gang.reason, gang.message = outcome.reason, outcome.message
        self._enter(_END_OF[outcome.kind])
        self._due.backoff = self._due.commit = None
        gang.backoff_left_s = 0.0
        self._announce(str(gang.state), gang.message, reason=gang.reason)
        if gang.epoch:
            self._effects.append(ForgetGang(epoch=gang.epoch))
        self._vacate_all(unclean=self._unclean_ranks())

    # ---- after a crash ----------------------------------------------------------------------------

    def _on_coordinator_recovered(self, event: CoordinatorRecovered) -> None:
        """Asks again for everything that may not have happened; all of it is idempotent."""
        gang = self.gang
        self._ask_again_for_machines()
        if gang.checkpoints.wish is not None or not gang.state.is_terminal:
            again = gang.checkpoints.recovered()
            self._dirty = self._dirty or bool(again)
            self._save(again)
        if gang.state.is_terminal or gang.state is RunState.SUSPENDED:
            if not gang.is_released:
                self._effects.extend(DismissMember(incarnation=m.incarnation) for m in gang.members.values())
                if gang.epoch:
                    self._effects.append(ForgetGang(epoch=gang.epoch))
        elif gang.state is RunState.PENDING:
            if gang.reservation == 0:
                self._on_run_accepted(RunAccepted())
            if gang.backoff_left_s:
                self._due.backoff = self._now.mono + gang.backoff_left_s
            self._begin_if_seated()
        else:
            self._resume_epoch()

    def _resume_epoch(self) -> None:
        gang = self.gang
        self._effects.append(OpenEpoch(epoch=gang.epoch, size=gang.plan.nodes, is_new=False))
        if gang.failures:
            # The latest that it can have been: in doubt a machine was silent first.
            self._failed_at = self._now.mono
        if gang.outcome is not None:
            self._effects.extend(self._fence_effects())
        for member in [m for m in gang.members.values() if m.is_expiring and m.settlement is None]:
            self._expire(member)
        if gang.outcome is not None:
            return
        if gang.state in ASSEMBLY_STATES:
            self._due.assembly = self._now.mono + gang.assembly_left_s
        if gang.failures:
            self._due.judgement = self._now.mono + blame.JUDGEMENT_WINDOW_S
        for member in gang.members.values():
            if member.reason is not None and not gang.barrier_open:
                self._effects.append(RevokeMember(incarnation=member.incarnation))
            elif member.phase is MemberPhase.ORDERED:
                self._effects.append(self._call(member))
        if gang.check is not None:
            gang.check = None  # it ended with the crash
            self._seat_members()


_HANDLERS: Mapping[type[Any], Callable[[GangCore, Any], None]] = {
    RunAccepted: GangCore._on_run_accepted,
    ReservationWaiting: GangCore._on_reservation_waiting,
    MachinesReserved: GangCore._on_machines_reserved,
    ReservationWithdrawn: GangCore._on_reservation_withdrawn,
    MachineReleased: GangCore._on_machine_released,
    MachineReclaimed: GangCore._on_machine_reclaimed,
    NetworkChecked: GangCore._on_network_checked,
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
    MemberVanished: GangCore._on_member_vanished,
    MemberSuspected: GangCore._on_member_suspected,
    MemberRevoked: GangCore._on_member_revoked,
    FenceTaken: GangCore._on_fence_taken,
    LeaseExpiring: GangCore._on_lease_expiring,
    StoreSilent: GangCore._on_store_silent,
    StoreHeard: GangCore._on_store_heard,
    MemberAdmitted: GangCore._on_member_admitted,
    CancelRequested: GangCore._on_cancel_requested,
    SuspendRequested: GangCore._on_suspend_requested,
    ResumeRequested: GangCore._on_resume_requested,
    FaultRehearsed: GangCore._on_fault_rehearsed,
    RehearsalLeft: GangCore._on_rehearsal_left,
    TimePassed: GangCore._on_time_passed,
    MemberFenced: GangCore._on_member_fenced,
    MemberFenceFailed: GangCore._on_member_fence_failed,
    CheckpointPartStored: GangCore._on_checkpoint_part_stored,
    CheckpointPartAnswered: GangCore._on_checkpoint_part_answered,
    CheckpointTroubled: GangCore._on_checkpoint_troubled,
    CheckpointWritten: GangCore._on_checkpoint_written,
    CheckpointLacking: GangCore._on_checkpoint_lacking,
    CoordinatorRecovered: GangCore._on_coordinator_recovered,
}
