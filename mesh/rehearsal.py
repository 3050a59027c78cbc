"""What came of a rehearsed fault: the verdict of `mesh chaos`. Pure.

Rules of this file:
1. Everything is told from what the API says of the run; times are differences of the deployment's own clock.
2. A run has resumed when all its ranks run in a later epoch than the one that was harmed.
3. A fault for a time, shorter than a lease, disturbs nobody: that is a verdict too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from mesh.messages import LEASE_GUARD_S, LEASE_TTL_S
from mesh.states import HarmKind, RunState

NOTICE_LIMIT_S = 10.0
"""By when, after a fault is undone, the run would have noticed it: a lease, its guards, and some patience."""


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


def outcome_of(run: Mapping[str, Any], harm: Mapping[str, Any]) -> Outcome | None:
    """None as long as it is open."""
    status = run["status"]
    state = RunState(status["state"])
    if state is RunState.RUNNING and status["epoch"] > harm["epoch"]:
        return Outcome.RESUMED
    if state.is_terminal:
        return Outcome.ENDED
    return Outcome.SUSPENDED if state is RunState.SUSPENDED else None


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
        "cause": cause,
        "ofTheHarm": None if cause is None else cause["rank"] == harm["rank"],
        "chargedTo": None if harmed is None else harmed["chargedTo"],
        "restarts": status["restarts"],
        "resumedFrom": {
            "checkpoint": last["restored"] if last is not None and has_restarted else None,
            "step": last["restoredStep"] if last is not None and has_restarted else None,
        },
        "lostSeconds": None if harmed is None else harmed["lostSeconds"],
        "seconds": _seconds(harmed, last if has_restarted else None, harm, first_line_at),
        "replaced": [{"rank": r, "from": places[r], "to": now[r]} for r in moved] if has_restarted else [],
        "kept": sorted(r for r in places if places[r] == now.get(r)) if has_restarted else [],
    }


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
