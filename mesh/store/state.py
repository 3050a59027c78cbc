"""The rendezvous store, pure: requests in, replies and pushes out. Time is an argument.

Rules of this file:
1. Nothing that a peer can send raises; what cannot be done is a `Refused` and changes nothing.
2. One gate, before any handler: a request of an older epoch is stale, one of an unknown gang or of an epoch that
   this store has not been told of yet may be tried again, and only the floor epoch gets through.
3. Only an admin raises floors, closes barriers, gives up or admits incarnations, lets leases run out, watches, or looks
   at gangs.
4. A floor never goes down while its gang is known; a restarted store knows nothing, and says so.

Theory of operation. The shell (`coordinator.store_actor`) numbers its connections, checks their secrets, and calls
`connected`, `handle` for each request, `disconnected`, and `tick` at `next_deadline()` or earlier. Each returns what
to send to whom, in order. `books` holds the data; `keys`, `leases` and `barrier` are the handlers behind the gate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from mesh.ids import RunUid
from mesh.reasons import Reason
from mesh.store import barrier, keys, leases
from mesh.store import messages as ms
from mesh.store.books import Books, ConnectionId, Gang, Output
from mesh.store.limits import TICK_S_MAX, StoreLimits

_Handler = Callable[[Books, Gang, Any, ConnectionId, float], list[Output]]
_UNDER_AN_EPOCH: dict[type, _Handler] = {
    ms.Get: keys.get,
    ms.Set: keys.set_value,
    ms.Add: keys.add,
    ms.Wait: keys.wait,
    ms.CompareAndSet: keys.compare_and_set,
    ms.Delete: keys.delete,
    ms.GrantLease: leases.grant,
    ms.ReleaseLease: leases.release,
    ms.Arrive: barrier.arrive,
}
_ADMIN_UNDER_AN_EPOCH: dict[type, _Handler] = {
    ms.CloseBarrier: barrier.close,
    ms.Revoke: leases.revoke,
    ms.Admit: leases.admit,
    ms.Expire: leases.expire,
}
_ADMIN = (ms.SetFloor, ms.DropGang, ms.Watch, ms.Gangs, ms.Snapshot, *_ADMIN_UNDER_AN_EPOCH)


class StoreState:
    """Every gang of one deployment.

    Args:
        instance: names this life of the store; another one after each restart.
    """

    def __init__(self, *, instance: str, limits: StoreLimits | None = None) -> None:
        self.instance = instance
        self.limits = limits or StoreLimits()
        self.books = Books(self.limits)
        self._gangs = self.books.gangs

    # ---- connections ------------------------------------------------------------------------------

    def connected(self, connection: ConnectionId, role: ms.Role, *, hello_id: int) -> list[Output]:
        """A connection whose secret was right. Numbers are never used again."""
        assert connection not in self.books.roles, "connection numbers are never used again"
        self.books.roles[connection] = role
        return [(connection, ms.Welcome(hello_id, self.instance, role))]

    def disconnected(self, connection: ConnectionId) -> list[Output]:
        """It closed: nobody waits there any more; leases held there count down, and watchers hear of it."""
        books = self.books
        if books.roles.pop(connection, None) is None:
            return []
        books.watchers.pop(connection, None)
        for waiter in books.waiters_of(connection):
            books.strike(waiter)
        outputs: list[Output] = []
        for lease in books.leases_of(connection):
            books.disown(lease)
            outputs += books.push(ms.MemberConnectionLost(lease.gang, lease.epoch, lease.rank, lease.token))
        return outputs

    # ---- requests ---------------------------------------------------------------------------------

    def handle(self, request: ms.Request, connection: ConnectionId, now: float) -> list[Output]:
        """One request of a connected connection, at `now` (seconds, monotonic)."""
        handler = _UNDER_AN_EPOCH.get(type(request))
        if handler is None:
            return self._on_other(request, connection, now)
        gang = self._gangs.get(request.gang)  # type: ignore[union-attr]
        if gang is None or gang.epoch != request.epoch:  # type: ignore[union-attr]
            return [(connection, _turn_away(gang, request))]  # type: ignore[arg-type]
        return handler(self.books, gang, request, connection, now)

    def _on_other(self, request: ms.Request, connection: ConnectionId, now: float) -> list[Output]:
        if isinstance(request, _ADMIN) and self.books.roles[connection] is not ms.Role.ADMIN:
            return [(connection, _forbidden(request.id))]
        match request:
            case ms.Ping():
                return [(connection, ms.Done(request.id))]
            case ms.Cancel():
                return self._on_cancel(request, connection)
            case ms.SetFloor():
                return self._on_set_floor(request, connection, now)
            case ms.DropGang():
                return self._on_drop_gang(request, connection)
            case ms.CloseBarrier() | ms.Revoke() | ms.Admit() | ms.Expire():
                gang = self._gangs.get(request.gang)
                if gang is None or gang.epoch != request.epoch:
                    return [(connection, _turn_away(gang, request))]
                return _ADMIN_UNDER_AN_EPOCH[type(request)](self.books, gang, request, connection, now)
            case ms.Watch():
                return self._on_watch(request, connection)
            case ms.Gangs():
                floors = tuple(
                    ms.GangFloor(g.uid, g.epoch, g.size, g.from_start) for g in self.books.gangs.values()
                )
                return [(connection, ms.GangList(request.id, floors))]
            case _:
                return self._on_rest(request, connection)

    def _on_rest(self, request: ms.Request, connection: ConnectionId) -> list[Output]:
        reply: ms.Reply
        if isinstance(request, ms.Snapshot):
            gang = self.books.gangs.get(request.gang)
            reply = _unknown(request.id, request.gang) if gang is None else self._snapshot(request.id, gang)
        else:
            reply = ms.Refused(request.id, Reason.CONFLICT, "This connection has said hello already.")
        return [(connection, reply)]

    def _on_cancel(self, request: ms.Cancel, connection: ConnectionId) -> list[Output]:
        waiter = self.books.waiter(connection, request.waiting_id)
        if waiter is not None:
            self.books.strike(waiter)
        return [(connection, ms.Done(request.id))]

    def _on_set_floor(self, request: ms.SetFloor, connection: ConnectionId, now: float) -> list[Output]:
        limits = self.limits
        gang = self.books.gangs.get(request.gang)
        refused: ms.Refused | None = None
        if request.epoch < 1 or request.size < 1:
            refused = _conflict(request, "epochs and sizes start at 1")
        elif request.size > limits.ranks_per_gang_max:
            refused = keys.over_limit(request.id, "ranks of one gang", limits.ranks_per_gang_max)
        elif len(request.gang) > limits.name_chars_max:
            refused = keys.over_limit(request.id, "characters in a gang's name", limits.name_chars_max)
        elif gang is None and len(self.books.gangs) >= limits.gangs_max:
            refused = keys.over_limit(request.id, "gangs", limits.gangs_max)
        elif gang is not None and request.epoch < gang.epoch:
            refused = _stale(request.id, gang, request.epoch)
        elif gang is not None and request.epoch == gang.epoch and request.size != gang.size:
            refused = _conflict(request, f"epoch {gang.epoch} has {gang.size} ranks")
        else:
            refused = self._cannot_revoke(request)
        if refused is not None:
            return [(connection, refused)]
        if gang is not None and gang.epoch == request.epoch:
            return [(connection, ms.Number(request.id, int(gang.from_start)))]
        outputs: list[Output] = [(connection, ms.Number(request.id, int(request.is_first)))]
        if gang is not None:
            message = f"Gang {gang.uid} has gone on to epoch {request.epoch}; nothing of epoch {gang.epoch} may run."
            outputs += self.books.drop(gang, ms.Refused(0, Reason.STALE_EPOCH, message, request.epoch))
        gang = Gang(uid=request.gang, epoch=request.epoch, size=request.size, from_start=request.is_first)
        self.books.gangs[gang.uid] = gang
        for rank, token in request.revoked:
            gang.revoked.setdefault(rank, set()).add(token)
        return outputs

    def _cannot_revoke(self, request: ms.SetFloor) -> ms.Refused | None:
        limits = self.limits
        if any(not 0 <= rank < request.size for rank, _ in request.revoked):
            return _conflict(request, "it has no such rank as one of those that were given up")
        if any(len(token) > limits.name_chars_max for _, token in request.revoked):
            return keys.over_limit(request.id, "characters in a token", limits.name_chars_max)
        if (
            max(Counter(rank for rank, _ in request.revoked).values(), default=0)
            > limits.revocations_per_rank_max
        ):
            limit = limits.revocations_per_rank_max
            return keys.over_limit(request.id, "revoked incarnations of one rank", limit)
        return None

    def _on_drop_gang(self, request: ms.DropGang, connection: ConnectionId) -> list[Output]:
        gang = self.books.gangs.get(request.gang)
        if gang is None or gang.epoch > request.epoch:
            return [(connection, ms.Number(request.id, 0))]
        return [(connection, ms.Number(request.id, 1)), *self.books.drop(gang, _unknown(0, gang.uid))]

    def _on_watch(self, request: ms.Watch, connection: ConnectionId) -> list[Output]:
        watchers = self.books.watchers
        if connection not in watchers and len(watchers) >= self.limits.watchers_max:
            return [(connection, keys.over_limit(request.id, "watchers", self.limits.watchers_max))]
        watchers[connection] = None
        return [(connection, ms.Done(request.id))]

    def _snapshot(self, request_id: int, gang: Gang) -> ms.GangSnapshot:
        last_tick = self.books.last_tick
        return ms.GangSnapshot(
            id=request_id,
            gang=gang.uid,
            epoch=gang.epoch,
            size=gang.size,
            leases=tuple(
                ms.LeaseView(
                    rank=lease.rank,
                    token=lease.token,
                    remaining_s=lease.deadline - last_tick if last_tick is not None else lease.ttl_s,
                    connected=lease.connection is not None,
                )
                for _, lease in sorted(gang.leases.items())
            ),
            barriers=tuple(
                ms.BarrierView(
                    name=name,
                    arrived=tuple(sorted(found.arrivals)),
                    is_open=found.payloads is not None,
                    is_closed=found.is_closed,
                    tokens=found.tokens(),
                )
                for name, found in sorted(gang.barriers.items())
            ),
        )

    # ---- time -------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest; None: any time, because the first tick is still to come."""
        books = self.books
        if books.last_tick is None:
            return None
        regular = books.last_tick + TICK_S_MAX
        lapse = books.next_deadline()
        return regular if lapse is None else min(regular, lapse)

    def tick(self, now: float) -> list[Output]:
        """Declares lapsed what has lapsed; unless this store was stalled itself: then every lease starts over."""
        books = self.books
        outputs: list[Output] = []
        if books.absolve_stall(now):
            for gang in books.gangs.values():
                outputs += barrier.open_if_complete(books, gang, now)
        books.last_tick = now if books.last_tick is None else max(now, books.last_tick)
        for lease in books.due_leases(now):
            outputs += leases.lapse(books, lease, now)
        return outputs


