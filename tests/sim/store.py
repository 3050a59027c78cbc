"""The simulated rendezvous store: the real `StoreState` on a clock of its own, which can be restarted and stall.

While the world is calm its keepers doze (see `tests.sim.keeper`), and so does the store's tick; the leases of those
that doze are brought up to date whenever they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunUid
from mesh.messages import HEARTBEAT_S
from mesh.store import messages as ms
from mesh.store.books import ConnectionId, Lease, Output
from mesh.store.limits import TICK_S_MAX
from mesh.store.state import StoreState

if TYPE_CHECKING:
    from tests.sim.keeper import SimKeeper
    from tests.sim.process import SimProcess
    from tests.sim.store_line import StoreLine
    from tests.sim.wire import Wire
    from tests.sim.world import World


_LOOKS_AT_LEASES = (ms.Arrive, ms.GrantLease, ms.Admit, ms.Snapshot)


class SimStore:
    """One store process after the other.

    Args:
        rate: of its monotonic clock.
    """

    def __init__(self, world: World, *, rate: float) -> None:
        self.world = world
        self.rate = rate
        self.life = 0
        self.had_trouble = False
        self.is_down = False
        self.is_stalled = False
        self.opened: dict[tuple[RunUid, Epoch], tuple[IncarnationToken, ...]] = {}
        """The truth about barriers: with which incarnations each one opened, whichever store opened it."""
        self.admitted: dict[tuple[RunUid, Epoch, Rank], list[IncarnationToken]] = {}
        """Who was admitted to an open barrier, the latest last."""
        self.keepers: dict[IncarnationToken, SimKeeper] = {}
        """Of leases that may be held."""
        self._connections = 0
        self._wires: dict[ConnectionId, Wire] = {}
        self._line: StoreLine | None = None
        self._line_id: ConnectionId | None = None
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._ticks = False
        self._start()

    def _start(self) -> None:
        self.state: StoreState = self.world.parts.store_state(instance=f"store {self.life}")
        self._keys = self._connect(ms.Role.MEMBER)
        self.state.tick(self.clock())

    def clock(self) -> float:
        return self.world.now * self.rate

    # ---- its own troubles -------------------------------------------------------------------------

    def run(self, act: Callable[..., None], *arguments: Any) -> None:
        """Something reaches it: handled now, or when it goes on."""
        if self.is_stalled:
            self._backlog.append((act, arguments))
        else:
            act(*arguments)

    def stall(self, for_s: float) -> None:
        """It does not run for a while; what is sent to it waits."""
        if self.is_down or self.is_stalled:
            return
        self.is_stalled = self.had_trouble = True
        for keeper in list(self.keepers.values()):
            if keeper.machine.is_the_stores:
                keeper.poll()
        self.world.after(for_s, self._go_on, self.life)

    def _go_on(self, life: int) -> None:
        if life != self.life or not self.is_stalled:
            return
        self.is_stalled = False
        ticks_first = self.world.random.random() < 0.5
        if ticks_first:
            self._deliver_all(self.state.tick(self.clock()))
        backlog, self._backlog = self._backlog, []
        for act, arguments in backlog:
            act(*arguments)
        self._tick_on()

    def restart(self, down_s: float) -> None:
        """Its process dies with everything it knew; another one comes."""
        if self.is_down:
            return
        self.is_down, self.is_stalled, self.had_trouble = True, False, True
        self._backlog.clear()
        self.life += 1
        wires, self._wires = self._wires, {}
        line, self._line, self._line_id = self._line, None, None
        for wire in wires.values():
            wire.down(None)
        if line is not None:
            line.hear_lost()
        self.world.after(down_s, self._come_back)

    def _come_back(self) -> None:
        self.is_down = False
        self._start()
        self._tick_on()

    # ---- connections ------------------------------------------------------------------------------

    def _connect(self, role: ms.Role) -> ConnectionId:
        self._connections += 1
        connection = ConnectionId(self._connections)
        self.state.connected(connection, role, hello_id=1)
        return connection

    def accept(self, wire: Wire) -> None:
        if self.is_down or wire.life != self.life:
            wire.down(None)
            return
        wire.id = self._connect(ms.Role.MEMBER)
        self._wires[wire.id] = wire
        wire.down(ms.Welcome(1, self.state.instance, ms.Role.MEMBER))

    def hang_up(self, wire: Wire) -> None:
        if wire.id is not None and self._wires.pop(wire.id, None) is not None:
            self._deliver_all(self.state.disconnected(wire.id))
            self._tick_on()

    def receive(self, wire: Wire, message: ms.Request) -> None:
        if wire.id not in self._wires:
            wire.down(None)
            return
        self._handle(message, wire.id)

    def connect_line(self, line: StoreLine) -> bool:
        """The coordinator's connection; False when there is nobody."""
        if self.is_down:
            return False
        self.hang_up_line(self._line)
        self._line, self._line_id = line, self._connect(ms.Role.ADMIN)
        return True

    def hang_up_line(self, line: StoreLine | None) -> None:
        if line is not None and line is self._line:
            assert self._line_id is not None
            self.state.disconnected(self._line_id)
            self._line = self._line_id = None

    def serve_line(self, line: StoreLine, message: ms.Request) -> None:
        if line is self._line and self._line_id is not None:
            self._handle(message, self._line_id)

    # ---- requests ---------------------------------------------------------------------------------

    def _handle(self, message: ms.Request, connection: ConnectionId) -> None:
        if isinstance(message, _LOOKS_AT_LEASES):
            self._refresh_dozing(message.gang)
        if isinstance(message, ms.Expire) and (keeper := self.keepers.get(message.token)) is not None:
            keeper.rouse()
        now = self.clock()
        for to, reply in self.state.handle(message, connection, now):
            if isinstance(message, ms.Admit) and isinstance(reply, ms.Number) and reply.value:
                self._note_admission(message)
            self._deliver(to, reply)
        if isinstance(message, ms.GrantLease | ms.Expire):
            self._tick_on()

    def _note_admission(self, message: ms.Admit) -> None:
        admitted = self.admitted.setdefault((message.gang, message.epoch, message.rank), [])
        if message.token not in admitted:
            admitted.append(message.token)
            self.world.truth.rank_admitted(message)

    def serve_key(self, process: SimProcess, kind: Any, fields: tuple[Any, ...]) -> None:
        """A request of a user's process, about keys; or of a ghost, about anything."""
        if self.is_down:
            return
        truth = self.world.truth
        if kind is ms.Arrive:
            rank, token, uid, epoch = fields
            request: Any = ms.Arrive(1, uid, epoch, rank, token, ms.START_BARRIER, b"ghost")
        else:
            request = kind(1, *fields)
        for to, reply in self.state.handle(request, self._keys, self.clock()):
            if to == self._keys:
                truth.key_answered(process, request, reply)
            else:
                self._deliver(to, reply)

    def _deliver_all(self, outputs: list[Output]) -> None:
        for to, message in outputs:
            self._deliver(to, message)

    def _deliver(self, to: ConnectionId, message: ms.Message) -> None:
        if isinstance(message, ms.BarrierOpened):
            if (message.gang, message.epoch) not in self.opened:
                self._note_opening(message)
        elif isinstance(message, ms.LeaseLapsed):
            self.world.truth.lease_lapsed(self.keepers.get(message.token))
        if to == self._line_id:
            assert self._line is not None
            self._line.from_store(message)
        elif (wire := self._wires.get(to)) is not None:
            if isinstance(message, ms.Opened):
                self._note_opened(wire)
            wire.down(message)

    def _note_opened(self, wire: Wire) -> None:
        """Whether anybody watches or not: the barrier is open once a member is told so."""
        incarnation = wire.receiver.incarnation  # type: ignore[attr-defined]
        gang = self.state.books.gangs[incarnation.run_uid]
        if (gang.uid, gang.epoch) not in self.opened:
            barrier = gang.barriers[ms.START_BARRIER]
            self._note_opening(ms.BarrierOpened(gang.uid, gang.epoch, ms.START_BARRIER, barrier.tokens()))

    def _note_opening(self, message: ms.BarrierOpened) -> None:
        self.opened[message.gang, message.epoch] = message.tokens
        gang = self.state.books.gangs[message.gang]
        now = self.clock()
        valid = {
            lease.token for lease in gang.leases.values() if now < lease.deadline or self._dozes(lease.token)
        }
        self.world.truth.barrier_opened(message, valid)

    # ---- time -------------------------------------------------------------------------------------

    def _dozes(self, token: IncarnationToken) -> bool:
        keeper = self.keepers.get(token)
        return keeper is not None and keeper.is_dozing

    def _refresh_dozing(self, uid: RunUid) -> None:
        gang = self.state.books.gangs.get(uid)
        if gang is not None:
            for lease in gang.leases.values():
                if self._dozes(lease.token):
                    _hear(lease, self.clock())

    def lets_run_out(self, incarnation: Incarnation) -> bool:
        """True when it renews this lease no more, whatever is still under way to say that it was."""
        gang = self.state.books.gangs.get(incarnation.run_uid)
        lease = None if gang is None else gang.leases.get(incarnation.rank)
        return lease is not None and lease.token == incarnation.token and lease.is_expiring

    def renewed(self, uid: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken, ago_s: float) -> None:
        """A keeper that has dozed says when its last heartbeat was received."""
        gang = self.state.books.gangs.get(uid)
        if gang is not None and gang.epoch == epoch:
            lease = gang.leases.get(rank)
            if lease is not None and lease.token == token:
                _hear(lease, self.clock() - ago_s * self.rate)

    def rouse_before(self) -> None:
        """It is about to go wrong itself: whatever dozed has been heard of until now."""
        if not self._ticks and not self.is_down:
            for gang in self.state.books.gangs.values():
                self._refresh_dozing(gang.uid)
            self.state.books.last_tick = self.clock()

    def rouse(self) -> None:
        """Heartbeats count again one by one."""
        self._tick_on()

    def _tick_on(self) -> None:
        if self._ticks or self.is_down or self.is_stalled or not self._has_to_tick():
            return
        self._ticks = True
        if self.state.books.last_tick is not None and not self.world.troubled:
            self.state.books.last_tick = self.clock()  # it has ticked all the time, only nobody wrote it down
        self.world.after(TICK_S_MAX * 0.9 / self.rate, self._tick, self.life)

    def _has_to_tick(self) -> bool:
        if self.world.troubled:
            return bool(self.state.books.gangs)
        return any(
            not self._dozes(lease.token)
            for gang in self.state.books.gangs.values()
            for lease in gang.leases.values()
        )

    def _tick(self, life: int) -> None:
        if life != self.life or self.is_stalled or self.is_down:
            self._ticks = False
            return
        now, keepers = self.clock(), self.keepers
        for gang in self.state.books.gangs.values():
            for lease in gang.leases.values():
                keeper = keepers.get(lease.token)
                if keeper is not None and keeper.is_dozing:
                    _hear(lease, now)
        self._deliver_all(self.state.tick(now))
        self._ticks = False
        self._tick_on()


def _hear(lease: Lease, at: float) -> None:
    """A renewal that was received then."""
    lease.renew(at)
    lease.alive_at, lease.answered_at = at - HEARTBEAT_S, at
