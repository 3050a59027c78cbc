"""One simulated keeper: the real lease core of `agents.core.lease`, on its machine's clock, over a wire.

Heartbeats would be most of all that happens. So a keeper that holds its lease while nothing is wrong in the world
*dozes*: its heartbeats are taken to succeed, unsimulated. Whenever something goes wrong, or something else happens to
it, it is brought to where its last heartbeat would have left it, at most a heartbeat ago, and is simulated one by one.
`Faults.every_heartbeat` turns that off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agents import lease_wire
from agents.core import events as ev
from agents.core import lease as ls
from agents.core import lease_events as le
from mesh.messages import HEARTBEAT_S, LEASE_GUARD_S, LEASE_TTL_S
from mesh.reasons import Reason
from mesh.store import messages as ms
from tests.sim.wire import Wire

if TYPE_CHECKING:
    from tests.sim.member import SimMember

TERMS = ls.LeaseTerms(ttl_s=LEASE_TTL_S, guard_s=LEASE_GUARD_S, heartbeat_s=HEARTBEAT_S)


class SimKeeper:
    """The process that holds one member's lease."""

    def __init__(self, member: SimMember) -> None:
        self.world = member.world
        self.member = member
        self.incarnation = member.incarnation
        self.machine = member.machine
        self.is_over = False
        self.is_dozing = False
        self._wire: Wire | None = None
        self._alarm_at: float | None = None
        self._alarm_number = 0
        self._has_connected = False
        self._tried_at = 0.0
        self.lease = self.world.parts.lease(terms=TERMS, started_at=self._now())
        self.world.store.keepers[self.incarnation.token] = self
        self._perform(self.lease.start())
        self._set_alarm()

    def _now(self) -> float:
        return self.machine.wall() if self.world.parts.leases_by_wall_clock else self.machine.clock()

    # ---- what it hears ----------------------------------------------------------------------------

    def hear(self, message: ms.Message) -> None:
        """From the store."""
        self._has_connected = True
        event = lease_wire.event_of(message)
        if event is not None:
            self.handle(event)

    def hear_lost(self) -> None:
        is_refused = self._wire is not None and self._wire.id is None
        if is_refused and self._has_connected and self.machine.is_the_stores and self.world.store.is_down:
            self.handle(le.StoreGone(seen_at=self._tried_at))
        self.handle(le.ConnectionLost())

    def _look_at_the_store(self) -> None:
        """On the store's own machine: whether it reads what lies before it."""
        sent_at = self.lease.state.sent_at
        if self.machine.is_the_stores and self.world.store.is_stalled and sent_at is not None:
            self.handle(le.StoreStoodStill(since=sent_at, seen_at=self._now()))

    def poll(self) -> None:
        """A keeper looks around at least once a heartbeat."""
        if not self.is_over and self.machine.is_the_stores and self.world.store.is_stalled:
            self._look_at_the_store()
            self.machine.after(HEARTBEAT_S, self.poll)

    def hear_parent_died(self) -> None:
        self.handle(le.ParentDied())

    def release(self) -> None:
        self.handle(le.ReleaseAsked())

    def die(self) -> None:
        """Killed: its connection closes, and its member sees the end of the pipe."""
        if self.is_over:
            return
        self._end()
        lost = ev.LeaseLost(
            incarnation=self.incarnation, reason=Reason.LEASE_LOST, message="The keeper died."
        )
        self.machine.after(0.005, self.member.handle, lost)

    def vanish(self) -> None:
        """Its machine is gone."""
        self.is_over = True
        self.is_dozing = False

    def handle(self, event: le.LeaseEvent) -> None:
        if self.is_over or self.machine.is_lost:
            return
        if self.is_dozing:
            self.rouse()
        self._perform(self.lease.handle(event, self._now()))
        if (
            isinstance(event, le.Confirmed)
            and not self.world.troubled
            and self.machine.is_roused_until <= self.world.now
            and not self.is_over
            and self.lease.state.phase is ls.LeasePhase.HOLDING
            and self.lease.state.connected
            and not self.world.store.lets_run_out(self.incarnation)
        ):
            self.is_dozing = True
            self._alarm_at = None
            self._alarm_number += 1
        else:
            self._set_alarm()

    # ---- time -------------------------------------------------------------------------------------

    def rouse(self) -> None:
        """Ends the doze: its last request was sent at most a heartbeat ago, and may still be under way."""
        if not self.is_dozing:
            return
        self.is_dozing = False
        up_s, down_s = self.machine.latency(), self.machine.latency()
        ago_s = self.world.random.uniform(0.0, HEARTBEAT_S - 0.01)
        state = self.lease.state
        if ago_s >= up_s + down_s:
            state.held_from = state.confirmed_at = self._now() - ago_s
            state.sent_at = None
            state.request_at = state.held_from + TERMS.heartbeat_s
        else:
            state.held_from = state.confirmed_at = self._now() - ago_s - TERMS.heartbeat_s
            state.sent_at = self._now() - ago_s
            state.request_at = None
            if ago_s < up_s:  # the one before it was received
                ago_s += TERMS.heartbeat_s
                self._request(le.Request(op="renew", request_id=state.request_id))
            elif self._wire is not None:
                self._wire.down(ms.Done(state.request_id))
        state.wake_at = self.lease.next_deadline() or self._now()
        me = self.incarnation
        self.world.store.renewed(me.run_uid, me.epoch, me.rank, me.token, max(0.0, ago_s - up_s))
        self._set_alarm()

    def _set_alarm(self) -> None:
        deadline = self.lease.next_deadline()
        if deadline is None or deadline == self._alarm_at or self.is_over:
            return
        self._alarm_at = deadline
        self._alarm_number += 1
        self.machine.after(max(0.0, deadline - self._now()) + 1e-3, self._alarm, self._alarm_number)

    def _alarm(self, number: int) -> None:
        if number == self._alarm_number:
            self._alarm_at = None
            self._look_at_the_store()
            self.handle(le.Woke())

    # ---- what it does -----------------------------------------------------------------------------

    def _perform(self, effects: list[le.LeaseEffect]) -> None:
        for effect in effects:
            match effect:
                case le.Request():
                    self._request(effect)
                case le.Connect():
                    if self._wire is not None:
                        self._wire.close()
                    self._tried_at = self._now()
                    self._wire = Wire(self.world.store, self.machine, self)
                case le.Tell():
                    self._tell(effect)
                case le.FreezeTree() | le.ThawTree() | le.KillTree():
                    self._treat_tree(effect)
                case le.End():
                    self._end()

    def _request(self, effect: le.Request) -> None:
        assert self._wire is not None, "a request follows a connection"
        me = self.incarnation
        key = (effect.request_id, me.run_uid, me.epoch, me.rank, me.token)
        if effect.op == "release":
            self._wire.send(ms.ReleaseLease, key)
        else:
            self._wire.send(ms.GrantLease, (*key, TERMS.ttl_s, TERMS.guard_s))

    def _tell(self, effect: le.Tell) -> None:
        me = self.incarnation
        reason = effect.reason or Reason.LEASE_LOST
        match effect.word:
            case "granted":
                event: ev.MemberEvent = ev.LeaseGranted(incarnation=me)
            case "refused":
                event = ev.LeaseRefused(incarnation=me, reason=reason, message=effect.message)
            case "lost":
                event = ev.LeaseLost(incarnation=me, reason=reason, message=effect.message)
            case _:
                return
        self.machine.after(0.001, self.member.handle, event)

    def _treat_tree(self, effect: le.LeaseEffect) -> None:
        process = self.member.process
        if process is None or not process.is_alive:
            return
        match effect:
            case le.FreezeTree():
                process.freeze()
            case le.ThawTree():
                process.thaw()
            case _:
                self.machine.after(self.world.random.uniform(0.0, 0.02), self.member.kill_tree)

    def _end(self) -> None:
        self.is_over = True
        self.is_dozing = False
        if self._wire is not None:
            self._wire.close()
