"""What ends an epoch: exits, failures, losses, reclaims; and the proof that nothing of it can act any more.

Rules of this file:
1. An epoch is stopped at once, and judged later: whether the run fails or goes on is decided when every member is
   accounted for, because a machine's death shows in the others first and in its own lease seconds later.
2. While only complaints about peers have been heard, the stop waits a little for the peer's own failure
   (`blame.JUDGEMENT_WINDOW_S`), which a stop would hide.
3. A lost lease is a loss when the barrier had opened; before that it costs its rank the machine, not the epoch.
4. Every fence comes to its end within a limit. A member whose agent does not answer, or does not confirm, has its lease
   renewed no more: its keeper ends everything there, and the lapse is the proof. Its machine counts as not clean. If
   even the lease does not end, the fence has failed.
5. A failure that is its rank's alone (`recovery.lone_failures`) stops that rank, not the epoch.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.core import blame, recovery
from coordinator.core.effects import ExpireLease
from coordinator.core.events import (
    FenceTaken,
    LeaseExpiring,
    LeaseGone,
    LeaseLapsed,
    MachineReclaimed,
    MemberSuspected,
    StoreHeard,
    StoreSilent,
)
from coordinator.core.gang_base import ASSEMBLY_STATES, RESTING_STATES
from coordinator.core.gang_state import Failure, MemberPhase, MemberRecord, Outcome, OutcomeKind, Settlement
from coordinator.core.refusing import Refusing
from coordinator.core.store_silence import StoreSilence
from mesh.ids import Rank
from mesh.messages import (
    CauseEvidence,
    MemberExited,
    MemberFenced,
    MemberFenceFailed,
    MemberStartFailed,
)
from mesh.reasons import Reason
from mesh.states import RunState

FENCE_LIMIT_S = 90.0
"""How long, over the grace period, a member that was told to stop may take to confirm it: killing what does not end,
handing over its output and its last part of a checkpoint (`agents.core.member_state`: 2 + 5 + 60 s at most)."""
EXPIRY_LIMIT_S = 30.0
"""How long a lease that is renewed no more may take to run out: ttl and guard, and what the store's own stalls add."""
STORE_AWAY_LIMIT_S = 600.0
"""How long the store may take to say that it renews a lease no more. By then nobody serves this deployment."""
LAST_WORD_WINDOW_S = 5.0
"""How long the reports of a member whose lease is gone are waited for: they say how its command ended."""


