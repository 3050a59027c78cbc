"""The rules of the rendezvous store, held by the pure state in memory and by the server over TCP alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mesh.errors import (
    AuthenticationError,
    ConflictError,
    FencedError,
    LeaseLostError,
    MeshError,
    MeshTimeoutError,
    RendezvousError,
)
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.client import StoreClient
from tests.contract.store_link import LinkedStore, ListeningStore, StoreUnderTest

GANG, OTHER = RunUid("a" * 16), RunUid("f" * 16)
E1, E2 = Epoch(1), Epoch(2)
TTL_S, GUARD_S = 0.3, 0.05


@pytest.fixture(params=["pure", "over TCP", "on the same machine"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StoreUnderTest]:
    found: StoreUnderTest
    if request.param == "pure":
        found = LinkedStore()
    else:
        found = await ListeningStore(prefers_local=request.param != "over TCP").start()
    yield found
    await found.stop()


@pytest.fixture
async def admin(store: StoreUnderTest) -> StoreClient:
    client = await store.connect(ms.Role.ADMIN)
    await client.set_floor(GANG, E1, 2)
    return client


def token(rank: int, life: str = "a") -> IncarnationToken:
    return IncarnationToken(f"{life}{rank}")


async def lease(
    client: StoreClient, rank: int, *, life: str = "a", epoch: Epoch = E1, ttl_s: float = 30.0
) -> None:
    await client.grant_lease(GANG, epoch, Rank(rank), token(rank, life), ttl_s=ttl_s, guard_s=GUARD_S)


async def arrive(
    client: StoreClient, rank: int, *, life: str = "a", epoch: Epoch = E1, timeout_s: float | None = 20.0
) -> tuple[bytes, ...]:
    payload = f"payload {rank}".encode()
    return await client.arrive(
        GANG, epoch, Rank(rank), token(rank, life), payload=payload, timeout_s=timeout_s
    )


async def arrived(store: StoreUnderTest, admin: StoreClient, ranks: tuple[int, ...]) -> None:
    """Until exactly these ranks wait at the start barrier."""
    async with asyncio.timeout(20):
        while True:
            barriers = (await admin.snapshot(GANG)).barriers
            if barriers and barriers[0].arrived == ranks:
                return


async def refused(awaitable: object) -> MeshError:
    with pytest.raises(MeshError) as caught:
        await awaitable  # type: ignore[misc]
    return caught.value


# ---- barriers -----------------------------------------------------------------------------------------


async def test_a_barrier_opens_for_all_with_every_payload_in_rank_order(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    first, second = await store.connect(), await store.connect()
    await lease(second, 1)
    late = asyncio.create_task(arrive(second, 1))
    await arrived(store, admin, (1,))
    assert not late.done()
    await lease(first, 0)
    assert await arrive(first, 0) == (b"payload 0", b"payload 1")
    assert await late == (b"payload 0", b"payload 1")


async def test_an_arrival_repeated_after_the_opening_gets_the_same_answer(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await lease(client, 0)
    await lease(client, 1)
    answers = await asyncio.gather(arrive(client, 0), arrive(client, 1))
    again = await store.connect()
    assert [await arrive(again, 1)] == answers[:1]


async def test_an_arrival_repeated_on_a_new_connection_takes_the_old_ones_place(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    old, new, peer = await store.connect(), await store.connect(), await store.connect()
    await lease(old, 0)
    await lease(peer, 1)
    first = asyncio.create_task(arrive(old, 0))
    await arrived(store, admin, (0,))
    second = asyncio.create_task(arrive(new, 0))
    assert isinstance(await refused(first), ConflictError)
    assert await arrive(peer, 1) == await second


async def test_another_incarnation_of_a_rank_is_refused_while_the_first_holds_its_lease(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await lease(client, 0)
    assert isinstance(await refused(lease(client, 0, life="b")), ConflictError)
    assert isinstance(await refused(arrive(client, 0, life="b")), ConflictError)


async def test_nobody_arrives_without_a_lease(store: StoreUnderTest, admin: StoreClient) -> None:
    client = await store.connect()
    assert isinstance(await refused(arrive(client, 0)), LeaseLostError)


async def test_a_member_that_hangs_up_has_not_arrived_and_the_barrier_waits_for_it(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    gone, peer = await store.connect(), await store.connect()
    await lease(peer, 0)
    await lease(peer, 1)
    waiting = asyncio.create_task(arrive(gone, 0))
    await arrived(store, admin, (0,))
    await gone.close()
    assert (await refused(waiting)).retryable
    await arrived(store, admin, ())
    other = asyncio.create_task(arrive(peer, 1))
    await arrived(store, admin, (1,))
    assert await arrive(peer, 0) == await other


async def test_a_cancelled_arrival_is_withdrawn_and_the_connection_stays_whole(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await lease(client, 0)
    waiting = asyncio.create_task(arrive(client, 0))
    await arrived(store, admin, (0,))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await arrived(store, admin, ())
    await client.ping()


async def test_an_arrival_that_takes_too_long_is_withdrawn(store: StoreUnderTest, admin: StoreClient) -> None:
    client = await store.connect()
    await lease(client, 0)
    assert isinstance(await refused(arrive(client, 0, timeout_s=0.05)), MeshTimeoutError)
    await arrived(store, admin, ())


async def test_a_closed_barrier_turns_everybody_away_and_says_that_it_never_opened(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await lease(client, 0)
    await lease(client, 1)
    waiting = asyncio.create_task(arrive(client, 0))
    await arrived(store, admin, (0,))
    assert await admin.close_barrier(GANG, E1) is False
    assert (await refused(waiting)).reason is Reason.CANCELLED
    assert (await refused(arrive(client, 1))).reason is Reason.CANCELLED
    assert await admin.close_barrier(GANG, E1) is False


async def test_closing_an_open_barrier_says_that_it_had_opened(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await lease(client, 0)
    await lease(client, 1)
    await asyncio.gather(arrive(client, 0), arrive(client, 1))
    assert await admin.close_barrier(GANG, E1) is True


async def test_after_the_opening_a_new_incarnation_needs_a_new_epoch(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await lease(client, 0)
    await lease(client, 1)
    await asyncio.gather(arrive(client, 0), arrive(client, 1))
    await client.release_lease(GANG, E1, Rank(0), token(0))
    assert isinstance(await refused(lease(client, 0, life="b")), ConflictError)


# ---- the gate -----------------------------------------------------------------------------------------


async def test_a_lifted_floor_turns_away_waiters_keys_and_leases_of_the_older_epoch(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await lease(client, 0)
    await client.set(GANG, E1, "key", b"old")
    at_barrier = asyncio.create_task(arrive(client, 0))
    for_key = asyncio.create_task(client.wait(GANG, E1, ["never"], timeout_s=20.0))
    await arrived(store, admin, (0,))
    await admin.set_floor(GANG, E2, 2)
    for waiting in (at_barrier, for_key):
        error = await refused(waiting)
        assert isinstance(error, FencedError)
        assert error.details["floor"] == 2
    assert isinstance(await refused(client.get(GANG, E1, "key")), FencedError)
    assert isinstance(await refused(lease(client, 0)), FencedError)
    assert isinstance(await refused(admin.close_barrier(GANG, E1)), FencedError)
    assert (await refused(client.get(GANG, E2, "key"))).reason is Reason.KEY_NOT_FOUND
    await lease(client, 0, life="b", epoch=E2)


async def test_an_unknown_gang_and_an_epoch_not_yet_known_may_be_tried_again(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    for gang, epoch in ((OTHER, E1), (GANG, E2)):
        error = await refused(client.get(gang, epoch, "key"))
        assert error.reason is Reason.UNKNOWN_GANG
        assert error.retryable


async def test_a_floor_never_goes_down_and_setting_it_twice_is_once(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    await admin.set_floor(GANG, E2, 2)
    await admin.set(GANG, E2, "key", b"kept")
    await admin.set_floor(GANG, E2, 2)
    assert await admin.get(GANG, E2, "key") == b"kept"
    assert isinstance(await refused(admin.set_floor(GANG, E1, 2)), FencedError)
    assert isinstance(await refused(admin.set_floor(GANG, E2, 3)), ConflictError)
    assert await admin.gangs() == (ms.GangFloor(GANG, E2, 2),)


async def test_a_dropped_gang_is_unknown_and_its_waiters_hear_it(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    waiting = asyncio.create_task(client.wait(GANG, E1, ["never"], timeout_s=20.0))
    await client.ping()
    assert await admin.drop_gang(GANG, E1) is True
    assert (await refused(waiting)).reason is Reason.UNKNOWN_GANG
    assert await admin.drop_gang(GANG, E1) is False


async def test_a_gang_that_has_gone_on_is_not_dropped_by_a_request_that_comes_late(
    admin: StoreClient,
) -> None:
    """It was suspended, the answer was lost, and it was resumed before the question was put again."""
    await admin.set_floor(GANG, E2, 2)
    assert await admin.drop_gang(GANG, E1) is False
    assert await admin.gangs() == (ms.GangFloor(GANG, E2, 2),)
    assert await admin.drop_gang(GANG, E2) is True


async def test_gangs_do_not_see_each_others_keys(store: StoreUnderTest, admin: StoreClient) -> None:
    await admin.set_floor(OTHER, E1, 1)
    await admin.set(GANG, E1, "key", b"mine")
    assert (await refused(admin.get(OTHER, E1, "key"))).reason is Reason.KEY_NOT_FOUND


async def test_a_member_may_not_raise_floors_close_barriers_watch_or_look_at_gangs(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    member = await store.connect()
    for call in (
        member.set_floor(GANG, E2, 2),
        member.revoke(GANG, E1, Rank(0), token(0)),
        member.admit(GANG, E1, Rank(0), token(0, "b"), instead_of=token(0)),
        member.expire(GANG, E1, Rank(0), token(0), ttl_s=TTL_S, guard_s=GUARD_S),
        member.drop_gang(GANG, E1),
        member.close_barrier(GANG, E1),
        member.watch(),
        member.gangs(),
        member.snapshot(GANG),
    ):
        error = await refused(call)
        assert isinstance(error, AuthenticationError)
        assert error.reason is Reason.FORBIDDEN
    assert (await admin.gangs())[0].epoch == E1


# ---- leases -------------------------------------------------------------------------------------------


async def test_a_lease_that_is_not_renewed_lapses_once_and_never_comes_back(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    pushes: list[ms.Push] = []
    watcher = await store.connect(ms.Role.ADMIN, on_push=pushes.append)
    await watcher.watch()
    client = await store.connect()
    await lease(client, 0, ttl_s=TTL_S)
    await lease(client, 1)
    await store.until(lambda: bool(pushes))
    (lapsed,) = pushes
    assert isinstance(lapsed, ms.LeaseLapsed) and lapsed[:4] == (GANG, E1, Rank(0), token(0))
    assert lapsed.silent_s is None, "it has shown no sign of having seen an answer"
    assert isinstance(await refused(lease(client, 0)), LeaseLostError)
    await lease(client, 0, life="b")


async def test_an_expiring_lease_is_refused_to_its_holder_and_lapses(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    pushes: list[ms.Push] = []
    watcher = await store.connect(ms.Role.ADMIN, on_push=pushes.append)
    await watcher.watch()
    client = await store.connect()
    await lease(client, 0, ttl_s=TTL_S)
    await lease(client, 0, ttl_s=TTL_S)  # as the short way knows it
    terms = {"ttl_s": TTL_S, "guard_s": GUARD_S}
    assert await admin.expire(GANG, E1, Rank(0), token(0), **terms) is False
    assert isinstance(await refused(lease(client, 0, ttl_s=TTL_S)), LeaseLostError)
    await store.until(lambda: bool(pushes))
    (lapsed,) = pushes
    assert isinstance(lapsed, ms.LeaseLapsed) and lapsed[:4] == (GANG, E1, Rank(0), token(0))
    assert await admin.expire(GANG, E1, Rank(0), token(0), **terms) is True


async def test_a_lapsed_lease_takes_its_rank_from_the_barrier(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await lease(client, 0, ttl_s=TTL_S)
    await lease(client, 1)
    waiting = asyncio.create_task(arrive(client, 0, timeout_s=None))
    await store.until(waiting.done)
    assert isinstance(await refused(waiting), LeaseLostError)
    await lease(client, 0, life="b")
    replacement = asyncio.create_task(arrive(client, 0, life="b"))
    assert await arrive(client, 1) == await replacement


async def test_a_released_lease_is_told_and_cannot_be_taken_again(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    pushes: list[ms.Push] = []
    watcher = await store.connect(ms.Role.ADMIN, on_push=pushes.append)
    await watcher.watch()
    client = await store.connect()
    await lease(client, 0)
    await client.release_lease(GANG, E1, Rank(0), token(0))
    await client.release_lease(GANG, E1, Rank(0), token(0))
    await store.until(lambda: bool(pushes))
    assert pushes == [ms.LeaseReleased(GANG, E1, Rank(0), token(0))]
    assert isinstance(await refused(lease(client, 0)), LeaseLostError)


async def test_a_closed_connection_is_told_at_once_and_its_lease_may_be_taken_over(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    pushes: list[ms.Push] = []
    watcher = await store.connect(ms.Role.ADMIN, on_push=pushes.append)
    await watcher.watch()
    first, second = await store.connect(), await store.connect()
    await lease(first, 0)
    await first.close()
    await store.until(lambda: bool(pushes))
    assert pushes == [ms.MemberConnectionLost(GANG, E1, Rank(0), token(0))]
    assert [view.connected for view in (await admin.snapshot(GANG)).leases] == [False]
    await lease(second, 0)
    assert [view.connected for view in (await admin.snapshot(GANG)).leases] == [True]


async def test_a_revoked_incarnation_hears_it_and_another_one_takes_the_rank(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    first, second = await store.connect(), await store.connect()
    await lease(first, 0)
    at_barrier = asyncio.create_task(arrive(first, 0))
    await arrived(store, admin, (0,))
    assert await admin.revoke(GANG, E1, Rank(0), token(0)) is False
    assert isinstance(await refused(at_barrier), LeaseLostError)
    assert isinstance(await refused(lease(first, 0)), LeaseLostError)
    await lease(second, 0, life="b")
    await lease(second, 1)
    await asyncio.gather(arrive(second, 0, life="b"), arrive(second, 1))
    assert await admin.revoke(GANG, E1, Rank(0), token(0)) is False
    assert await admin.revoke(GANG, E1, Rank(0), token(0, "b")) is True
    await lease(second, 0, life="b")


async def test_an_admitted_incarnation_takes_a_rank_whose_life_is_over_and_is_let_through_at_once(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await lease(client, 0)
    await lease(client, 1)
    opened = (await asyncio.gather(arrive(client, 0), arrive(client, 1)))[0]

    async def admit(life: str, instead_of: str) -> bool:
        return await admin.admit(GANG, E1, Rank(1), token(1, life), instead_of=token(1, instead_of))

    assert not await admit("b", "a"), "the one before is not over"
    await client.release_lease(GANG, E1, Rank(1), token(1))
    assert isinstance(await refused(lease(client, 1, life="b")), ConflictError), "not admitted yet"
    assert await admit("b", "a")
    assert await admit("b", "a"), "asked again"
    assert isinstance(await refused(admit("c", "a")), ConflictError)
    assert isinstance(await refused(arrive(client, 1, life="b")), LeaseLostError), "it has no lease yet"
    assert isinstance(await refused(lease(client, 1, life="c")), ConflictError)
    await lease(client, 1, life="b")
    assert await arrive(client, 1, life="b") == opened
    assert await arrive(client, 1, life="b") == opened
    assert isinstance(await refused(arrive(client, 1)), ConflictError), "the one before does not get through"
    assert (await admin.snapshot(GANG)).barriers[0].tokens == (token(0), token(1, "b"))
    assert await admin.revoke(GANG, E1, Rank(1), token(1, "b")) is True, "it has passed"


async def test_a_holder_that_moved_to_another_connection_is_not_missed_on_the_old_one(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    pushes: list[ms.Push] = []
    watcher = await store.connect(ms.Role.ADMIN, on_push=pushes.append)
    await watcher.watch()
    first, second = await store.connect(), await store.connect()
    await lease(first, 0)
    await lease(second, 0)
    await first.close()
    await second.release_lease(GANG, E1, Rank(0), token(0))
    await store.until(lambda: bool(pushes))
    assert pushes == [ms.LeaseReleased(GANG, E1, Rank(0), token(0))]


async def test_a_watcher_hears_openings_and_a_snapshot_tells_the_same(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    pushes: list[ms.Push] = []
    watcher = await store.connect(ms.Role.ADMIN, on_push=pushes.append)
    await watcher.watch()
    client = await store.connect()
    await lease(client, 0)
    await lease(client, 1)
    await asyncio.gather(arrive(client, 0), arrive(client, 1))
    await store.until(lambda: bool(pushes))
    assert pushes == [ms.BarrierOpened(GANG, E1, ms.START_BARRIER, (token(0), token(1)))]
    snapshot = await admin.snapshot(GANG)
    assert (snapshot.epoch, snapshot.size) == (1, 2)
    assert [(view.rank, view.token, view.connected) for view in snapshot.leases] == [
        (0, "a0", True),
        (1, "a1", True),
    ]
    opened = ms.BarrierView("start", (Rank(0), Rank(1)), True, False, (token(0), token(1)))
    assert snapshot.barriers == (opened,)
    assert isinstance(await refused(admin.snapshot(OTHER)), RendezvousError)


# ---- keys ---------------------------------------------------------------------------------------------


async def test_keys_are_set_read_and_deleted(store: StoreUnderTest, admin: StoreClient) -> None:
    client = await store.connect()
    await client.set(GANG, E1, "key", b"\x00\xff")
    await client.set(GANG, E1, "key", b"two")
    assert await client.get(GANG, E1, "key") == b"two"
    assert await client.delete(GANG, E1, "key") is True
    assert await client.delete(GANG, E1, "key") is False


async def test_counters_count_from_zero_and_read_as_digits(store: StoreUnderTest, admin: StoreClient) -> None:
    client = await store.connect()
    assert [await client.add(GANG, E1, "n", amount) for amount in (1, 5, -10)] == [1, 6, -4]
    assert await client.get(GANG, E1, "n") == b"-4"
    await client.set(GANG, E1, "n", b"40")
    assert await client.add(GANG, E1, "n", 2) == 42
    await client.set(GANG, E1, "n", b"words")
    assert isinstance(await refused(client.add(GANG, E1, "n", 1)), ConflictError)
    await client.set(GANG, E1, "n", b"%d" % (2**63 - 1))
    assert isinstance(await refused(client.add(GANG, E1, "n", 1)), ConflictError)


async def test_a_compare_and_set_has_one_winner(store: StoreUnderTest, admin: StoreClient) -> None:
    clients = [await store.connect() for _ in range(4)]
    results = await asyncio.gather(
        *(
            client.compare_and_set(GANG, E1, "key", expected=None, value=b"%d" % number)
            for number, client in enumerate(clients)
        )
    )
    assert [result.swapped for result in results].count(True) == 1
    assert {result.value for result in results} == {await clients[0].get(GANG, E1, "key")}


async def test_a_wait_ends_when_the_last_of_its_keys_is_there(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    waiter, setter = await store.connect(), await store.connect()
    waiting = asyncio.create_task(waiter.wait(GANG, E1, ["one", "two", "three"], timeout_s=20.0))
    await waiter.ping()
    await setter.set(GANG, E1, "one", b"")
    await setter.add(GANG, E1, "two", 1)
    assert not waiting.done()
    await setter.compare_and_set(GANG, E1, "three", expected=None, value=b"3")
    await waiting
    await waiter.wait(GANG, E1, ["one", "two"], timeout_s=20.0)


async def test_a_wait_that_is_given_up_leaves_nothing_behind(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    assert isinstance(await refused(client.wait(GANG, E1, ["never"], timeout_s=0.05)), MeshTimeoutError)
    await client.set(GANG, E1, "never", b"too late")
    assert await client.get(GANG, E1, "never") == b"too late"


async def test_a_full_limit_is_a_visible_refusal_that_changes_nothing(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    error = await refused(client.set(GANG, E1, "key", bytes(1024 * 1024 + 1)))
    assert error.reason is Reason.LIMIT_EXCEEDED
    assert "1048576" in str(error)
    assert (await refused(client.set(GANG, E1, "k" * 513, b""))).reason is Reason.LIMIT_EXCEEDED
    error = await refused(client.arrive(GANG, E1, Rank(0), token(0), payload=bytes(4096), timeout_s=1.0))
    assert isinstance(error, LeaseLostError), "the lease is asked for first"
    assert (await refused(admin.set_floor(OTHER, E1, 5000))).reason is Reason.LIMIT_EXCEEDED
    assert (await refused(client.get(GANG, E1, "key"))).reason is Reason.KEY_NOT_FOUND


async def test_many_requests_under_way_are_each_answered_with_their_own(
    store: StoreUnderTest, admin: StoreClient
) -> None:
    client = await store.connect()
    await asyncio.gather(*(client.set(GANG, E1, f"k{i}", b"%d" % i) for i in range(300)))
    values = await asyncio.gather(*(client.get(GANG, E1, f"k{i}") for i in range(300)))
    assert values == [b"%d" % i for i in range(300)]
