"""The simulated rendezvous store: the real `StoreState`, and connections that are function calls.

Heartbeats are not events of their own (they would be most of all events): whoever is alive is taken to have
renewed its lease whenever the store looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agents.core.events import Arrival
from coordinator.core.events import BarrierOpened, LeaseGone, LeaseLapsed
from coordinator.core.resync import StoreView, missed_events
from mesh.ids import Epoch, Incarnation, RunUid
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.books import ConnectionId, Output
from mesh.store.limits import TICK_S_MAX
from mesh.store.state import StoreState

if TYPE_CHECKING:
    from tests.sim.member import SimMember
    from tests.sim.world import World

TTL_S, GUARD_S = 3.0, 0.3
TICKS_TO_LAPSE = int((TTL_S + GUARD_S) / TICK_S_MAX) + 3


class SimStore:
    """One store that never fails (the faults of this simulation are elsewhere)."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = StoreState(instance="sim")
        self._opened: set[tuple[RunUid, Epoch]] = set()
        self._connections = 0
        self._request_id = 0
        self._members: dict[ConnectionId, SimMember] = {}
        self._ticks_left = 0
        self._admin = self._connect(ms.Role.ADMIN)
        self._ask(self._admin, ms.Watch, ())
        self.state.tick(world.now)

    # ---- connections ------------------------------------------------------------------------------

    def _connect(self, role: ms.Role) -> ConnectionId:
        self._connections += 1
        connection = ConnectionId(self._connections)
        self.state.connected(connection, role, hello_id=1)
        return connection

    def _ask(self, connection: ConnectionId, kind: Any, fields: tuple[Any, ...]) -> Any:
        """Sends a request; delivers what it leads to; returns the direct reply, None when it is deferred."""
        self._request_id += 1
        outputs = self.state.handle(kind(self._request_id, *fields), connection, self.world.now)
        reply = None
        for to, message in outputs:
            if to == connection and getattr(message, "id", None) == self._request_id:
                reply = message
                if kind is not ms.Arrive:
                    continue
            self._deliver(to, message)
        return reply

    def _deliver_all(self, outputs: list[Output]) -> None:
        for to, message in outputs:
            self._deliver(to, message)

    def _deliver(self, to: ConnectionId, message: ms.Message) -> None:
        if to == self._admin:
            self._push(message)
            return
        member = self._members.get(to)
        if member is None:
            return
        match message:
            case ms.Opened():
                self._opened.add((member.incarnation.run_uid, member.incarnation.epoch))
                member.barrier_opened(tuple(_arrival(payload) for payload in message.payloads))
            case ms.Refused():
                member.barrier_refused(message.reason)
            case _:
                raise AssertionError(message)

    def _push(self, message: ms.Message) -> None:
        """What the watching coordinator hears, if it is up."""
        world, life = self.world, self.world.life
        match message:
            case ms.BarrierOpened():
                event: Any = BarrierOpened(epoch=message.epoch, tokens=message.tokens)
            case ms.LeaseLapsed() | ms.LeaseReleased():
                kind = LeaseLapsed if isinstance(message, ms.LeaseLapsed) else LeaseGone
                event = kind(
                    incarnation=Incarnation(
                        run_uid=message.gang, epoch=message.epoch, rank=message.rank, token=message.token
                    )
                )
            case _:
                return
        world.soon(world._answer, message.gang, event, life)

    # ---- what the coordinator asks ----------------------------------------------------------------

    def open_epoch(self, uid: RunUid, epoch: Epoch, size: int, is_new: bool) -> None:
        self._ask(self._admin, ms.SetFloor, (uid, epoch, size, is_new, ()))

    def revoke(self, incarnation: Incarnation) -> bool | None:
        """None: not known yet, ask again."""
        reply = self._ask(self._admin, ms.Revoke, _key(incarnation))
        if isinstance(reply, ms.Refused):
            return None if reply.reason is Reason.UNKNOWN_GANG else True
        return bool(reply.value)

    def close_barrier(self, uid: RunUid, epoch: Epoch) -> bool | None:
        """None: not known yet, ask again."""
        reply = self._ask(self._admin, ms.CloseBarrier, (uid, epoch, ms.START_BARRIER))
        if isinstance(reply, ms.Refused):
            return None if reply.reason is Reason.UNKNOWN_GANG else False
        return bool(reply.value)

    def forget(self, uid: RunUid, epoch: Epoch) -> None:
        self._ask(self._admin, ms.DropGang, (uid,))

    def resync(self) -> None:
        """A coordinator that came back watches again, and catches up."""
        self.state.disconnected(self._admin)
        self._admin = self._connect(ms.Role.ADMIN)
        self._ask(self._admin, ms.Watch, ())
        for uid, core in self.world.cores.items():
            snapshot = self._ask(self._admin, ms.Snapshot, (uid,))
            if isinstance(snapshot, ms.GangSnapshot):
                view = StoreView(
                    epoch=snapshot.epoch,
                    holders=frozenset((lease.rank, lease.token) for lease in snapshot.leases),
                    has_opened=any(b.is_open for b in snapshot.barriers),
                    tokens=next((b.tokens for b in snapshot.barriers), ()),
                )
                for event in missed_events(core.gang, view):
                    self.world.soon(self.world._answer, uid, event, self.world.life)

    # ---- what members ask -------------------------------------------------------------------------

    def grant_lease(self, member: SimMember) -> Reason | None:
        """None when it was granted."""
        if member.connection is None:
            member.connection = self._connect(ms.Role.MEMBER)
            self._members[member.connection] = member
        incarnation = member.incarnation
        reply = self._ask(member.connection, ms.GrantLease, (*_key(incarnation), TTL_S, GUARD_S))
        return reply.reason if isinstance(reply, ms.Refused) else None

    def release_lease(self, member: SimMember) -> None:
        if member.connection is not None:
            self._ask(member.connection, ms.ReleaseLease, _key(member.incarnation))

    def arrive(self, member: SimMember, arrival: Arrival) -> None:
        if member.is_gone or member.connection is None:
            return
        self._renew_the_living()
        payload = repr((arrival.address, arrival.master_port)).encode()
        key = _key(member.incarnation)
        self._ask(member.connection, ms.Arrive, (*key, ms.START_BARRIER, payload))

    def connection_lost(self, member: SimMember) -> None:
        """The member died; its lease counts down from here."""
        if member.connection is None:
            return
        connection, member.connection = member.connection, None
        del self._members[connection]
        self._renew_the_living()
        holds_lease = bool(self.state.books.leases_of(connection))
        self._deliver_all(self.state.disconnected(connection))
        if not holds_lease:
            return
        if self._ticks_left == 0:
            self.world.after(TICK_S_MAX, self._tick)
        self._ticks_left = TICKS_TO_LAPSE

    def _renew_the_living(self) -> None:
        if self._ticks_left == 0:
            self.state.tick(self.world.now)  # nobody is dying: the time since the last look is forgiven
        for connection, member in list(self._members.items()):
            if member.core.state.lease_held:
                self._ask(connection, ms.GrantLease, (*_key(member.incarnation), TTL_S, GUARD_S))

    def _tick(self) -> None:
        self._renew_the_living()
        self._deliver_all(self.state.tick(self.world.now))
        self._ticks_left -= 1
        if self._ticks_left:
            self.world.after(TICK_S_MAX, self._tick)

    def has_opened(self, uid: RunUid, epoch: Epoch) -> bool:
        """The truth about a barrier: somebody was let through, and it was complete."""
        return (uid, epoch) in self._opened


def _key(incarnation: Incarnation) -> tuple[Any, ...]:
    return (incarnation.run_uid, incarnation.epoch, incarnation.rank, incarnation.token)


def _arrival(payload: bytes) -> Arrival:
    address, master_port = payload.decode().strip("()").split(", ")
    return Arrival(address=address.strip("'"), master_port=int(master_port))
