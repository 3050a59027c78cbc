"""The coordinator's line to the rendezvous store: kept up, watched, and brought up to date after every gap.

Rules of this file:
1. What the store pushes is lost while the line is down; after each connect the difference is worked out from a
   snapshot of every gang whose epoch is under way (`coordinator.core.resync`).
2. What a store is told after a restart, and what is believed of it, is decided by `coordinator.core.store_trust`; this
   file asks and tells.
3. Of a store that is not believed the answer is "it may have": a barrier may have opened, an incarnation may have
   passed it. Every member then has to be accounted for one by one.
4. Nothing ends the line for good: what the coordinator cannot take now is made up for after the next connect.
5. The store is asked for a sign of life all the time; the gangs hear when there is none (`core.store_silence`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from coordinator.core.events import (
    BarrierOpened,
    GangEvent,
    LeaseGone,
    LeaseLapsed,
    MemberSuspected,
    StoreHeard,
    StoreSilent,
)
from coordinator.core.gang_state import Gang, MemberRecord
from coordinator.core.resync import StoreView, members_with_lease, missed_events, unaccounted
from coordinator.core.store_silence import PULSE_S, StorePulse
from coordinator.core.store_trust import CatchUp, EpochKey, Floors, StoreTrust
from mesh.errors import (
    ConflictError,
    FencedError,
    LeaseLostError,
    MeshError,
    RendezvousError,
    TransportError,
)
from mesh.ids import Epoch, Incarnation, IncarnationToken, RunUid
from mesh.messages import LEASE_GUARD_S, LEASE_TTL_S
from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.client import StoreClient

CONNECT_LIMIT_S = 5.0
RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 0.2
"""Far below a lease: until a restarted store has been told its gangs again, nobody can renew one."""

_log = logging.getLogger(__name__)


class GangEvents(Protocol):
    """Who hears what the store says; the coordinator."""

    def post(self, uid: RunUid, event: GangEvent) -> None:
        """Raises asyncio.QueueFull when the gang's inbox is full."""
        ...

    def live_gangs(self) -> list[Gang]:
        """Every gang whose epoch is under way."""
        ...


