"""What the store remembers: gangs, leases, barriers, waiters, connections.

Rules of this file:
1. Everything hangs under one (gang, epoch); a lifted floor drops the `Gang` whole and makes a new one.
2. A `Waiter` is in the books exactly as long as its reply is owed; whoever answers it strikes it out first.
3. A `Lease` has exactly one entry in the heap of deadlines from its grant until its entry comes up after its end;
   a renewal moves only `deadline`, and the entry is put back when it comes up too early.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NewType

from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.store.limits import STALL_SHARE, TICK_S_MAX, TTL_S_MIN, StoreLimits
from mesh.store.messages import Message, Push, Refused, Role

ConnectionId = NewType("ConnectionId", int)
Output = tuple[ConnectionId, Message]
"""What to send, and to whom."""
LATE_S = TICK_S_MAX + TTL_S_MIN * STALL_SHARE
"""A store that ticks later than this may have left something unread."""
StoredValue = bytes | int
"""Counters stay numbers until somebody reads them as bytes (decimal digits)."""


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """One incarnation's right to run. `is_over` is final."""

    gang: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken
    ttl_s: float
    guard_s: float
    deadline: float
    """When it is declared lapsed: receipt + ttl + guard, on the store's clock."""
    connection: ConnectionId | None
    """Where its last grant or renewal came from; None after that connection closed."""
    alive_at: float | None = None
    """When its holder lived for certain: it saw the store's answer of that moment before it sent its last renewal. What
    is received may be old (it lay unread while the store stood still, or travelled for seconds), and its sender
    dead. None while it has seen none."""
    answered_at: float | None = None
    """When its holder's last renewal was answered; over `connection`, as request `answered_id`."""
    answered_id: int | None = None
    is_expiring: bool = False
    """Nobody renews it any more, whoever asks."""
    is_over: bool = False

    def renew(self, now: float) -> None:
        self.deadline = now + self.ttl_s + self.guard_s

    def heard(self, request_id: int, now: float) -> None:
        """Its holder has renewed it, over `connection`. The same id again: it has seen the answer to the one before."""
        if self.answered_id == request_id:
            self.alive_at = self.answered_at
        self.answered_id, self.answered_at = request_id, now
        self.renew(now)


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """A request whose reply is owed: for keys (`missing` not empty) or for a barrier (`rank` set)."""

    connection: ConnectionId
    id: int
    gang: RunUid
    missing: set[str] = field(default_factory=set)
    barrier: str = ""
    rank: Rank | None = None


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A rank at a barrier. Before the opening it has a waiter: who does not listen has not arrived."""

    token: IncarnationToken
    payload: bytes
    waiter: Waiter | None


@dataclass(slots=True, kw_only=True)
class Barrier:
    """`payloads` is set when it opened, once; `is_closed` before that means that it never will."""

    arrivals: dict[Rank, Arrival] = field(default_factory=dict)
    payloads: tuple[bytes, ...] | None = None
    is_closed: bool = False

    def tokens(self) -> tuple[IncarnationToken, ...]:
        """With which incarnations it opened, in rank order; empty until then."""
        if self.payloads is None:
            return ()
        return tuple(self.arrivals[rank].token for rank in sorted(self.arrivals))


@dataclass(slots=True, kw_only=True)
class Gang:
    """One gang at its floor epoch."""

    uid: RunUid
    epoch: Epoch
    size: int
    from_start: bool = False
    """This store was the first to be told of the epoch: it has seen all of it."""
    leases: dict[Rank, Lease] = field(default_factory=dict)
    """Those that are not over."""
    ended: dict[Rank, set[IncarnationToken]] = field(default_factory=dict)
    """Incarnations of this epoch whose lease is over: they never get another one. After an admission the older ones are
    forgotten: from then on the rank is for the one that was admitted only."""
    revoked: dict[Rank, set[IncarnationToken]] = field(default_factory=dict)
    """Incarnations that the coordinator gave up before a barrier had opened with them. Never forgotten."""
    admitted: dict[Rank, IncarnationToken] = field(default_factory=dict)
    """Who may take the rank after the opening: the last one that the coordinator admitted, if it ever did."""
    barriers: dict[str, Barrier] = field(default_factory=dict)
    keys: dict[str, StoredValue] = field(default_factory=dict)
    bytes_held: int = 0
    """All byte values of `keys` together."""
    key_waiters: dict[str, list[Waiter]] = field(default_factory=dict)
    """By a key that is missing."""

    @property
    def has_opened(self) -> bool:
        """True when any barrier opened: from then on the gang's incarnations are fixed."""
        return any(barrier.payloads is not None for barrier in self.barriers.values())

    def is_over(self, rank: Rank, token: IncarnationToken) -> bool:
        """True when this incarnation never gets a lease again in this epoch."""
        return token in self.ended.get(rank, ()) or token in self.revoked.get(rank, ())


