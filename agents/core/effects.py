"""What a member's core asks its shell to do. Imperative, frozen, about one incarnation.

The shell performs a batch in order and turns what comes of it into events. None of these blocks the
core: an effect that takes long (a barrier, a grace period) answers when it is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from agents.core.events import Arrival
from mesh.ids import Incarnation
from mesh.messages import JoinOrder, MemberReport


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEffect:
    """Base of every effect."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeLease(MemberEffect):
    """Start the keeper. Answers: LeaseGranted or LeaseRefused; after a grant, LeaseLost at most once."""

    order: JoinOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLease(MemberEffect):
    """Give the lease back and end the keeper. No answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmLauncher(MemberEffect):
    """Bring up the launcher's process while there is time. No answer: `LaunchCommand` waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare(MemberEffect):
    """Make directories and reserve the rendezvous port. Answers: Prepared or PreparationFailed."""

    order: JoinOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class ArriveAtBarrier(MemberEffect):
    """Wait at the barrier, through reconnects. Answers: BarrierOpened or BarrierRefused."""

    order: JoinOrder
    arrival: Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonPreparation(MemberEffect):
    """Stop preparing and leave the barrier; what was under way may still answer. No answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand(MemberEffect):
    """Start the command. Answers: CommandStarted, then CommandExited, then TreeEmpty; or CommandStartFailed.

    However it is stopped or killed, one of CommandStartFailed and TreeEmpty comes in the end.
    """

    order: JoinOrder
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCommand(MemberEffect):
    """SIGTERM now, SIGKILL of the whole tree after `grace_s`. A later one may only shorten it."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KillEverything(MemberEffect):
    """SIGKILL the whole tree at once, with or without the launcher. Answers: TreeEmpty or KillFailed."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverLogs(MemberEffect):
    """Ship what is left in the spool. Answers: LogsHandedOver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport(MemberEffect):
    """Tell the coordinator. Answers: ReportAcknowledged or ReportUndelivered, within REPORT_ANSWER_S."""

    report_id: int
    report: MemberReport


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeResources(MemberEffect):
    """Nothing runs any more: let go of the reserved port, the launcher and the spool. No answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(MemberEffect):
    """The member's life is over: end its shell. No answer."""
