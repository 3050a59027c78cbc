"""What can happen to a gang, in the past tense. Frozen data; nothing here decides anything.

A member's reports (`mesh.messages`) are events too: the core takes them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank
from mesh.messages import HEARTBEAT_S, LEASE_GUARD_S, LEASE_TTL_S, MemberReport
from mesh.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The two clocks at one moment.

    `mono` (seconds) is what every decision counts with; it never goes back while one coordinator lives.
    `wall` (seconds since 1970) is only written down for people.
    """

    mono: float
    wall: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One reserved machine. The ranks that a reservation was asked for get its machines in order."""

    machine: MachineName
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccepted:
    """The run is in the journal for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesReserved:
    """Every machine of a reservation is held, all of them or none."""

    reservation: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationWaiting:
    """The machines cannot be had at once for now; `why` says so machine by machine."""

    reservation: int
    why: str
    is_possible: bool = True
    """False when no machine that there is, busy ones included, could ever be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationWithdrawn:
    """Nothing is wanted or held under this reservation any more."""

    reservation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReleased:
    """The machine is not held any more: it is gone, or nothing of the gang runs there and others may have it."""

    reservation: int
    machine: MachineName


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReclaimed:
    """Whoever lends the machine wants it back in `grace_s` seconds: a notice, the machine still runs."""

    machine: MachineName
    grace_s: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRefusal:
    """A machine that the others cannot work with; `message` names pair, direction and port, and says what to do."""

    rank: Rank
    machine: MachineName
    message: str
    peers: tuple[Rank, ...] = ()
    """Whose machines it does not work with, when it may as well be these that are bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChecked:
    """The network between machines of the gang was checked, or could not be (not `is_performed`).

    `message`: what came of it, or why it could not be done. `warnings` stop nothing.
    """

    number: int
    message: str
    refusals: tuple[NetworkRefusal, ...] = ()
    warnings: tuple[str, ...] = ()
    is_performed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierOpened:
    """The store opened the epoch's start barrier: every rank had arrived.

    `tokens`: with which incarnations, in rank order; empty when that is not known.
    """

    epoch: Epoch
    tokens: tuple[IncarnationToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierClosed:
    """The store will never open this epoch's barrier (again). `was_open` says whether it ever did."""

    epoch: Epoch
    was_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLapsed:
    """The store declared the member lost: its ttl and the guard are over."""

    incarnation: Incarnation
    silent_s: float | None = LEASE_TTL_S + LEASE_GUARD_S + HEARTBEAT_S
    """Since it is known to have lived; None when that store cannot tell (it was restarted meanwhile)."""
    said_after: float | None = None
    """The store said so after this moment (the coordinator's monotonic clock): it may be read late. None: now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGone:
    """The member holds no lease any more: it gave it back, or it lapsed while nobody watched.

    Nothing of it runs. Its own report, which knows more, should be on its way.
    """

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSuspected:
    """The connection over which the member renewed its lease has closed, and the lease counts down.

    A suspicion, no verdict: a living member makes another connection within a heartbeat, a dead one's lease lapses.
    """

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberVanished:
    """The member's actor is dead or could not be created. Its processes may not be dead yet."""

    incarnation: Incarnation
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRevoked:
    """The store refuses this incarnation from now on, unless `has_passed`: the barrier had opened for it before.

    None when nobody knows that (the store has not seen all of the epoch); then nothing was changed.
    """

    incarnation: Incarnation
    has_passed: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceTaken:
    """The member's agent runs, and has been told to stop its command within `grace_s` (seconds)."""

    incarnation: Incarnation
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpiring:
    """The store renews the member's lease no more. `is_over`: it had run out, or been given back, before."""

    incarnation: Incarnation
    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSilent:
    """This coordinator hears nothing of the store; its last answer came at `since`, on the monotonic clock."""

    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeard:
    """The store answers again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberAdmitted:
    """The store lets this incarnation through the open barrier, or (not `is_admitted`) never will.

    It will not when it has not seen the opening, because it was restarted since.
    """

    incarnation: Incarnation
    is_admitted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    """The manifest of a checkpoint that was wished for is in the store."""

    number: int
    uri: str
    size_bytes: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLacking:
    """It is not, and will not be: the store lacks something of these parts (digests; empty: it was not the parts)."""

    number: int
    parts: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Somebody wants the run to end."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRequested:
    """Somebody wants the run to stop for now, and its machines to be given back."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """Somebody wants a suspended run to go on."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRehearsed:
    """Somebody does this rank harm on purpose, now; what comes of it is heard as of any other fault."""

    rank: Rank
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalLeft:
    """Harm that was done for a time is not undone, or was not done at all."""

    rank: Rank
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRecovered:
    """This core was read back from the journal after a crash: what was under way may not have happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """A deadline may have come."""


GangEvent = (
    RunAccepted
    | MachinesReserved
    | ReservationWaiting
    | ReservationWithdrawn
    | MachineReleased
    | MachineReclaimed
    | NetworkChecked
    | BarrierOpened
    | BarrierClosed
    | LeaseLapsed
    | LeaseGone
    | MemberSuspected
    | MemberVanished
    | MemberRevoked
    | FenceTaken
    | LeaseExpiring
    | StoreSilent
    | StoreHeard
    | MemberAdmitted
    | CheckpointWritten
    | CheckpointLacking
    | CancelRequested
    | SuspendRequested
    | ResumeRequested
    | FaultRehearsed
    | RehearsalLeft
    | CoordinatorRecovered
    | TimePassed
    | MemberReport
)