class Ending(Refusing):
    """Everything that an epoch can end of."""

    # ---- exits and failures -----------------------------------------------------------------------

    def _on_member_start_failed(self, event: MemberStartFailed) -> None:
        member = self._current(event.incarnation)
        if member is None:
            return
        member = self._beyond_barrier(member)
        message = f"Rank {member.rank} on {member.machine} could not start its command: {event.message}"
        # A path that could not be opened is its machine's fault, or the network's.
        evidence = CauseEvidence(by_infrastructure=event.reason is Reason.NETWORK_FAILED)
        self._note_failure(
            Failure(rank=member.rank, at=event.at, reason=event.reason, message=message, evidence=evidence)
        )

    def _on_member_exited(self, event: MemberExited) -> None:
        member = self._current(event.incarnation)
        if member is None or member.phase is MemberPhase.EXITED:
            return
        member = self._beyond_barrier(member)
        member = replace(member, phase=MemberPhase.EXITED, exit=event.exit, ended_at=event.at)
        self._update(member)
        self._announce("Exited", f"Rank {member.rank} ended with {event.exit.words}.", rank=member.rank)
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
        """Keeps a failure as evidence, after the stop as well: what a fence had reached is not reported as one."""
        gang = self.gang
        if any(f.rank == failure.rank for f in gang.failures):
            return
        gang.failures.append(failure)
        self._announce("RankFailed", failure.message, reason=failure.reason, rank=failure.rank)
        if self._failed_at is None:
            self._failed_at = self._now.mono
        if self._due.judgement is None and gang.outcome is None:
            self._due.judgement = self._now.mono + blame.JUDGEMENT_WINDOW_S

    # ---- losses -----------------------------------------------------------------------------------

    def _on_lease_lapsed(self, event: LeaseLapsed) -> None:
        member = self._current(event.incarnation)
        if member is not None:
            said_at = self._now.mono if event.said_after is None else event.said_after
            alive_at = None if event.silent_s is None else said_at - event.silent_s
            self._settle_lost(member, alive_at=alive_at)

    def _settle_lost(self, member: MemberRecord, *, alive_at: float | None) -> None:
        gang = self.gang
        is_being_replaced = member.reason is not None
        how = "it did not answer when it was stopped" if member.is_expiring else "its lease ran out"
        message = f"Rank {member.rank}: {member.machine} was lost ({how})."
        # A lease that had to be ended was renewed until then.
        silent = not member.is_expiring and blame.was_silent_before(self._failed_at, alive_at)
        settled = self._settle(member, Settlement.LEASE_LAPSED, reason=Reason.MACHINE_LOST, message=message)
        settled = replace(settled, was_silent_first=silent)
        self._update(settled)
        self._announce("MemberLost", message, reason=Reason.MACHINE_LOST, rank=member.rank)
        if not is_being_replaced and gang.outcome is None:
            self._give_up(settled, Reason.MACHINE_LOST, message)

    def _on_lease_gone(self, event: LeaseGone) -> None:
        member = self._current(event.incarnation)
        if member is not None:
            self._due.last_words.setdefault(member.rank, self._now.mono + LAST_WORD_WINDOW_S)

    def _on_member_suspected(self, event: MemberSuspected) -> None:
        member = self._current(event.incarnation)
        if member is not None and member.exit is None and self.gang.outcome is None:
            message = f"Rank {member.rank}: {member.machine} closed the connection of its lease."
            self._announce("Suspected", message, rank=member.rank)

    def _settle_silent(self) -> None:
        """Members whose lease is gone and whose last report did not come."""
        for rank in [r for r, due in self._due.last_words.items() if self._now.mono >= due]:
            del self._due.last_words[rank]
            member = self.gang.members.get(rank)
            if member is not None and self._current(member.incarnation) is not None:
                self._settle_lost(member, alive_at=None)  # nobody watched

    def _on_machine_reclaimed(self, event: MachineReclaimed) -> None:
        gang = self.gang
        rank = next((r for r, seat in gang.seats.items() if seat.machine == event.machine), None)
        if rank is None or event.machine in gang.reclaimed or gang.state.is_terminal:
            return
        gang.reclaimed = (*gang.reclaimed, event.machine)
        message = (
            f"Rank {rank}: {event.machine} is wanted back in {event.grace_s:g} s. {event.message}".rstrip()
        )
        self._announce("Reclaimed", message, reason=Reason.MACHINE_RECLAIMED, rank=rank)
        if gang.state in RESTING_STATES:
            self._vacate(rank, is_clean=True)
            self._want((rank,), avoid=(event.machine,))
            return
        if rank in gang.members and gang.members[rank].succeeded:
            return  # it has finished: nobody waits for what it would do there
        if gang.barrier_open and blame.may_have_crossed(self._failed_at, self._now.mono):
            gang.was_reclaimed_first = True
        if gang.outcome is not None:
            return  # the end of the epoch takes it into account
        if gang.barrier_open:
            outcome = Outcome(kind=OutcomeKind.JUDGE, reason=Reason.MACHINE_RECLAIMED, message=message)
            self._decide(outcome, grace_s=event.grace_s)
        elif gang.state is RunState.ASSEMBLING:
            self._refuse_machine(rank, Reason.MACHINE_RECLAIMED, message)

    # ---- the decision to stop ---------------------------------------------------------------------

    def _stop_if_over(self) -> None:
        """Stops the epoch when something in it has happened that it cannot go on from, or when all have finished."""
        gang = self.gang
        if gang.outcome is not None or not gang.barrier_open or gang.state in RESTING_STATES:
            return
        if gang.state.is_terminal:
            return
        members = gang.members.values()
        lone = {failure.rank for failure in recovery.lone_failures(gang)}
        lost = [m for m in members if m.settlement is not None and not m.succeeded and m.rank not in lone]
        if lost:
            first = min(lost, key=lambda m: (m.ended_at or 0.0, m.rank))
            self._decide(
                Outcome(
                    kind=OutcomeKind.JUDGE,
                    reason=first.reason or Reason.MACHINE_LOST,
                    message=first.message or f"Rank {first.rank} was lost.",
                )
            )
        elif lone:
            self._due.judgement = None
        elif gang.failures:
            failed = {f.rank for f in gang.failures}
            has_waited = self._due.judgement is not None and self._now.mono >= self._due.judgement
            all_ended = all(m.exit is not None or m.rank in failed for m in members)
            if has_waited or all_ended or blame.may_be_judged(gang.failures):
                cause = blame.first_cause(gang.failures)
                self._decide(Outcome(kind=OutcomeKind.JUDGE, reason=cause.reason, message=cause.message))
        elif gang.state is RunState.RUNNING and all(m.succeeded for m in members):
            self._decide(
                Outcome(
                    kind=OutcomeKind.SUCCEED, reason=Reason.COMPLETED, message="Every rank exited with 0."
                )
            )

    # ---- proofs -----------------------------------------------------------------------------------

    def _on_member_fenced(self, event: MemberFenced) -> None:
        member = self._current(event.incarnation)
        if member is None:
            return
        gang = self.gang
        fenced_itself = event.reason is not None  # whatever the reason: it was not our order
        member = replace(member, fenced_exit=event.exit, fenced_itself=fenced_itself)
        words = event.message
        if event.reason is Reason.STORE_UNREACHABLE:
            self._unrenewed[member.rank] = self._now.mono
            if self._is_excused(member.rank):
                member = replace(member, store_was_silent=True)
                words = f"{words}{self._silence_note()}".strip()
        if member.exit is None:
            member = replace(member, ended_at=event.at)
        is_lone = event.reason is None and member.exit is not None  # told to stop alone
        if gang.outcome is not None or member.succeeded or is_lone:
            message = words or (gang.outcome.message if gang.outcome is not None else "")
            reason = event.reason or Reason.EPOCH_ENDED
            self._settle(member, Settlement.CONFIRMED, reason=reason, message=message)
            return
        # It fenced itself before anybody asked.
        why_text = words or "it had lost its lease."
        message = f"Rank {member.rank} on {member.machine} stopped itself: {why_text}"
        reason = event.reason or Reason.LEASE_LOST
        is_being_replaced = member.reason is not None
        settled = self._settle(member, Settlement.CONFIRMED, reason=reason, message=message)
        self._announce("SelfFenced", message, reason=reason, rank=member.rank)
        if gang.state in ASSEMBLY_STATES and not gang.barrier_open and not is_being_replaced:
            self._give_up(settled, reason, message)

    # ---- the store's silence ----------------------------------------------------------------------

    def _on_store_silent(self, event: StoreSilent) -> None:
        self._silence = StoreSilence(since=event.since)
        for rank, member in self.gang.members.items():
            if self._is_excused(rank) and not member.store_was_silent:
                message = f"{member.message}{self._silence_note()}".strip()
                self._update(replace(member, store_was_silent=True, message=message))
        for rank in self._due.expiry:
            self._due.expiry[rank] = self._now.mono + STORE_AWAY_LIMIT_S

    def _on_store_heard(self, event: StoreHeard) -> None:
        if self._silence is not None:
            self._silence.until = self._now.mono
        for rank in self._due.expiry:
            self._due.expiry[rank] = self._now.mono + EXPIRY_LIMIT_S

    def _silence_note(self) -> str:
        assert self._silence is not None, "it explains something"
        return f" The coordinator had heard nothing of the store for {self._silence.length_s(self._now.mono):.1f} s."

    def _is_excused(self, rank: Rank) -> bool:
        """It stopped itself for want of a renewal, and the store had been silent here as well."""
        stopped_at = self._unrenewed.get(rank)
        return stopped_at is not None and self._silence is not None and self._silence.explains(stopped_at)

    # ---- when no proof comes ----------------------------------------------------------------------

    def _on_fence_taken(self, event: FenceTaken) -> None:
        member = self._current(event.incarnation)
        if member is not None and not member.is_expiring:
            self._due.fence[member.rank] = self._now.mono + event.grace_s + FENCE_LIMIT_S

    def _end_overdue_fences(self) -> None:
        """Members that hang while their keepers renew their leases: these are to run out (rule 4)."""
        for rank in [r for r, due in self._due.fence.items() if self._now.mono >= due]:
            del self._due.fence[rank]
            member = self.gang.members[rank]
            message = f"Rank {rank} on {member.machine} does not answer, or does not end: its lease is renewed no more."
            self._announce("FenceOverdue", message, rank=rank)
            self._expire(member)

    def _expire(self, member: MemberRecord) -> None:
        self._update(replace(member, is_expiring=True))
        self._due.expiry[member.rank] = self._now.mono + STORE_AWAY_LIMIT_S
        self._effects.append(ExpireLease(incarnation=member.incarnation))

    def _on_lease_expiring(self, event: LeaseExpiring) -> None:
        member = self._current(event.incarnation)
        if member is None:
            return
        self._due.expiry[member.rank] = self._now.mono + EXPIRY_LIMIT_S
        if event.is_over:
            self._on_lease_gone(LeaseGone(incarnation=event.incarnation))

    def _give_up_unproven(self) -> None:
        """Neither the member nor its lease has ended: there is no proof, and there will be none."""
        for rank in [r for r, due in self._due.expiry.items() if self._now.mono >= due]:
            message = "it does not answer, and the store did not say that its lease had run out."
            self._settle_unfenced(self.gang.members[rank], message)

    def _on_member_fence_failed(self, event: MemberFenceFailed) -> None:
        member = self._current(event.incarnation)
        if member is None:
            return
        member = self._beyond_barrier(member)  # there is something to kill: a command was started
        self._settle_unfenced(replace(member, ended_at=event.at), event.message)

    def _settle_unfenced(self, member: MemberRecord, why: str) -> None:
        message = f"Rank {member.rank} on {member.machine} could not be fenced: {why}"
        self._settle(member, Settlement.FENCE_FAILED, reason=Reason.FENCE_FAILED, message=message)
        self._announce("FenceFailed", message, reason=Reason.FENCE_FAILED, rank=member.rank)
