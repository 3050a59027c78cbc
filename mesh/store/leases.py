"""Leases: granted to one incarnation per rank, renewed, given back, declared lapsed.

Rules of this file:
1. The store counts from when it received a grant or renewal, and declares a lease lapsed at ttl + guard; its
   holder counts from when it sent it, and stops at ttl - guard. So the holder always stops first.
2. An incarnation whose lease is over never gets another one.
3. Within an epoch another incarnation may take a rank only after the lease before it is over, and only until
   a barrier has opened: from then on a new incarnation needs a new epoch, or has been admitted by the coordinator in
   place of the one that had the rank (`admit`), which is over.
4. An incarnation that the coordinator has given up (`revoke`) is as good as one whose lease is over, unless the start
   barrier has opened with it: then it may run, and only a fence ends it.
5. A lease that is expiring (`expire`) is renewed no more. Its holder is told so at once, and the lease is over at its
   time all the same: being told is no proof.
6. Before a lease is found to be over the store asks whether it was itself stalled (`Books.absolve_stall`).
"""

from __future__ import annotations

from math import inf

from mesh.ids import IncarnationToken, Rank
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.books import Barrier, Books, ConnectionId, Gang, Lease, Output
from mesh.store.keys import over_limit
from mesh.store.limits import TTL_S_MAX, TTL_S_MIN

LEASE_LOST = "The lease of rank {rank} in epoch {epoch} of gang {gang} is over; nothing of it may run."


def grant(
    books: Books, gang: Gang, request: ms.GrantLease, connection: ConnectionId, now: float
) -> list[Output]:
    rank = request.rank
    lease = gang.leases.get(rank)
    if lease is not None and lease.token == request.token:
        return _renew(books, gang, lease, request.id, connection, now)
    refused = _grant_refusal(books, gang, request, lease)
    if refused is not None:
        return [(connection, refused)]
    lease = _new_lease(gang, request, now)
    books.add_lease(gang, lease)
    books.hold(lease, connection)
    if books.roles[connection] is ms.Role.MEMBER:
        lease.heard(request.id, now)
    return [(connection, ms.Done(request.id))]


def release(
    books: Books, gang: Gang, request: ms.ReleaseLease, connection: ConnectionId, _now: float
) -> list[Output]:
    lease = gang.leases.get(request.rank)
    outputs: list[Output] = [(connection, ms.Done(request.id))]
    if lease is None or lease.token != request.token:
        # The second time, or never held: what the caller wants is so in both cases, if it can be remembered.
        return outputs if gang.is_over(request.rank, request.token) else [(connection, lost(request))]
    return [
        *outputs,
        *end(books, gang, lease),
        *books.push(ms.LeaseReleased(gang.uid, gang.epoch, lease.rank, lease.token)),
    ]


def revoke(
    books: Books, gang: Gang, request: ms.Revoke, connection: ConnectionId, _now: float
) -> list[Output]:
    rank, token, limits = request.rank, request.token, books.limits
    if not 0 <= rank < gang.size:
        return [(connection, _conflict(request, f"there are ranks 0 to {gang.size - 1} only"))]
    if len(token) > limits.name_chars_max:
        return [(connection, over_limit(request.id, "characters in a token", limits.name_chars_max))]
    start = gang.barriers.get(ms.START_BARRIER)
    if start is not None and start.payloads is not None and start.arrivals[rank].token == token:
        return [(connection, ms.Number(request.id, 1))]
    revoked = gang.revoked.setdefault(rank, set())
    if token not in revoked and len(revoked) >= limits.revocations_per_rank_max:
        limit = limits.revocations_per_rank_max
        return [(connection, over_limit(request.id, "revoked incarnations of one rank", limit))]
    revoked.add(token)
    outputs: list[Output] = [(connection, ms.Number(request.id, 0))]
    lease = gang.leases.get(rank)
    if lease is not None and lease.token == token:
        outputs += end(books, gang, lease)
    return outputs


def admit(books: Books, gang: Gang, request: ms.Admit, connection: ConnectionId, now: float) -> list[Output]:
    rank, token, limits = request.rank, request.token, books.limits
    start = gang.barriers.get(ms.START_BARRIER)
    reply: ms.Reply = ms.Number(request.id, 1)
    if not 0 <= rank < gang.size:
        reply = _conflict(request, f"there are ranks 0 to {gang.size - 1} only")
    elif len(token) > limits.name_chars_max:
        reply = over_limit(request.id, "characters in a token", limits.name_chars_max)
    elif start is None or start.payloads is None:
        reply = _conflict(request, "this store has not opened the start barrier")
    elif (present := _who_passed(gang, start, rank)) != token:
        if request.instead_of != present:
            reply = _conflict(request, "the rank is another incarnation's")
        elif gang.is_over(rank, token):
            reply = _conflict(request, "this incarnation is over")
        elif not gang.is_over(rank, present) or not _others_live(gang, rank, now - request.alive_within_s):
            reply = ms.Number(request.id, 0)
        else:
            gang.admitted[rank] = token
            gang.ended[rank] = {present}
    return [(connection, reply)]


def _others_live(gang: Gang, rank: Rank, since: float) -> bool:
    """Every other rank that holds a lease is known to have lived after that moment.

    Of one that was lost the coordinator hears before it hears of the admission; and one that had succeeded may be lost.
    """
    if since == -inf:
        return True
    others = (lease for other, lease in gang.leases.items() if other != rank)
    return all(lease.alive_at is not None and lease.alive_at > since for lease in others)


