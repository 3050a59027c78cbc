"""Barriers: open for every rank at once, or for none.

Rules of this file:
1. A rank has arrived while the connection that asked waits for its answer, and while it holds a valid lease
   of the token that it came with. Whoever stops listening, or loses its lease, has not arrived.
2. It opens in one step when all ranks have arrived; the same answer, with what everybody brought in rank order,
   goes to all. After that nothing changes any more, and whoever comes again with its token gets it again. So does,
   until the barrier is closed, one that was admitted in place of one that is over (`leases.admit`): from then on it is
   the one that has arrived.
3. A closed barrier never opens; closing an open one only says that it had opened.
"""

from __future__ import annotations

from mesh.ids import Rank
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.books import Arrival, Barrier, Books, ConnectionId, Gang, Output, Waiter
from mesh.store.keys import over_limit
from mesh.store.leases import lost


def arrive(
    books: Books, gang: Gang, request: ms.Arrive, connection: ConnectionId, now: float
) -> list[Output]:
    barrier = gang.barriers.get(request.name)
    if barrier is not None and barrier.payloads is not None:
        if _may_take_the_place(gang, barrier, request):
            refused = _refusal(books, gang, barrier, request, connection, now)
            if refused is not None:
                return [(connection, refused)]
            barrier.arrivals[request.rank].token = request.token
        return [(connection, _answer_when_open(barrier.payloads, barrier, request))]
    refused = _refusal(books, gang, barrier, request, connection, now)
    if refused is not None:
        return [(connection, refused)]
    barrier = barrier or gang.barriers.setdefault(request.name, Barrier())
    outputs = _replace_older(books, barrier, request)
    waiter = Waiter(
        connection=connection, id=request.id, gang=gang.uid, barrier=request.name, rank=request.rank
    )
    barrier.arrivals[request.rank] = Arrival(token=request.token, payload=request.payload, waiter=waiter)
    books.add_waiter(waiter)
    if len(barrier.arrivals) == gang.size and _all_leases_are_valid(books, gang, now):
        outputs += _open(books, gang, request.name, barrier)
    return outputs


def close(
    books: Books, gang: Gang, request: ms.CloseBarrier, connection: ConnectionId, _now: float
) -> list[Output]:
    barrier = gang.barriers.get(request.name)
    if barrier is None:
        if len(gang.barriers) >= books.limits.barriers_per_gang_max:
            return [(connection, _too_many(books, request.id))]
        barrier = gang.barriers.setdefault(request.name, Barrier())
    barrier.is_closed = True
    outputs: list[Output] = [(connection, ms.Number(request.id, int(barrier.payloads is not None)))]
    if barrier.payloads is None:
        for arrival in list(barrier.arrivals.values()):
            waiter = arrival.waiter
            assert waiter is not None, "before the opening an arrival has a waiter"
            books.strike(waiter)
            outputs.append((waiter.connection, _closed(waiter.id, request.name)))
    return outputs


def open_if_complete(books: Books, gang: Gang, now: float) -> list[Output]:
    """A lease that was found invalid at the last arrival may have been renewed since."""
    outputs: list[Output] = []
    for name, barrier in gang.barriers.items():
        is_waiting = barrier.payloads is None and not barrier.is_closed
        if is_waiting and len(barrier.arrivals) == gang.size and _all_leases_are_valid(books, gang, now):
            outputs += _open(books, gang, name, barrier)
    return outputs


def _refusal(
    books: Books,
    gang: Gang,
    barrier: Barrier | None,
    request: ms.Arrive,
    connection: ConnectionId,
    now: float,
) -> ms.Refused | None:
    limits = books.limits
    lease = gang.leases.get(request.rank)
    if lease is None or gang.is_over(request.rank, request.token):
        return lost(request)
    if lease.token != request.token:
        message = f"Rank {request.rank} of gang {request.gang} is another incarnation in epoch {gang.epoch}."
        return ms.Refused(request.id, Reason.CONFLICT, message)
    if now >= lease.deadline:
        books.absolve_stall(now)
        if now >= lease.deadline:
            return lost(request)
    if barrier is not None and barrier.is_closed:
        return _closed(request.id, request.name)
    if barrier is None and len(gang.barriers) >= limits.barriers_per_gang_max:
        return _too_many(books, request.id)
    if len(request.name) > limits.name_chars_max:
        return over_limit(request.id, "characters in a barrier's name", limits.name_chars_max)
    if len(request.payload) > limits.payload_bytes_max:
        return over_limit(request.id, "bytes that a rank brings to a barrier", limits.payload_bytes_max)
    if books.waiter(connection, request.id) is not None:
        message = f"Request {request.id} of this connection still waits for its answer."
        return ms.Refused(request.id, Reason.CONFLICT, message)
    if books.waiters_count >= limits.waiters_max and request.rank not in (
        barrier.arrivals if barrier else ()
    ):
        return over_limit(request.id, "waiting requests", limits.waiters_max)
    return None


def _replace_older(books: Books, barrier: Barrier, request: ms.Arrive) -> list[Output]:
    """The same incarnation arrived before, on a connection that it has given up: the newer one counts."""
    older = barrier.arrivals.get(request.rank)
    if older is None or older.waiter is None:
        return []
    waiter = older.waiter
    books.strike(waiter)
    message = f"Rank {request.rank} has arrived again; this wait is over."
    return [(waiter.connection, ms.Refused(waiter.id, Reason.CONFLICT, message))]


def _all_leases_are_valid(books: Books, gang: Gang, now: float) -> bool:
    books.absolve_stall(now)
    return len(gang.leases) == gang.size and all(now < lease.deadline for lease in gang.leases.values())


def _open(books: Books, gang: Gang, name: str, barrier: Barrier) -> list[Output]:
    arrivals = [barrier.arrivals[Rank(rank)] for rank in range(gang.size)]
    payloads = tuple(arrival.payload for arrival in arrivals)
    barrier.payloads = payloads
    outputs: list[Output] = []
    for arrival in arrivals:
        waiter = arrival.waiter
        assert waiter is not None, "before the opening an arrival has a waiter"
        books.strike(waiter)
        outputs.append((waiter.connection, ms.Opened(waiter.id, payloads)))
    return outputs + books.push(ms.BarrierOpened(gang.uid, gang.epoch, name, barrier.tokens()))


def _may_take_the_place(gang: Gang, barrier: Barrier, request: ms.Arrive) -> bool:
    """Whether this is the first arrival of one that was admitted after the opening."""
    arrival = barrier.arrivals.get(request.rank)
    is_admitted = gang.admitted.get(request.rank) == request.token
    return arrival is not None and is_admitted and arrival.token != request.token


def _answer_when_open(payloads: tuple[bytes, ...], barrier: Barrier, request: ms.Arrive) -> ms.Reply:
    arrival = barrier.arrivals.get(request.rank)
    if arrival is not None and arrival.token == request.token:
        return ms.Opened(request.id, payloads)
    message = f"The barrier of epoch {request.epoch} opened without this incarnation of rank {request.rank}."
    return ms.Refused(request.id, Reason.CONFLICT, message)


def _closed(request_id: int, name: str) -> ms.Refused:
    return ms.Refused(
        request_id, Reason.CANCELLED, f"The barrier '{name}' was closed; it does not open any more."
    )


def _too_many(books: Books, request_id: int) -> ms.Refused:
    return over_limit(request_id, "barriers of one gang", books.limits.barriers_per_gang_max)
