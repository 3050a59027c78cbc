"""What is asked of the store, what it answers, and what it tells its watchers.

Rules of this file:
1. Every request and reply starts with `id`, which the asker chooses: above 0, and free again when its reply is
   there. Id 0 is the store's own (a refusal of the whole connection).
2. Requests are named tuples, not frozen dataclasses: one is built per frame, and building it is a
   measurable share of the store's time (see tests/bench/store_bench.py).
3. Everything under (gang, epoch) has the fields `gang` and `epoch`, for the one gate at the store's door. They come
   next; only in `Set` the value is before them, so that the rest of its frame can be known again (see `protocol`).
4. Times are durations in seconds; a clock's reading never travels.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.reasons import Reason

START_BARRIER = "start"
"""The barrier that every rank passes before its command starts."""
PROTOCOL_VERSION = 3

Revocations = tuple[tuple[Rank, IncarnationToken], ...]
"""Incarnations that were given up, each a rank and its token."""


class Role(StrEnum):
    """What a secret opens: members may not raise floors, watch, or look at other gangs."""

    ADMIN = "admin"
    MEMBER = "member"


# ---- requests: of the connection --------------------------------------------------------------------


class Hello(NamedTuple):
    """The first frame of every connection."""

    id: int
    secret: str
    version: int


class Ping(NamedTuple):
    """Answered with Done."""

    id: int


class Cancel(NamedTuple):
    """Stop waiting for the request `waiting_id` of this connection: no answer to it follows Done."""

    id: int
    waiting_id: int


# ---- requests: admin ----------------------------------------------------------------------------------


class SetFloor(NamedTuple):
    """Only this epoch counts from now on; `size` ranks make the gang. Never lowered.

    `is_first`: nobody has been told of this epoch before, so this store will have seen all of it. `revoked`: as
    many `Revoke`s, before anything else of the epoch. A store that knows the epoch takes no notice of the two.
    Answered with Number: 1 when this store has seen all of the epoch.
    """

    id: int
    gang: RunUid
    epoch: Epoch
    size: int
    is_first: bool = False
    revoked: Revocations = ()


class DropGang(NamedTuple):
    """Forget the gang, with everything under it, unless it has gone on to a later epoch: this may have been asked
    before that, and come late. Answered with Number: 1 when something was forgotten."""

    id: int
    gang: RunUid
    epoch: Epoch


class CloseBarrier(NamedTuple):
    """The barrier may not open any more. Answered with Number: 1 when it had opened before."""

    id: int
    gang: RunUid
    epoch: Epoch
    name: str


class Revoke(NamedTuple):
    """This incarnation may never hold a lease or arrive in this epoch again, whether it ever did or not.

    Answered with Number: 1 when the start barrier has opened with it, and then nothing was changed; else 0.
    Nothing of this incarnation can have started then, nor can it ever. Another one may take the rank.
    """

    id: int
    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken


class Admit(NamedTuple):
    """The open start barrier lets this incarnation through in place of `instead_of`, whose life is over.

    The one exception to "a new incarnation needs a new epoch". Answered with Number: 1, the second time too, or 0 when
    the lease of `instead_of` is not over yet, or not every other holder of a lease is known to have lived
    `alive_within_s` ago or later (seconds; see LeaseLapsed; infinite: whoever is there); then nothing was changed.
    Refused (Conflict) unless this store has opened the barrier and `instead_of` is whose the rank's place there is.
    What was admitted takes a lease and arrives as any other, and is answered at once with the opening's payloads,
    unless the barrier has been closed.
    """

    id: int
    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken
    instead_of: IncarnationToken
    alive_within_s: float


class Expire(NamedTuple):
    """The lease of this incarnation is renewed no more: it runs out by its own time, and its lapse is told.

    For a member that does not answer while its keeper goes on renewing. An incarnation without a lease is given one, as
    by GrantLease, that nobody can renew: it may hold one of an earlier life of the store. Answered with Number: 1 when
    its lease is over already, else 0.
    """

    id: int
    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken
    ttl_s: float
    guard_s: float


class Watch(NamedTuple):
    """Push everything that happens to leases and barriers to this connection. Resync by Snapshot."""

    id: int


class Gangs(NamedTuple):
    """Which gangs are known, and their floors. Answered with GangList."""

    id: int


class Snapshot(NamedTuple):
    """Leases and barriers of one gang. Answered with GangSnapshot."""

    id: int
    gang: RunUid


# ---- requests: leases and barriers ------------------------------------------------------------------


class GrantLease(NamedTuple):
    """The right of this incarnation to run, for `ttl_s` from receipt; declared lapsed after `guard_s` more.

    Repeated with the same token it renews, by the terms of the first time. There is no other renewal, so a
    store that was restarted learns its leases from the next heartbeats. With the same id again, over the same
    connection, the holder says that it has seen the answer to the one before.
    """

    id: int
    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken
    ttl_s: float
    guard_s: float


class ReleaseLease(NamedTuple):
    """Nothing of this incarnation runs any more. Answered with Done, the second time too."""

    id: int
    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken


class Arrive(NamedTuple):
    """Wait until every rank has arrived. Answered with Opened, later. Needs a valid lease of the token."""

    id: int
    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken
    name: str
    payload: bytes


# ---- requests: keys -----------------------------------------------------------------------------------


class Get(NamedTuple):
    """Answered with Value; KeyNotFound when it is not there."""

    id: int
    gang: RunUid
    epoch: Epoch
    key: str


class Set(NamedTuple):
    """Answered with Done."""

    id: int
    value: bytes
    gang: RunUid
    epoch: Epoch
    key: str


class Add(NamedTuple):
    """Counts up (from 0 when the key is not there). Answered with Number: the new count, a signed 64-bit one."""

    id: int
    gang: RunUid
    epoch: Epoch
    key: str
    amount: int


class Wait(NamedTuple):
    """Answered with Done as soon as each of the keys has been there once."""

    id: int
    gang: RunUid
    epoch: Epoch
    keys: tuple[str, ...]


class CompareAndSet(NamedTuple):
    """Sets when the present value is `expected` (None: when there is none). Answered with Compared."""

    id: int
    gang: RunUid
    epoch: Epoch
    key: str
    expected: bytes | None
    value: bytes


class Delete(NamedTuple):
    """Answered with Number: how many keys were deleted, 0 or 1."""

    id: int
    gang: RunUid
    epoch: Epoch
    key: str


LeaseRequest = GrantLease | ReleaseLease
KeyRequest = Get | Set | Add | Wait | CompareAndSet | Delete
GangRequest = LeaseRequest | KeyRequest | Arrive | CloseBarrier | Revoke | Admit | Expire
AdminRequest = SetFloor | DropGang | CloseBarrier | Revoke | Admit | Expire | Watch | Gangs | Snapshot
Request = Hello | Ping | Cancel | GangRequest | AdminRequest
DEFERRED = (Arrive, Wait)
"""Requests whose reply may take as long as it likes, so a caller that gives up has to say so."""


# ---- replies ------------------------------------------------------------------------------------------


class Done(NamedTuple):
    id: int


class Number(NamedTuple):
    id: int
    value: int


class Value(NamedTuple):
    id: int
    value: bytes


class Compared(NamedTuple):
    """Whether it was set, and the value that the key has now."""

    id: int
    swapped: bool
    value: bytes | None


class Opened(NamedTuple):
    """The barrier is open: what each rank brought, in rank order."""

    id: int
    payloads: tuple[bytes, ...]


class Welcome(NamedTuple):
    """`instance` is another one after each start of the store: it then knows nothing."""

    id: int
    instance: str
    role: Role


class GangFloor(NamedTuple):
    """`from_start`: this store has seen all of the epoch; what it has not seen has not been."""

    gang: RunUid
    epoch: Epoch
    size: int
    from_start: bool = False


class GangList(NamedTuple):
    id: int
    gangs: tuple[GangFloor, ...]


class LeaseView(NamedTuple):
    """`remaining_s` is until it is declared lapsed; `connected` whether its holder's connection is there."""

    rank: Rank
    token: IncarnationToken
    remaining_s: float
    connected: bool


