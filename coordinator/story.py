"""A run's story as the API tells it: its epochs, what each led to, restarts, and the share of productive time. Pure.

Rules of this file:
1. Times are wall-clock seconds, for people. One that was set back between two stations never gives a negative length.
2. An epoch's running time leads somewhere as far as it is not lost: up to the checkpoint that the next epoch began
   from, all of it when the run succeeded, and all of it as long as it runs.
"""

from __future__ import annotations

from coordinator.core.gang_state import Chapter, CommittedCheckpoint, Failure, Gang
from mesh.messages import ProcessExit
from mesh.resources import Cause, CheckpointStatus, EpochStatus, ProcessEnd, Productive, RestartCounts
from mesh.states import RunState


def epochs(gang: Gang) -> list[EpochStatus]:
    """The story, the current epoch last."""
    return [_epoch(gang, chapter, then) for chapter, then in _with_next(gang)]


def restart_counts(gang: Gang) -> RestartCounts:
    restarts = gang.restarts
    return {
        "of": gang.plan.max_restarts,
        "failure": restarts.failure,
        "loss": restarts.loss,
        "reclaim": restarts.reclaim,
        "ours": restarts.ours,
        "withoutProgress": restarts.fruitless,
        "total": restarts.total,
    }


def checkpoint_status(checkpoint: CommittedCheckpoint | None) -> CheckpointStatus | None:
    if checkpoint is None:
        return None
    return {
        "id": checkpoint.id,
        "uri": checkpoint.uri,
        "epoch": checkpoint.epoch,
        "step": checkpoint.step,
        "bytes": checkpoint.bytes,
        "at": checkpoint.at,
    }


def productive(gang: Gang, now: float) -> Productive:
    """Rule 2, summed up."""
    seconds = sum(
        ran_s(gang, chapter, now) - (lost_s(gang, chapter, then) or 0.0) for chapter, then in _with_next(gang)
    )
    whole = (gang.ended_at or now) - gang.created_at
    share = min(1.0, seconds / whole) if whole > 0 else 0.0
    return {"seconds": round(seconds, 3), "share": round(share, 4)}


def chapter_of(gang: Gang, epoch: int) -> Chapter | None:
    """None for one that has been left out of very many."""
    return next((chapter for chapter in reversed(gang.history) if chapter.epoch == epoch), None)


def last_cause(gang: Gang) -> Failure | None:
    """Of the last epoch, once it has ended of something."""
    return gang.history[-1].cause if gang.history else gang.cause


def ran_s(gang: Gang, chapter: Chapter, now: float) -> float:
    """How long all ranks of the epoch ran, until now if they still do; with one away alone (RestartRank) as well."""
    if chapter.running_at is None:
        return 0.0
    until = chapter.stopped_at or chapter.ended_at or gang.ended_at or now
    return max(0.0, until - chapter.running_at)


def lost_s(gang: Gang, chapter: Chapter, then: Chapter | None) -> float | None:
    """How much of its running time the epoch lost; None while it runs, and for one that never ran."""
    stopped_at = chapter.stopped_at or chapter.ended_at
    if chapter.running_at is None or stopped_at is None:
        return None
    if then is None and gang.state is RunState.SUCCEEDED:
        return 0.0
    newest_at = None if gang.checkpoint is None else gang.checkpoint.at
    saved_at = newest_at if then is None else then.restored_at
    return max(0.0, stopped_at - max(chapter.running_at, saved_at or 0.0))


def process_end(exit_: ProcessExit | None) -> ProcessEnd | None:
    return None if exit_ is None else {"code": exit_.code, "signal": exit_.signal}


def cause_resource(failure: Failure) -> Cause:
    return {
        "rank": failure.rank,
        "at": failure.at,
        "reason": str(failure.reason),
        "message": failure.message,
        "exit": process_end(failure.exit),
        "workerExit": process_end(failure.evidence.exit),
        "globalRank": failure.evidence.global_rank,
        "hint": failure.evidence.hint,
        "lastLines": list(failure.last_lines),
    }


def _with_next(gang: Gang) -> list[tuple[Chapter, Chapter | None]]:
    """Each epoch with the one after it."""
    history = gang.history
    return [(c, history[i + 1] if i + 1 < len(history) else None) for i, c in enumerate(history)]


def _epoch(gang: Gang, chapter: Chapter, then: Chapter | None) -> EpochStatus:
    lost = lost_s(gang, chapter, then)
    ran = ran_s(gang, chapter, chapter.running_at or 0.0) if lost is not None else 0.0
    is_running = chapter.running_at is not None and lost is None
    return {
        "epoch": chapter.epoch,
        "beganAt": chapter.began_at,
        "openedAt": chapter.opened_at,
        "runningAt": chapter.running_at,
        "stoppedAt": chapter.stopped_at,
        "endedAt": chapter.ended_at,
        "kept": list(chapter.kept),
        "replaced": list(chapter.replaced),
        "restored": chapter.restored,
        "restoredStep": chapter.restored_step,
        "network": chapter.network,
        "reason": None if chapter.reason is None else str(chapter.reason),
        "cause": None if chapter.cause is None else cause_resource(chapter.cause),
        "victims": list(chapter.victims),
        "chargedTo": None if chapter.charged is None else str(chapter.charged),
        "ledSomewhere": is_running or (lost is not None and lost < ran),
        "lostSeconds": None if lost is None else round(lost, 3),
    }
