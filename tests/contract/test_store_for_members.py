"""What a member asks of the store, on the real one and on the fake that its tests use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

import pytest

from coordinator.store_actor import StoreServer
from mesh.errors import AuthenticationError, FencedError, LeaseLostError, RendezvousError
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.plan import Endpoint
from mesh.store.client import StoreClient
from tests.fakes.store import FakeStore

GANG = RunUid("ab" * 8)
EPOCH, OLD = Epoch(3), Epoch(2)
TOKENS = [IncarnationToken("00" * 8), IncarnationToken("11" * 8)]


class Implementation(Protocol):
    endpoint: Endpoint

    async def know_gang(self) -> None: ...


class Real:
    def __init__(self) -> None:
        self.server = StoreServer(host="127.0.0.1", port=0, admin_secret="admin", member_secret="s3cret")

    async def start(self) -> None:
        address = await self.server.start()
        self.endpoint = Endpoint(host="127.0.0.1", port=address.port, secret="s3cret")

    async def know_gang(self) -> None:
        admin = await StoreClient.connect(replace(self.endpoint, secret="admin"))
        await admin.set_floor(GANG, EPOCH, 2)
        await admin.close()

    async def stop(self) -> None:
        await self.server.stop("the test is over")


class Fake:
    def __init__(self) -> None:
        self.store = FakeStore(size=2, floor=None)

    async def start(self) -> None:
        await self.store.start()
        self.endpoint = self.store.endpoint

    async def know_gang(self) -> None:
        self.store.floor = EPOCH

    async def stop(self) -> None:
        await self.store.stop()


@pytest.fixture(params=[Real, Fake])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Implementation]:
    store = request.param()
    await store.start()
    yield store
    await store.stop()


@pytest.fixture
async def client(store: Implementation) -> AsyncIterator[StoreClient]:
    client = await StoreClient.connect(store.endpoint)
    yield client
    await client.close()


async def grant(client: StoreClient, rank: int, *, epoch: Epoch = EPOCH) -> None:
    await client.grant_lease(GANG, epoch, Rank(rank), TOKENS[rank], ttl_s=5.0, guard_s=0.5)


async def test_a_wrong_secret_is_refused(store: Implementation) -> None:
    with pytest.raises(AuthenticationError):
        await StoreClient.connect(replace(store.endpoint, secret="wrong"))


async def test_a_gang_that_is_not_known_yet_may_be_later(store: Implementation, client: StoreClient) -> None:
    with pytest.raises(RendezvousError) as caught:
        await grant(client, 0)
    assert caught.value.retryable
    await store.know_gang()
    await grant(client, 0)


async def test_an_older_epoch_is_stale(store: Implementation, client: StoreClient) -> None:
    await store.know_gang()
    with pytest.raises(FencedError):
        await grant(client, 0, epoch=OLD)


async def test_a_grant_is_renewed_by_itself_and_released_twice(
    store: Implementation, client: StoreClient
) -> None:
    await store.know_gang()
    for _ in range(3):
        await grant(client, 0)
    for _ in range(2):
        await client.release_lease(GANG, EPOCH, Rank(0), TOKENS[0])


async def test_nobody_arrives_without_a_lease(store: Implementation, client: StoreClient) -> None:
    await store.know_gang()
    with pytest.raises(LeaseLostError):
        await client.arrive(GANG, EPOCH, Rank(0), TOKENS[0], payload=b"", timeout_s=5.0)


async def test_the_barrier_opens_for_all_at_once_in_rank_order(
    store: Implementation, client: StoreClient
) -> None:
    await store.know_gang()
    for rank in (1, 0):
        await grant(client, rank)
    answers = await asyncio.gather(
        *(
            client.arrive(GANG, EPOCH, Rank(rank), TOKENS[rank], payload=b"%d" % rank, timeout_s=5.0)
            for rank in (1, 0)
        )
    )
    assert answers == [(b"0", b"1"), (b"0", b"1")]
