"""Two stores for one contract suite, and for whoever needs a store in a test without a socket.

`LinkedStore` is the pure state behind `StoreClient`s that are joined to it in memory: the frames are real, the time is
the test's. `ListeningStore` is the server as it runs. `test_store.py` holds both to the same rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from coordinator.store_actor import StoreServer
from mesh.errors import MeshError
from mesh.plan import Endpoint
from mesh.store import messages as ms
from mesh.store.books import ConnectionId, Output
from mesh.store.client import StoreClient
from mesh.store.limits import TICK_S_MAX, StoreLimits
from mesh.store.protocol import ReplyEncoder, ReplyStream, RequestStream
from mesh.store.state import StoreState

DEADLINE_S = 20.0
ADMIN, MEMBER = "admin-secret", "member-secret"
SECRETS = {ms.Role.ADMIN: ADMIN, ms.Role.MEMBER: MEMBER}

OnPush = Callable[[ms.Push], None]
OnLost = Callable[[MeshError], None]


class StoreUnderTest(Protocol):
    """What the suite needs of a store."""

    async def connect(
        self, role: ms.Role = ms.Role.MEMBER, *, on_push: OnPush | None = None, on_lost: OnLost | None = None
    ) -> StoreClient: ...

    async def until(self, condition: Callable[[], bool]) -> None:
        """Lets time pass until the condition holds; fails after a deadline."""
        ...

    async def stop(self) -> None: ...


class LinkedStore:
    """The pure state, joined to its clients in memory. `now` is its clock; `pass_time` moves it, tick by tick."""

    def __init__(self, *, limits: StoreLimits | None = None) -> None:
        self.state = StoreState(instance="linked", limits=limits or StoreLimits())
        self.now = 1000.0
        self.links: dict[ConnectionId, _Link] = {}
        self.encoder = ReplyEncoder()
        self._next_number = 1
        self.state.tick(self.now)

    async def connect(
        self, role: ms.Role = ms.Role.MEMBER, *, on_push: OnPush | None = None, on_lost: OnLost | None = None
    ) -> StoreClient:
        number = ConnectionId(self._next_number)
        self._next_number += 1
        client = StoreClient(
            Endpoint(host="memory", port=1, secret=SECRETS[role]), on_push=on_push, on_lost=on_lost
        )
        link = self.links[number] = _Link(self, client, number)
        client._made(link)  # type: ignore[arg-type]
        self.deliver(self.state.connected(number, role, hello_id=2**31 - 1))
        client.instance, client.role = self.state.instance, role
        return client

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            for _ in range(5):  # what is on its way arrives before time passes
                await asyncio.sleep(0)
            if condition():
                return
            self.pass_time(TICK_S_MAX / 2)
        raise AssertionError("it did not happen in 100 simulated seconds")

    def pass_time(self, seconds: float) -> None:
        """A store that is never stalled: it ticks at least as often as it asks for."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK_S_MAX / 2)
            self.deliver(self.state.tick(self.now))

    def deliver(self, outputs: list[Output]) -> None:
        for number, message in outputs:
            if number in self.links:
                self.links[number].answer(self.encoder.encode(message))

    async def stop(self) -> None:
        for link in list(self.links.values()):
            link.close()
        await asyncio.sleep(0)


class _Link:
    """The transport that a linked client believes to have."""

    def __init__(self, store: LinkedStore, client: StoreClient, number: ConnectionId) -> None:
        self._store = store
        self._client = client
        self._number = number
        self._requests = RequestStream(bytes_max=store.state.limits.frame_bytes_max)
        self._replies = ReplyStream()

    def write(self, frame: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._arrived, frame)

    def _arrived(self, frame: bytes) -> None:
        if self._number not in self._store.links:
            return
        for request in self._requests.feed(frame):
            self._store.deliver(self._store.state.handle(request, self._number, self._store.now))

    def answer(self, frame: bytes) -> None:
        messages = [message for message in self._replies.feed(frame) if not isinstance(message, ms.Welcome)]
        asyncio.get_running_loop().call_soon(self._client._received, messages)

    def close(self) -> None:
        if self._store.links.pop(self._number, None) is not None:
            self._store.deliver(self._store.state.disconnected(self._number))
            asyncio.get_running_loop().call_soon(self._client._ended, None)

    abort = close


class ListeningStore:
    """The real server on a free port of the loopback address."""

    def __init__(
        self, *, limits: StoreLimits | None = None, prefers_local: bool = True, **options: Any
    ) -> None:
        self._prefers_local = prefers_local
        self.server = StoreServer(
            host="127.0.0.1", port=0, admin_secret=ADMIN, member_secret=MEMBER, limits=limits, **options
        )
        self.endpoint = Endpoint(host="127.0.0.1", port=0, secret=MEMBER)
        self._clients: list[StoreClient] = []

    async def start(self) -> ListeningStore:
        address = await self.server.start()
        self.endpoint = replace(self.endpoint, port=address.port)
        return self

    async def connect(
        self, role: ms.Role = ms.Role.MEMBER, *, on_push: OnPush | None = None, on_lost: OnLost | None = None
    ) -> StoreClient:
        endpoint = replace(self.endpoint, secret=SECRETS[role])
        client = await StoreClient.connect(
            endpoint, on_push=on_push, on_lost=on_lost, prefers_local=self._prefers_local
        )
        self._clients.append(client)
        return client

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        for client in self._clients:
            await client.close()
        await self.server.stop("the test is over")
