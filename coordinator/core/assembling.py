"""From machines to running commands: a new epoch, its members, the barrier, the starts.

Rules of this file:
1. An epoch begins when the gang has a machine for every rank, or after a restart, as soon as the survivors have
   theirs: they prepare and wait at the barrier while the lost ranks' machines are being got.
2. A member that is refused, lost, or never appears while the barrier is closed costs its rank the machine, and
   nobody else anything: the store revokes the incarnation, and another one is ordered elsewhere. At most
   `REPLACEMENTS_MAX` times in one assembly; then the assembly has failed.
3. A command can only have started when the epoch's barrier opened; so a barrier that was closed without
   having opened settles every member at once, heard of or not.
4. Nobody is ordered to a machine of which it is not known that the others can work with it (`checking`); one that they
   cannot work with costs its rank the machine as in rule 2.
5. One whole assembly is bounded by `startup_timeout_s`. Past it everything is given back and it is tried again,
   `max_assembly_retries` times.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.core.checking import Checking
from coordinator.core.effects import DismissMember, OpenEpoch, OrderMember, RevokeMember
from coordinator.core.events import (
    BarrierClosed,
    BarrierOpened,
    MachineReleased,
    MachinesReserved,
    MemberRevoked,
    MemberVanished,
    ReservationWaiting,
)
from coordinator.core.gang_base import ASSEMBLY_STATES
from coordinator.core.gang_state import (
    ATTEMPTS_KEPT_MAX,
    CHAPTERS_KEPT_MAX,
    REPLACEMENTS_MAX,
    Chapter,
    MemberPhase,
    MemberRecord,
    Outcome,
    OutcomeKind,
    Settlement,
    incarnation_for,
)
from mesh.ids import Epoch, Rank
from mesh.messages import MemberArrived, MemberPreparationFailed, MemberRegistered, MemberStarted
from mesh.reasons import Reason
from mesh.states import RunState, Transport

PATHS_IN_WORDS = {
    Transport.PRIVATE: "their private network, as it is",
    Transport.PUBLIC: "their public addresses, in clear text",
    Transport.DIRECT: "gateway to gateway, encrypted",
    Transport.RELAYED: "through a relay, encrypted, slow and for small models",
}
APPEAR_LIMIT_S = 120.0
"""By when a member that was ordered has to have taken its lease: a process start, whatever is prepared after it."""


class Assembling(Checking):
    """Assembling and Starting."""

    # ---- a new epoch ------------------------------------------------------------------------------

    def _begin_if_seated(self) -> None:
        """From Pending to the next epoch, when rule 1 says so."""
        gang = self.gang
        if gang.state is not RunState.PENDING or self._due.backoff is not None or gang.outcome is not None:
            return
        if any(m.settlement is Settlement.FENCE_FAILED for m in gang.members.values()):
            return  # a suspended run was resumed before its machine was swept: nothing begins beside what may still act
        is_restart = gang.assemblies == 0 and gang.restarts.total > 0
        if gang.vacant and not (is_restart and gang.seats):
            self._due.commit = None
        elif not self._awaits_commit():
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        gang = self.gang
        had = {rank: member.machine for rank, member in gang.members.items()}
        self._retire(*(gang.members[rank] for rank in sorted(gang.members)))
        gang.members = {}
        gang.epoch = Epoch(gang.epoch + 1)
        gang.assemblies += 1
        gang.replacements = 0
        gang.suspects = ()
        gang.barrier_open = gang.barrier_closed = False
        gang.outcome = gang.wish = gang.reason = None
        gang.failures = []
        gang.was_reclaimed_first = False
        gang.backoff_left_s = 0.0
        self._failed_at = None
        self._unrenewed = {}
        self._due.assembly = self._now.mono + gang.plan.startup_timeout_s
        seats = gang.seats
        kept = tuple(r for r in sorted(seats) if had.get(r) == seats[r].machine)
        self._begin_checkpoints()
        checkpoint = gang.checkpoint
        gang.history.append(
            Chapter(
                epoch=gang.epoch,
                began_at=self._now.wall,
                kept=kept,
                replaced=tuple(r for r in sorted(seats) if r in had and r not in kept),
                restored=None if checkpoint is None else checkpoint.id,
                restored_step=None if checkpoint is None else checkpoint.step,
                restored_at=None if checkpoint is None else checkpoint.at,
            )
        )
        del gang.history[:-CHAPTERS_KEPT_MAX]
        self._enter(RunState.ASSEMBLING)
        self._announce("Assembling", self._assembly_sentence(kept))
        self._effects.append(OpenEpoch(epoch=gang.epoch, size=gang.plan.nodes, is_new=True))
        self._seat_members()
        self._tell_arrivals()

    def _assembly_sentence(self, kept: tuple[Rank, ...]) -> str:
        gang = self.gang
        seats = gang.seats
        sentence = f"Epoch {gang.epoch} assembles on {', '.join(seats[r].machine for r in sorted(seats))}."
        if gang.epoch > 1 and kept:
            sentence += f" Kept: {_ranks(kept)}."
        if gang.vacant:
            sentence += f" Waiting for another machine for {_ranks(gang.vacant)}."
        return sentence

    def _retire(self, *members: MemberRecord) -> None:
        """Moves lives that are over into the history."""
        self.gang.attempts.extend(members)
        del self.gang.attempts[:-ATTEMPTS_KEPT_MAX]

    def _seat_members(self) -> None:
        """Orders every rank whose machine has been checked, and has the others checked first (rule 4)."""
        gang = self.gang
        self._check_seats()
        seats = gang.seats
        for rank in sorted(seats):
            if seats[rank].is_checked and rank not in gang.members:
                self._seat_member(rank)

    def _seat_member(self, rank: Rank) -> None:
        """Orders a new incarnation of the rank to its machine."""
        gang = self.gang
        seat = gang.seats[rank]
        member = MemberRecord(
            incarnation=incarnation_for(gang.uid, gang.epoch, rank, self._new_token()),
            machine=seat.machine,
            address=seat.address,
            ordered_at=self._now.wall,
        )
        self._update(member)
        self._effects.append(self._order(member))

    def _order(self, member: MemberRecord) -> OrderMember:
        self._due.appear[member.rank] = self._now.mono + APPEAR_LIMIT_S
        return OrderMember(
            incarnation=member.incarnation,
            machine=member.machine,
            reservation=self.gang.seats[member.rank].reservation,
            is_clean_start=self.gang.may_have_run and member.instead_of is None,
            restore=self.gang.checkpoints.reference(),
            is_left_behind=member.instead_of is not None,
        )

    # ---- machines come ----------------------------------------------------------------------------

    def _on_machines_reserved(self, event: MachinesReserved) -> None:
        gang = self.gang
        ranks = self._take_seats(event)
        if gang.state is RunState.ASSEMBLING and gang.outcome is None:
            for rank in ranks:
                self._announce("Replaced", f"Rank {rank} gets {gang.seats[rank].machine}.", rank=rank)
            if ranks:
                self._seat_members()
                chapter = gang.history[-1]
                kept = tuple(r for r in chapter.kept if r not in ranks)
                self._tell_chapter(kept=kept, replaced=tuple(sorted({*chapter.replaced, *ranks})))
                self._tell_arrivals()
        else:
            self._begin_if_seated()

    def _on_machine_released(self, event: MachineReleased) -> None:
        super()._on_machine_released(event)
        for member in list(self.gang.members.values()):
            if member.machine == event.machine and member.settlement is Settlement.FENCE_FAILED:
                # It was given back as unclean, so it has been swept, or is gone.
                self._update(replace(member, settlement=Settlement.CONFIRMED))
        self._begin_if_seated()

    def _on_reservation_waiting(self, event: ReservationWaiting) -> None:
        want = self._note_waiting(event)
        gang = self.gang
        if want is None or gang.outcome is not None:
            return
        if not event.is_possible and self._admit_swept(want):
            return
        if gang.state is not RunState.ASSEMBLING:
            return
        self._tell_arrivals(event.why)
        if want.is_for_refusal and not event.is_possible:
            message = f"o other machine can take {_ranks(want.ranks)}. {event.why}"
            message = f"{want.refusal} N{message}" if want.refusal else f"n{message}"
            self._assembly_failed(Reason.MACHINE_REFUSED, message)

    # ---- members ----------------------------------------------------------------------------------

    def _on_member_registered(self, event: MemberRegistered) -> None:
        member = self._current(event.incarnation)
        if member is None or member.phase is not MemberPhase.ORDERED:
            return
        self._due.appear.pop(member.rank, None)
        self._update(
            replace(member, phase=MemberPhase.REGISTERED, address=event.address, registered_at=event.at)
        )
        self._fence_newcomer(member)

    def _fence_newcomer(self, member: MemberRecord) -> None:
        """Its order was under way when the epoch was stopped: the fence found nobody yet."""
        outcome = self.gang.outcome
        if outcome is not None and outcome.kind is not OutcomeKind.SUCCEED:
            self._effects.append(self._fence(member, self.gang.plan.grace_period_s))

    def _on_member_arrived(self, event: MemberArrived) -> None:
        member = self._current(event.incarnation)
        if member is not None:
            self._note_arrival(member, event.at)

    def _note_arrival(self, member: MemberRecord, at: float) -> None:
        if member.phase.has_reached(MemberPhase.ARRIVED):
            return
        self._due.appear.pop(member.rank, None)
        self._update(replace(member, phase=MemberPhase.ARRIVED, arrived_at=at))
        self._tell_arrivals()
        self._announce("Arrived", f"Rank {member.rank} is at the barrier.", rank=member.rank)

    def _tell_arrivals(self, why: str = "") -> None:
        gang = self.gang
        if gang.state is RunState.ASSEMBLING:
            gang.message = "The network is being checked. " if gang.check is not None else ""
            gang.message += f"At the barrier: {gang.arrived_count()} of {gang.plan.nodes}."
            if why:
                gang.message += f" {why}"
            self._dirty = True

    def _on_member_preparation_failed(self, event: MemberPreparationFailed) -> None:
        member = self._current(event.incarnation)
        if member is None or self.gang.outcome is not None:
            return
        message = f"Rank {member.rank} could not be prepared: {event.message}"
        number = event.damaged_checkpoint
        if number is not None and self._note_damage(member, number, event.message):
            self._decide(
                Outcome(
                    kind=OutcomeKind.RETRY_ASSEMBLY, reason=Reason.CHECKPOINT_CORRUPT, message=event.message
                )
            )
        else:
            self._give_up(member, event.reason, message)

    def _on_member_vanished(self, event: MemberVanished) -> None:
        member = self._current(event.incarnation)
        if member is None or member.phase is not MemberPhase.ORDERED or self.gang.outcome is not None:
            return  # a member that has registered holds a lease: its lapse will tell
        self._give_up(member, Reason.MACHINE_REFUSED, f"Rank {member.rank}: {event.message}")

    def _give_up_absent(self) -> None:
        """Members that were ordered long ago and never took their lease."""
        for rank in [r for r, due in self._due.appear.items() if self._now.mono >= due]:
            self._due.appear.pop(rank, None)  # an assembly that fails waits for nobody any more
            member = self.gang.members.get(rank)
            if member is not None and member.phase is MemberPhase.ORDERED and self.gang.outcome is None:
                message = f"Rank {rank} did not appear on {member.machine} within {APPEAR_LIMIT_S:g} s."
                self._give_up(member, Reason.MACHINE_REFUSED, message)

    # ---- another machine for one rank -------------------------------------------------------------

    def _give_up(self, member: MemberRecord, reason: Reason, message: str) -> None:
        """The rank needs another machine, if the barrier has not opened for this member (rule 2)."""
        gang = self.gang
        if member.reason is not None and member.settlement is None:
            return  # the store has been asked already
        if gang.barrier_open or gang.state is not RunState.ASSEMBLING:
            return
        if gang.replacements >= REPLACEMENTS_MAX:
            self._too_many_replaced(reason, message)
            return
        gang.replacements += 1
        self._update(replace(member, reason=reason, message=message))
        if member.settlement is None:
            self._announce("Refused", message, reason=reason, rank=member.rank)
        self._effects.append(RevokeMember(incarnation=member.incarnation))

    def _too_many_replaced(self, reason: Reason, message: str) -> None:
        self._assembly_failed(reason, f"{message} Machines were replaced {REPLACEMENTS_MAX} times already.")

    def _on_member_revoked(self, event: MemberRevoked) -> None:
        gang = self.gang
        member = gang.members.get(event.incarnation.rank)
        if member is None or member.incarnation != event.incarnation or gang.state.is_terminal:
            return
        if event.has_passed is None:
            self._cannot_be_replaced(member)
            return
        if event.has_passed:
            self._passed_after_all(member)
            return
        if member.settlement is None:
            member = self._settle(member, Settlement.REVOKED)
        if gang.state is not RunState.ASSEMBLING or gang.outcome is not None:
            return
        is_lost = member.reason in (Reason.MACHINE_LOST, Reason.MACHINE_RECLAIMED)
        del gang.members[member.rank]
        self._retire(member)
        machine = self._vacate(member.rank, is_clean=False)
        self._effects.append(DismissMember(incarnation=member.incarnation))
        self._want(
            (member.rank,),
            avoid=() if machine is None else (machine,),
            is_for_refusal=not is_lost,
            refusal=member.message if member.reason is Reason.NETWORK_CHECK_FAILED else "",
        )
        self._tell_arrivals()

    def _cannot_be_replaced(self, member: MemberRecord) -> None:
        """Nobody knows whether it has passed the barrier: this epoch can neither go on without it nor with it."""
        gang = self.gang
        if gang.outcome is not None or gang.barrier_open or gang.state is not RunState.ASSEMBLING:
            return
        if member.reason is not None:
            message = f"{member.message} The store was restarted, and cannot say what had passed the barrier."
            self._assembly_failed(member.reason, message)

    def _passed_after_all(self, member: MemberRecord) -> None:
        """It was given up, and then it arrived as the last one: the barrier is open, and it counts."""
        if member.settlement is None:
            self._update(replace(member, reason=None, message=""))
        self._note_barrier_open()

    # ---- the barrier ------------------------------------------------------------------------------

    def _on_barrier_opened(self, event: BarrierOpened) -> None:
        if not self._is_current_epoch(event.epoch) or self.gang.state is RunState.RUNNING:
            return  # all of them have started: who has taken a rank since was admitted
        members = self.gang.members
        if event.tokens and any(
            (member := members.get(Rank(rank))) is None or member.incarnation.token != token
            for rank, token in enumerate(event.tokens)
        ):
            # It opened with a life that was replaced meanwhile: the two crossed, and this epoch cannot be relied on.
            self._note_open_flag()
            if self.gang.outcome is None:
                self._assembly_failed(
                    Reason.MACHINE_LOST, "the barrier opened for a machine that was given up."
                )
            return
        self._note_barrier_open()

    def _beyond_barrier(self, member: MemberRecord) -> MemberRecord:
        """The member as it is known once it is clear that its barrier has opened."""
        self._note_barrier_open()
        return self.gang.members[member.rank]

    def _note_open_flag(self) -> None:
        if not self.gang.barrier_open:
            self.gang.barrier_open = self.gang.may_have_run = True
            self._dirty = True
            self._tell_chapter(opened_at=self._now.wall)

    def _note_barrier_open(self) -> None:
        gang = self.gang
        if not gang.barrier_open:
            self._note_open_flag()
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
        self._dirty = True
        if event.was_open:
            self._note_open_flag()
        if gang.barrier_open:
            return
        for member in list(gang.members.values()):
            if member.settlement is None:
                self._settle(member, Settlement.NEVER_STARTED)

    def _on_member_started(self, event: MemberStarted) -> None:
        member = self._current(event.incarnation)
        if member is None or member.phase.has_reached(MemberPhase.STARTED):
            return
        member = self._beyond_barrier(member)
        member = replace(
            member,
            phase=MemberPhase.STARTED,
            pid=event.pid,
            started_at=event.at,
            path=event.path,
            address=member.address if event.path is None else event.path.address,
        )
        self._tell_path(member)
        self._update(member)
        self._announce("Started", f"Rank {member.rank} runs as process {event.pid}.", rank=member.rank)
        self._run_if_all_started()
        if self.gang.state is RunState.RUNNING and not self.gang.failures:
            self.gang.message = self._progress()

    def _tell_path(self, member: MemberRecord) -> None:
        """The first of the epoch says it for all; where its machine's fence does not cover it, each for itself."""
        path = member.path
        if path is None or not (path.layer or path.lacks):
            return
        if all(other.path is None for other in self.gang.members.values()):
            self._announce(
                "Path", f"Members reach each other by {path.transport}: {PATHS_IN_WORDS[path.transport]}."
            )
        if path.lacks:
            how = "not whole" if path.layer else "off"
            message = (
                f"On {member.machine} the network's layer of the fence is {how}: {path.lacks.rstrip('.')}."
            )
            self._announce("NetworkLayerOff", message, rank=member.rank)

    def _run_if_all_started(self) -> None:
        gang = self.gang
        if gang.state is not RunState.STARTING or gang.outcome is not None:
            return
        if all(m.phase.has_reached(MemberPhase.STARTED) for m in gang.members.values()):
            self._enter(RunState.RUNNING)
            gang.started_at = gang.started_at or self._now.wall
            gang.assemblies = gang.replacements = 0
            gang.message = self._progress()
            self._tell_chapter(running_at=self._now.wall)
            self._announce("Running", "Every rank runs.")

    def _progress(self) -> str:
        """Who has finished, also when that was before the last one had started."""
        nodes = self.gang.plan.nodes
        done = sum(m.succeeded for m in self.gang.members.values())
        return f"{done} of {nodes} ranks finished." if done else f"{nodes} of {nodes} ranks running."

    # ---- an assembly that fails -------------------------------------------------------------------

    def _fail_overdue_assembly(self) -> None:
        gang = self.gang
        is_overdue = self._due.assembly is not None and self._now.mono >= self._due.assembly
        if not is_overdue or gang.outcome is not None or gang.state not in ASSEMBLY_STATES:
            return
        missing = [
            Rank(rank)
            for rank in range(gang.plan.nodes)
            if (member := gang.members.get(Rank(rank))) is None
            or not member.phase.has_reached(MemberPhase.ARRIVED)
        ]
        who = f"{_ranks(missing)} never arrived" if missing else "not every command started"
        limit = gang.plan.startup_timeout_s
        self._assembly_failed(Reason.GANG_ASSEMBLY_TIMEOUT, f"Assembly took longer than {limit:g} s: {who}.")

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


def _ranks(ranks: tuple[Rank, ...] | list[Rank]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
