"""A member's wait at the barrier, over a connection that somebody in between forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from agents import barrier
from agents.core.events import Arrival
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.messages import JoinOrder
from mesh.plan import Endpoint, RunPlan
from mesh.store import messages as ms
from tests.contract.store_link import MEMBER, ListeningStore

UID, EPOCH = RunUid("a" * 16), Epoch(1)
LIMIT_S = 20.0


class Middlebox:
    """Between members and the store. What it has forgotten it drops, without a word to anybody."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._known: set[int] = set()
        self._connections = 0
        self.endpoint = Endpoint(host="127.0.0.1", port=0, secret=MEMBER)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.endpoint = Endpoint(host="127.0.0.1", port=port, secret=MEMBER)

    def forget_all(self) -> None:
        self._known.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._connections += 1
        number = self._connections
        self._known.add(number)
        self._writers += [writer, far_writer]
        for one, other in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(number, one, other))
            self._tasks.add(task)

    async def _carry(self, number: int, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if number in self._known:
                    target.write(data)

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)
        await self._server.wait_closed()


@pytest.fixture
async def store() -> AsyncIterator[ListeningStore]:
    store = await ListeningStore().start()
    yield store
    await store.stop()
    await store.server.stop("the test is over")


@pytest.fixture
async def middlebox(store: ListeningStore) -> AsyncIterator[Middlebox]:
    middlebox = Middlebox(store.endpoint.port)
    await middlebox.start()
    yield middlebox
    await middlebox.stop()


def order(endpoint: Endpoint) -> JoinOrder:
    me = Incarnation(run_uid=UID, epoch=EPOCH, rank=Rank(0), token=IncarnationToken("t0"))
    return JoinOrder(
        incarnation=me,
        plan=RunPlan(name=RunName("job"), command=("true",), nodes=2),
        machine=MachineName("m0"),
        store=endpoint,
        logs=endpoint,
    )


async def test_a_wait_that_a_middlebox_has_forgotten_is_taken_up_over_another_connection(
    store: ListeningStore, middlebox: Middlebox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 14: it waits for a slow machine for minutes, and says nothing meanwhile."""
    monkeypatch.setattr(barrier, "ALIVE_S", 0.05)
    monkeypatch.setattr(barrier, "ALIVE_LIMIT_S", 0.3)
    admin = await store.connect(ms.Role.ADMIN)
    await admin.set_floor(UID, EPOCH, 2)
    leases = await store.connect()
    for rank in (Rank(0), Rank(1)):
        await leases.grant_lease(UID, EPOCH, rank, IncarnationToken(f"t{rank}"), ttl_s=60.0, guard_s=0.3)
    waiting = asyncio.create_task(
        barrier.arrive(order(middlebox.endpoint), Arrival(address="a", master_port=1))
    )

    async def until_arrived() -> None:
        while (await admin.snapshot(UID)).barriers == () or not (await admin.snapshot(UID)).barriers[
            0
        ].arrived:
            await asyncio.sleep(0.005)

    async with asyncio.timeout(LIMIT_S):
        await until_arrived()
        middlebox.forget_all()
        slow = await store.connect()
        payload = barrier.msgpack.packb(Arrival(address="b", master_port=0).to_payload())
        arriving = slow.arrive(UID, EPOCH, Rank(1), IncarnationToken("t1"), payload=payload, timeout_s=None)
        assert len(await arriving) == 2, "the store has opened, and its word does not get through"
        assert [arrival.address for arrival in await waiting] == ["a", "b"]
