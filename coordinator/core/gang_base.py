"""What every room of the gang's core stands on: the one door for state, the gate, the story, the fence.

`coordinator.core.gang` describes the whole and lists its rules. The rooms stand on each other in this order:
`gang_base` → `saving` (checkpoints) → `seats` (machines) → `checking` (the network between them) → `assembling` (until
every command runs) → `refusing` (machines that will not do) → `ending` (until every member is accounted for) →
`lone_ranks` (one that starts again alone) → `gang` (what users want, what comes after an epoch, crashes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coordinator.core.effects import Announcement, CloseBarrier, FenceMember, GangEffect, RevokeMember
from coordinator.core.events import Now
from coordinator.core.gang_state import (
    Gang,
    MemberPhase,
    MemberRecord,
    Outcome,
    OutcomeKind,
    Settlement,
)
from coordinator.core.store_silence import StoreSilence
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank
from mesh.reasons import Reason
from mesh.states import RunState

TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset(
        {RunState.ASSEMBLING, RunState.SUSPENDED, RunState.CANCELLED, RunState.FAILED}
    ),
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

ASSEMBLY_STATES = frozenset({RunState.ASSEMBLING, RunState.STARTING})
RESTING_STATES = frozenset({RunState.PENDING, RunState.SUSPENDED})
"""No epoch is under way."""
FENCE_TAKEN_LIMIT_S = 30.0
"""How long, over the grace period, a member may take to answer that it has been told to stop: a busy machine's agent
answers in seconds."""


class Deadlines:
    """When what is due, on the monotonic clock. Not durable: what has to survive a crash is in the state too."""

    __slots__ = (
        "appear",
        "assembly",
        "backoff",
        "begin",
        "check",
        "commit",
        "expiry",
        "fence",
        "healthy",
        "judgement",
        "last_words",
        "lone",
    )

    def __init__(self) -> None:
        self.assembly: float | None = None
        self.backoff: float | None = None
        self.check: float | None = None
        """Until when the answer of a network check is waited for."""
        self.commit: float | None = None
        """Until when the next epoch waits for a checkpoint that is being written."""
        self.healthy: float | None = None
        self.judgement: float | None = None
        self.appear: dict[Rank, float] = {}
        """By when a member that was ordered has to have registered."""
        self.fence: dict[Rank, float] = {}
        """By when a member that was told to stop has to have answered, or confirmed."""
        self.expiry: dict[Rank, float] = {}
        """By when a lease that is renewed no more has to be over."""
        self.last_words: dict[Rank, float] = {}
        """When to stop waiting for the report of a member whose lease is gone."""
        self.lone: dict[Rank, float | None] = {}
        """When a rank that has failed may start again alone; None once that has come."""
        self.begin: dict[Rank, float] = {}
        """By when the command of such a rank has to run."""

    def next(self) -> float | None:
        """The first of them."""
        single = (self.assembly, self.backoff, self.check, self.commit, self.healthy, self.judgement)
        several = (self.appear, self.fence, self.expiry, self.last_words, self.lone, self.begin)
        by_rank = [due for deadlines in several for due in deadlines.values()]
        return min([d for d in (*single, *by_rank) if d is not None], default=None)


class GangBase:
    """State, and the ways to change and tell it."""

    def __init__(
        self, gang: Gang, *, new_token: Callable[[], IncarnationToken], checks_network: bool = False
    ) -> None:
        self.gang = gang
        self._new_token = new_token
        self._now = Now(mono=0.0, wall=0.0)
        self._due = Deadlines()
        self._checks_network = checks_network
        self._dirty = False
        self._announcements: list[Announcement] = []
        self._effects: list[GangEffect] = []
        self._told_at: float | None = None
        """When a committed checkpoint was told last in this epoch."""
        self._troubles: dict[Rank, int] = {}
        """How often a rank's trouble with its checkpoints was told in this epoch."""
        self._failed_at: float | None = None
        """When the epoch's first failure was heard, on the monotonic clock of this coordinator's life."""
        self._lone_since: dict[Rank, float] = {}
        """When it was heard last of each rank that it had failed alone; after a crash, when that was found."""
        self._silence: StoreSilence | None = None
        """The last time in which this coordinator heard nothing of the store."""
        self._unrenewed: dict[Rank, float] = {}
        """When it was heard in this epoch that a member had stopped itself because its lease was not renewed."""

    # ---- the one door for state -------------------------------------------------------------------

    def _enter(self, state: RunState) -> None:
        gang = self.gang
        assert state in TRANSITIONS[gang.state], f"{gang.state} -> {state}"
        gang.state = state
        self._dirty = True
        if state not in ASSEMBLY_STATES:
            self._due.assembly = None
            self._due.appear.clear()
        if state is not RunState.ASSEMBLING:
            self._due.check = gang.check = None
        if state is not RunState.RUNNING:
            self._due.healthy = None
        if state.is_terminal or state in RESTING_STATES:
            self._due.judgement = None
            self._due.last_words.clear()
        if state.is_terminal:
            gang.ended_at = self._now.wall
            self._due.backoff = None

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

    def _settle(
        self, member: MemberRecord, settlement: Settlement, *, reason: Reason | None = None, message: str = ""
    ) -> MemberRecord:
        """Writes down why nothing of the member can act any more. What was said before about its end stays."""
        if member.reason is None and member.exit is None:
            member = replace(member, reason=reason, message=message)
        ended_at = member.ended_at or self._now.wall
        settled = replace(member, settlement=settlement, ended_at=ended_at)
        for deadlines in (self._due.last_words, self._due.appear, self._due.fence, self._due.expiry):
            deadlines.pop(member.rank, None)
        self._update(settled)
        return settled

    def _tell_chapter(self, **facts: Any) -> None:
        """Adds to the story of the current epoch."""
        history = self.gang.history
        if history:
            history[-1] = replace(history[-1], **facts)
            self._dirty = True

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
        gang = self.gang
        return epoch == gang.epoch and not gang.state.is_terminal and gang.state not in RESTING_STATES

    # ---- the fence --------------------------------------------------------------------------------

    def _decide(self, outcome: Outcome, *, grace_s: float | None = None) -> None:
        """The epoch ends, and this is what it leads to."""
        gang = self.gang
        assert gang.outcome is None, "an epoch ends once"
        gang.outcome = outcome
        self._dirty = True
        self._due.judgement = None
        self._due.lone.clear()
        self._due.begin.clear()
        if outcome.kind is not OutcomeKind.SUCCEED:
            self._enter(RunState.FENCING)
            self._tell_chapter(stopped_at=self._now.wall)
            gang.message = f"Stopping every rank: {outcome.message}"
            self._announce("Fencing", f"Epoch {gang.epoch} is being fenced.", reason=outcome.reason)
        self._effects.extend(self._fence_effects(grace_s))

    def _fence_effects(self, grace_s: float | None = None) -> list[GangEffect]:
        gang = self.gang
        effects: list[GangEffect] = []
        is_success = gang.outcome is not None and gang.outcome.kind is OutcomeKind.SUCCEED
        if not gang.barrier_closed and not is_success:
            effects.append(CloseBarrier(epoch=gang.epoch))
        grace_s = gang.plan.grace_period_s if grace_s is None else min(grace_s, gang.plan.grace_period_s)
        unsettled = [m for m in gang.members.values() if m.settlement is None]
        effects.extend(self._fence(m, grace_s) for m in unsettled)
        effects.extend(
            RevokeMember(incarnation=m.incarnation)  # nobody may be there to confirm, and its order under way
            for m in unsettled
            if m.instead_of is not None and not m.phase.has_reached(MemberPhase.STARTED)
        )
        return effects

    def _fence(self, member: MemberRecord, grace_s: float) -> FenceMember:
        if not member.is_expiring:
            self._due.fence[member.rank] = self._now.mono + grace_s + FENCE_TAKEN_LIMIT_S
        return FenceMember(incarnation=member.incarnation, grace_s=grace_s)