def _turn_away(gang: Gang | None, request: ms.GangRequest) -> ms.Refused:
    """What the gate says to a request that is not of the floor epoch."""
    if gang is None:
        return _unknown(request.id, request.gang)
    if request.epoch < gang.epoch:
        return _stale(request.id, gang, request.epoch)
    message = f"Gang {gang.uid} is at epoch {gang.epoch}; this store has not been told of epoch {request.epoch} yet."
    return ms.Refused(request.id, Reason.UNKNOWN_GANG, message, gang.epoch)


def _stale(request_id: int, gang: Gang, epoch: int) -> ms.Refused:
    message = f"Gang {gang.uid} has gone on to epoch {gang.epoch}; nothing of epoch {epoch} may run."
    return ms.Refused(request_id, Reason.STALE_EPOCH, message, gang.epoch)


def _unknown(request_id: int, gang: RunUid) -> ms.Refused:
    message = f"This store does not know gang {gang[:80]} (it may have been restarted)."
    return ms.Refused(request_id, Reason.UNKNOWN_GANG, message)


def _forbidden(request_id: int) -> ms.Refused:
    return ms.Refused(request_id, Reason.FORBIDDEN, "Only the coordinator may ask this of the store.")


def _conflict(request: ms.SetFloor, why: str) -> ms.Refused:
    message = f"Gang {request.gang} cannot be set to epoch {request.epoch} with {request.size} ranks: {why}."
    return ms.Refused(request.id, Reason.CONFLICT, message)