def expire(
    books: Books, gang: Gang, request: ms.Expire, connection: ConnectionId, now: float
) -> list[Output]:
    refused = _unfit(books, gang, request)
    if refused is not None:
        return [(connection, refused)]
    start = gang.barriers.get(ms.START_BARRIER)
    is_open = start is not None and start.payloads is not None
    may_hold = start is None or not is_open or _who_passed(gang, start, request.rank) == request.token
    if not may_hold or gang.is_over(request.rank, request.token):
        return [(connection, ms.Number(request.id, 1))]
    lease = gang.leases.get(request.rank)
    if lease is not None and lease.token != request.token:
        return [(connection, _conflict(request, "another incarnation holds its lease"))]
    if lease is None:
        lease = _new_lease(gang, request, now)
        books.add_lease(gang, lease)
    lease.is_expiring = True
    return [(connection, ms.Number(request.id, 0))]


def lapse(books: Books, lease: Lease, now: float) -> list[Output]:
    """Declares the member lost."""
    gang = books.gangs[lease.gang]
    silent_s = None if lease.alive_at is None else now - lease.alive_at
    return [
        *end(books, gang, lease),
        *books.push(ms.LeaseLapsed(gang.uid, gang.epoch, lease.rank, lease.token, silent_s)),
    ]


def end(books: Books, gang: Gang, lease: Lease) -> list[Output]:
    """The lease is over: its rank leaves every barrier that has not opened."""
    outputs: list[Output] = []
    for barrier in gang.barriers.values():
        arrival = barrier.arrivals.get(lease.rank)
        if arrival is not None and arrival.waiter is not None and arrival.token == lease.token:
            waiter = arrival.waiter
            books.strike(waiter)
            message = LEASE_LOST.format(rank=lease.rank, epoch=gang.epoch, gang=gang.uid)
            outputs.append((waiter.connection, ms.Refused(waiter.id, Reason.LEASE_LOST, message)))
    books.end_lease(gang, lease)
    return outputs


def lost(request: ms.GrantLease | ms.ReleaseLease | ms.Arrive) -> ms.Refused:
    message = LEASE_LOST.format(rank=request.rank, epoch=request.epoch, gang=request.gang)
    return ms.Refused(request.id, Reason.LEASE_LOST, message)


def _who_passed(gang: Gang, start: Barrier, rank: Rank) -> IncarnationToken:
    """Whose the rank's place is behind the open start barrier."""
    return gang.admitted.get(rank, start.arrivals[rank].token)


def _new_lease(gang: Gang, request: ms.GrantLease | ms.Expire, now: float) -> Lease:
    return Lease(
        gang=gang.uid,
        epoch=gang.epoch,
        rank=request.rank,
        token=request.token,
        ttl_s=request.ttl_s,
        guard_s=request.guard_s,
        deadline=now + request.ttl_s + request.guard_s,
        connection=None,
    )


def _renew(
    books: Books, gang: Gang, lease: Lease, request_id: int, connection: ConnectionId, now: float
) -> list[Output]:
    if now >= lease.deadline:
        books.absolve_stall(now)
        if now >= lease.deadline:
            message = LEASE_LOST.format(rank=lease.rank, epoch=gang.epoch, gang=gang.uid)
            return [
                (connection, ms.Refused(request_id, Reason.LEASE_LOST, message)),
                *lapse(books, lease, now),
            ]
    if lease.is_expiring:
        message = (
            f"The lease of rank {lease.rank} in epoch {gang.epoch} of gang {gang.uid} is renewed no more."
        )
        return [(connection, ms.Refused(request_id, Reason.LEASE_LOST, message))]
    if books.roles[connection] is ms.Role.MEMBER:
        books.hold(lease, connection)
        lease.heard(request_id, now)
    else:  # the coordinator speaks for its holder, whoever that is connected to
        lease.renew(now)
    return [(connection, ms.Done(request_id))]


def _grant_refusal(
    books: Books, gang: Gang, request: ms.GrantLease, present: Lease | None
) -> ms.Refused | None:
    rank = request.rank
    limits = books.limits
    if (unfit := _unfit(books, gang, request)) is not None:
        return unfit
    if gang.is_over(rank, request.token):
        return lost(request)
    if present is not None:
        return _conflict(request, "another incarnation holds its lease")
    if gang.has_opened and gang.admitted.get(rank) != request.token:
        return _conflict(request, "the barrier is open, so a new incarnation needs a new epoch")
    if len(gang.ended.get(rank, ())) >= limits.tokens_per_rank_max:
        return over_limit(request.id, "incarnations of one rank in one epoch", limits.tokens_per_rank_max)
    return None


def _unfit(books: Books, gang: Gang, request: ms.GrantLease | ms.Expire) -> ms.Refused | None:
    """What no lease can be."""
    limits = books.limits
    if not 0 <= request.rank < gang.size:
        return _conflict(request, f"there are ranks 0 to {gang.size - 1} only")
    if not TTL_S_MIN <= request.ttl_s <= TTL_S_MAX or not 0 <= request.guard_s <= TTL_S_MAX:
        return _conflict(request, f"a lease lasts from {TTL_S_MIN} to {TTL_S_MAX} seconds")
    if len(request.token) > limits.name_chars_max:
        return over_limit(request.id, "characters in a token", limits.name_chars_max)
    return None


def _conflict(request: ms.GrantLease | ms.Revoke | ms.Admit | ms.Expire, why: str) -> ms.Refused:
    return ms.Refused(
        request.id,
        Reason.CONFLICT,
        f"No lease for rank {request.rank} in epoch {request.epoch} of gang {request.gang}: {why}.",
    )
