"""Closed sets that the whole system shares. The values are what users see: never rename one."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """The life of a run. The table of legal moves is `coordinator.core.gang.TRANSITIONS`."""

    PENDING = "Pending"
    ASSEMBLING = "Assembling"
    STARTING = "Starting"
    RUNNING = "Running"
    FENCING = "Fencing"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def is_terminal(self) -> bool:
        """True when the state is reached once and is final."""
        return self in _TERMINAL


_TERMINAL = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED})


class LauncherKind(StrEnum):
    """How a rank's command is started."""

    PLAIN = "Plain"
    TORCHRUN = "Torchrun"
    RAY = "Ray"
    VERL = "Verl"
    ACCELERATE = "Accelerate"
    DEEPSPEED = "Deepspeed"


class NetworkScope(StrEnum):
    """Where members may be, relative to each other."""

    COLOCATED = "Colocated"
    REGIONAL = "Regional"
    GLOBAL = "Global"


class TransportPolicy(StrEnum):
    """Which paths between members the user accepts."""

    DIRECT = "Direct"
    AUTO = "Auto"


class Transport(StrEnum):
    """The path that a gang's epoch uses; the value is `NODUS_GANG_TRANSPORT`."""

    PRIVATE = "private"
    PUBLIC = "public"
    DIRECT = "direct"
    RELAYED = "relayed"


class HarmKind(StrEnum):
    """What can be done to a rank on purpose, so that its recovery is rehearsed (`mesh chaos`)."""

    LOSE_MACHINE = "LoseMachine"
    """Everything of its machine is killed at once."""
    KILL_RANK = "KillRank"
    """The processes of its command are killed; the machine stays."""
    FREEZE = "Freeze"
    """Everything of its machine stands still for a time."""
    CUT = "Cut"
    """Nothing reaches its machine, or leaves it, for a time."""

    @property
    def is_for_a_time(self) -> bool:
        """It is undone after a while."""
        return self in (HarmKind.FREEZE, HarmKind.CUT)


class FailurePolicy(StrEnum):
    """What a non-zero exit leads to (`recovery.onProcessFailure`)."""

    FAIL = "Fail"
    RESTART_GANG = "RestartGang"
    RESTART_RANK = "RestartRank"
