"""A gang as the journal keeps it: plain JSON-able data, and back.

Rules of this file:
1. What `record_of` writes, `gang_of` reads back as it was; but for what is asked again after a crash.
2. A change here is another schema of the journal: see `coordinator.journal.sql.SCHEMA_VERSION`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from coordinator.core.checkpoints import Checkpoints
from coordinator.core.gang_state import (
    Chapter,
    CommittedCheckpoint,
    Failure,
    Gang,
    Holding,
    MemberPhase,
    MemberRecord,
    NetworkCheck,
    Outcome,
    OutcomeKind,
    RestartKind,
    Restarts,
    Settlement,
    Want,
)
from mesh.ids import Epoch, Incarnation, MachineName, Rank, RunUid
from mesh.messages import CauseEvidence, PathTaken, ProcessExit
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import RunState, Transport


def record_of(gang: Gang) -> dict[str, Any]:
    """Plain JSON-able data; `gang_of` is the inverse."""
    return {
        "uid": gang.uid,
        "plan": gang.plan.to_record(),
        "created_at": gang.created_at,
        "state": gang.state,
        "reason": gang.reason,
        "message": gang.message,
        "epoch": gang.epoch,
        "reservation": gang.reservation,
        "wanted": [_want_record(w) for w in gang.wanted.values()],
        "withdrawing": list(gang.withdrawing),
        "waiting_for": gang.waiting_for,
        "assemblies": gang.assemblies,
        "replacements": gang.replacements,
        "checks": gang.checks,
        "suspects": list(gang.suspects),
        "check": None if gang.check is None else [gang.check.number, [list(f) for f in gang.check.fresh]],
        "restarts": asdict(gang.restarts),
        "backoff_left_s": gang.backoff_left_s,
        "assembly_left_s": gang.assembly_left_s,
        "barrier_open": gang.barrier_open,
        "barrier_closed": gang.barrier_closed,
        "outcome": _outcome_record(gang.outcome),
        "wish": _outcome_record(gang.wish),
        "members": [_member_record(gang.members[rank]) for rank in sorted(gang.members)],
        "attempts": [_member_record(m) for m in gang.attempts],
        "history": [_chapter_record(c) for c in gang.history],
        "failures": [_failure_record(f) for f in gang.failures],
        "cause": None if gang.cause is None else _failure_record(gang.cause),
        "holdings": [asdict(h) for h in gang.holdings],
        "reclaimed": list(gang.reclaimed),
        "was_reclaimed_first": gang.was_reclaimed_first,
        "checkpoint": None if gang.checkpoint is None else asdict(gang.checkpoint),
        "checkpoints": gang.checkpoints.to_record(),
        "may_have_run": gang.may_have_run,
        "started_at": gang.started_at,
        "ended_at": gang.ended_at,
    }


def gang_of(record: dict[str, Any]) -> Gang:
    """The gang that `record_of` wrote down."""
    members = [_member_from(m) for m in record["members"]]
    plain = (
        "created_at", "message", "reservation", "waiting_for", "assemblies", "replacements", "backoff_left_s",
        "assembly_left_s", "barrier_open", "barrier_closed", "was_reclaimed_first", "started_at", "ended_at",
    )  # fmt: skip
    return Gang(
        **{name: record[name] for name in plain},
        uid=RunUid(record["uid"]),
        plan=RunPlan.from_record(record["plan"]),
        state=RunState(record["state"]),
        reason=None if record["reason"] is None else Reason(record["reason"]),
        epoch=Epoch(record["epoch"]),
        checks=record.get("checks", 0),  # these three are younger than the schema
        suspects=tuple(record.get("suspects", ())),
        check=_check_from(record.get("check")),
        wanted={want[0]: _want_from(want) for want in record["wanted"]},
        withdrawing=tuple(record["withdrawing"]),
        restarts=Restarts(**record["restarts"]),
        outcome=_outcome_from(record["outcome"]),
        wish=_outcome_from(record["wish"]),
        members={m.rank: m for m in members},
        attempts=[_member_from(m) for m in record["attempts"]],
        history=[_chapter_from(c) for c in record["history"]],
        failures=[_failure_from(f) for f in record["failures"]],
        cause=None if record["cause"] is None else _failure_from(record["cause"]),
        holdings=[Holding(**h) for h in record["holdings"]],
        reclaimed=tuple(record["reclaimed"]),
        checkpoint=None if record["checkpoint"] is None else CommittedCheckpoint(**record["checkpoint"]),
        checkpoints=Checkpoints.from_record(record["checkpoints"]),
        may_have_run=record["may_have_run"],
    )


def _want_record(want: Want) -> list[Any]:
    return [want.reservation, want.ranks, want.avoid, want.is_for_refusal, want.refusal]


def _want_from(record: list[Any]) -> Want:
    reservation, ranks, avoid, is_for_refusal, *younger = record
    return Want(
        reservation=reservation,
        ranks=tuple(ranks),
        avoid=tuple(avoid),
        is_for_refusal=is_for_refusal,
        refusal=younger[0] if younger else "",
    )


def _check_from(record: list[Any] | None) -> NetworkCheck | None:
    if record is None:
        return None
    number, fresh = record
    return NetworkCheck(
        number=number, fresh=tuple((Rank(rank), MachineName(machine)) for rank, machine in fresh)
    )


def _outcome_record(outcome: Outcome | None) -> dict[str, str] | None:
    if outcome is None:
        return None
    return {"kind": outcome.kind, "reason": outcome.reason, "message": outcome.message}


def _outcome_from(record: dict[str, str] | None) -> Outcome | None:
    if record is None:
        return None
    return Outcome(
        kind=OutcomeKind(record["kind"]), reason=Reason(record["reason"]), message=record["message"]
    )


def _chapter_record(chapter: Chapter) -> dict[str, Any]:
    record = {name: getattr(chapter, name) for name in Chapter.__slots__}
    record["cause"] = None if chapter.cause is None else _failure_record(chapter.cause)
    return record


def _chapter_from(record: dict[str, Any]) -> Chapter:
    cause, charged, reason = record["cause"], record["charged"], record["reason"]
    return Chapter(
        **{
            **record,
            "kept": tuple(record["kept"]),
            "replaced": tuple(record["replaced"]),
            "victims": tuple(record["victims"]),
            "reason": None if reason is None else Reason(reason),
            "cause": None if cause is None else _failure_from(cause),
            "charged": None if charged is None else RestartKind(charged),
        }
    )


def _exit_record(exit_: ProcessExit | None) -> list[int | None] | None:
    return None if exit_ is None else [exit_.code, exit_.signal]


def _exit_from(record: list[int | None] | None) -> ProcessExit | None:
    return None if record is None else ProcessExit(code=record[0], signal=record[1])


def _member_record(member: MemberRecord) -> dict[str, Any]:
    return {
        "incarnation": str(member.incarnation),
        "machine": member.machine,
        "address": member.address,
        "phase": member.phase,
        "settlement": member.settlement,
        "pid": member.pid,
        "exit": _exit_record(member.exit),
        "fenced_exit": _exit_record(member.fenced_exit),
        "times": [
            member.ordered_at,
            member.registered_at,
            member.arrived_at,
            member.started_at,
            member.ended_at,
        ],
        "reason": member.reason,
        "message": member.message,
        "was_silent_first": member.was_silent_first,
        "fenced_itself": member.fenced_itself,
        "store_was_silent": member.store_was_silent,
        "is_expiring": member.is_expiring,
        "instead_of": member.instead_of,
        "path": None if member.path is None else asdict(member.path),
    }


def _member_from(record: dict[str, Any]) -> MemberRecord:
    ordered_at, registered_at, arrived_at, started_at, ended_at = record["times"]
    return MemberRecord(
        incarnation=Incarnation.parse(record["incarnation"]),
        machine=MachineName(record["machine"]),
        address=record["address"],
        phase=MemberPhase(record["phase"]),
        settlement=None if record["settlement"] is None else Settlement(record["settlement"]),
        pid=record["pid"],
        exit=_exit_from(record["exit"]),
        fenced_exit=_exit_from(record["fenced_exit"]),
        ordered_at=ordered_at,
        registered_at=registered_at,
        arrived_at=arrived_at,
        started_at=started_at,
        ended_at=ended_at,
        reason=None if record["reason"] is None else Reason(record["reason"]),
        message=record["message"],
        was_silent_first=record["was_silent_first"],
        fenced_itself=record["fenced_itself"],
        store_was_silent=record.get("store_was_silent", False),  # these four are younger than the schema
        is_expiring=record.get("is_expiring", False),
        instead_of=record.get("instead_of"),
        path=_path_from(record.get("path")),
    )


def _path_from(record: dict[str, Any] | None) -> PathTaken | None:
    return None if record is None else PathTaken(**{**record, "transport": Transport(record["transport"])})


def _failure_record(failure: Failure) -> dict[str, Any]:
    return {
        "rank": failure.rank,
        "at": failure.at,
        "reason": failure.reason,
        "message": failure.message,
        "exit": _exit_record(failure.exit),
        "evidence": {**asdict(failure.evidence), "exit": _exit_record(failure.evidence.exit)},
        "last_lines": list(failure.last_lines),
    }


def _failure_from(record: dict[str, Any]) -> Failure:
    evidence = record["evidence"]
    return Failure(
        rank=Rank(record["rank"]),
        at=record["at"],
        reason=Reason(record["reason"]),
        message=record["message"],
        exit=_exit_from(record["exit"]),
        evidence=replace(CauseEvidence(**{**evidence, "exit": None}), exit=_exit_from(evidence["exit"])),
        last_lines=tuple(record["last_lines"]),
    )
