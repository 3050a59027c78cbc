"""The store's listener against peers that are slow, silent, many, or say the wrong thing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import uvloop

from coordinator.store_actor import StoreServer
from mesh.errors import AuthenticationError, DeploymentError, RendezvousError, TransportError
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.store import local
from mesh.store import messages as ms
from mesh.store.books import Output
from mesh.store.client import StoreClient
from mesh.store.limits import StoreLimits
from mesh.store.protocol import ReplyStream, encode_request
from tests.contract.store_link import ADMIN, MEMBER, ListeningStore

GANG, E1 = RunUid("a" * 16), Epoch(1)
DEADLINE_S = 20.0
Starter = Callable[..., object]


@pytest.fixture
async def start() -> AsyncIterator[Starter]:
    """Starts a store with the limits given; stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def starter(**limits: float) -> ListeningStore:
            store = await ListeningStore(limits=StoreLimits(**limits)).start()  # type: ignore[arg-type]
            stack.push_async_callback(store.stop)
            return store

        yield starter


class Peer:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.stream = ReplyStream()

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    async def message(self) -> ms.Message:
        async with asyncio.timeout(DEADLINE_S):
            while not (messages := self.stream.feed(await self.reader.read(65536))):
                pass
        return messages[0]

    async def closed(self) -> None:
        """Until the store has closed it."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass


@contextlib.asynccontextmanager
async def peer(store: ListeningStore, *first: bytes) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", store.endpoint.port)
    writer.write(b"".join(first))
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def hello(secret: str = MEMBER, *, version: int = ms.PROTOCOL_VERSION) -> bytes:
    return encode_request(ms.Hello(1, secret, version))


# ---- the door -----------------------------------------------------------------------------------------


async def test_a_wrong_secret_is_told_so_cut_and_counted(start: Starter) -> None:
    store = await start()
    for secret in ("", "wrong", MEMBER + "x", MEMBER[:-1]):
        with pytest.raises(AuthenticationError):
            await StoreClient.connect(replace(store.endpoint, secret=secret))
    assert store.server.counts["wrong secret"] == 4
    await store.until(lambda: store.server.health()["connections"] == 0)


async def test_each_secret_opens_its_own_role(start: Starter) -> None:
    store = await start()
    for secret, role in ((ADMIN, ms.Role.ADMIN), (MEMBER, ms.Role.MEMBER)):
        client = await StoreClient.connect(replace(store.endpoint, secret=secret))
        assert (client.role, client.instance) == (role, store.server.state.instance)
        await client.close()


async def test_nothing_is_answered_before_hello(start: Starter) -> None:
    store = await start()
    async with peer(store, encode_request(ms.Gangs(5)), hello(ADMIN)) as stranger:
        refused = await stranger.message()
        assert isinstance(refused, ms.Refused)
        assert (refused.id, refused.reason) == (5, Reason.UNAUTHENTICATED)
        await stranger.closed()
    assert store.server.counts["no hello"] == 1


async def test_another_version_is_told_which_one_is_spoken(start: Starter) -> None:
    store = await start()
    async with peer(store, hello(version=99)) as stranger:
        refused = await stranger.message()
        assert isinstance(refused, ms.Refused)
        assert refused.reason is Reason.PROTOCOL
        await stranger.closed()


async def test_who_says_nothing_is_cut_after_the_limit(start: Starter) -> None:
    store = await start(hello_limit_s=0.1)
    async with peer(store) as silent, peer(store, hello()[:10]) as slow:
        await silent.closed()
        await slow.closed()
    assert store.server.counts["no hello"] == 2


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x01\xc1", b"\xff" * 100])
@pytest.mark.parametrize("first", [b"", hello()], ids=["before hello", "after hello"])
async def test_garbage_costs_its_own_connection_and_nobody_elses(
    start: Starter, first: bytes, garbage: bytes
) -> None:
    store = await start()
    bystander = await store.connect()
    async with peer(store, first) as stranger:
        if first:
            assert isinstance(await stranger.message(), ms.Welcome)
        stranger.send(garbage)
        await stranger.closed()
    assert store.server.counts["garbage"] == 1
    await bystander.ping()


async def test_a_large_frame_is_refused_before_hello_and_taken_after_it(start: Starter) -> None:
    store = await start()
    async with peer(store, struct.pack(">I", 5000)) as stranger:
        await stranger.closed()
    assert store.server.counts["garbage"] == 1
    admin = await store.connect(ms.Role.ADMIN)
    await admin.set_floor(GANG, E1, 1)
    await admin.set(GANG, E1, "large", bytes(1024 * 1024))
    assert await admin.get(GANG, E1, "large") == bytes(1024 * 1024)


async def test_requests_sent_together_with_the_hello_are_answered_after_it(start: Starter) -> None:
    store = await start()
    frames = [hello(), *(encode_request(ms.Ping(number)) for number in (2, 3))]
    async with peer(store, *frames) as eager:
        received: list[ms.Message] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(received) < 3:
                received += eager.stream.feed(await eager.reader.read(65536))
    assert [message.id for message in received] == [1, 2, 3]  # type: ignore[union-attr]


async def test_a_frame_sent_byte_by_byte_is_understood(start: Starter) -> None:
    store = await start()
    async with peer(store) as slow:
        for byte in hello():
            slow.send(bytes([byte]))
            await slow.writer.drain()
            await asyncio.sleep(0)
        assert isinstance(await slow.message(), ms.Welcome)


async def test_half_a_frame_that_never_ends_is_cut_though_the_peer_was_let_in(start: Starter) -> None:
    store = await start(stalled_limit_s=0.2)
    async with peer(store, hello()) as loris:
        await loris.message()
        loris.send(encode_request(ms.Ping(2))[:-1])
        await loris.closed()
    assert store.server.counts["half frame"] == 1


async def test_the_connection_too_many_is_told_why(start: Starter) -> None:
    store = await start(connections_max=2)
    first, second = await store.connect(), await store.connect()
    with pytest.raises(RendezvousError, match="2") as caught:
        await store.connect()
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    await first.close()
    await store.until(lambda: store.server.health()["connections"] == 1)
    await (await store.connect()).ping()
    await second.ping()


async def test_five_hundred_connections_are_served_alike(start: Starter) -> None:
    store = await start()
    admin = await store.connect(ms.Role.ADMIN)
    await admin.set_floor(GANG, E1, 500)
    clients = [await store.connect() for _ in range(500)]
    payloads = [b"%d" % rank for rank in range(500)]

    async def live(rank: int, client: StoreClient) -> tuple[bytes, ...]:
        token = IncarnationToken(f"t{rank}")
        await client.grant_lease(GANG, E1, Rank(rank), token, ttl_s=60.0, guard_s=0.3)
        return await client.arrive(GANG, E1, Rank(rank), token, payload=payloads[rank], timeout_s=60.0)

    answers = await asyncio.gather(*(live(rank, client) for rank, client in enumerate(clients)))
    assert set(answers) == {tuple(payloads)}


# ---- slow readers -------------------------------------------------------------------------------------


async def flooded(store: ListeningStore, secret: str, *first: ms.Request) -> socket.socket:
    """A socket that has said hello, with a small receive buffer, and that nobody reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", store.endpoint.port))
    await loop.sock_sendall(connection, hello(secret) + b"".join(map(encode_request, first)))
    return connection


