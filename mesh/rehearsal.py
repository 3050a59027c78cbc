"""What came of a rehearsed fault: the verdict of `mesh chaos`. Pure.

Rules of this file:
1. Everything is told from what the API says of the run; times are differences of the deployment's own clock.
2. A run has resumed when all its ranks run in a later epoch than the one that was harmed, or when the harmed rank
   runs again in that one, alone.
3. A fault for a time, shorter than a lease, disturbs nobody: that is a verdict too.
4. What a deployment can never do is refused before anything is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from mesh.deployment import start_again
from mesh.errors import ConflictError
from mesh.messages import LEASE_GUARD_S, LEASE_TTL_S
from mesh.reasons import Reason
from mesh.states import HarmKind, RunState

NOTICE_LIMIT_S = 10.0
"""By when, after a fault is undone, the run would have noticed it: a lease, its guards, and some patience."""


def why_no_rehearsal(details: Mapping[str, Any], *, at_step: int | None = None) -> ConflictError | None:
    """Why a deployment takes no such rehearsal, by the details of its status; None also where they do not say."""
    state, started_with = details.get("state", ""), details.get("startedWith", {})
    if details.get("chaos") is False:
        store = (
            "" if details.get("checkpoints", "") else " (and --checkpoints URL, to go on from what was saved)"
        )
        again = start_again(state, started_with, "--allow-chaos")
        return ConflictError(
            "This deployment allows no rehearsed faults: it was started without --allow-chaos.",
            hint=f"That cannot be changed while it runs. {again}{store}",
            reason=Reason.FORBIDDEN,
        )
    if at_step is not None and details.get("checkpoints", "") is None:
        again = start_again(state, started_with, "--checkpoints", "URL")
        return ConflictError(
            f"Step {at_step} is never committed here: the deployment has no checkpoint store.",
            hint=f"Say when by --after 30s, or give it one, which needs a new start. {again}",
        )
    return None


class Outcome(StrEnum):
    """What became of the run."""

    RESUMED = "Resumed"
    UNDISTURBED = "Undisturbed"
    """The fault was over before anybody had to act."""
    ENDED = "Ended"
    SUSPENDED = "Suspended"
    NOT_YET = "NotYet"
    """The time to wait was over first."""

    @property
    def is_well(self) -> bool:
        return self in (Outcome.RESUMED, Outcome.UNDISTURBED)


def outcome_of(before: Mapping[str, Any], run: Mapping[str, Any], harm: Mapping[str, Any]) -> Outcome | None:
    """None as long as it is open. `before`: the run when it was harmed."""
    status = run["status"]
    state = RunState(status["state"])
    if state is RunState.RUNNING and (status["epoch"] > harm["epoch"] or _began_again(before, run, harm)):
        return Outcome.RESUMED
    if state.is_terminal:
        return Outcome.ENDED
    return Outcome.SUSPENDED if state is RunState.SUSPENDED else None


def _began_again(before: Mapping[str, Any], run: Mapping[str, Any], harm: Mapping[str, Any]) -> bool:
    """The harmed rank runs in its next life of the same epoch, or has run in it."""
    if run["status"]["epoch"] != harm["epoch"]:
        return False
    was, now = _rank(before, harm), _rank(run, harm)
    return (
        was is not None and now is not None and now["lives"] > was["lives"] and now["startedAt"] is not None
    )


def _rank(run: Mapping[str, Any], harm: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((rank for rank in run["status"]["ranks"] if rank["rank"] == harm["rank"]), None)


def undisturbed_after_s(harm: Mapping[str, Any]) -> float | None:
    """How long after the harm a run that nothing happened to is undisturbed; None where something has to happen."""
    if not HarmKind(harm["kind"]).is_for_a_time:
        return None
    return float(harm["seconds"] or 0.0) + LEASE_TTL_S + LEASE_GUARD_S + NOTICE_LIMIT_S


def verdict(
    before: Mapping[str, Any],
    run: Mapping[str, Any],
    harm: Mapping[str, Any],
    *,
    outcome: Outcome,
    first_line_at: float | None = None,
) -> dict[str, Any]:
    """Everything about it, as data.

    Args:
        before: the run when it was harmed.
        run: the run when the outcome was clear.
        first_line_at: when the resumed command first printed something; None when it has not.
    """
    status = run["status"]
    epochs = {epoch["epoch"]: epoch for epoch in status["epochs"]}
    harmed, last = epochs.get(harm["epoch"]), epochs.get(status["epoch"])
    has_restarted = last is not None and status["epoch"] > harm["epoch"]
    is_alone = _began_again(before, run, harm)
    cause = None if harmed is None else harmed["cause"]
    places = {rank["rank"]: rank["machine"] for rank in before["status"]["ranks"]}
    now = {rank["rank"]: rank["machine"] for rank in status["ranks"]}
    moved = sorted(r for r in places if r in now and places[r] != now[r])
    return {
        "run": run["metadata"]["name"],
        "harm": dict(harm),
        "outcome": str(outcome),
        "state": status["state"],
        "message": status["message"],
        "epoch": status["epoch"],
        "alone": is_alone,
        "cause": cause,
        "ofTheHarm": None if cause is None else cause["rank"] == harm["rank"],
        "chargedTo": "Failure" if is_alone else None if harmed is None else harmed["chargedTo"],
        "restarts": status["restarts"],
        "resumedFrom": {
            "checkpoint": last["restored"] if last is not None and has_restarted else None,
            "step": last["restoredStep"] if last is not None and has_restarted else None,
        },
        "lostSeconds": None if harmed is None else harmed["lostSeconds"],
        "seconds": _seconds(harmed, last if has_restarted else None, harm, first_line_at)
        | ({"total": _alone_s(run, harm)} if is_alone else {}),
        "replaced": [{"rank": r, "from": places[r], "to": now[r]} for r in moved] if has_restarted else [],
        "kept": sorted(r for r in places if places[r] == now.get(r)) if has_restarted or is_alone else [],
    }


def _alone_s(run: Mapping[str, Any], harm: Mapping[str, Any]) -> float:
    """From the harm until the rank ran again."""
    rank = _rank(run, harm)
    assert rank is not None, "it began again"
    return round(max(0.0, float(rank["startedAt"]) - float(harm["at"])), 3)


def _seconds(
    harmed: Mapping[str, Any] | None,
    last: Mapping[str, Any] | None,
    harm: Mapping[str, Any],
    first_line_at: float | None,
) -> dict[str, float | None]:
    def between(since: float | None, until: float | None) -> float | None:
        return None if since is None or until is None else round(max(0.0, until - since), 3)

    old: Mapping[str, Any] = harmed or {"stoppedAt": None, "endedAt": None}
    new: Mapping[str, Any] = last or {"beganAt": None, "openedAt": None, "runningAt": None}
    return {
        "detection": between(harm["at"], old["stoppedAt"]),
        "fence": between(old["stoppedAt"], old["endedAt"]),
        "pause": between(old["endedAt"], new["beganAt"]),
        "assembly": between(new["beganAt"], new["openedAt"]),
        "start": between(new["openedAt"], new["runningAt"]),
        "firstLine": between(new["openedAt"], first_line_at),
        "total": between(harm["at"], first_line_at or new["runningAt"]),
    }
