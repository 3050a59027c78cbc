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
6. Under RestartRank a rank starts again alone where nothing suggests that the gang shares something: its command ended
   by itself while every rank ran, it complains about no peer and was not taken down with its machine, it is not rank 0
   (which hosts the rendezvous), and its launcher has no store for all ranks. Anything else is the gang's.
7. Nothing is fenced then that could prove the others alive. So a rank waits until a machine that was silent when it
   failed would have been declared lost (`LONE_WINDOW_S`), or as long as the pause of its kind is, whichever is more;
   and the store admits it only when every other rank has shown that it lived after that failure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.core.blame import START_FAILURES, Verdict
from coordinator.core.gang_state import Failure, Gang, RestartKind, Restarts, Settlement
from mesh.messages import HEARTBEAT_S, LEASE_GUARD_S, LEASE_TTL_S
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import FailurePolicy, LauncherKind, RunState

LONE_WINDOW_S = LEASE_TTL_S + LEASE_GUARD_S + HEARTBEAT_S
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


def lone_failures(gang: Gang) -> tuple[Failure, ...]:
    """The failures of the epoch when each of them is its rank's alone (rule 6); none when one is not."""
    plan = gang.plan
    is_for_ranks = (
        plan.on_process_failure is FailurePolicy.RESTART_RANK and plan.launcher is LauncherKind.PLAIN
    )
    if not is_for_ranks or gang.state is not RunState.RUNNING or gang.outcome is not None:
        return ()
    failures = tuple(gang.failures)
    is_in_budget = gang.restarts.failure + len(failures) <= plan.max_restarts
    return failures if is_in_budget and all(_is_lone(gang, failure) for failure in failures) else ()


def _is_lone(gang: Gang, failure: Failure) -> bool:
    member, evidence = gang.members[failure.rank], failure.evidence
    return (
        failure.rank != 0
        and failure.reason not in START_FAILURES
        and failure.exit is not None
        and not evidence.blames_peer
        and not evidence.by_infrastructure
        and not member.fenced_itself
        and member.settlement in (None, Settlement.CONFIRMED)
        and member.machine not in gang.reclaimed
    )


def lone_delay_s(restarts: Restarts) -> float:
    """From a rank's failure until it starts again (rule 7)."""
    return max(LONE_WINDOW_S, _delay_s(lone_charged(restarts), RestartKind.FAILURE))


def lone_charged(restarts: Restarts) -> Restarts:
    """After a rank's restart. Without progress is said of whole epochs only: the other ranks have gone on."""
    return replace(restarts, failure=restarts.failure + 1, total=restarts.total + 1)


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