async def test_who_asks_for_much_and_reads_nothing_is_not_read_and_then_cut(start: Starter) -> None:
    store = await start(stalled_limit_s=0.2)
    admin = await store.connect(ms.Role.ADMIN)
    await admin.set_floor(GANG, E1, 1)
    await admin.set(GANG, E1, "large", bytes(1024 * 1024))
    connection = await flooded(store, MEMBER, *(ms.Get(n, GANG, E1, "large") for n in range(2, 10)))
    await store.until(lambda: store.server.counts["slow reader"] == 1)
    await admin.ping()
    connection.close()


async def test_short_answers_do_not_overtake_a_long_one_that_the_peer_reads_slowly(start: Starter) -> None:
    """Short ones go straight to the kernel, long ones wait in the transport."""
    store = await start()
    admin = await store.connect(ms.Role.ADMIN)
    await admin.set_floor(GANG, E1, 1)
    await admin.set(GANG, E1, "large", bytes(240 * 1024))
    await admin.add(GANG, E1, "n")
    loop = asyncio.get_running_loop()
    connection = await flooded(store, MEMBER)
    for number in range(2, 120):
        kind = ms.Get(number, GANG, E1, "large") if number % 20 == 2 else ms.Add(number, GANG, E1, "n", 1)
        await loop.sock_sendall(connection, encode_request(kind))
        await admin.ping()  # the store has read it by itself
    stream, heard = ReplyStream(), []
    async with asyncio.timeout(DEADLINE_S):
        while len(heard) < 119:
            heard += [message.id for message in stream.feed(await loop.sock_recv(connection, 65536))]
    assert heard == [1, *range(2, 120)]
    connection.close()


