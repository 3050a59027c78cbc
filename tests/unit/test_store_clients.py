"""Both clients against stores that answer late, wrongly, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest

from mesh.errors import (
    AuthenticationError,
    FencedError,
    LeaseLostError,
    MeshError,
    MeshTimeoutError,
    RemoteProtocolError,
    RendezvousError,
    TransportError,
)
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.store import client as client_module
from mesh.store import messages as ms
from mesh.store.blocking_client import BlockingStoreClient
from mesh.store.client import StoreClient
from mesh.store.protocol import ReplyEncoder, RequestStream
from tests.contract.store_link import ADMIN, ListeningStore

GANG, E1, E2 = RunUid("a" * 16), Epoch(1), Epoch(2)
TOKEN = IncarnationToken("t0")
DEADLINE_S = 20.0
Answer = Callable[[ms.Request], list[bytes]]
encode = ReplyEncoder().encode


class ScriptedStore:
    """Answers the hello, then every request as the script says. Serves on a thread, for both clients."""

    def __init__(self, answer: Answer, *, welcomes: bool = True) -> None:
        self._answer = answer
        self._welcomes = welcomes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(host="127.0.0.1", port=self._listener.getsockname()[1], secret="s")
        self.seen: list[ms.Request] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # closed before anybody came
        stream = RequestStream(bytes_max=1 << 20)
        with connection, contextlib.suppress(ConnectionError):
            while data := connection.recv(65536):
                for request in stream.feed(data):
                    self.seen.append(request)
                    if isinstance(request, ms.Hello) and self._welcomes:
                        connection.sendall(encode(ms.Welcome(request.id, "scripted", ms.Role.MEMBER)))
                        continue
                    for frame in self._answer(request):
                        if not frame:
                            return
                        connection.sendall(frame)

    def close(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection(self._listener.getsockname(), timeout=5):
            pass  # wakes a thread that still waits for its first connection
        self._listener.close()
        self._thread.join(DEADLINE_S)


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedStore]]:
    stores: list[ScriptedStore] = []

    def make(answer: Answer, *, welcomes: bool = True) -> ScriptedStore:
        stores.append(ScriptedStore(answer, welcomes=welcomes))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
async def store() -> AsyncIterator[ListeningStore]:
    found = await ListeningStore().start()
    admin = await found.connect(ms.Role.ADMIN)
    await admin.set_floor(GANG, E1, 1)
    yield found
    await found.stop()


def silent(_request: ms.Request) -> list[bytes]:
    return []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


# ---- connecting ---------------------------------------------------------------------------------------


async def test_nobody_listening_is_a_transport_error_that_names_the_address() -> None:
    endpoint = Endpoint(host="127.0.0.1", port=free_port(), secret="s")
    with pytest.raises(TransportError, match=str(endpoint.port)):
        await StoreClient.connect(endpoint)
    with pytest.raises(TransportError, match=str(endpoint.port)):
        BlockingStoreClient(endpoint)


async def test_a_store_that_never_welcomes_is_a_timeout(scripted: Callable[..., ScriptedStore]) -> None:
    with pytest.raises(MeshTimeoutError):
        await StoreClient.connect(scripted(silent, welcomes=False).endpoint, timeout_s=0.1)
    with pytest.raises(MeshTimeoutError):
        BlockingStoreClient(scripted(silent, welcomes=False).endpoint, timeout_s=0.1)


async def test_a_wrong_secret_is_an_authentication_error_in_both(store: ListeningStore) -> None:
    wrong = replace(store.endpoint, secret="wrong")
    with pytest.raises(AuthenticationError):
        await StoreClient.connect(wrong)
    with pytest.raises(AuthenticationError):
        await asyncio.to_thread(BlockingStoreClient, wrong)


async def test_cancelling_a_connect_leaves_no_connection(scripted: Callable[..., ScriptedStore]) -> None:
    connecting = asyncio.create_task(StoreClient.connect(scripted(silent, welcomes=False).endpoint))
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting


# ---- the asyncio client -------------------------------------------------------------------------------


async def test_a_request_without_an_answer_times_out_and_says_which(
    scripted: Callable[..., ScriptedStore],
) -> None:
    client = await StoreClient.connect(scripted(silent).endpoint)
    with pytest.raises(MeshTimeoutError, match="Ping"):
        await client.ping(timeout_s=0.05)
    await client.close()


async def test_a_late_answer_is_not_taken_for_the_next_ones(scripted: Callable[..., ScriptedStore]) -> None:
    held: list[bytes] = []

    def late(request: ms.Request) -> list[bytes]:
        """Holds the first count back until the second is asked for."""
        number = encode(ms.Number(request.id, len(held)))
        held.append(number)
        return [] if len(held) == 1 else held

    client = await StoreClient.connect(scripted(late).endpoint)
    first = asyncio.create_task(client.add(GANG, E1, "n"))
    await asyncio.sleep(0)
    first.cancel()
    assert await client.add(GANG, E1, "n") == 1
    await client.close()


async def test_a_lost_connection_fails_every_call_and_is_told_once(
    scripted: Callable[..., ScriptedStore],
) -> None:
    def hang_up(request: ms.Request) -> list[bytes]:
        return [b""] if isinstance(request, ms.Ping) else []

    lost: list[MeshError] = []
    client = await StoreClient.connect(scripted(hang_up).endpoint, on_lost=lost.append)
    calls = [client.wait(GANG, E1, ["never"], timeout_s=None), client.add(GANG, E1, "n"), client.ping()]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [TransportError] * 3
    assert [type(error) for error in lost] == [TransportError]
    assert not client.is_connected
    with pytest.raises(TransportError):
        await client.ping()
    await client.close()


async def test_garbage_from_the_store_ends_the_connection_as_a_protocol_error(
    scripted: Callable[..., ScriptedStore],
) -> None:
    client = await StoreClient.connect(scripted(lambda _: [b"\xff" * 8]).endpoint)
    with pytest.raises(RemoteProtocolError):
        await client.ping()
    await client.close()


async def test_an_answer_of_the_wrong_kind_is_a_protocol_error(
    scripted: Callable[..., ScriptedStore],
) -> None:
    client = await StoreClient.connect(scripted(lambda r: [encode(ms.Number(r.id, 1))]).endpoint)
    with pytest.raises(RemoteProtocolError, match="Number"):
        await client.ping()
    await client.close()


async def test_too_many_requests_under_way_are_a_visible_refusal(
    scripted: Callable[..., ScriptedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REQUESTS_MAX", 3)
    client = await StoreClient.connect(scripted(silent).endpoint)
    waiting = [asyncio.create_task(client.ping()) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(RendezvousError) as caught:
        await client.ping()
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    await client.close()
    assert all(
        isinstance(error, TransportError) for error in await asyncio.gather(*waiting, return_exceptions=True)
    )


async def test_closing_is_no_loss_and_may_be_repeated(store: ListeningStore) -> None:
    lost: list[MeshError] = []
    client = await store.connect(on_lost=lost.append)
    await client.close()
    await client.close()
    assert lost == []


async def test_ids_are_used_again_and_a_cancelled_wait_gives_its_own_back(store: ListeningStore) -> None:
    client = await store.connect()
    for _ in range(50):
        waiting = asyncio.create_task(client.wait(GANG, E1, ["never"], timeout_s=None))
        await asyncio.sleep(0)
        waiting.cancel()
        await client.ping()
    assert next(client._fresh_ids) < 10
    assert store.server.health()["waiters"] == 0


# ---- the blocking client ------------------------------------------------------------------------------


async def test_the_blocking_client_does_what_the_other_one_does(store: ListeningStore) -> None:
    def live() -> None:
        client = BlockingStoreClient(store.endpoint)
        client.ping()
        client.set(GANG, E1, "key", b"value")
        assert client.get(GANG, E1, "key") == b"value"
        assert [client.add(GANG, E1, "n", 5) for _ in range(3)] == [5, 10, 15]
        assert client.compare_and_set(GANG, E1, "key", expected=b"value", value=b"new").swapped
        assert client.delete(GANG, E1, "key")
        client.wait(GANG, E1, ["n"], timeout_s=DEADLINE_S)
        for _ in range(3):
            client.grant_lease(GANG, E1, Rank(0), TOKEN, ttl_s=30.0, guard_s=0.3)
        assert client.arrive(GANG, E1, Rank(0), TOKEN, payload=b"me", timeout_s=DEADLINE_S) == (b"me",)
        client.release_lease(GANG, E1, Rank(0), TOKEN)
        large = bytes(range(256)) * 4000
        client.set(GANG, E1, "large", large)
        assert client.get(GANG, E1, "large") == large
        assert client.instance == store.server.state.instance
        client.close()
        client.close()

    await asyncio.to_thread(live)


async def test_a_refusal_is_raised_and_the_blocking_client_goes_on(store: ListeningStore) -> None:
    def live() -> None:
        client = BlockingStoreClient(store.endpoint)
        with pytest.raises(RendezvousError):
            client.get(GANG, E1, "nothing")
        with pytest.raises(RendezvousError):
            client.add(GANG, E2, "n", 1)
        with pytest.raises(LeaseLostError):
            client.arrive(GANG, E1, Rank(0), TOKEN, payload=b"", timeout_s=1.0)
        with pytest.raises(RendezvousError):
            client.set(GANG, E1, "key", bytes(2 * 1024 * 1024))
        client.grant_lease(GANG, E1, Rank(0), TOKEN, ttl_s=30.0, guard_s=0.3)
        client.close()

    await asyncio.to_thread(live)


async def test_a_blocking_waiter_hears_of_a_lifted_floor(store: ListeningStore) -> None:
    client = await asyncio.to_thread(BlockingStoreClient, store.endpoint)
    waiting = asyncio.create_task(
        asyncio.to_thread(lambda: client.wait(GANG, E1, ["never"], timeout_s=DEADLINE_S))
    )
    await store.until(lambda: store.server.health()["waiters"] == 1)
    admin = await StoreClient.connect(replace(store.endpoint, secret=ADMIN))
    await admin.set_floor(GANG, E2, 1)
    with pytest.raises(FencedError):
        await waiting
    client.close()
    await admin.close()


async def test_after_a_limit_the_blocking_client_is_closed_so_no_late_answer_is_mistaken(
    store: ListeningStore,
) -> None:
    def live() -> None:
        client = BlockingStoreClient(store.endpoint)
        with pytest.raises(MeshTimeoutError):
            client.wait(GANG, E1, ["never"], timeout_s=0.05)
        assert not client.is_connected
        with pytest.raises(TransportError):
            client.ping()

    await asyncio.to_thread(live)
    await store.until(lambda: store.server.health()["waiters"] == 0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([b""], TransportError),
        ([b"\xff" * 8], RemoteProtocolError),
        ([encode(ms.Value(1, b"x"))], RemoteProtocolError),
        ([encode(ms.Done(1))[:5]], MeshTimeoutError),
    ],
)
def test_whatever_is_no_answer_closes_the_blocking_client(
    scripted: Callable[..., ScriptedStore], answer: list[bytes], error: type[MeshError]
) -> None:
    client = BlockingStoreClient(scripted(lambda _: answer).endpoint, timeout_s=0.2)
    with pytest.raises(error):
        client.add(GANG, E1, "n", 1)
    assert not client.is_connected
