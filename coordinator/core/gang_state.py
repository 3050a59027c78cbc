"""A gang's state: what is journalled after every event that changed it. Frozen parts, one mutable whole."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from mesh.ids import NO_EPOCH, Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunUid
from mesh.messages import CauseEvidence, ProcessExit
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import RunState


class MemberPhase(StrEnum):
    """How far a member has come in its epoch, as far as the coordinator knows. Only ever moves down."""

    ORDERED = "Ordered"
    REGISTERED = "Preparing"
    ARRIVED = "AtBarrier"
    STARTED = "Running"
    EXITED = "Exited"

    def has_reached(self, phase: MemberPhase) -> bool:
        """True when a member in this phase has been in that one, or is."""
        return _ORDER[self] >= _ORDER[phase]


_ORDER = {phase: place for place, phase in enumerate(MemberPhase)}


class Settlement(StrEnum):
    """Why no process of a member can act any more: the proof that a fence needs."""

    CONFIRMED = "Confirmed"
    """The member itself killed everything and looked."""
    LEASE_LAPSED = "LeaseLapsed"
    """Its lease and the guard are over: it has fenced itself, or its machine is gone."""
    NEVER_STARTED = "NeverStarted"
    """Its barrier was closed without ever having opened: no command can have started."""
    FENCE_FAILED = "FenceFailed"
    """It said that something could not be killed. The machine must not be used again."""


class OutcomeKind(StrEnum):
    """What the end of the current epoch leads to."""

    SUCCEED = "Succeed"
    FAIL = "Fail"
    CANCEL = "Cancel"
    RETRY_ASSEMBLY = "RetryAssembly"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A decision that has been taken and waits for the epoch to be fenced."""

    kind: OutcomeKind
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's failure, as evidence for the judgement of who was first."""

    rank: Rank
    at: float
    """Wall-clock time at the member; compared only to order failures for people."""
    reason: Reason
    message: str
    exit: ProcessExit | None = None
    evidence: CauseEvidence = field(default_factory=CauseEvidence)
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """One rank in one epoch: an attempt."""

    incarnation: Incarnation
    machine: MachineName
    address: str
    phase: MemberPhase = MemberPhase.ORDERED
    settlement: Settlement | None = None
    """Set once, when it is proven that none of its processes can act."""
    pid: int | None = None
    exit: ProcessExit | None = None
    """Set when and only when the command ended by itself (phase EXITED)."""
    fenced_exit: ProcessExit | None = None
    """How the command ended under a fence."""
    ordered_at: float
    registered_at: float | None = None
    arrived_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def rank(self) -> Rank:
        return self.incarnation.rank

    @property
    def succeeded(self) -> bool:
        return self.exit is not None and self.exit.ok


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One line of the ledger: a machine, from when it was held until its release was confirmed."""

    machine: MachineName
    reservation: int
    since: float
    until: float | None = None


@dataclass(slots=True, kw_only=True)
class Gang:
    """Everything a coordinator must not forget about one run."""

    uid: RunUid
    plan: RunPlan
    created_at: float
    state: RunState = RunState.PENDING
    """Written by `_enter` of the core only."""
    reason: Reason | None = None
    message: str = ""
    epoch: Epoch = NO_EPOCH
    """Grows by one with every assembly; durable before anybody hears of it."""
    reservation: int = 0
    """Grows by one with every attempt to get machines; 0 before the first."""
    machines_held: bool = False
    """True from MachinesReserved until MachinesReleased of the current reservation."""
    release_pending: bool = False
    """True from the wish to give machines back until the provider confirmed it."""
    assemblies: int = 0
    """Assemblies begun; at most 1 + plan.max_assembly_retries."""
    restarts: int = 0
    """Epochs begun because of a loss; at most plan.max_restarts."""
    assembly_left_s: float = 0.0
    """What was left of the assembly's time at the last write; counts only in Assembling and Starting."""
    barrier_open: bool = False
    """The current epoch's barrier has opened."""
    barrier_closed: bool = False
    """The store has confirmed that the current epoch's barrier will not open any more."""
    outcome: Outcome | None = None
    """Set once per epoch: from here on the epoch only ends."""
    members: dict[Rank, MemberRecord] = field(default_factory=dict)
    """The current epoch's members: empty, or one for every rank."""
    attempts: list[MemberRecord] = field(default_factory=list)
    """Members of earlier epochs, all settled."""
    failures: list[Failure] = field(default_factory=list)
    """Failures of the current epoch in the order in which they were heard."""
    cause: Failure | None = None
    """The failure that is the run's reason; set when the outcome is FAIL because of a rank."""
    holdings: list[Holding] = field(default_factory=list)
    started_at: float | None = None
    ended_at: float | None = None

    def snapshot(self) -> Gang:
        """A copy that later events do not touch."""
        twin = object.__new__(Gang)
        for name in Gang.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.members = dict(self.members)
        twin.attempts = list(self.attempts)
        twin.failures = list(self.failures)
        twin.holdings = list(self.holdings)
        return twin

    @property
    def all_members(self) -> list[MemberRecord]:
        """Every attempt, oldest first, then by rank."""
        return [*self.attempts, *(self.members[rank] for rank in sorted(self.members))]

    def arrived_count(self) -> int:
        """Members that are at the barrier or beyond it."""
        return sum(m.phase.has_reached(MemberPhase.ARRIVED) for m in self.members.values())

    def to_record(self) -> dict[str, Any]:
        """Plain JSON-able data; `from_record` is the inverse."""
        return {
            "uid": self.uid,
            "plan": self.plan.to_record(),
            "created_at": self.created_at,
            "state": self.state,
            "reason": self.reason,
            "message": self.message,
            "epoch": self.epoch,
            "reservation": self.reservation,
            "machines_held": self.machines_held,
            "release_pending": self.release_pending,
            "assemblies": self.assemblies,
            "restarts": self.restarts,
            "assembly_left_s": self.assembly_left_s,
            "barrier_open": self.barrier_open,
            "barrier_closed": self.barrier_closed,
            "outcome": _outcome_record(self.outcome),
            "members": [_member_record(self.members[rank]) for rank in sorted(self.members)],
            "attempts": [_member_record(m) for m in self.attempts],
            "failures": [_failure_record(f) for f in self.failures],
            "cause": None if self.cause is None else _failure_record(self.cause),
            "holdings": [[h.machine, h.reservation, h.since, h.until] for h in self.holdings],
            "started_at": self.started_at,
            "ended_at": self.ended_at,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Gang:
        members = [_member_from(m) for m in record["members"]]
        outcome = record["outcome"]
        return cls(
            uid=RunUid(record["uid"]),
            plan=RunPlan.from_record(record["plan"]),
            created_at=record["created_at"],
            state=RunState(record["state"]),
            reason=None if record["reason"] is None else Reason(record["reason"]),
            message=record["message"],
            epoch=Epoch(record["epoch"]),
            reservation=record["reservation"],
            machines_held=record["machines_held"],
            release_pending=record["release_pending"],
            assemblies=record["assemblies"],
            restarts=record["restarts"],
            assembly_left_s=record["assembly_left_s"],
            barrier_open=record["barrier_open"],
            barrier_closed=record["barrier_closed"],
            outcome=None
            if outcome is None
            else Outcome(
                kind=OutcomeKind(outcome["kind"]),
                reason=Reason(outcome["reason"]),
                message=outcome["message"],
            ),
            members={m.rank: m for m in members},
            attempts=[_member_from(m) for m in record["attempts"]],
            failures=[_failure_from(f) for f in record["failures"]],
            cause=None if record["cause"] is None else _failure_from(record["cause"]),
            holdings=[
                Holding(machine=MachineName(m), reservation=r, since=s, until=u)
                for m, r, s, u in record["holdings"]
            ],
            started_at=record["started_at"],
            ended_at=record["ended_at"],
        )


def _outcome_record(outcome: Outcome | None) -> dict[str, str] | None:
    if outcome is None:
        return None
    return {"kind": outcome.kind, "reason": outcome.reason, "message": outcome.message}


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
    )


def _failure_record(failure: Failure) -> dict[str, Any]:
    evidence = failure.evidence
    return {
        "rank": failure.rank,
        "at": failure.at,
        "reason": failure.reason,
        "message": failure.message,
        "exit": _exit_record(failure.exit),
        "evidence": {
            "exit": _exit_record(evidence.exit),
            "global_rank": evidence.global_rank,
            "message": evidence.message,
            "blames_peer": evidence.blames_peer,
            "hint": evidence.hint,
            "by_infrastructure": evidence.by_infrastructure,
        },
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


def incarnation_for(uid: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> Incarnation:
    """The incarnation of a rank's part in an epoch."""
    return Incarnation(run_uid=uid, epoch=epoch, rank=rank, token=token)