async def test_a_flood_of_requests_in_one_piece_is_cut_at_the_limit_of_unsent_bytes(start: Starter) -> None:
    store = await start(write_buffer_bytes_max=4 * 1024 * 1024)
    admin = await store.connect(ms.Role.ADMIN)
    await admin.set_floor(GANG, E1, 1)
    await admin.set(GANG, E1, "large", bytes(1024 * 1024))
    connection = await flooded(store, MEMBER, *(ms.Get(n, GANG, E1, "large") for n in range(2, 100)))
    await store.until(lambda: store.server.counts["slow reader"] == 1)
    connection.close()


async def test_a_watcher_that_does_not_read_is_cut_and_resyncs_by_snapshot(start: Starter) -> None:
    store = await start(watcher_buffer_bytes_max=300 * 1024)
    admin = await store.connect(ms.Role.ADMIN)
    slow = await flooded(store, ADMIN, ms.Watch(2))
    await store.until(lambda: len(store.server.state.books.watchers) == 1)
    epoch = 0
    async with asyncio.timeout(DEADLINE_S):
        while not store.server.counts["slow reader"]:
            epoch += 1
            await admin.set_floor(GANG, Epoch(epoch), 1)
            for life in range(60):
                token = IncarnationToken(f"{life}".rjust(500, "t"))
                await admin.grant_lease(GANG, Epoch(epoch), Rank(0), token, ttl_s=60.0, guard_s=0.3)
                await admin.release_lease(GANG, Epoch(epoch), Rank(0), token)
    await store.until(lambda: not store.server.state.books.watchers)
    slow.close()
    assert (await admin.snapshot(GANG)).epoch == epoch


# ---- the short way ------------------------------------------------------------------------------------


def family(store: ListeningStore) -> int:
    """Of the one connection that has said hello."""
    (connection,) = store.server.connections.values()
    family: int = connection._transport.get_extra_info("socket").family
    return family


async def test_a_client_on_the_stores_machine_takes_the_short_way(start: Starter) -> None:
    store = await start()
    client = await store.connect()
    assert family(store) == socket.AF_UNIX
    await client.ping()


async def test_a_client_does_not_say_its_secret_to_a_stranger_who_took_the_name(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await start()
    monkeypatch.setattr(local, "_listener_uid", lambda _: 65534)
    client = await store.connect()
    assert family(store) == socket.AF_INET
    await client.ping()


async def test_the_kernel_says_who_listens() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(local.local_name("127.0.0.1", 1))
        listener.listen()
        connection = local.connect_locally("127.0.0.1", 1)
        assert connection is not None
        assert local._listener_uid(connection) == os.geteuid()
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "a.name", ""])
def test_where_nobody_listens_locally_there_is_no_short_way(host: str) -> None:
    assert local.connect_locally(host, 2) is None


