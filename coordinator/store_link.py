"""The coordinator's line to the rendezvous store: kept up, watched, and brought up to date after every gap.

Rules of this file:
1. What the store pushes is lost while the line is down; after each connect the difference is worked out from a
   snapshot of every gang whose epoch is under way (`coordinator.core.resync`).
2. A store that was restarted knows nothing. It is told the epochs again, and is given a lease for every member that
   must hold one: a living member renews it within a heartbeat, a dead one's lapses and says so.
3. "The barrier never opened" settles members that were never heard of, and "it did not open with this incarnation"
   one, so both are believed only of a store that has seen the epoch from its first moment, by its own word
   (`GangFloor.from_start`; it gets that word from the one who told it as the first). Of another one the answer is
   "it may have": every member then has to be accounted for one by one.
4. An incarnation that was given up stays so: a store that was restarted is told with the epoch itself, before
   anybody can take a lease. Only a certain "it did not pass" counts as given up.
5. Nothing ends the line for good: what the coordinator cannot take now is made up for after the next connect.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from coordinator.core.events import BarrierOpened, GangEvent, LeaseGone, LeaseLapsed, MemberSuspected
from coordinator.core.gang_state import Gang, MemberRecord
from coordinator.core.resync import StoreView, members_with_lease, missed_events
from mesh.errors import (
    ConflictError,
    FencedError,
    LeaseLostError,
    MeshError,
    RendezvousError,
    TransportError,
)
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunUid
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
_Epoch = tuple[RunUid, Epoch]


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
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        lease_ttl_s: float = LEASE_TTL_S,
        lease_guard_s: float = LEASE_GUARD_S,
    ) -> None:
        self._endpoint = endpoint
        self._lease_ttl_s = lease_ttl_s
        self._lease_guard_s = lease_guard_s
        self._client: StoreClient | None = None
        self._events: GangEvents | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._trusted: dict[_Epoch, str] = {}
        """Epochs that a store instance says to have seen from their first moment -> that instance."""
        self._revoked: dict[_Epoch, set[tuple[Rank, IncarnationToken]]] = {}
        """What was given up through this link: the gang hears of it a moment later, and the store may die before."""
        self._told: set[_Epoch] = set()
        """Epochs that this link has tried to open."""

    def start(self, events: GangEvents) -> None:
        """Keeps the line up from now on."""
        self._events = events
        self._task = asyncio.create_task(self._keep(), name="store link")

    async def stop(self) -> None:
        """Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    # ---- StoreControl -----------------------------------------------------------------------------

    async def open_epoch(self, uid: RunUid, epoch: Epoch, size: int, *, is_new: bool) -> None:
        """See `StoreControl`. Raises MeshError (retryable) while the store cannot be reached."""
        client = self._connected()
        key = (uid, epoch)
        is_first_try = key not in self._told
        self._told.add(key)
        gang = self._live_gang(uid, epoch)
        floors = {(g.gang, g.epoch): g.from_start for g in await client.gangs()}
        is_whole = floors.get(key)
        if is_whole is None:
            is_first = is_new and is_first_try
            try:
                is_whole = await client.set_floor(
                    uid, epoch, size, is_first=is_first, revoked=self._given_up(key, gang)
                )
            except FencedError:
                return  # the gang has gone on meanwhile
            if not is_whole and gang is not None:
                await self._account_after_loss(client, gang)
        if is_whole:
            self._trusted[key] = client.instance

    async def close_barrier(self, uid: RunUid, epoch: Epoch) -> bool:
        """See `StoreControl`. True as well when nobody knows any more."""
        client = self._connected()
        try:
            was_open = await client.close_barrier(uid, epoch)
        except FencedError:
            return True
        if was_open or self._is_trusted(client, (uid, epoch)):
            return was_open
        if (gang := self._live_gang(uid, epoch)) is not None:
            await self._account_for(client, gang, members_with_lease(gang, has_opened=True))
        return True

    async def revoke(self, uid: RunUid, incarnation: Incarnation) -> bool:
        """See `StoreControl`. True as well when nobody knows any more: nothing is changed then."""
        client = self._connected()
        key = (uid, incarnation.epoch)
        if not self._is_trusted(client, key):
            return True
        try:
            has_passed = await client.revoke(uid, incarnation.epoch, incarnation.rank, incarnation.token)
        except FencedError:
            return True
        if not has_passed:
            self._revoked.setdefault(key, set()).add((incarnation.rank, incarnation.token))
        return has_passed

    async def forget(self, uid: RunUid, epoch: Epoch) -> None:
        """See `StoreControl`."""
        await self._connected().drop_gang(uid)
        for key in [key for key in self._told if key[0] == uid]:  # earlier epochs too
            self._told.discard(key)
            self._trusted.pop(key, None)
            self._revoked.pop(key, None)

    def _connected(self) -> StoreClient:
        if self._client is None or not self._client.is_connected:
            raise TransportError("The rendezvous store cannot be reached now.")
        return self._client

    def _is_trusted(self, client: StoreClient, key: _Epoch) -> bool:
        """True when what this store has not seen of the epoch has not been."""
        return self._trusted.get(key) == client.instance

    def _given_up(self, key: _Epoch, gang: Gang | None) -> ms.Revocations:
        """Every incarnation of this epoch that may never act again."""
        earlier = (
            [] if gang is None else [m.incarnation for m in gang.attempts if m.incarnation.epoch == key[1]]
        )
        return tuple(sorted({(i.rank, i.token) for i in earlier} | self._revoked.get(key, set())))

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
            await self._lost.wait()
            _log.warning("the line to the store was lost")

    async def _catch_up(self, client: StoreClient) -> None:
        await client.watch()
        assert self._events is not None
        floors = {(g.gang, g.epoch): g.from_start for g in await client.gangs()}
        for gang in self._events.live_gangs():
            key = (gang.uid, gang.epoch)
            if floors.get(key):
                self._trusted[key] = client.instance
            if key in floors:
                await self._compare(client, gang)
            elif key in self._told:
                await self._tell_again(client, gang)

    async def _compare(self, client: StoreClient, gang: Gang) -> None:
        assert self._events is not None
        try:
            snapshot = await client.snapshot(gang.uid)
        except RendezvousError as error:
            if error.reason is Reason.UNKNOWN_GANG:
                return  # it was forgotten a moment ago
            raise
        start = [barrier for barrier in snapshot.barriers if barrier.name == ms.START_BARRIER]
        view = StoreView(
            epoch=snapshot.epoch,
            holders=frozenset((lease.rank, lease.token) for lease in snapshot.leases),
            unconnected=frozenset(
                (lease.rank, lease.token) for lease in snapshot.leases if not lease.connected
            ),
            has_opened=any(b.is_open for b in start),
            tokens=next((b.tokens for b in start), ()),
        )
        for event in missed_events(gang, view):
            self._events.post(gang.uid, event)

    async def _tell_again(self, client: StoreClient, gang: Gang) -> None:
        """The store was restarted (rule 2)."""
        try:
            await client.set_floor(
                gang.uid,
                gang.epoch,
                gang.plan.nodes,
                revoked=self._given_up((gang.uid, gang.epoch), gang),
            )
        except FencedError:
            return  # the gang has gone on meanwhile
        await self._account_after_loss(client, gang)

    async def _account_after_loss(self, client: StoreClient, gang: Gang) -> None:
        """The store has just been told of an epoch that it had forgotten, with every lease of it (rule 2)."""
        await self._account_for(client, gang, members_with_lease(gang, has_opened=gang.barrier_open))

    async def _account_for(self, client: StoreClient, gang: Gang, members: list[MemberRecord]) -> None:
        """Gives each of them a lease, unless it has taken its own again or has given it back."""
        for member in members:
            try:
                await client.grant_lease(
                    gang.uid,
                    gang.epoch,
                    member.rank,
                    member.incarnation.token,
                    ttl_s=self._lease_ttl_s,
                    guard_s=self._lease_guard_s,
                )
            except LeaseLostError:
                assert self._events is not None
                self._events.post(gang.uid, LeaseGone(incarnation=member.incarnation))
            except (FencedError, ConflictError) as error:
                _log.info("no lease for %s: %s", member.incarnation, error)

    def _on_push(self, push: ms.Push) -> None:
        try:
            self._tell(push)
        except asyncio.QueueFull:
            _log.warning("a gang cannot take what the store says now; the line is made again")
            assert self._client is not None, "pushes come after watch"
            self._client.abort()
            self._lost.set()

    def _tell(self, push: ms.Push) -> None:
        assert self._events is not None
        match push:
            case ms.BarrierOpened():
                if push.name == ms.START_BARRIER:
                    self._events.post(push.gang, BarrierOpened(epoch=push.epoch, tokens=push.tokens))
            case ms.LeaseLapsed():
                self._events.post(push.gang, LeaseLapsed(incarnation=_incarnation(push)))
            case ms.LeaseReleased():
                self._events.post(push.gang, LeaseGone(incarnation=_incarnation(push)))
            case ms.MemberConnectionLost():
                self._events.post(push.gang, MemberSuspected(incarnation=_incarnation(push)))


def _incarnation(push: ms.LeaseLapsed | ms.LeaseReleased | ms.MemberConnectionLost) -> Incarnation:
    return Incarnation(run_uid=push.gang, epoch=push.epoch, rank=push.rank, token=push.token)
