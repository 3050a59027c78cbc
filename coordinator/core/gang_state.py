"""A gang's state: what is journalled after every event that changed it. Frozen parts, one mutable whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.core.checkpoints import Checkpoints
from mesh.ids import NO_EPOCH, Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunUid
from mesh.messages import CauseEvidence, PathTaken, ProcessExit
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import RunState

REPLACEMENTS_MAX = 2
"""Ranks that may get another machine in one assembly (first document, "Failures and restarts")."""
ATTEMPTS_KEPT_MAX = 512
CHAPTERS_KEPT_MAX = 256


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
    REVOKED = "Revoked"
    """The store refuses it for ever, and its barrier had not opened for it: no command can have started."""
    FENCE_FAILED = "FenceFailed"
    """It said that something could not be killed. No proof: no other epoch may begin beside it."""


class OutcomeKind(StrEnum):
    """What the end of the current epoch leads to."""

    SUCCEED = "Succeed"
    FAIL = "Fail"
    CANCEL = "Cancel"
    SUSPEND = "Suspend"
    JUDGE = "Judge"
    """The epoch is over; whether the run fails or goes on is judged when every member is accounted for."""
    RETRY_ASSEMBLY = "RetryAssembly"


class RestartKind(StrEnum):
    """What a restart is charged to. Each kind has a budget of its own."""

    FAILURE = "Failure"
    """The user's command."""
    LOSS = "Loss"
    """A machine, without notice."""
    RECLAIM = "Reclaim"
    """A machine, with notice."""
    OURS = "Ours"
    """This program or the network to it; nobody's budget."""


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
    reason: Reason | None = None
    """Why this life ended (or is being ended), when that was not its command's own exit."""
    message: str = ""
    was_silent_first: bool = False
    """It was lost, and nothing proves that it still lived when the first failure was heard."""
    fenced_itself: bool = False
    """It lost its lease, and stopped before a fence that was ordered had reached it."""
    store_was_silent: bool = False
    """When it did so, nothing had been heard of the store here either."""
    is_expiring: bool = False
    """It did not answer its fence: the store renews its lease no more, and is told so again after each restart."""
    instead_of: IncarnationToken | None = None
    """The life before it of the same rank in the same epoch, when that had passed the barrier: the rank started again
    alone, and this one has to be admitted."""

    path: PathTaken | None = None
    """How it reaches its peers, once its command runs."""

    @property
    def rank(self) -> Rank:
        return self.incarnation.rank

    @property
    def succeeded(self) -> bool:
        return self.exit is not None and self.exit.ok

    @property
    def may_still_come(self) -> bool:
        """It was admitted after the opening, and may not have taken its lease yet."""
        return self.instead_of is not None and self.phase is MemberPhase.ORDERED


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One line of the ledger: a machine, from when it was held until its release was confirmed."""

    machine: MachineName
    address: str
    reservation: int
    rank: Rank
    """Whose machine it is, as long as it is not leaving."""
    since: float
    until: float | None = None
    is_leaving: bool = False
    """Its release has been asked for and is not confirmed."""
    is_clean: bool = True
    """False when something of the gang may still run there; counts only while it is leaving."""
    is_checked: bool = True
    """Its network has been checked against every other seat's that was, or needs not be: the rank may be ordered."""

    @property
    def is_seat(self) -> bool:
        """The rank may be ordered there."""
        return self.until is None and not self.is_leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Machines that have been asked for and are not held yet."""

    reservation: int
    ranks: tuple[Rank, ...]
    """Who gets them, in the order in which they come."""
    avoid: tuple[MachineName, ...] = ()
    is_for_refusal: bool = False
    """It replaces a machine that was refused, not lost: when none can ever be had, the assembly has failed."""
    refusal: str = ""
    """Why that one was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCheck:
    """A check of the network that has been asked for, and of which nothing has been heard yet."""

    number: int
    fresh: tuple[tuple[Rank, MachineName], ...]
    """Whom it is about: each of them against all that the gang has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Restarts that count against a budget now, by kind; a healthy stretch earns them back."""

    failure: int = 0
    loss: int = 0
    reclaim: int = 0
    ours: int = 0
    fruitless: int = 0
    """Restarts in a row that brought no newer checkpoint and no healthy stretch."""
    total: int = 0
    """Of the whole run; never earned back."""

    def count(self, kind: RestartKind) -> int:
        """Those of one kind."""
        return {
            RestartKind.FAILURE: self.failure,
            RestartKind.LOSS: self.loss,
            RestartKind.RECLAIM: self.reclaim,
            RestartKind.OURS: self.ours,
        }[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """A gang checkpoint that may be restored from: every rank's part of it is in the checkpoint store."""

    id: str
    uri: str
    """Of its manifest: `NODUS_RESTORE_URI`."""
    epoch: Epoch
    step: int | None
    bytes: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One epoch in the run's story: when it passed its stations, how it ended, and what was kept."""

    epoch: Epoch
    began_at: float
    opened_at: float | None = None
    running_at: float | None = None
    stopped_at: float | None = None
    """When it was decided that it ends."""
    ended_at: float | None = None
    """When every member was accounted for."""
    kept: tuple[Rank, ...] = ()
    """Ranks that had their machine from the epoch before, and have not got another one during its assembly."""
    replaced: tuple[Rank, ...] = ()
    """Ranks that got another machine for this epoch, or during its assembly."""
    restored: str | None = None
    """The checkpoint that it began from."""
    restored_step: int | None = None
    restored_at: float | None = None
    """When that checkpoint was committed: what ran after it is lost."""
    reason: Reason | None = None
    """Why it ended, in one word: the cause's where it has one."""
    cause: Failure | None = None
    victims: tuple[Rank, ...] = ()
    """Ranks that failed because of the cause."""
    network: str | None = None
    """What its network check came to, in a sentence; None where nothing was checked."""
    charged: RestartKind | None = None
    """What the restart after it was charged to; None when it was the last one, or its assembly was tried again."""


@dataclass(kw_only=True)
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
    """Grows by one with every wish for machines; 0 before the first."""
    wanted: dict[int, Want] = field(default_factory=dict)
    """By reservation: machines that are asked for and not held yet."""
    withdrawing: tuple[int, ...] = ()
    """Reservations whose withdrawal is not confirmed yet."""
    waiting_for: int = 0
    """The reservation of which it was told last that it takes time."""
    assemblies: int = 0
    """Assemblies begun since the run last ran; at most 1 + plan.max_assembly_retries."""
    replacements: int = 0
    """Ranks that got another machine in the current assembly; at most `REPLACEMENTS_MAX`."""
    checks: int = 0
    """Grows by one with every check of the network."""
    check: NetworkCheck | None = None
    """The one that is under way; only in Assembling, and with no outcome."""
    suspects: tuple[Rank, ...] = ()
    """Ranks that were one end of a bad pair in this assembly, and kept their machine."""
    restarts: Restarts = Restarts()
    backoff_left_s: float = 0.0
    """What was left of the pause before the next epoch at the last write; counts only in Pending."""
    assembly_left_s: float = 0.0
    """What was left of the assembly's time at the last write; counts only in Assembling and Starting."""
    barrier_open: bool = False
    """The current epoch's barrier has opened."""
    barrier_closed: bool = False
    """The store has confirmed that the current epoch's barrier will not open any more."""
    outcome: Outcome | None = None
    """Set once per epoch: from here on the epoch only ends."""
    wish: Outcome | None = None
    """Cancel or suspend, said while the epoch was ending already: it takes the place of a restart."""
    members: dict[Rank, MemberRecord] = field(default_factory=dict)
    """The current epoch's members: one for every rank that has a machine."""
    attempts: list[MemberRecord] = field(default_factory=list)
    """Earlier lives, of earlier epochs or replaced in this one, all settled; the oldest beyond `ATTEMPTS_KEPT_MAX`
    are in the events only."""
    history: list[Chapter] = field(default_factory=list)
    """The epochs, the current one last."""
    reclaimed: tuple[MachineName, ...] = ()
    """Machines of this gang that somebody wants back; they are left at the end of the epoch."""
    was_reclaimed_first: bool = False
    """The epoch's first notice came before its first failure, or so soon after that the two may have crossed."""
    checkpoint: CommittedCheckpoint | None = None
    """The newest one that may be restored from."""
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(world_size=0))
    """Parts, wishes and what is committed. Its world size is the plan's."""
    may_have_run: bool = False
    """A barrier of the run has opened: state directories may hold what no checkpoint has."""
    failures: list[Failure] = field(default_factory=list)
    """Failures of the current epoch in the order in which they were heard."""
    cause: Failure | None = None
    """The failure that is the run's reason; set when the outcome is FAIL because of a rank."""
    holdings: list[Holding] = field(default_factory=list)
    started_at: float | None = None
    ended_at: float | None = None

    def __post_init__(self) -> None:
        self.checkpoints.world_size = self.plan.nodes

    def snapshot(self) -> Gang:
        """A copy that later events do not touch."""
        twin = object.__new__(Gang)
        twin.__dict__.update(self.__dict__)
        twin.members = dict(self.members)
        twin.attempts = list(self.attempts)
        twin.failures = list(self.failures)
        twin.holdings = list(self.holdings)
        twin.history = list(self.history)
        twin.wanted = dict(self.wanted)
        twin.checkpoints = self.checkpoints.snapshot()
        return twin

    @property
    def seats(self) -> dict[Rank, Holding]:
        """The machine of every rank that has one."""
        return {h.rank: h for h in self.holdings if h.is_seat}

    @property
    def vacant(self) -> tuple[Rank, ...]:
        """Ranks without a machine."""
        seats = self.seats
        return tuple(Rank(r) for r in range(self.plan.nodes) if r not in seats)

    @property
    def is_released(self) -> bool:
        """Nothing is held, asked for or being given back."""
        return not self.wanted and not self.withdrawing and all(h.until is not None for h in self.holdings)

    @property
    def all_members(self) -> list[MemberRecord]:
        """Every attempt, oldest first, then by rank."""
        return [*self.attempts, *(self.members[rank] for rank in sorted(self.members))]

    def arrived_count(self) -> int:
        """Members that are at the barrier or beyond it."""
        return sum(m.phase.has_reached(MemberPhase.ARRIVED) for m in self.members.values())


def incarnation_for(uid: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> Incarnation:
    """The incarnation of a rank's part in an epoch."""
    return Incarnation(run_uid=uid, epoch=epoch, rank=rank, token=token)
