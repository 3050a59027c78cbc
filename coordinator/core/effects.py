"""What a gang wants done, in the imperative. The shell performs it; what it leads to is the next event.

Every effect may be performed twice (a crash lies between the journal and the world), so each names
what it is about exactly: performing it again must change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.core.checkpoints import CleanCheckpointStore, CommitCheckpoint
from mesh.checkpoint_format import RestoreReference
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank
from mesh.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One line of the run's story: what `mesh get events` lists."""

    kind: str
    message: str
    reason: Reason | None = None
    epoch: Epoch
    rank: Rank | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Write the gang's record and these announcements in one transaction.

    A barrier: nothing after it in the batch happens before it is durable. At most one per batch, first.
    """

    announcements: tuple[Announcement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveMachines:
    """Get `nodes` machines of this shape, all or none; keep trying until told otherwise."""

    reservation: int
    nodes: int
    gpus_per_node: int
    gpu_types: tuple[str, ...]
    avoid: tuple[MachineName, ...] = ()
    """Not these: a replacement never lands on the machine that it replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawReservation:
    """Stop trying, give back whatever is held under this reservation, and say when it is confirmed."""

    reservation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseMachine:
    """Give one machine back, and say when it is confirmed.

    Unless `is_clean`, something of the gang may still run there: nobody else gets the machine before it is
    proven that nothing does, or the machine is gone.
    """

    reservation: int
    machine: MachineName
    is_clean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckNetwork:
    """Find out whether the machines of `fresh` ranks reach each other and all others of these, and say so.

    A closed barrier ends it: nobody waits for its answer any more.
    """

    number: int
    machines: tuple[tuple[Rank, MachineName], ...]
    fresh: tuple[Rank, ...]
    suspects: tuple[Rank, ...] = ()
    """Who was one end of a bad pair before, and was kept: at the second time it is the bad one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEpoch:
    """Tell the store that this epoch is the gang's current one: everything older is stale from here.

    `is_new` is False when the store should know it already: one that does not has forgotten what it knew, and
    its word that a barrier never opened proves nothing.
    """

    epoch: Epoch
    size: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseBarrier:
    """Make sure that the epoch's barrier does not open from now on, and learn whether it ever did."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderMember:
    """Bring a member to life on its machine and let it join the epoch."""

    incarnation: Incarnation
    machine: MachineName
    reservation: int
    is_clean_start: bool = False
    """A command of the run has run before: the state directory becomes what `restore` says."""
    restore: RestoreReference | None = None
    is_left_behind: bool = False
    """The rank starts again alone: it finds the state directory as a life that did not end well has left it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellAboutPart:
    """Ask a member whether its state directory still is this part; without a question: the store has lost it."""

    incarnation: Incarnation
    digest: str
    question: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeMember:
    """Make sure that this incarnation never passes its epoch's barrier, and learn whether it had."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitMember:
    """Have the store let this incarnation through the open barrier, in place of one that is over, or learn why not.

    `alive_since` (the coordinator's monotonic clock): first every other rank has to be known to have lived after that.
    """

    incarnation: Incarnation
    instead_of: IncarnationToken
    alive_since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceMember:
    """Stop the member's processes: SIGTERM, SIGKILL after the grace period, confirm."""

    incarnation: Incarnation
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireLease:
    """Have the member's lease renewed no more: its keeper ends everything there, and the lapse will tell."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissMember:
    """The member has nothing more to do: end its actor."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetGang:
    """The store may forget the gang; whoever still speaks for it is refused."""

    epoch: Epoch


GangEffect = (
    Persist
    | ReserveMachines
    | WithdrawReservation
    | ReleaseMachine
    | CheckNetwork
    | OpenEpoch
    | CloseBarrier
    | OrderMember
    | TellAboutPart
    | CommitCheckpoint
    | CleanCheckpointStore
    | RevokeMember
    | AdmitMember
    | FenceMember
    | ExpireLease
    | DismissMember
    | ForgetGang
)
