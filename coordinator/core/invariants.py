"""What must hold after every event, whatever happened. Raised as AssertionError, in tests and simulation.

The numbers are those of the design ("Invariants"). Those that need the whole world (no two epochs alive
anywhere, no process before the barrier) are checked by the simulation, which sees the members too.
"""

from __future__ import annotations

from operator import attrgetter

from coordinator.core.gang_state import (
    ATTEMPTS_KEPT_MAX,
    REPLACEMENTS_MAX,
    Gang,
    MemberPhase,
    MemberRecord,
    OutcomeKind,
    Settlement,
)
from coordinator.core.recovery import FRUITLESS_MAX
from mesh.states import FailurePolicy, RunState

_EPOCH_STATES = frozenset({RunState.ASSEMBLING, RunState.STARTING, RunState.RUNNING, RunState.FENCING})
_RUN_STATES = frozenset({RunState.STARTING, RunState.RUNNING})
_GOES_ON = (OutcomeKind.JUDGE, OutcomeKind.RETRY_ASSEMBLY)
_PROOFS = frozenset(Settlement) - {Settlement.FENCE_FAILED}
_of_machines = attrgetter("holdings", "wanted", "members", "state", "outcome", "reservation", "check")
"""All that `_check_machines` looks at: while it is what it was, the answer is too."""


def check_invariants(before: Gang, after: Gang) -> None:
    """Raises AssertionError when the step from `before` to `after` broke a rule."""
    _check_epoch_step(before, after)
    _check_outcome_step(before, after)
    _check_members_step(before, after)
    _check_state(after)
    if _of_machines(before) != _of_machines(after):
        _check_machines(after)
    _check_budgets(after)


def _check_epoch_step(before: Gang, after: Gang) -> None:
    assert after.epoch in (before.epoch, before.epoch + 1), "3: epochs grow by one"
    if before.state.is_terminal:
        assert after.state is before.state, "4: a terminal state is final"
        assert after.reason is before.reason and after.message == before.message, "4: so is its reason"
    if after.epoch == before.epoch:
        return
    assert not before.state.is_terminal and before.state is not RunState.SUSPENDED, (
        "3: an epoch begins after the last one"
    )
    assert before.outcome is None or before.outcome.kind in _GOES_ON, "4: a cancelled run begins no epoch"
    assert before.wish is None, "4: a wish to stop leads to no epoch"
    if before.state is RunState.FENCING and before.outcome is not None:
        _check_survivors(before, after)


def _check_survivors(before: Gang, after: Gang) -> None:
    kept, left = after.seats, before.reclaimed
    for rank, seat in before.seats.items():
        member = before.members.get(rank)
        is_lost = member is None or member.settlement in (None, Settlement.LEASE_LAPSED)
        if not is_lost and seat.machine not in left:
            assert rank in kept and kept[rank].machine == seat.machine, (
                "5: who was not lost keeps its machine"
            )


def _check_outcome_step(before: Gang, after: Gang) -> None:
    if before.outcome is None or after.outcome is before.outcome:
        return
    if before.outcome.kind is OutcomeKind.SUSPEND:
        is_resumed = before.state is RunState.SUSPENDED and after.outcome is None
        is_cancelled = after.outcome is not None and after.outcome.kind is OutcomeKind.CANCEL
        assert is_resumed or is_cancelled, "a suspension ends in a resume or a cancel"
        return
    assert before.outcome.kind in _GOES_ON, "an outcome is decided once"


def _check_members_step(before: Gang, after: Gang) -> None:
    for rank, old in before.members.items():
        new = after.members.get(rank)
        if new is old:
            continue
        if new is not None and new.incarnation == old.incarnation:
            assert new.machine == old.machine, "5: a member keeps its machine"
            assert new.phase.has_reached(old.phase), "phases only move on"
            is_final = old.settlement not in (None, Settlement.FENCE_FAILED)
            assert not is_final or new.settlement is old.settlement, "a settlement is final"
            continue
        past = [m for m in after.attempts if m.incarnation == old.incarnation]
        assert past, "a life that is over is history"
        assert past[0].settlement in _PROOFS, "1: nothing begins beside what may still act"
        if after.epoch == before.epoch and before.barrier_open:
            _check_lone_restart(before, past[0], new)
    if len(after.attempts) < ATTEMPTS_KEPT_MAX:
        assert after.attempts[: len(before.attempts)] == before.attempts, "history is only added to"


