"""Whether, and when, a gang starts again after an epoch that has failed.

Rules of this file:
1. Kinds are apart (`RestartKind`): fifty reclaims do not eat the budget of a bug, and a bug does not burn fifty
   machines. Each kind may restart `recovery.maxAttempts` times; what was this program's own fault costs nothing.
2. Ten healthy minutes earn every count back.
3. The first restart of a kind is immediate; then the pauses double from 10 s to 5 min. A reclaim waits for nothing: its
   machine is replaced anyway. (Figures: second document, "When a worker fails".)
4. Three restarts in a row without progress end the run, whatever they were charged to. Progress is a newer
   checkpoint, or ten healthy minutes.
5. A command that exits non-zero starts again only where `recovery.onProcessFailure` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.core.blame import START_FAILURES, Verdict
from coordinator.core.gang_state import Gang, RestartKind, Restarts
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import FailurePolicy

HEALTHY_S = 600.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 10.0, 300.0
FRUITLESS_MAX = 3

_CHARGED_TO = {
    RestartKind.FAILURE: "a command that failed",
    RestartKind.LOSS: "lost machines",
    RestartKind.RECLAIM: "reclaimed machines",
    RestartKind.OURS: "the deployment itself",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The gang starts again, after a pause."""

    restarts: Restarts
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRestart:
    """The run fails. `why` is added to the cause; None when the cause says it all."""

    reason: Reason | None
    why: str


def decide(gang: Gang, verdict: Verdict) -> Restart | NoRestart:
    """What a failed epoch leads to."""
    plan, restarts = gang.plan, gang.restarts
    may_not_restart = plan.on_process_failure is FailurePolicy.FAIL or verdict.cause.reason in START_FAILURES
    if verdict.kind is RestartKind.FAILURE and may_not_restart:
        return NoRestart(reason=None, why="")
    if plan.max_restarts == 0:
        return NoRestart(reason=None, why="" if verdict.kind is RestartKind.FAILURE else _no_restarts(plan))
    if verdict.kind is not RestartKind.OURS and restarts.count(verdict.kind) >= plan.max_restarts:
        spent = (
            f"{restarts.count(verdict.kind)} of {plan.max_restarts} restarts for {_CHARGED_TO[verdict.kind]}"
        )
        return NoRestart(
            reason=Reason.RESTART_BUDGET_SPENT, why=f"It is not started again: {spent} are spent."
        )
    if restarts.fruitless >= FRUITLESS_MAX:
        return NoRestart(
            reason=Reason.NO_PROGRESS,
            why=f"It is not started again: {restarts.fruitless} restarts in a row brought no newer checkpoint and "
            f"no {HEALTHY_S / 60:g} healthy minutes.",
        )
    charged = _charge(restarts, verdict.kind)
    return Restart(restarts=charged, delay_s=_delay_s(charged, verdict.kind))


def describe(restarts: Restarts, kind: RestartKind, plan: RunPlan) -> str:
    """ "Restart 2 of 3 for lost machines"."""
    if kind is RestartKind.OURS:
        return "Restart that counts for nothing"
    return f"Restart {restarts.count(kind)} of {plan.max_restarts} for {_CHARGED_TO[kind]}"


def earned_back(restarts: Restarts) -> Restarts:
    """After a healthy stretch."""
    return Restarts(total=restarts.total)


def with_progress(restarts: Restarts) -> Restarts:
    """After a newer checkpoint."""
    return replace(restarts, fruitless=0)


def _charge(restarts: Restarts, kind: RestartKind) -> Restarts:
    return Restarts(
        failure=restarts.failure + (kind is RestartKind.FAILURE),
        loss=restarts.loss + (kind is RestartKind.LOSS),
        reclaim=restarts.reclaim + (kind is RestartKind.RECLAIM),
        ours=restarts.ours + (kind is RestartKind.OURS),
        fruitless=restarts.fruitless + 1,
        total=restarts.total + 1,
    )


def _delay_s(charged: Restarts, kind: RestartKind) -> float:
    count = charged.count(kind)
    if count <= 1 or kind is RestartKind.RECLAIM:
        return 0.0
    return float(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (count - 2)))


def _no_restarts(plan: RunPlan) -> str:
    return "recovery.maxAttempts is 0: it is not started again."
