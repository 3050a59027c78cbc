"""One rank that starts again while the others go on: `recovery.onProcessFailure: RestartRank`.

`recovery.lone_failures` says of which failures that is true; every other one stops the epoch (`ending`).

Theory of operation. The gang stays Running. The failed rank's member alone is fenced. When it has confirmed, and the
pause is over without a machine having been found lost, another incarnation is made for the rank, on the same machine,
in the same epoch; the store is asked to admit it in place of the one before; and then it is ordered. The failure stays
among the gang's until the store has said yes: up to there whatever else happens is judged with it.

Rules of this file:
1. No incarnation is made beside one that may still act: the one before has confirmed, and its lease is over (the store
   sees to that).
2. It counts as a restart for a command that failed, when it was admitted.
3. What keeps it from beginning, or from running within the time of an assembly, is its machine's fault, not its
   command's; and it is not tried alone again. A store that was restarted, and does not let in whom it had admitted, is
   nobody's.
4. It finds the state directory as the life before has left it.
"""

from __future__ import annotations

from coordinator.core import recovery
from coordinator.core.effects import AdmitMember, DismissMember, OrderMember
from coordinator.core.ending import Ending
from coordinator.core.events import MemberAdmitted
from coordinator.core.gang_state import (
    Failure,
    MemberPhase,
    MemberRecord,
    Outcome,
    OutcomeKind,
    RestartKind,
    Settlement,
    incarnation_for,
)
from mesh.messages import CauseEvidence
from mesh.reasons import Reason

_STORE_RESTARTED = "cannot start again alone: the store has been restarted since."


class LoneRanks(Ending):
    """Ranks that start again alone."""

    def _restart_lone_ranks(self) -> None:
        """After every event: each such failure one step further, where it can go."""
        for failure in recovery.lone_failures(self.gang):
            rank, member = failure.rank, self.gang.members[failure.rank]
            if member.exit is None:
                continue  # its next life is there already, and not admitted yet
            if rank not in self._due.lone:
                self._stop_alone(failure, member)
            elif (
                self._due.lone[rank] is None
                and member.settlement is Settlement.CONFIRMED
                and not self._due.last_words  # of a machine that may be the cause
            ):
                self._begin_again(member)
        for member in self.gang.members.values():
            if self._is_beginning(member) and member.rank not in self._due.begin:
                self._due.begin[member.rank] = self._now.mono + self.gang.plan.startup_timeout_s

    def _is_beginning(self, member: MemberRecord) -> bool:
        """It was admitted, and its command does not run yet."""
        has_to = member.instead_of is not None and self.gang.outcome is None
        return (
            has_to
            and not member.phase.has_reached(MemberPhase.STARTED)
            and self._failure_before(member) is None
        )

    def _note_lone_deadlines(self) -> None:
        now, due = self._now.mono, self._due
        for rank in [r for r, pause_ends in due.lone.items() if pause_ends is not None and now >= pause_ends]:
            due.lone[rank] = None
        for rank in [r for r, limit in due.begin.items() if now >= limit]:
            del due.begin[rank]
            member = self.gang.members[rank]
            if self._is_beginning(member):
                limit_s = self.gang.plan.startup_timeout_s
                message = f"Rank {rank} did not begin again on {member.machine} within {limit_s:g} s."
                self._give_up(member, Reason.PREPARATION_FAILED, message)

    def _stop_alone(self, failure: Failure, member: MemberRecord) -> None:
        """The rank has failed, or a coordinator that was restarted finds that it has."""
        delay_s = recovery.lone_delay_s(self.gang.restarts)
        self._lone_since[failure.rank] = self._now.mono
        self._due.lone[failure.rank] = self._now.mono + delay_s
        self._due.healthy = None
        sentence = f"Rank {failure.rank} starts again alone in {delay_s:g} s; the others go on."
        if self.gang.message != (message := f"{failure.message} {sentence}"):
            self.gang.message = message
            self._announce("RankRestarting", sentence, reason=failure.reason, rank=failure.rank)
        if member.settlement is None:
            self._effects.append(self._fence(member, 0.0))

    def _begin_again(self, member: MemberRecord) -> None:
        gang, rank = self.gang, member.rank
        del self._due.lone[rank]
        self._due.begin.pop(rank, None)
        self._retire(member)
        gang.checkpoints.rank_began_again(rank)
        self._troubles.pop(rank, None)
        successor = MemberRecord(
            incarnation=incarnation_for(gang.uid, gang.epoch, rank, self._new_token()),
            machine=member.machine,
            address=member.address,
            ordered_at=self._now.wall,
            instead_of=member.incarnation.token,
        )
        self._update(successor)
        self._effects.append(DismissMember(incarnation=member.incarnation))
        self._effects.append(self._call(successor))

    def _call(self, member: MemberRecord) -> AdmitMember | OrderMember:
        """Its admission until the store has said yes, its order from then on."""
        if member.instead_of is not None and self._failure_before(member) is not None:
            since = self._lone_since.get(member.rank, self._now.mono)
            return AdmitMember(
                incarnation=member.incarnation, instead_of=member.instead_of, alive_since=since
            )
        return self._order(member)

    def _failure_before(self, member: MemberRecord) -> Failure | None:
        """Of the life that this one is to follow, as long as it has not been admitted."""
        if member.exit is not None:
            return None  # that is its own
        return next((f for f in self.gang.failures if f.rank == member.rank and f.exit is not None), None)

    def _on_member_admitted(self, event: MemberAdmitted) -> None:
        gang, member = self.gang, self._current(event.incarnation)
        failure = None if member is None else self._failure_before(member)
        if member is None or failure is None or gang.outcome is not None:
            return
        if not event.is_admitted:
            self._settle(member, Settlement.REVOKED)  # nobody but the store has ever heard of it
            why = f"Rank {member.rank} {_STORE_RESTARTED}"
            self._announce("RankNotRestarted", why, reason=failure.reason, rank=member.rank)
            message = f"{failure.message} {why}"
            self._decide(Outcome(kind=OutcomeKind.JUDGE, reason=failure.reason, message=message))
            return
        gang.failures.remove(failure)
        if not gang.failures:
            self._failed_at = None
        gang.restarts = recovery.lone_charged(gang.restarts)
        charge = recovery.describe(gang.restarts, RestartKind.FAILURE, gang.plan)
        sentence = f"{charge}: rank {member.rank} starts again alone on {member.machine}."
        gang.message = sentence
        self._announce("RankRestarted", sentence, reason=failure.reason, rank=member.rank)
        self._effects.append(self._order(member))

    def _give_up(self, member: MemberRecord, reason: Reason, message: str) -> None:
        if member.instead_of is None:
            super()._give_up(member, reason, message)
        elif member.settlement is None:  # else it is lost, and the epoch is over
            ours = CauseEvidence(by_infrastructure=True)
            if reason is Reason.MACHINE_REFUSED:  # it had taken the rank before
                reason = Reason.MACHINE_LOST
            elif reason is Reason.CANCELLED:  # the barrier is closed, in a store that did not admit it
                reason = Reason.STORE_UNREACHABLE
                message = f"Rank {member.rank} {_STORE_RESTARTED}"
            self._note_failure(
                Failure(rank=member.rank, at=self._now.wall, reason=reason, message=message, evidence=ours)
            )

    def _has_rank_away(self) -> bool:
        """A rank has failed, or has not begun again yet."""
        members = self.gang.members.values()
        return bool(self.gang.failures) or any(not m.phase.has_reached(MemberPhase.STARTED) for m in members)