def _check_lone_restart(before: Gang, old: MemberRecord, new: MemberRecord | None) -> None:
    assert (
        before.plan.on_process_failure is FailurePolicy.RESTART_RANK and before.state is RunState.RUNNING
    ), "2: after the opening nobody is replaced within an epoch"
    assert old.settlement is Settlement.CONFIRMED and old.exit is not None and not old.succeeded, (
        "1: a rank starts again alone once its failed command is proven gone"
    )
    assert new is not None and new.instead_of == old.incarnation.token and new.machine == old.machine, (
        "5: a rank that starts again alone keeps its machine"
    )


def _check_state(gang: Gang) -> None:
    members = gang.members.values()
    if gang.state in _EPOCH_STATES:
        assert gang.epoch > 0
        assert all(m.incarnation.epoch == gang.epoch for m in members)
        assert gang.history and gang.history[-1].epoch == gang.epoch, "the story has the epoch"
    if gang.state in _RUN_STATES:
        assert len(gang.members) == gang.plan.nodes, "2: what runs has all its ranks"
    if gang.state is RunState.FENCING:
        assert gang.outcome is not None, "fencing knows what it leads to"
    if gang.state is RunState.SUCCEEDED:
        assert len(gang.members) == gang.plan.nodes and all(m.succeeded for m in members), (
            "success is every rank's zero"
        )
    if gang.state.is_terminal or gang.state is RunState.SUSPENDED:
        assert all(m.settlement is not None for m in members), "1: nothing runs after the end"
        assert not gang.wanted and not gang.seats, "6: what has stopped wants and keeps no machine"
    if any(m.phase.has_reached(MemberPhase.STARTED) for m in members):
        assert gang.barrier_open, "2: nothing starts before the barrier"


def _check_machines(gang: Gang) -> None:
    open_lines = [h for h in gang.holdings if h.until is None]
    seats = [h for h in open_lines if h.is_seat]
    machines = {h.machine for h in open_lines}
    assert len(machines) == len(open_lines), "6: a machine is in the ledger once at a time"
    by_rank = {h.rank: h.machine for h in seats}
    assert len(by_rank) == len(seats), "5: a rank has one machine"
    if gang.state in _EPOCH_STATES:
        for rank, member in gang.members.items():
            assert by_rank.get(rank) == member.machine, "6: members are on machines that are held"
        assert all(seat.is_checked for seat in seats if seat.rank in gang.members), (
            "2: nobody is ordered to a machine that was not checked"
        )
    if gang.state is RunState.ASSEMBLING and gang.outcome is None:
        is_waited_for = gang.check is not None
        assert is_waited_for or by_rank.keys() == gang.members.keys(), "9: who has a machine is ordered there"
    else:
        assert gang.check is None, "9: the network is checked while the gang assembles"
    asked = [rank for want in gang.wanted.values() for rank in want.ranks]
    assert len(asked) == len(set(asked)), "6: a rank's machine is asked for once"
    assert not by_rank.keys() & set(asked), "6: who has a machine asks for none"
    if gang.outcome is None and gang.reservation and gang.state in (RunState.PENDING, RunState.ASSEMBLING):
        assert set(gang.vacant) == set(asked), "9: who has no machine asks for one"


def _check_budgets(gang: Gang) -> None:
    assert gang.assemblies <= gang.plan.max_assembly_retries + 1, "7: assemblies stay in their budget"
    assert gang.replacements <= REPLACEMENTS_MAX, "7: replacements stay in their budget"
    restarts, allowed = gang.restarts, gang.plan.max_restarts
    assert max(restarts.failure, restarts.loss, restarts.reclaim) <= allowed, (
        "7: restarts stay in their budget"
    )
    assert restarts.fruitless <= FRUITLESS_MAX, "7: restarts without progress stay in their budget"
