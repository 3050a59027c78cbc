"""A gang as the API shows it: pure functions from the journalled state to resources."""

from __future__ import annotations

from typing import Any

from coordinator.core.gang_state import Failure, Gang, MemberRecord, Settlement
from coordinator.journal import EventRow
from mesh.ids import RunUid
from mesh.messages import ProcessExit
from mesh.resources import Attempt, Cause, Condition, Event, ProcessEnd, RankStatus, Run
from mesh.selectors import JOB_LABEL, RANK_LABEL
from mesh.states import RunState

CANCELLED_EXIT_CODE = 130
"""What a shell reports for a command that was interrupted."""


FINISHED_EARLY_S = 5.0
"""How long a rank must have been finished before that is worth a word: ranks never end at one moment."""


def run_resource(gang: Gang, job: dict[str, Any], *, now: float) -> Run:
    """The Job resource with its status filled in. `now` is wall-clock seconds; `lastOutputAt` is the API's to fill."""
    plan = gang.plan
    return {
        "apiVersion": "nodus.dev/v1",
        "kind": "Job",
        "metadata": {
            "name": plan.name,
            "uid": gang.uid,
            "labels": dict(plan.labels),
            "createdAt": gang.created_at,
        },
        "spec": job.get("spec", {}),
        "status": {
            "state": str(gang.state),
            "reason": None if gang.reason is None else str(gang.reason),
            "message": gang.message,
            "epoch": gang.epoch,
            "exitCode": exit_code(gang),
            "topology": {
                "nodes": plan.nodes,
                "gpusPerNode": plan.gpus_per_node,
                "processesPerNode": plan.processes_per_node,
                "worldSize": plan.nodes * plan.processes_per_node,
            },
            "barrier": {"arrived": gang.arrived_count(), "of": plan.nodes},
            "startedAt": gang.started_at,
            "endedAt": gang.ended_at,
            "ranks": [_rank_status(gang.members[rank]) for rank in sorted(gang.members)],
            "conditions": _conditions(gang, now),
            "cause": None if gang.cause is None else _cause(gang.cause),
        },
    }


def exit_code(gang: Gang) -> int | None:
    """The run's own exit code once it has ended; None while it lives and when no process gave one."""
    if gang.state is RunState.SUCCEEDED:
        return 0
    if gang.state is RunState.CANCELLED:
        return CANCELLED_EXIT_CODE
    if gang.state is RunState.FAILED and gang.cause is not None:
        true_exit = gang.cause.evidence.exit or gang.cause.exit
        return None if true_exit is None else true_exit.shell_code
    return None


def attempt_resources(gang: Gang) -> list[Attempt]:
    """Every rank's part in every epoch."""
    return [_attempt(gang, member) for member in gang.all_members]


def event_resource(row: EventRow) -> Event:
    """One event, as the API shows it."""
    return {
        "seq": row.seq,
        "at": row.at,
        "run": row.run,
        "uid": row.uid,
        "epoch": row.epoch,
        "rank": row.rank,
        "kind": row.kind,
        "reason": row.reason,
        "message": row.message,
    }


def _attempt(gang: Gang, member: MemberRecord) -> Attempt:
    is_cause = gang.cause is not None and gang.cause.rank == member.rank
    is_last = member.incarnation.epoch == gang.epoch
    return {
        "run": gang.plan.name,
        "uid": RunUid(gang.uid),
        "rank": member.rank,
        "epoch": member.incarnation.epoch,
        "machine": member.machine,
        "state": _member_state(member),
        "labels": {JOB_LABEL: gang.plan.name, RANK_LABEL: str(member.rank), **dict(gang.plan.labels)},
        "createdAt": member.ordered_at,
        "startedAt": member.started_at,
        "endedAt": member.ended_at,
        "exit": _process_end(member.exit or member.fenced_exit),
        "cause": _cause(gang.cause) if is_cause and is_last and gang.cause is not None else None,
        "placement": {"machine": member.machine, "address": member.address},
        "cost": None,
    }


def _rank_status(member: MemberRecord) -> RankStatus:
    return {
        "rank": member.rank,
        "machine": member.machine,
        "address": member.address,
        "state": _member_state(member),
        "stage": None,
        "exit": _process_end(member.exit or member.fenced_exit),
        "lastOutputAt": None,
        "finishedAt": member.ended_at,
    }


def _member_state(member: MemberRecord) -> str:
    if member.exit is not None:
        return "Exited"
    if member.settlement is Settlement.LEASE_LAPSED:
        return "Lost"
    if member.settlement is not None:
        return "Fenced"
    return str(member.phase)


def _conditions(gang: Gang, now: float) -> list[Condition]:
    found: list[Condition] = []
    ended = sorted(now - (m.ended_at or now) for m in gang.members.values() if m.succeeded)
    is_uneven = gang.state is RunState.RUNNING and 0 < len(ended) < len(gang.members)
    if is_uneven and ended[-1] >= FINISHED_EARLY_S:
        found.append(
            {
                "type": "RanksFinishedEarly",
                "message": f"{len(ended)} of {len(gang.members)} ranks finished {ended[-1]:.0f} s ago; "
                "the others still run.",
            }
        )
    found.extend(
        {
            "type": "FenceFailed",
            "message": f"Rank {m.rank} left processes on {m.machine} that could not be killed.",
        }
        for m in gang.all_members
        if m.settlement is Settlement.FENCE_FAILED
    )
    return found


def _process_end(exit_: ProcessExit | None) -> ProcessEnd | None:
    return None if exit_ is None else {"code": exit_.code, "signal": exit_.signal}


def _cause(failure: Failure) -> Cause:
    return {
        "rank": failure.rank,
        "at": failure.at,
        "reason": str(failure.reason),
        "message": failure.message,
        "exit": _process_end(failure.exit),
        "workerExit": _process_end(failure.evidence.exit),
        "globalRank": failure.evidence.global_rank,
        "hint": failure.evidence.hint,
        "lastLines": list(failure.last_lines),
    }