class BarrierView(NamedTuple):
    """`tokens`: with which incarnations it opened, in rank order; empty until then."""

    name: str
    arrived: tuple[Rank, ...]
    is_open: bool
    is_closed: bool
    tokens: tuple[IncarnationToken, ...] = ()


class GangSnapshot(NamedTuple):
    id: int
    gang: RunUid
    epoch: Epoch
    size: int
    leases: tuple[LeaseView, ...]
    barriers: tuple[BarrierView, ...]


class Refused(NamedTuple):
    """Nothing was changed. `protocol.error_of` is the error that a client raises for it."""

    id: int
    reason: Reason
    message: str
    epoch: int | None = None
    """The gang's floor, where the epoch is what was wrong."""


Reply = Done | Number | Value | Compared | Opened | Welcome | GangList | GangSnapshot | Refused


# ---- pushes -------------------------------------------------------------------------------------------


class LeaseLapsed(NamedTuple):
    """The member is declared lost: its lease ran out, guard included.

    `silent_s`: since its holder is known to have lived: it has seen what the store answered then, and renewed the
    lease after that. Longer ago than the lease's length, by a heartbeat or more: a renewal proves no life when it is
    received, since it may have lain unread or travelled for long. None when it has seen no answer of this store
    (which was restarted, and was told to grant the lease).
    """

    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken
    silent_s: float | None = None


class LeaseReleased(NamedTuple):
    """The member gave its lease back: nothing of it runs."""

    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken


class MemberConnectionLost(NamedTuple):
    """The connection that held the lease closed. The lease still counts down: a suspicion, no verdict."""

    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken


class BarrierOpened(NamedTuple):
    """`tokens`: with which incarnations, in rank order."""

    gang: RunUid
    epoch: Epoch
    name: str
    tokens: tuple[IncarnationToken, ...] = ()


Push = LeaseLapsed | LeaseReleased | MemberConnectionLost | BarrierOpened
Message = Reply | Push
