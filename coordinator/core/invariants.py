"""What must hold after every event, whatever happened. Raised as AssertionError, in tests and simulation.

The numbers are those of the design ("Invariants"). Those that need the whole world (no two epochs alive
anywhere, no process before the barrier) are checked by the simulation, which sees the members too.
"""

from __future__ import annotations

from coordinator.core.gang_state import Gang, MemberPhase, OutcomeKind
from mesh.states import RunState

_EPOCH_STATES = frozenset({RunState.ASSEMBLING, RunState.STARTING, RunState.RUNNING, RunState.FENCING})


def check_invariants(before: Gang, after: Gang) -> None:
    """Raises AssertionError when the step from `before` to `after` broke a rule."""
    _check_step(before, after)
    _check_state(after)


def _check_step(before: Gang, after: Gang) -> None:
    assert after.epoch in (before.epoch, before.epoch + 1), "3: epochs grow by one"
    if after.epoch != before.epoch:
        assert before.state in (RunState.PENDING, RunState.FENCING), "3: an epoch begins after the last one"
        assert before.outcome is None or before.outcome.kind is OutcomeKind.RETRY_ASSEMBLY, (
            "4: a cancelled run begins no epoch"
        )
        assert all(m.settlement is not None for m in before.members.values()), "1: the old epoch is fenced"
    if before.state.is_terminal:
        assert after.state is before.state, "4: a terminal state is final"
        assert after.reason is before.reason and after.message == before.message, "4: so is its reason"
    if before.outcome is not None and after.outcome is not before.outcome:
        assert before.outcome.kind is OutcomeKind.RETRY_ASSEMBLY, "an outcome is decided once"
    if after.epoch == before.epoch:
        for rank, old in before.members.items():
            new = after.members[rank]
            assert new.machine == old.machine, "5: a member keeps its machine"
            assert new.phase.has_reached(old.phase), "phases only move on"
            assert old.settlement is None or new.settlement is old.settlement, "a settlement is final"
    assert after.attempts[: len(before.attempts)] == before.attempts, "history is only added to"


def _check_state(gang: Gang) -> None:
    if gang.state in _EPOCH_STATES:
        assert gang.epoch > 0 and len(gang.members) == gang.plan.nodes, "an epoch has all its members"
        assert gang.machines_held, "6: members are on machines that are held"
        assert all(m.incarnation.epoch == gang.epoch for m in gang.members.values())
    if gang.state is RunState.FENCING:
        assert gang.outcome is not None, "fencing knows what it leads to"
    if gang.state is RunState.SUCCEEDED:
        assert all(m.succeeded for m in gang.members.values()), "success is every rank's zero"
    if gang.state.is_terminal:
        assert all(m.settlement is not None for m in gang.members.values()), "1: nothing runs after the end"
    if any(m.phase.has_reached(MemberPhase.STARTED) for m in gang.members.values()):
        assert gang.barrier_open, "2: nothing starts before the barrier"
    assert gang.assemblies <= gang.plan.max_assembly_retries + 1, "7: assemblies stay in their budget"
    assert gang.restarts <= gang.plan.max_restarts, "7: restarts stay in their budget"
    open_lines = [h.machine for h in gang.holdings if h.until is None]
    assert len(open_lines) == len(set(open_lines)), "6: a machine is in the ledger once at a time"
    if not gang.machines_held:
        assert not open_lines, "6: what is not held has its line closed"
    elif gang.members:
        assert len(open_lines) == gang.plan.nodes, "6: what is held has its line"