async def test_a_store_whose_short_way_is_taken_serves_over_tcp(start: Starter) -> None:
    port = socket.create_server(("127.0.0.1", 0))
    number = port.getsockname()[1]
    port.close()
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(local.local_name("127.0.0.1", number))
        server = StoreServer(host="127.0.0.1", port=number, admin_secret=ADMIN, member_secret=MEMBER)
        address = await server.start()
        client = await StoreClient.connect(Endpoint(host="127.0.0.1", port=address.port, secret=MEMBER))
        await client.ping()
        await client.close()
        await server.stop("done")


# ---- start and stop -----------------------------------------------------------------------------------


async def test_a_taken_port_is_said_by_name() -> None:
    async with asyncio.timeout(DEADLINE_S):
        taken = socket.create_server(("127.0.0.1", 0))
        server = StoreServer(
            host="127.0.0.1", port=taken.getsockname()[1], admin_secret=ADMIN, member_secret=MEMBER
        )
        with pytest.raises(DeploymentError) as caught:
            await server.start()
        assert caught.value.reason is Reason.PORT_TAKEN
        taken.close()


async def test_each_start_is_another_instance() -> None:
    stores = [await ListeningStore().start() for _ in range(2)]
    assert len({store.server.address.instance for store in stores}) == 2
    for store in stores:
        await store.stop()


async def test_stopping_ends_connections_frees_the_port_and_may_be_repeated(start: Starter) -> None:
    store = await start()
    lost: list[object] = []
    client = await store.connect(on_lost=lost.append)
    port = store.server.address.port
    await store.server.stop("once")
    await store.server.stop("twice")
    await store.until(lambda: bool(lost))
    with pytest.raises(TransportError):
        await client.ping()
    again = StoreServer(host="127.0.0.1", port=port, admin_secret=ADMIN, member_secret=MEMBER)
    await again.start()
    await again.stop("done")


def test_it_runs_on_uvloop_as_it_does_in_its_actor() -> None:
    async def live() -> None:
        store = await ListeningStore().start()
        admin = await store.connect(ms.Role.ADMIN)
        await admin.set_floor(GANG, E1, 1)
        assert await asyncio.gather(*(admin.add(GANG, E1, "n") for _ in range(100))) == list(range(1, 101))
        async with peer(store, b"\xff" * 8) as stranger:
            await stranger.closed()
        slow = await flooded(store, MEMBER)
        await store.until(lambda: store.server.health()["connections"] == 2)
        slow.close()
        await store.stop()
        assert store.server.health()["connections"] == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())


async def test_a_store_that_was_stopped_for_a_while_buries_nobody_when_it_goes_on() -> None:
    moved = 0.0

    def clock() -> float:
        return asyncio.get_running_loop().time() + moved

    store = await ListeningStore(clock=clock).start()
    pushes: list[ms.Push] = []
    watcher = await store.connect(ms.Role.ADMIN, on_push=pushes.append)
    await watcher.watch()
    await watcher.set_floor(GANG, E1, 1)
    await watcher.grant_lease(GANG, E1, Rank(0), IncarnationToken("t"), ttl_s=5.0, guard_s=0.1)
    moved = 60.0
    books = store.server.state.books
    await store.until(lambda: (books.last_tick or 0.0) > asyncio.get_running_loop().time() + 59.0)
    await watcher.grant_lease(GANG, E1, Rank(0), IncarnationToken("t"), ttl_s=5.0, guard_s=0.1)
    assert pushes == []
    await store.stop()


async def test_a_tick_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await ListeningStore().start()
    tick = store.server.state.tick
    faults = [RuntimeError("a bug")]

    def fail_once(now: float) -> list[Output]:
        if faults:
            raise faults.pop()
        return tick(now)

    monkeypatch.setattr(store.server.state, "tick", fail_once)
    pushes: list[ms.Push] = []
    watcher = await store.connect(ms.Role.ADMIN, on_push=pushes.append)
    await watcher.watch()
    await watcher.set_floor(GANG, E1, 1)
    await watcher.grant_lease(GANG, E1, Rank(0), IncarnationToken("t"), ttl_s=0.5, guard_s=0.1)
    await store.until(lambda: any(isinstance(push, ms.LeaseLapsed) for push in pushes))
    assert not faults
    await store.stop()
