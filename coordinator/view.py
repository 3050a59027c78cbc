"""A gang as the API shows it: pure functions from the journalled state to resources."""

from __future__ import annotations

import re
from typing import Any

from coordinator import story
from coordinator.core.gang_state import Failure, Gang, MemberRecord, Settlement
from coordinator.fleet import MachineFacts
from coordinator.journal import EventRow
from coordinator.path_view import machine_network, path_conditions, path_status
from coordinator.story import cause_resource, process_end
from mesh.exits import describe_exit
from mesh.ids import RunUid
from mesh.reasons import Reason
from mesh.resources import Attempt, Condition, Event, Machine, RankStatus, Run
from mesh.selectors import JOB_LABEL, RANK_LABEL
from mesh.states import RunState

_SECRET = re.compile("key|token|secret|passw|_pwd|credential|auth", re.IGNORECASE)
LOCAL_PROVIDER = "local"
"""What machines that are simulated on the head's host say of themselves."""
SHELL_CODES_OF_NO_START = {Reason.COMMAND_NOT_FOUND: 127, Reason.COMMAND_NOT_EXECUTABLE: 126}
CANCELLED_EXIT_CODE = 130
"""What a shell reports for a command that was interrupted."""


FINISHED_EARLY_S = 5.0
"""How long a rank must have been finished before that is worth a word: ranks never end at one moment."""


def run_resource(gang: Gang, job: dict[str, Any], *, now: float) -> Run:
    """The Job resource with its status filled in. `now` is wall-clock seconds; `lastOutputAt` is the API's to fill."""
    plan, cause = gang.plan, story.last_cause(gang)
    return {
        "apiVersion": "nodus.dev/v1",
        "kind": "Job",
        "metadata": {
            "name": plan.name,
            "uid": gang.uid,
            "labels": dict(plan.labels),
            "createdAt": gang.created_at,
        },
        "spec": shown_spec(job.get("spec", {})),
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
            "ranks": [_rank_status(gang, gang.members[rank]) for rank in sorted(gang.members)],
            "path": path_status(gang),
            "conditions": path_conditions(gang) + _conditions(gang, now),
            "cause": None if cause is None else cause_resource(cause),
            "restarts": story.restart_counts(gang),
            "epochs": story.epochs(gang),
            "checkpoint": story.checkpoint_status(gang.checkpoint),
            "productive": story.productive(gang, now),
        },
    }


def machine_resource(facts: MachineFacts, user: str | None) -> Machine:
    """One machine, and the run that has it."""
    return {
        "name": facts.name,
        "address": facts.address,
        "labels": facts.labels,
        "gpus": {"type": facts.gpu_type, "count": facts.gpu_count},
        "state": _machine_state(facts, user),
        "run": user,
        "waitsFor": _waits_for(facts, user),
        "network": machine_network(facts),
    }


def _machine_state(facts: MachineFacts, user: str | None) -> str:
    if not facts.is_alive:
        return "Lost"
    if facts.is_cordoned:
        return "Leaving"
    return "Ready" if user is None else "InUse"


def _waits_for(facts: MachineFacts, user: str | None) -> str | None:
    if not facts.is_alive or not facts.is_cordoned:
        return None
    if user is not None:
        return f"run {user} to leave it"
    # The head ends a simulated one that is free; a real one is its owner's.
    return "its end" if facts.labels.get("provider") == LOCAL_PROVIDER else "its agent to be stopped there"


def shown_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Without the values of variables that sound like secrets: what the API shows is sent on and pasted."""
    env = {name: None if _SECRET.search(name) else value for name, value in spec.get("env", {}).items()}
    return {**spec, **({"env": env} if env else {})}


def exit_code(gang: Gang) -> int | None:
    """The run's own exit code once it has ended: a shell's, where its command did not start. None while it lives, and
    when no command's end was the cause."""
    if gang.state is RunState.SUCCEEDED:
        return 0
    if gang.state is RunState.CANCELLED:
        return CANCELLED_EXIT_CODE
    cause = story.last_cause(gang)
    if gang.state is RunState.FAILED and cause is not None:
        true_exit = cause.evidence.exit or cause.exit
        return SHELL_CODES_OF_NO_START.get(cause.reason) if true_exit is None else true_exit.shell_code
    return None


def attempt_resources(gang: Gang) -> list[Attempt]:
    """Every rank's part in every epoch, each life of it."""
    members = gang.all_members
    last = {
        (m.incarnation.epoch, m.rank): m for m in members
    }  # a rank that was replaced has several lives in one
    return [_attempt(gang, m, is_last=last[(m.incarnation.epoch, m.rank)] is m) for m in members]


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


def _attempt(gang: Gang, member: MemberRecord, *, is_last: bool) -> Attempt:
    chapter = story.chapter_of(gang, member.incarnation.epoch)
    cause = chapter.cause if chapter is not None and is_last else None
    is_cause = cause is not None and cause.rank == member.rank
    is_victim = chapter is not None and is_last and member.rank in chapter.victims
    reason, message = _why_it_ended(member, cause, is_victim=is_victim)
    arrived_at = member.arrived_at
    origin = chapter if member.instead_of is None else None  # one that began again alone was not restored
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
        "exit": process_end(member.exit or member.fenced_exit),
        "reason": None if reason is None else str(reason),
        "message": message,
        "cause": cause_resource(cause) if cause is not None and is_cause else None,
        "registeredAt": member.registered_at,
        "arrivedAt": arrived_at,
        "bootSeconds": None if arrived_at is None else max(0.0, round(arrived_at - member.ordered_at, 3)),
        "restored": None if origin is None else origin.restored,
        "restoredStep": None if origin is None else origin.restored_step,
        "placement": {"machine": member.machine, "address": member.address},
        "cost": None,
    }


def _why_it_ended(
    member: MemberRecord, cause: Failure | None, *, is_victim: bool
) -> tuple[Reason | None, str]:
    """Why this life ended; (None, "") while it goes on."""
    if cause is not None and cause.rank == member.rank:
        return cause.reason, cause.message
    if member.succeeded:
        return Reason.COMPLETED, "It exited 0."
    if member.exit is not None:
        what = describe_exit(code=member.exit.code, signal=member.exit.signal)
        reason = Reason.COMMAND_FAILED if member.exit.signal is None else Reason.COMMAND_KILLED
        because = f" because of rank {cause.rank}" if cause is not None and is_victim else ""
        return reason, f"It ended with {what}{because}."
    if member.settlement is None:
        return None, ""
    return member.reason or Reason.EPOCH_ENDED, member.message


def _rank_status(gang: Gang, member: MemberRecord) -> RankStatus:
    before = [m for m in gang.attempts if m.rank == member.rank and m.incarnation.epoch == gang.epoch]
    return {
        "rank": member.rank,
        "machine": member.machine,
        "address": member.address,
        "state": _member_state(member),
        "exit": process_end(member.exit or member.fenced_exit),
        "lastOutputAt": None,
        "startedAt": member.started_at,
        "finishedAt": member.ended_at,
        "lives": 1 + sum(m.started_at is not None for m in before),
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
    if gang.reclaimed and not gang.state.is_terminal:
        found.append(
            {"type": "MachineWantedBack", "message": f"{', '.join(gang.reclaimed)} will be replaced."}
        )
    if gang.restarts.total and not gang.state.is_terminal and gang.checkpoint is None:
        found.append(
            {
                "type": "NothingToRestore",
                "message": "No checkpoint has been committed yet: after a restart the command begins anew.",
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