class Books:
    """Everything, with the indexes that make each step cheap."""

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self.gangs: dict[RunUid, Gang] = {}
        self.roles: dict[ConnectionId, Role] = {}
        """Of every connection that said hello and is still there."""
        self.watchers: dict[ConnectionId, None] = {}
        self.waiters_count = 0
        self.last_tick: float | None = None
        self._waiters: dict[ConnectionId, dict[int, Waiter]] = {}
        self._leases: dict[ConnectionId, set[Lease]] = {}
        self._deadlines: list[tuple[float, int, Lease]] = []
        self._sequence = 0

    def push(self, push: Push) -> list[Output]:
        """One push to every watcher."""
        return [(watcher, push) for watcher in self.watchers]

    # ---- waiters ----------------------------------------------------------------------------------

    def add_waiter(self, waiter: Waiter) -> None:
        self._waiters.setdefault(waiter.connection, {})[waiter.id] = waiter
        self.waiters_count += 1

    def waiter(self, connection: ConnectionId, waiting_id: int) -> Waiter | None:
        return self._waiters.get(connection, {}).get(waiting_id)

    def waiters_of(self, connection: ConnectionId) -> list[Waiter]:
        return list(self._waiters.get(connection, {}).values())

    def all_waiters(self) -> Iterator[Waiter]:
        for waiters in self._waiters.values():
            yield from waiters.values()

    def strike(self, waiter: Waiter) -> None:
        """Its reply is no longer owed. Takes it out of its gang's indexes as well."""
        of_connection = self._waiters[waiter.connection]
        del of_connection[waiter.id]
        if not of_connection:
            del self._waiters[waiter.connection]
        self.waiters_count -= 1
        gang = self.gangs[waiter.gang]
        for key in waiter.missing:
            waiting = gang.key_waiters[key]
            waiting.remove(waiter)
            if not waiting:
                del gang.key_waiters[key]
        if waiter.rank is not None:
            barrier = gang.barriers[waiter.barrier]
            if barrier.payloads is None:
                del barrier.arrivals[waiter.rank]
            else:
                barrier.arrivals[waiter.rank].waiter = None

    # ---- leases -----------------------------------------------------------------------------------

    def add_lease(self, gang: Gang, lease: Lease) -> None:
        gang.leases[lease.rank] = lease
        self._sequence += 1
        heapq.heappush(self._deadlines, (lease.deadline, self._sequence, lease))

    def hold(self, lease: Lease, connection: ConnectionId) -> None:
        """The lease's holder is at this connection from now on."""
        if lease.connection != connection:
            self.disown(lease)
            lease.answered_id = None
        lease.connection = connection
        self._leases.setdefault(connection, set()).add(lease)

    def leases_of(self, connection: ConnectionId) -> list[Lease]:
        return sorted(self._leases.get(connection, ()), key=lambda lease: (lease.gang, lease.rank))

    def end_lease(self, gang: Gang, lease: Lease) -> None:
        """Over, for good. The incarnation may not have another one."""
        lease.is_over = True
        self.disown(lease)
        del gang.leases[lease.rank]
        gang.ended.setdefault(lease.rank, set()).add(lease.token)

    def disown(self, lease: Lease) -> None:
        """Its holder is at no connection any more."""
        if lease.connection is None:
            return
        held = self._leases[lease.connection]
        held.remove(lease)
        if not held:
            del self._leases[lease.connection]
        lease.connection = None

    def next_deadline(self) -> float | None:
        """When the next lease may lapse; it may turn out to have been renewed."""
        return self._deadlines[0][0] if self._deadlines else None

    def due_leases(self, now: float) -> list[Lease]:
        """Leases whose deadline has passed, earliest first."""
        due: list[Lease] = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, sequence, lease = heapq.heappop(deadlines)
            if lease.is_over:
                continue
            if lease.deadline <= now:
                due.append(lease)
            else:
                heapq.heappush(deadlines, (lease.deadline, sequence, lease))
        return due

    def is_late(self, now: float) -> bool:
        """The last tick is longer ago than a store that runs lets pass."""
        return self.last_tick is not None and now - self.last_tick > LATE_S

    def absolve_stall(self, now: float) -> bool:
        """A store that did not run has not heard the heartbeats of that time: no lease ends for it.

        Every lease starts over for whose ttl the last tick is too long ago: by `STALL_SHARE` of it, on top of
        the pause that ticks have anyhow. Returns whether there was one.
        """
        if self.last_tick is None or now <= self.last_tick:
            return False
        gap_s = now - self.last_tick
        found = False
        if not self.is_late(now):  # as nearly always; there may be many leases
            self.last_tick = now
            return False
        for gang in self.gangs.values():
            for lease in gang.leases.values():
                if gap_s > TICK_S_MAX + lease.ttl_s * STALL_SHARE:
                    lease.renew(now)
                    found = True
        # From here on this counts as a tick: the same gap is not forgiven twice.
        self.last_tick = now
        return found

    def drop(self, gang: Gang, refusal: Refused) -> list[Output]:
        """The gang leaves the books, and everybody who waits under it hears why."""
        outputs: list[Output] = []
        for waiter in [waiter for waiter in self.all_waiters() if waiter.gang == gang.uid]:
            self.strike(waiter)
            outputs.append((waiter.connection, refusal._replace(id=waiter.id)))
        for lease in list(gang.leases.values()):
            self.end_lease(gang, lease)
        del self.gangs[gang.uid]
        return outputs
