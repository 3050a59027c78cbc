"""Why something ended, was refused, or waits: a closed set, used in status, events, errors and the API."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The value is what a user reads in `mesh describe` and what programs match on: never rename one."""

    # What the user asked for
    INVALID_SPEC = "InvalidSpec"
    NOT_AVAILABLE_YET = "NotAvailableYet"
    ALREADY_EXISTS = "AlreadyExists"
    NOT_FOUND = "NotFound"
    CONFLICT = "Conflict"
    CANCELLED = "Cancelled"
    CLIENT_INTERRUPTED = "ClientInterrupted"
    SUSPENDED = "Suspended"

    # The user's command
    COMPLETED = "Completed"
    COMMAND_FAILED = "CommandFailed"
    COMMAND_KILLED = "CommandKilled"
    COMMAND_NOT_FOUND = "CommandNotFound"
    COMMAND_NOT_EXECUTABLE = "CommandNotExecutable"
    COMMAND_START_FAILED = "CommandStartFailed"
    WORKING_DIR_MISSING = "WorkingDirMissing"

    # Machines and assembly
    NO_CAPACITY = "NoCapacity"
    MACHINE_REFUSED = "MachineRefused"
    NETWORK_CHECK_FAILED = "NetworkCheckFailed"
    MACHINE_LOST = "MachineLost"
    MACHINE_RECLAIMED = "MachineReclaimed"
    NETWORK_FAILED = "NetworkFailed"
    GANG_ASSEMBLY_TIMEOUT = "GangAssemblyTimeout"
    PREPARATION_FAILED = "PreparationFailed"
    SHIM_NOT_LOADED = "ShimNotLoaded"
    FENCE_FAILED = "FenceFailed"
    RESTART_BUDGET_SPENT = "RestartBudgetSpent"
    NO_PROGRESS = "NoProgress"
    EPOCH_ENDED = "EpochEnded"

    # Checkpoints
    CHECKPOINT_CORRUPT = "CheckpointCorrupt"
    CHECKPOINT_STORE_FAILED = "CheckpointStoreFailed"

    # Rendezvous, leases, fences
    STALE_EPOCH = "StaleEpoch"
    UNKNOWN_GANG = "UnknownGang"
    LEASE_LOST = "LeaseLost"
    STORE_UNREACHABLE = "StoreUnreachable"
    KEY_NOT_FOUND = "KeyNotFound"
    LIMIT_EXCEEDED = "LimitExceeded"
    TIMEOUT = "Timeout"

    # The deployment
    UNAUTHENTICATED = "Unauthenticated"
    IDENTITY_IN_USE = "IdentityInUse"
    IDENTITY_COPIED = "IdentityCopied"
    CLOCK_SKEW = "ClockSkew"
    FORBIDDEN = "Forbidden"
    UNREACHABLE = "Unreachable"
    PROTOCOL = "ProtocolError"
    DEPLOYMENT_NOT_RUNNING = "DeploymentNotRunning"
    DEPLOYMENT_BUSY = "DeploymentBusy"
    PORT_TAKEN = "PortTaken"
    STATE_NOT_WRITABLE = "StateNotWritable"
    STORAGE_FULL = "StorageFull"
    UNREADABLE = "Unreadable"
    PACKAGE_SHADOWED = "PackageShadowed"
    INTERNAL = "InternalError"
