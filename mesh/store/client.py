"""The store's asyncio client: members, the coordinator, tools.

Rules of this file:
1. Every wait has a limit, and the error says which wait it was.
2. Requests are pipelined: each has an id, answers come in any order. An id is free again when its answer is there.
3. Cancelling a call leaves the connection whole. A call that may wait for long is cancelled at the store as well.
4. When the connection is lost every call on it fails with TransportError, and the client stays closed: whether to
   connect again is the caller's decision (`instance` then says whether the store is still the same one).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from math import inf
from typing import TypeVar, cast

from mesh.errors import (
    LocalProtocolError,
    MeshError,
    MeshTimeoutError,
    RemoteProtocolError,
    RendezvousError,
    TransportError,
)
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.local import connect_locally
from mesh.store.protocol import ID_MAX, ReplyStream, encode_request, error_of

REQUEST_LIMIT_S = 5.0
"""How long the store may take for what it answers at once."""
REQUESTS_MAX = 4096
"""Requests of one client that have no answer yet."""
LIMIT_CHECK_S = 0.02
"""How exactly limits are kept: one timer looks after all requests of a client."""

R = TypeVar("R")
_Waiting = tuple[asyncio.Future[ms.Reply], float | None, ms.Request]


class StoreClient:
    """One connection to the store. Make it with `connect`.

    Args of `connect`:
        on_push: called on the loop for every push, after `watch`.
        on_lost: called once when the connection is lost other than by `close`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        on_push: Callable[[ms.Push], None] | None = None,
        on_lost: Callable[[MeshError], None] | None = None,
    ) -> None:
        self.instance = ""
        """Which life of the store this is connected to."""
        self.role = ms.Role.MEMBER
        self._endpoint = endpoint
        self._on_push = on_push
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._free_ids: list[int] = []
        self._fresh_ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._lost: MeshError | None = None
        self._closed = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        endpoint: Endpoint,
        *,
        timeout_s: float = REQUEST_LIMIT_S,
        on_push: Callable[[ms.Push], None] | None = None,
        on_lost: Callable[[MeshError], None] | None = None,
        prefers_local: bool = True,
    ) -> StoreClient:
        """Connects and says hello; `prefers_local` takes the short way to a store on this machine.

        Raises:
            TransportError: nobody listens there, or the connection broke.
            AuthenticationError: the secret is wrong.
            MeshTimeoutError: not done within `timeout_s`.
        """
        client = cls(endpoint, on_push=on_push, on_lost=None)
        try:
            async with asyncio.timeout(timeout_s):
                await client._open(prefers_local)
        except TimeoutError:
            client.abort()
            raise MeshTimeoutError(
                f"The rendezvous store at {endpoint.host} port {endpoint.port} "
                f"did not answer within {timeout_s:g} s.",
                timeout_s=timeout_s,
            ) from None
        except BaseException:
            client.abort()
            raise
        client._on_lost = on_lost
        return client

    @property
    def is_connected(self) -> bool:
        return self._transport is not None and self._lost is None

    async def close(self) -> None:
        """Ends the connection; what still waits fails. Idempotent."""
        self._on_lost = None
        if self._transport is None:
            return
        self._fail(TransportError("This connection to the rendezvous store was closed."))
        self._transport.close()
        try:
            async with asyncio.timeout(1.0):
                await self._closed.wait()
        except TimeoutError:
            self._transport.abort()

    def abort(self) -> None:
        """Like `close`, without waiting for anything."""
        self._on_lost = None
        if self._transport is not None:
            self._fail(TransportError("This connection to the rendezvous store was closed."))
            self._transport.abort()

    # ---- admin ------------------------------------------------------------------------------------

    async def set_floor(
        self,
        gang: RunUid,
        epoch: Epoch,
        size: int,
        *,
        is_first: bool = False,
        revoked: ms.Revocations = (),
    ) -> bool:
        """Only this epoch counts from now on. FencedError when the store knows a higher one.

        Returns whether the store has seen all of the epoch. One that knows it already takes no notice of `is_first`
        and `revoked` (see `ms.SetFloor`).
        """
        request = ms.SetFloor(0, gang, epoch, size, is_first, revoked)
        return bool((await self._ask(request, ms.Number)).value)

    async def drop_gang(self, gang: RunUid, epoch: Epoch) -> bool:
        """Forgets the gang unless it is in a later epoch; returns whether there was something to forget."""
        return bool((await self._ask(ms.DropGang(0, gang, epoch), ms.Number)).value)

    async def close_barrier(self, gang: RunUid, epoch: Epoch, *, name: str = ms.START_BARRIER) -> bool:
        """It opens no more; returns whether it had opened before."""
        return bool((await self._ask(ms.CloseBarrier(0, gang, epoch, name), ms.Number)).value)

    async def revoke(self, gang: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> bool:
        """Gives the incarnation up for this epoch; returns whether the start barrier had opened with it.

        If so nothing was changed.
        """
        return bool((await self._ask(ms.Revoke(0, gang, epoch, rank, token), ms.Number)).value)

    async def admit(
        self,
        gang: RunUid,
        epoch: Epoch,
        rank: Rank,
        token: IncarnationToken,
        *,
        instead_of: IncarnationToken,
        alive_within_s: float = inf,
    ) -> bool:
        """Lets the incarnation through the open start barrier in place of one whose life is over.

        False when the lease of `instead_of` is not over yet, or somebody else's life since then is not known (see
        `messages.Admit`). ConflictError unless this store has opened the barrier, and the rank's place there is
        `instead_of`'s.
        """
        request = ms.Admit(0, gang, epoch, rank, token, instead_of, alive_within_s)
        return bool((await self._ask(request, ms.Number)).value)

    async def expire(
        self,
        gang: RunUid,
        epoch: Epoch,
        rank: Rank,
        token: IncarnationToken,
        *,
        ttl_s: float,
        guard_s: float,
    ) -> bool:
        """Its lease is renewed no more (see `ms.Expire`); returns whether it is over already."""
        request = ms.Expire(0, gang, epoch, rank, token, ttl_s, guard_s)
        return bool((await self._ask(request, ms.Number)).value)

    async def watch(self) -> None:
        """From now on `on_push` hears of every lease and barrier. What was before: `snapshot`."""
        await self._ask(ms.Watch(0), ms.Done)

    async def gangs(self) -> tuple[ms.GangFloor, ...]:
        """Every gang that the store knows, and its floor."""
        return (await self._ask(ms.Gangs(0), ms.GangList)).gangs

    async def snapshot(self, gang: RunUid) -> ms.GangSnapshot:
        """Leases and barriers of one gang. RendezvousError when the store does not know it."""
        return await self._ask(ms.Snapshot(0, gang), ms.GangSnapshot)

    # ---- leases and barriers ----------------------------------------------------------------------

    async def grant_lease(
        self,
        gang: RunUid,
        epoch: Epoch,
        rank: Rank,
        token: IncarnationToken,
        *,
        ttl_s: float,
        guard_s: float,
        timeout_s: float = REQUEST_LIMIT_S,
    ) -> None:
        """Takes or renews the lease. The caller counts its ttl from before this call."""
        request = ms.GrantLease(0, gang, epoch, rank, token, ttl_s, guard_s)
        await self._ask(request, ms.Done, timeout_s=timeout_s)

    async def release_lease(self, gang: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> None:
        """Nothing of the incarnation runs any more."""
        await self._ask(ms.ReleaseLease(0, gang, epoch, rank, token), ms.Done)

    async def arrive(
        self,
        gang: RunUid,
        epoch: Epoch,
        rank: Rank,
        token: IncarnationToken,
        *,
        payload: bytes,
        timeout_s: float | None,
        name: str = ms.START_BARRIER,
    ) -> tuple[bytes, ...]:
        """Waits until every rank has arrived (None: for ever); returns all payloads in rank order.

        Raises:
            FencedError: the gang has gone on to another epoch.
            LeaseLostError: the token holds no lease.
            ConflictError: the rank is another incarnation, or the barrier was closed (reason Cancelled).
        """
        request = ms.Arrive(0, gang, epoch, rank, token, name, payload)
        return (await self._ask(request, ms.Opened, timeout_s=timeout_s)).payloads

    # ---- keys -------------------------------------------------------------------------------------

    async def get(self, gang: RunUid, epoch: Epoch, key: str) -> bytes:
        """RendezvousError (KeyNotFound) when it is not there."""
        return (await self._ask(ms.Get(0, gang, epoch, key), ms.Value)).value

    async def set(self, gang: RunUid, epoch: Epoch, key: str, value: bytes) -> None:
        """Returns when it is set."""
        await self._ask(ms.Set(0, value, gang, epoch, key), ms.Done)

    async def add(self, gang: RunUid, epoch: Epoch, key: str, amount: int = 1) -> int:
        """The new count."""
        return (await self._ask(ms.Add(0, gang, epoch, key, amount), ms.Number)).value

    async def wait(self, gang: RunUid, epoch: Epoch, keys: Iterable[str], *, timeout_s: float | None) -> None:
        """Until all keys are there."""
        await self._ask(ms.Wait(0, gang, epoch, tuple(keys)), ms.Done, timeout_s=timeout_s)

    async def compare_and_set(
        self, gang: RunUid, epoch: Epoch, key: str, *, expected: bytes | None, value: bytes
    ) -> ms.Compared:
        """Sets when the present value is `expected` (None: when there is none)."""
        return await self._ask(ms.CompareAndSet(0, gang, epoch, key, expected, value), ms.Compared)

    async def delete(self, gang: RunUid, epoch: Epoch, key: str) -> bool:
        """Whether it was there."""
        return bool((await self._ask(ms.Delete(0, gang, epoch, key), ms.Number)).value)

    async def ping(self, *, timeout_s: float = REQUEST_LIMIT_S) -> None:
        """Returns when the store has answered."""
        await self._ask(ms.Ping(0), ms.Done, timeout_s=timeout_s)

    # ---- inside -----------------------------------------------------------------------------------

    async def _open(self, prefers_local: bool) -> None:
        endpoint = self._endpoint
        loop = asyncio.get_running_loop()
        may_be_short = prefers_local and endpoint.source is None
        local = connect_locally(endpoint.host, endpoint.port) if may_be_short else None
        source = None if endpoint.source is None else (endpoint.source, 0)
        try:
            if local is None:
                await loop.create_connection(
                    lambda: _Wire(self), endpoint.host, endpoint.port, local_addr=source
                )
            else:
                await loop.create_unix_connection(lambda: _Wire(self), sock=local)
        except OSError as error:
            raise TransportError(
                f"The rendezvous store at {endpoint.host} port {endpoint.port} cannot be reached: "
                f"{error.strerror or error}."
            ) from error
        hello = ms.Hello(0, endpoint.secret, ms.PROTOCOL_VERSION)
        welcome = await self._ask(hello, ms.Welcome, timeout_s=None)
        self.instance, self.role = welcome.instance, welcome.role

    async def _ask(
        self, request: ms.Request, kind: type[R], *, timeout_s: float | None = REQUEST_LIMIT_S
    ) -> R:
        """Sends it under a fresh id and waits for its answer. A refusal is raised."""
        if self._lost is not None or self._transport is None:
            raise self._lost or TransportError("This client is not connected to the rendezvous store.")
        if len(self._waiting) >= REQUESTS_MAX:
            raise RendezvousError(
                f"This client has {REQUESTS_MAX} requests without an answer; it sends no more.",
                reason=Reason.LIMIT_EXCEEDED,
            )
        loop = asyncio.get_running_loop()
        identifier = self._free_ids.pop() if self._free_ids else next(self._fresh_ids)
        if identifier > ID_MAX:
            raise LocalProtocolError("This client has used up its request numbers.")
        numbered = request._replace(id=identifier)
        future: asyncio.Future[ms.Reply] = loop.create_future()
        limit_at = None if timeout_s is None else loop.time() + timeout_s
        try:
            frame = encode_request(numbered)
        except LocalProtocolError:
            self._free_ids.append(identifier)
            raise
        self._waiting[identifier] = (future, limit_at, numbered)
        self._transport.write(frame)
        if limit_at is not None and self._timer is None:
            self._timer = loop.call_later(LIMIT_CHECK_S, self._check_limits)
        try:
            reply = await future
        except asyncio.CancelledError:
            self._abandon(identifier)
            raise
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, ms.Refused):
            raise error_of(reply)
        raise RemoteProtocolError(f"The store answered {type(request).__name__} with {type(reply).__name__}.")

    def _abandon(self, identifier: int) -> None:
        """Nobody waits for this answer any more. The id stays taken until the store has spoken its last on it."""
        waiting = self._waiting.get(identifier)
        if waiting is None or not isinstance(waiting[2], ms.DEFERRED) or self._transport is None:
            return
        cancel_id = self._free_ids.pop() if self._free_ids else next(self._fresh_ids)
        done: asyncio.Future[ms.Reply] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda _: self._forget(identifier))
        cancel = ms.Cancel(cancel_id, identifier)
        self._waiting[cancel_id] = (done, None, cancel)
        self._transport.write(encode_request(cancel))

    def _forget(self, identifier: int) -> None:
        if self._waiting.pop(identifier, None) is not None:
            self._free_ids.append(identifier)

    def _check_limits(self) -> None:
        """One timer for all: fails what has taken too long."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        is_needed = False
        for identifier, (future, limit_at, request) in list(self._waiting.items()):
            if limit_at is None or future.done():
                continue
            if now < limit_at:
                is_needed = True
                continue
            what = type(request).__name__
            message = f"The rendezvous store did not answer {what} in time."
            if isinstance(request, ms.DEFERRED):
                message = f"What {what} waits for did not come in time."
            future.set_exception(MeshTimeoutError(message, request=what))
            self._abandon(identifier)
        self._timer = loop.call_later(LIMIT_CHECK_S, self._check_limits) if is_needed else None

    def _fail(self, error: MeshError) -> None:
        """The connection is of no use any more."""
        if self._lost is not None:
            return
        self._lost = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        for future, _, request in waiting.values():
            if future.done():
                continue
            if isinstance(request, ms.Cancel):
                future.cancel()
            else:
                future.set_exception(error)
        if self._on_lost is not None:
            self._on_lost(error)

    # ---- called by the wire -----------------------------------------------------------------------

    def _made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def _received(self, messages: list[ms.Message]) -> None:
        for message in messages:
            if isinstance(message, ms.Push):
                if self._on_push is not None:
                    self._on_push(message)
                continue
            if message.id == 0:
                self._fail(error_of(cast(ms.Refused, message)))
                continue
            waiting = self._waiting.pop(message.id, None)
            if waiting is None:
                continue  # of an abandoned request whose Cancel has been answered: cannot be, but harms nobody
            self._free_ids.append(message.id)
            if not waiting[0].done():
                waiting[0].set_result(message)

    def _ended(self, error: Exception | None) -> None:
        self._closed.set()
        self._fail(
            error
            if isinstance(error, MeshError)
            else TransportError(
                f"The connection to the rendezvous store was lost: {error or 'it was closed'}."
            )
        )


class _Wire(asyncio.Protocol):
    """The loop's side of a client."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._stream = ReplyStream()
        self._garbage: RemoteProtocolError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client._made(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._stream.feed(data)
        except RemoteProtocolError as error:
            self._garbage = error
            self._transport.abort()
            return
        self._client._received(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client._ended(self._garbage or exc)
