"""The coordinator's line to the store: what `coordinator.store_link.StoreLink` does, as steps of the simulation.

One line per life of a coordinator and connection. Each request is a `yield` of a message's class and fields; what is
sent back is the reply, or `DOWN` when the line was lost meanwhile. The rules are those of `StoreLink`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coordinator.core import events as ev
from coordinator.core.gang_state import Gang, MemberRecord
from coordinator.core.resync import StoreView, members_with_lease, missed_events, unaccounted
from coordinator.core.store_silence import PULSE_S, StorePulse
from coordinator.core.store_trust import CatchUp, EpochKey
from mesh.ids import Epoch, Incarnation, IncarnationToken, RunUid
from mesh.messages import LEASE_GUARD_S, LEASE_TTL_S
from mesh.reasons import Reason
from mesh.store import messages as ms
from tests.sim.tasks import DOWN, Begin, Down, Step

if TYPE_CHECKING:
    from tests.sim.coordinator import SimCoordinator

RECONNECT_S = 0.15


class StoreLine:
    """What one life of the coordinator knows of the store, over as many connections as it takes."""

    def __init__(self, coordinator: SimCoordinator) -> None:
        self.coordinator = coordinator
        self.world = coordinator.world
        self.store = coordinator.world.store
        self.is_up = False
        self.is_over = False
        self._request_id = 100
        self._after_up = self._after_down = 0.0
        self._waiting: dict[int, Any] = {}
        self._trust = coordinator.world.parts.trust()
        self._instance = ""
        self._pulse = StorePulse(self.world.now)
        self._listens = False

    # ---- the connection ---------------------------------------------------------------------------

    def connect(self) -> None:
        if self.is_over or self.is_up:
            return
        self.listen()
        if self.world.line_cut_until > self.world.now or not self.store.connect_line(self):
            self.world.after(RECONNECT_S, self.connect)
            return
        self.is_up = True
        self._instance = self.store.state.instance
        self.coordinator.spawn(("line",), self._catch_up())

    def hear_lost(self) -> None:
        """The connection is gone; another one is made."""
        if not self.is_up:
            return
        self.is_up = False
        waiting, self._waiting = self._waiting, {}
        for resume in waiting.values():
            resume(DOWN)
        self.coordinator.stop(("line",))
        if not self.is_over:
            self.world.after(RECONNECT_S, self.connect)

    def close(self) -> None:
        """The coordinator died."""
        self.is_over = True
        self.is_up = False
        self._waiting.clear()
        self.world.after(0.005, self.store.hang_up_line, self)

    def ask(self, kind: Any, *fields: Any) -> Begin:
        """Begins one request; to be yielded."""

        def begin(resume: Any) -> None:
            if not self.is_up:
                self.world.after(0.0, resume, DOWN)
                return
            self._request_id += 1
            self._waiting[self._request_id] = resume
            message = kind(self._request_id, *fields)
            at = max(self.world.now, self.world.line_cut_until) + self.world.random.expovariate(300.0)
            self._after_up = at = max(at, self._after_up)
            self.world.at(at, self.store.run, self.store.serve_line, self, message)

        return begin

    def listen(self) -> None:
        """From now on the store may not answer. What it answered until now is not simulated."""
        if not self._listens:
            self._listens = True
            self._pulse = StorePulse(self.world.now - self.world.random.uniform(0.0, PULSE_S))
            self.world.after(PULSE_S, self._look_for_life)

    def _look_for_life(self) -> None:
        if self.is_over:
            return
        store, now = self.store, self.world.now
        event: ev.GangEvent | None
        if self.is_up and not store.is_stalled and not store.is_down and self.world.line_cut_until <= now:
            self._listens = False
            event = self._pulse.answered(asked_at=now, now=now)
        else:
            self.world.after(PULSE_S, self._look_for_life)
            event = self._pulse.look(now)
        if event is not None:
            for gang in self.coordinator.live_gangs():
                self.coordinator.tell(gang.uid, event)

    def from_store(self, message: ms.Message) -> None:
        answered_at = self._pulse.heard_at if self._listens else self.world.now
        said_after = answered_at - PULSE_S
        at = max(self.world.now, self.world.line_cut_until) + self.world.random.expovariate(300.0)
        self._after_down = at = max(at, self._after_down)
        self.world.at(at, self._hear, message, self._instance, said_after)

    def _hear(self, message: ms.Message, instance: str, said_after: float) -> None:
        if not self.is_up or instance != self._instance:
            return
        request_id = getattr(message, "id", None)
        if request_id is None:
            self._push(message, said_after)
        elif (resume := self._waiting.pop(request_id, None)) is not None:
            resume(message)

    def _tell_of(self, uid: RunUid, event: ev.GangEvent) -> None:
        self._trust.heard(event)
        self.coordinator.tell(uid, event)

    def _push(self, message: ms.Message, said_after: float) -> None:
        tell = self._tell_of
        match message:
            case ms.BarrierOpened():
                tell(message.gang, ev.BarrierOpened(epoch=message.epoch, tokens=message.tokens))
            case ms.LeaseLapsed():
                lapsed = ev.LeaseLapsed(
                    incarnation=_incarnation(message), silent_s=message.silent_s, said_after=said_after
                )
                tell(message.gang, lapsed)
            case ms.LeaseReleased():
                tell(message.gang, ev.LeaseGone(incarnation=_incarnation(message)))
            case ms.MemberConnectionLost():
                tell(message.gang, ev.MemberSuspected(incarnation=_incarnation(message)))

    # ---- StoreControl -----------------------------------------------------------------------------

    def open_epoch(self, uid: RunUid, epoch: Epoch, size: int, is_new: bool) -> Step[None]:
        key = (uid, epoch)
        floors = yield from self._floors()
        if key in floors:
            self._trust.ask(key, is_new=False)
            self._trust.learn(key, self._instance, from_start=floors[key])
            return
        is_first = self._trust.ask(key, is_new=is_new)
        yield from self._tell(key, size, self.coordinator.live_gang(uid, epoch), is_first)

    def close_barrier(self, uid: RunUid, epoch: Epoch) -> Step[bool]:
        reply = yield self.ask(ms.CloseBarrier, uid, epoch, ms.START_BARRIER)
        if _is_stale(reply):
            return True
        was_open = bool(_answer(reply).value)
        if not self._trust.may_have_opened((uid, epoch), self._instance, was_open=was_open):
            self._trust.never_opens((uid, epoch))
            return False
        if not was_open and (gang := self.coordinator.live_gang(uid, epoch)) is not None:
            view = yield from self._look(gang, False)
            yield from self._account_for(gang, unaccounted(gang, replace(view, has_opened=True)))
        return True

    def revoke(self, incarnation: Incarnation) -> Step[bool | None]:
        me = incarnation
        if not self.is_up:
            raise Down
        if not self._trust.is_believed((me.run_uid, me.epoch), self._instance):
            return None
        reply = yield self.ask(ms.Revoke, me.run_uid, me.epoch, me.rank, me.token)
        if _is_stale(reply):
            return None
        has_passed = bool(_answer(reply).value)
        if not has_passed:
            self._trust.gave_up(me)
        return has_passed

    def expire(self, incarnation: Incarnation) -> Step[bool]:
        me = incarnation
        key = (me.run_uid, me.epoch, me.rank, me.token)
        reply = yield self.ask(ms.Expire, *key, LEASE_TTL_S, LEASE_GUARD_S)
        is_over = bool(_answer(reply).value)
        if is_over:
            self._trust.heard(ev.LeaseGone(incarnation=me))
        return is_over

    def admit(self, incarnation: Incarnation, instead_of: IncarnationToken, alive_since: float) -> Step[bool]:
        me = incarnation
        within_s = self.world.now - alive_since
        reply = yield self.ask(ms.Admit, me.run_uid, me.epoch, me.rank, me.token, instead_of, within_s)
        if _is_stale(reply) or _is_conflict(reply):
            return False
        if not _answer(reply).value:
            raise Down  # the one before is not over yet, or not everybody is known to live
        return True

    def forget(self, uid: RunUid, epoch: Epoch) -> Step[None]:
        _answer((yield self.ask(ms.DropGang, uid, epoch)))
        self._trust.forget(uid, epoch)

    # ---- after a gap ------------------------------------------------------------------------------

    def _floors(self) -> Step[dict[EpochKey, bool]]:
        reply = _answer((yield self.ask(ms.Gangs)))
        return {(g.gang, g.epoch): g.from_start for g in reply.gangs}

    def _catch_up(self) -> Step[None]:
        try:
            yield self.ask(ms.Watch)
            floors = yield from self._floors()
            for gang in self.coordinator.live_gangs():
                key = (gang.uid, gang.epoch)
                match self._trust.catch_up(gang, self._instance, floors):
                    case CatchUp.COMPARE:
                        yield from self._compare(gang, floors[key])
                    case CatchUp.TELL:
                        yield from self._tell(key, gang.plan.nodes, gang, False)
        except Down:
            return

    def _compare(self, gang: Gang, from_start: bool) -> Step[None]:
        gang = gang.snapshot()
        try:
            view = yield from self._look(gang, from_start)
        except Down:
            return  # it was forgotten a moment ago
        for event in missed_events(gang, view):
            self._tell_of(gang.uid, event)
        if gang.barrier_open and not view.has_opened:
            yield self.ask(ms.CloseBarrier, gang.uid, gang.epoch, ms.START_BARRIER)
        yield from self._account_for(gang, unaccounted(gang, view))

    def _look(self, gang: Gang, from_start: bool) -> Step[StoreView]:
        snapshot = _answer((yield self.ask(ms.Snapshot, gang.uid)))
        start = [barrier for barrier in snapshot.barriers if barrier.name == ms.START_BARRIER]
        return StoreView(
            epoch=snapshot.epoch,
            holders=frozenset((lease.rank, lease.token) for lease in snapshot.leases),
            has_opened=any(b.is_open for b in start),
            tokens=next((b.tokens for b in start), ()),
            unconnected=frozenset(
                (lease.rank, lease.token) for lease in snapshot.leases if not lease.connected
            ),
            from_start=from_start,
        )

    def _tell(self, key: EpochKey, size: int, gang: Gang | None, is_first: bool) -> Step[None]:
        uid, epoch = key
        telling = self._trust.telling(key, gang, is_first=is_first)
        reply = yield self.ask(ms.SetFloor, uid, epoch, size, telling.is_first, telling.revoked)
        if _is_stale(reply):
            return  # the gang has gone on meanwhile
        from_start = bool(_answer(reply).value)
        if telling.has_opened:
            reply = yield self.ask(ms.CloseBarrier, uid, epoch, ms.START_BARRIER)
            if _is_stale(reply):
                return
            _answer(reply)
        self._trust.learn(key, self._instance, from_start=from_start)
        if not from_start and gang is not None:
            yield from self._account_for(gang, members_with_lease(gang, has_opened=gang.barrier_open))

    def _account_for(self, gang: Gang, members: list[MemberRecord]) -> Step[None]:
        uid, epoch = gang.uid, gang.epoch
        for member in members:
            kind = ms.Expire if member.is_expiring else ms.GrantLease
            reply = yield self.ask(
                kind, uid, epoch, member.rank, member.incarnation.token, LEASE_TTL_S, LEASE_GUARD_S
            )
            is_over = isinstance(reply, ms.Number) and bool(reply.value)
            if is_over or (isinstance(reply, ms.Refused) and reply.reason is Reason.LEASE_LOST):
                self._tell_of(uid, ev.LeaseGone(incarnation=member.incarnation))
            elif not _is_stale(reply) and not _is_conflict(reply):
                _answer(reply)


def _answer(reply: Any) -> Any:
    """What the store said. Raises Down when nothing was, or when it is to be asked again."""
    if reply is DOWN or isinstance(reply, ms.Refused):
        raise Down
    return reply


def _is_stale(reply: Any) -> bool:
    return isinstance(reply, ms.Refused) and reply.reason is Reason.STALE_EPOCH


def _is_conflict(reply: Any) -> bool:
    return isinstance(reply, ms.Refused) and reply.reason is Reason.CONFLICT


def _incarnation(push: Any) -> Incarnation:
    return Incarnation(run_uid=push.gang, epoch=push.epoch, rank=push.rank, token=push.token)
