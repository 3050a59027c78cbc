"""What can happen to a member: everything that its core is told.

Rules of this file:
1. Past tense; frozen; each event carries the `Incarnation` that it is about, so that one gate at the
   core's door can drop what belongs to another life.
2. An event is a fact. What a peer, a process, a disk or a network did wrong is an event with a `Reason`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mesh.ids import Incarnation
from mesh.messages import CauseEvidence, JoinOrder, PathTaken, ProcessExit
from mesh.net.paths import NetworkFacts
from mesh.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What one rank brings to the barrier; every rank gets all of them, in rank order, when it opens."""

    address: str
    master_port: int = 0
    """The rendezvous port that rank 0 has reserved; 0 from every other rank."""
    network: NetworkFacts | None = None
    """Where its machine stands; None on a machine that is not on the mesh."""

    def to_payload(self) -> dict[str, Any]:
        """Plain data for the store; `from_payload` is the inverse."""
        payload: dict[str, Any] = {"address": self.address, "master_port": self.master_port}
        return payload if self.network is None else payload | {"network": self.network.to_payload()}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Arrival:
        network = payload.get("network")
        return cls(
            address=str(payload["address"]),
            master_port=int(payload.get("master_port", 0)),
            network=None if network is None else NetworkFacts.from_payload(network),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvent:
    """Base of every event."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOrdered(MemberEvent):
    """The coordinator asks this member to take part in an epoch."""

    order: JoinOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceOrdered(MemberEvent):
    """The coordinator asks this member to stop its part and to prove that nothing of it is left."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOrdered(MemberEvent):
    """The member is not needed any more: stop whatever still runs, at once, and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted(MemberEvent):
    """The keeper holds the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRefused(MemberEvent):
    """The store gave no lease; nothing has run."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(MemberEvent):
    """The right to run is over, or cannot be proven any more (the keeper died)."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(MemberEvent):
    """Directories, rendezvous port and launcher are ready."""

    arrival: Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationFailed(MemberEvent):
    """This machine cannot take part."""

    reason: Reason
    message: str
    damaged_checkpoint: int | None = None
    """The number of a checkpoint that cannot be restored: then it is not the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierOpened(MemberEvent):
    """Every rank of the epoch has arrived."""

    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierRefused(MemberEvent):
    """The store will not let this member through, however often it asks."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandStarted(MemberEvent):
    """The user's command runs."""

    pid: int
    path: PathTaken | None = None
    """How it reaches its peers; None where nobody has said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandStartFailed(MemberEvent):
    """The user's command could not be started; nothing of it is left."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandExited(MemberEvent):
    """The command's first process ended; others of its tree may be left."""

    exit: ProcessExit


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEmpty(MemberEvent):
    """Nothing of the command's process tree is left, and all its output is in the spool."""

    evidence: CauseEvidence = field(default_factory=CauseEvidence)
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KillFailed(MemberEvent):
    """Something of the tree is still there although it was killed."""

    pids: tuple[int, ...]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsHandedOver(MemberEvent):
    """The head's log sink has acknowledged everything that the command wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAcknowledged(MemberEvent):
    """The coordinator has taken this report (and made durable what it had to)."""

    report_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportUndelivered(MemberEvent):
    """The coordinator could not be reached, or could not take the report now."""

    report_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed(MemberEvent):
    """The time that `next_deadline` named has come."""