class StoreLink:
    """A `StoreControl` over one connection that is made again whenever it is lost.

    Args:
        endpoint: with the admin's secret.
        lease_ttl_s, lease_guard_s: of the leases that are granted for members of a store that was restarted;
            the members' own.
        on_new_store: called when the line is up again, and the store is another one than before.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        lease_ttl_s: float = LEASE_TTL_S,
        lease_guard_s: float = LEASE_GUARD_S,
        on_new_store: Callable[[], None] = lambda: None,
    ) -> None:
        self._endpoint = endpoint
        self._lease_ttl_s = lease_ttl_s
        self._lease_guard_s = lease_guard_s
        self._client: StoreClient | None = None
        self._events: GangEvents | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lost = asyncio.Event()
        self._on_new_store = on_new_store
        self._instance = ""
        """Of the store that was connected last; empty before the first."""
        self._trust = StoreTrust()
        self._pulse = StorePulse(time.monotonic())

    def start(self, events: GangEvents) -> None:
        """Keeps the line up from now on."""
        self._events = events
        self._pulse = StorePulse(time.monotonic())
        self._tasks = [
            asyncio.create_task(self._keep(), name="store link"),
            asyncio.create_task(self._ask_for_life(), name="store pulse: ask"),
            asyncio.create_task(self._look_for_life(), name="store pulse: look"),
        ]

    async def stop(self) -> None:
        """Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    # ---- StoreControl -----------------------------------------------------------------------------

    async def open_epoch(self, uid: RunUid, epoch: Epoch, size: int, *, is_new: bool) -> None:
        """See `StoreControl`. Raises MeshError (retryable) while the store cannot be reached."""
        client = self._connected()
        key = (uid, epoch)
        floors = _floors(await client.gangs())
        if key in floors:
            self._trust.ask(key, is_new=False)
            self._trust.learn(key, client.instance, from_start=floors[key])
            return
        is_first = self._trust.ask(key, is_new=is_new)
        await self._tell(client, key, size, self._live_gang(uid, epoch), is_first=is_first)

    async def close_barrier(self, uid: RunUid, epoch: Epoch) -> bool:
        """See `StoreControl`. True as well when nobody knows any more."""
        client, key = self._connected(), (uid, epoch)
        try:
            was_open = await client.close_barrier(uid, epoch)
        except FencedError:
            return True
        if not self._trust.may_have_opened(key, client.instance, was_open=was_open):
            self._trust.never_opens(key)
            return False
        if not was_open and (gang := self._live_gang(uid, epoch)) is not None:
            # A lease that is there has to run out by itself: renewed from here, it would hide since when its holder is
            # silent.
            view = await self._look(client, gang, from_start=False)
            await self._account_for(client, gang, unaccounted(gang, replace(view, has_opened=True)))
        return True

    async def revoke(self, uid: RunUid, incarnation: Incarnation) -> bool | None:
        """See `StoreControl`."""
        client = self._connected()
        key = (uid, incarnation.epoch)
        if not self._trust.is_believed(key, client.instance):
            return None
        try:
            has_passed = await client.revoke(uid, incarnation.epoch, incarnation.rank, incarnation.token)
        except FencedError:
            return None
        if not has_passed:
            self._trust.gave_up(incarnation)
        return has_passed

    async def expire(self, uid: RunUid, incarnation: Incarnation) -> bool:
        """See `StoreControl`."""
        is_over = await self._expire(self._connected(), incarnation)
        if is_over:
            self._trust.heard(LeaseGone(incarnation=incarnation))
        return is_over

    async def _expire(self, client: StoreClient, incarnation: Incarnation) -> bool:
        me = incarnation
        terms = {"ttl_s": self._lease_ttl_s, "guard_s": self._lease_guard_s}
        return await client.expire(me.run_uid, me.epoch, me.rank, me.token, **terms)

    async def admit(
        self, uid: RunUid, incarnation: Incarnation, *, instead_of: IncarnationToken, alive_within_s: float
    ) -> bool:
        """See `StoreControl`. RendezvousError (retryable) while the lease of the one before is not over, or somebody's
        life is not known."""
        me = incarnation
        try:
            is_admitted = await self._connected().admit(
                uid, me.epoch, me.rank, me.token, instead_of=instead_of, alive_within_s=alive_within_s
            )
        except (FencedError, ConflictError) as error:
            _log.warning("rank %s cannot start again alone: %s", me.rank, error)
            return False
        if not is_admitted:
            raise RendezvousError(
                f"The lease of rank {me.rank}'s life before is not over yet, or not every rank has shown that it lives."
            )
        return True

    async def forget(self, uid: RunUid, epoch: Epoch) -> None:
        """See `StoreControl`."""
        await self._connected().drop_gang(uid, epoch)
        self._trust.forget(uid, epoch)

    def _connected(self) -> StoreClient:
        if self._client is None or not self._client.is_connected:
            raise TransportError("The rendezvous store cannot be reached now.")
        return self._client

    def _live_gang(self, uid: RunUid, epoch: Epoch) -> Gang | None:
        assert self._events is not None, "connected"
        found = (gang for gang in self._events.live_gangs() if gang.uid == uid and gang.epoch == epoch)
        return next(found, None)

    # ---- keeping the line -------------------------------------------------------------------------

    async def _keep(self) -> None:
        pause_s = RECONNECT_FIRST_S
        while True:
            self._lost.clear()
            try:
                self._client = await StoreClient.connect(
                    self._endpoint,
                    timeout_s=CONNECT_LIMIT_S,
                    on_push=self._on_push,
                    on_lost=lambda _: self._lost.set(),
                )
                await self._catch_up(self._client)
            except Exception as error:  # noqa: BLE001 - the guard: without this line no gang would ever go on
                _log.warning(
                    "the store cannot be reached, trying again in %.2f s: %s",
                    pause_s,
                    error,
                    exc_info=None if isinstance(error, MeshError | asyncio.QueueFull) else error,
                )
                if self._client is not None:
                    self._client.abort()
                await asyncio.sleep(pause_s)
                pause_s = min(RECONNECT_MAX_S, pause_s * 2)
                continue
            pause_s = RECONNECT_FIRST_S
            self._note_instance(self._client.instance)
            await self._lost.wait()
            _log.warning("the line to the store was lost")

    async def _ask_for_life(self) -> None:
        while True:
            asked_at = time.monotonic()
            try:
                await self._connected().ping()
            except MeshError:
                pass  # `_look_for_life` counts what did come
            else:
                self._tell_all(self._pulse.answered(asked_at=asked_at, now=time.monotonic()))
            await asyncio.sleep(PULSE_S)

    async def _look_for_life(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._tell_all(self._pulse.look(time.monotonic()))

    def _tell_all(self, event: StoreSilent | StoreHeard | None) -> None:
        """To every gang whose epoch is under way; one that cannot take it now judges without."""
        assert self._events is not None
        if event is None:
            return
        for gang in self._events.live_gangs():
            with suppress(asyncio.QueueFull):
                self._events.post(gang.uid, event)

    def _note_instance(self, instance: str) -> None:
        before, self._instance = self._instance, instance
        if before not in ("", instance):
            _log.warning("the store was restarted")
            self._on_new_store()

    async def _catch_up(self, client: StoreClient) -> None:
        await client.watch()
        assert self._events is not None
        floors = _floors(await client.gangs())
        for gang in self._events.live_gangs():
            match self._trust.catch_up(gang, client.instance, floors):
                case CatchUp.COMPARE:
                    await self._compare(client, gang, from_start=floors[gang.uid, gang.epoch])
                case CatchUp.TELL:
                    key = (gang.uid, gang.epoch)
                    await self._tell(client, key, gang.plan.nodes, gang, is_first=False)
                case CatchUp.LEAVE:
                    pass

    async def _compare(self, client: StoreClient, gang: Gang, *, from_start: bool) -> None:
        gang = gang.snapshot()  # what comes while the store is asked is newer than its answer
        try:
            view = await self._look(client, gang, from_start=from_start)
        except RendezvousError as error:
            if error.reason is Reason.UNKNOWN_GANG:
                return  # it was forgotten a moment ago
            raise
        for event in missed_events(gang, view):
            self._post(gang.uid, event)
        if (
            gang.barrier_open and not view.has_opened
        ):  # whoever told this store may have died before it had closed it
            with suppress(FencedError):
                await client.close_barrier(gang.uid, gang.epoch)
        await self._account_for(client, gang, unaccounted(gang, view))

    async def _look(self, client: StoreClient, gang: Gang, *, from_start: bool) -> StoreView:
        snapshot = await client.snapshot(gang.uid)
        start = [barrier for barrier in snapshot.barriers if barrier.name == ms.START_BARRIER]
        return StoreView(
            epoch=snapshot.epoch,
            holders=frozenset((lease.rank, lease.token) for lease in snapshot.leases),
            unconnected=frozenset(
                (lease.rank, lease.token) for lease in snapshot.leases if not lease.connected
            ),
            has_opened=any(b.is_open for b in start),
            tokens=next((b.tokens for b in start), ()),
            from_start=from_start,
        )

    async def _tell(
        self, client: StoreClient, key: EpochKey, size: int, gang: Gang | None, *, is_first: bool
    ) -> None:
        """A store that does not know the epoch hears of it, and of every lease that there must be."""
        uid, epoch = key
        telling = self._trust.telling(key, gang, is_first=is_first)
        try:
            from_start = await client.set_floor(
                uid, epoch, size, is_first=telling.is_first, revoked=telling.revoked
            )
            if telling.has_opened:
                await client.close_barrier(uid, epoch)
        except FencedError:
            return  # the gang has gone on meanwhile
        self._trust.learn(key, client.instance, from_start=from_start)
        if not from_start and gang is not None:
            members = members_with_lease(gang, has_opened=gang.barrier_open)
            await self._account_for(client, gang, members)

    async def _account_for(self, client: StoreClient, gang: Gang, members: list[MemberRecord]) -> None:
        """Gives each of them a lease, unless it has taken its own again or has given it back; or lets it run out."""
        for member in members:
            me = member.incarnation
            try:
                if member.is_expiring:
                    is_over = await self._expire(client, me)
                else:
                    is_over = not await self._grant(client, me)
            except (FencedError, ConflictError) as error:
                _log.info("no lease for %s: %s", me, error)
            else:
                if is_over:
                    self._post(gang.uid, LeaseGone(incarnation=me))

    async def _grant(self, client: StoreClient, incarnation: Incarnation) -> bool:
        """False when its lease is over."""
        me = incarnation
        terms = {"ttl_s": self._lease_ttl_s, "guard_s": self._lease_guard_s}
        try:
            await client.grant_lease(me.run_uid, me.epoch, me.rank, me.token, **terms)
        except LeaseLostError:
            return False
        return True

    def _on_push(self, push: ms.Push) -> None:
        try:
            self._pass_on(push)
        except asyncio.QueueFull:
            _log.warning("a gang cannot take what the store says now; the line is made again")
            assert self._client is not None, "pushes come after watch"
            self._client.abort()
            self._lost.set()

    def _pass_on(self, push: ms.Push) -> None:
        match push:
            case ms.BarrierOpened():
                if push.name == ms.START_BARRIER:
                    self._post(push.gang, BarrierOpened(epoch=push.epoch, tokens=push.tokens))
            case ms.LeaseLapsed():
                lapsed = LeaseLapsed(
                    incarnation=_incarnation(push), silent_s=push.silent_s, said_after=self._pulse.said_after
                )
                self._post(push.gang, lapsed)
            case ms.LeaseReleased():
                self._post(push.gang, LeaseGone(incarnation=_incarnation(push)))
            case ms.MemberConnectionLost():
                self._post(push.gang, MemberSuspected(incarnation=_incarnation(push)))

    def _post(self, uid: RunUid, event: GangEvent) -> None:
        """What a store says is remembered before the gang hears of it: that store may be gone by then."""
        assert self._events is not None, "started"
        self._trust.heard(event)
        self._events.post(uid, event)


def _incarnation(push: ms.LeaseLapsed | ms.LeaseReleased | ms.MemberConnectionLost) -> Incarnation:
    return Incarnation(run_uid=push.gang, epoch=push.epoch, rank=push.rank, token=push.token)


def _floors(gangs: Iterable[ms.GangFloor]) -> Floors:
    return {(floor.gang, floor.epoch): floor.from_start for floor in gangs}
