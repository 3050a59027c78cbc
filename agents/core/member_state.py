"""What a member knows: its phases, the moves between them, its limits and its state.

Rules of this file:
1. Data only. `agents.core.member` decides; its `_enter` is the only writer of `phase`.
2. Every field says what holds for it; `Member.check` asserts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from agents.core.events import Arrival
from mesh.ids import Incarnation
from mesh.messages import JoinOrder, MemberReport, ProcessExit
from mesh.reasons import Reason


class Phase(StrEnum):
    """Where a member is in its life."""

    IDLE = "Idle"
    LEASING = "Leasing"
    PREPARING = "Preparing"
    ARRIVED = "Arrived"
    LAUNCHING = "Launching"
    RUNNING = "Running"
    EXITED = "Exited"
    FENCING = "Fencing"
    FENCED = "Fenced"
    GONE = "Gone"


_P = Phase
TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        _P.IDLE: frozenset({_P.LEASING, _P.FENCED, _P.GONE}),
        _P.LEASING: frozenset({_P.PREPARING, _P.EXITED, _P.FENCED}),
        _P.PREPARING: frozenset({_P.ARRIVED, _P.EXITED, _P.FENCED}),
        _P.ARRIVED: frozenset({_P.LAUNCHING, _P.EXITED, _P.FENCED}),
        _P.LAUNCHING: frozenset({_P.RUNNING, _P.EXITED, _P.FENCING}),
        _P.RUNNING: frozenset({_P.EXITED, _P.FENCING}),
        _P.EXITED: frozenset({_P.FENCING, _P.FENCED}),
        _P.FENCING: frozenset({_P.FENCED}),
        _P.FENCED: frozenset({_P.GONE}),
        _P.GONE: frozenset(),
    }
)

REPORTS_MAX = 8
"""Registered, Arrived, Started, Exited, FenceFailed, Fenced: six kinds at most, each once in the queue."""
REPORT_ANSWER_S = 10.0
"""A report that was neither acknowledged nor given up by then is sent again."""
REPORT_REPEAT_FIRST_S = 0.2
REPORT_REPEAT_MAX_S = 3.0
KILL_MARGIN_S = 2.0
"""How long after the grace period the supervisor may take before the member kills the tree itself."""
KILL_REPEAT_S = 5.0
"""A tree that is still there so long after a kill is killed again, and the coordinator is told."""
LOGS_STALL_S = 5.0
"""How long a fence waits for a head that takes no more of the last logs: one that is away holds no epoch up."""
LOGS_LIMIT_S = 60.0
"""How long it waits for one that is taking them: some 60 MiB may be left at 16 MiB a second, on a busy machine."""


@dataclass(slots=True)
class MemberState:
    """Everything that a member knows. Copied by `Member.snapshot`, compared by tests."""

    phase: Phase = Phase.IDLE
    incarnation: Incarnation | None = None
    """Set once, by the first order; None only in Idle (and in Gone, when no order ever came)."""
    order: JoinOrder | None = None
    """Set with the JoinOrder; None when a fence came first."""
    lease_held: bool = False
    """True between LeaseGranted and the loss or release of the lease."""
    arrivals: tuple[Arrival, ...] = ()
    """Set when the barrier opened, in rank order."""
    launched: bool = False
    """True for ever once LaunchCommand was asked for."""
    tree_empty: bool = True
    """False from LaunchCommand until TreeEmpty or CommandStartFailed."""
    exit: ProcessExit | None = None
    """How the command ended, once known."""
    exit_to_report: bool = False
    """The command ended by itself, before any fence: MemberExited is due when the tree is empty."""
    stop_by: float | None = None
    """When the grace period of the fence ends; only ever moves earlier."""
    kill_at: float | None = None
    """When to kill (again), while Fencing with a tree that is not empty."""
    kills: int = 0
    """How often KillEverything was asked for."""
    fence_failure_told: bool = False
    logs_until: float | None = None
    """When the fence stops waiting for the logs; set exactly while it waits for them."""
    fence_reason: Reason | None = None
    """Why the member fenced itself; None when the fence was ordered."""
    fence_message: str = ""
    leaving: bool = False
    """Fenced leads straight to Gone."""
    reports: tuple[tuple[int, MemberReport], ...] = ()
    """Not yet acknowledged, oldest first."""
    next_report_id: int = 1
    report_due: float | None = None
    """When to send the oldest report (again); None exactly when there is none."""
    report_tries: int = 0
    """How often the oldest report failed to be delivered."""
