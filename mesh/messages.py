"""What members and the coordinator say to each other. Frozen, picklable, always stamped.

Rules of this file:
1. An order goes down (coordinator -> member), a report comes up (member -> coordinator).
2. Everything carries its `Incarnation`; a receiver drops what is not of the incarnation it knows.
3. A report is repeated by its member until the coordinator has acknowledged it, so every handler of a
   report must take it twice.
4. Wall-clock times (`*_at`, seconds since 1970) are for people; no decision is taken from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh.checkpoint_format import RestoreReference
from mesh.exits import describe_exit, signal_behind
from mesh.ids import Incarnation, MachineName
from mesh.plan import Endpoint, RunPlan
from mesh.reasons import Reason
from mesh.states import Transport

LEASE_TTL_S = 3.0
LEASE_GUARD_S = 0.3
HEARTBEAT_S = 0.5

RAY_NAMESPACE = "gangmesh"
COORDINATOR_NAME = "coordinator"
"""Under which name, in that namespace, members find the coordinator's actor wherever it runs now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOrder:
    """Take part in one epoch: take a lease, prepare, arrive at the barrier, run when it opens."""

    incarnation: Incarnation
    plan: RunPlan
    machine: MachineName
    store: Endpoint
    logs: Endpoint
    lease_ttl_s: float = LEASE_TTL_S
    lease_guard_s: float = LEASE_GUARD_S
    heartbeat_s: float = HEARTBEAT_S
    checkpoints: str | None = None
    """URL of the checkpoint store; None where none is kept."""
    is_clean_start: bool = False
    """The state directory becomes exactly what `restore` says, empty without one. False before a command has ever run:
    then it is left as it is."""
    restore: RestoreReference | None = None
    is_left_behind: bool = False
    """The state directory is as a life of this rank before it, which did not end well, has left it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceOrder:
    """Stop this incarnation: SIGTERM, SIGKILL after the grace period, confirm that nothing is left.

    A second order never prolongs the first one's grace period; it may shorten it.
    """

    incarnation: Incarnation
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOrder:
    """About a part that this member has stored: is the directory still that, or, without a question: it is lost."""

    incarnation: Incarnation
    digest: str
    question: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How a process ended: exactly one of the two is set. `signal` is the number, `code` 0..255."""

    code: int | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def words(self) -> str:
        """ "exit code 42", "SIGSEGV (signal 11)"."""
        return describe_exit(code=self.code, signal=self.signal)

    @property
    def signal_behind(self) -> int | None:
        """The signal that ended it, or ended what a shell ran in it."""
        return signal_behind(code=self.code, signal=self.signal)

    @property
    def shell_code(self) -> int:
        """What a shell would report: the code, or 128 + signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.code if self.code is not None else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseEvidence:
    """What is known about why a rank's command failed, beyond the exit of the launcher itself.

    For torchrun `exit` is the first failed worker's own end (torchrun turns every failure into 1).
    """

    exit: ProcessExit | None = None
    global_rank: int | None = None
    message: str = ""
    """The failure's own words, without its exit: the exception, else the last line of output; empty without any."""
    blames_peer: bool = False
    """The error is about another rank (connection closed by peer, collective timeout)."""
    peer_address: str = ""
    """Whom a complaint is about, where it says so by address."""
    peer_global_rank: int | None = None
    """Whom a complaint is about, where it says so by global rank."""
    oom_killed: bool = False
    """It died of SIGKILL, and the kernel's out-of-memory killer ended a process while it ran."""
    hint: str = ""
    """Set when the fault is a known one (torch's exit race on gloo, for example)."""
    is_without_shim: bool = False
    """It was ended because it would have gone past the overlay: a program of it did not load the shim."""
    by_infrastructure: bool = False
    """The command was ended by a fault of its machine or of this program, not by its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCertificate:
    """What a member shows to its peers' gateways, and whom it believes. The key never left its machine."""

    certificate_pem: bytes
    bundle_pem: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTaken:
    """How a member and its peers reach each other in this epoch, and what keeps ghosts and strangers away there."""

    transport: Transport
    address: str
    """At which its peers reach this member."""
    layer: str = ""
    """What the network's layer of the fence is, in words; empty where there is none."""
    lacks: str = ""
    """Why there is none, or what it does not cover, where there should be one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """Base of everything that a member reports."""

    incarnation: Incarnation
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRegistered(MemberReport):
    """The member holds its lease and prepares."""

    machine: MachineName
    address: str
    """The address at which its peers reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberArrived(MemberReport):
    """The member waits at the barrier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPreparationFailed(MemberReport):
    """The member cannot take part; its machine may be at fault (`reason`)."""

    reason: Reason
    message: str
    damaged_checkpoint: int | None = None
    """The number of the checkpoint that cannot be restored: then it is not the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStarted(MemberReport):
    """The barrier was open and the command runs."""

    pid: int
    master_port: int
    path: PathTaken | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStartFailed(MemberReport):
    """The barrier was open and the command could not be started (not found, not executable …)."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberExited(MemberReport):
    """The command ended and nothing of its process tree is left; all its output is in the spool."""

    exit: ProcessExit
    evidence: CauseEvidence
    last_lines: tuple[str, ...] = ()
    """The last lines of output, at most 20, each at most 500 characters: for the failure's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFenced(MemberReport):
    """Nothing of this incarnation runs any more, and its logs have been handed over."""

    exit: ProcessExit | None = None
    """How the command ended under the fence; None when it never ran."""
    reason: Reason | None = None
    """Why the member fenced itself (LeaseLost, StaleEpoch); None when the coordinator ordered it."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFenceFailed(MemberReport):
    """Something of this incarnation could not be killed (a process in uninterruptible sleep, say)."""

    message: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPartStored(MemberReport):
    """A part of a gang checkpoint, a snapshot of the rank's state directory, is in the store."""

    number: int
    """Of this incarnation's parts: a later one is newer."""
    digest: str
    content: str
    """Equal for parts that differ in logs only."""
    steps: tuple[int, ...]
    files: int
    """Logs and folders left out: 0 when the rank has saved nothing."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPartAnswered(MemberReport):
    """The answer to a CheckpointOrder's question."""

    question: int
    digest: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTroubled(MemberReport):
    """Something keeps this rank's checkpoints back; the run goes on."""

    message: str
