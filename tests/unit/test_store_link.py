"""The coordinator's line to the store, over the store as it runs: restarts of either, of both, and whom to believe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from math import inf

import pytest

from agents import lease_wire
from agents.core.lease import LeaseTerms
from coordinator.core.events import (
    BarrierOpened,
    GangEvent,
    LeaseGone,
    LeaseLapsed,
    MemberSuspected,
    StoreHeard,
    StoreSilent,
)
from coordinator.core.gang_state import Gang, MemberPhase, MemberRecord
from coordinator.core.store_silence import SILENT_S
from coordinator.store_actor import StoreConnection, StoreServer
from coordinator.store_link import StoreLink
from mesh.errors import ConflictError, LeaseLostError, RendezvousError, TransportError
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.plan import Endpoint, RunPlan
from mesh.states import RunState
from mesh.store import messages as ms
from mesh.store.client import StoreClient
from tests.contract.store_link import ADMIN, MEMBER, ListeningStore

UID, EPOCH = RunUid("run"), Epoch(1)
TTL_S, GUARD_S = 0.2, 0.05
DEADLINE_S = 20.0


def gang_of(phase: MemberPhase, *, barrier_open: bool) -> Gang:
    members = {
        Rank(rank): MemberRecord(
            incarnation=Incarnation(
                run_uid=UID, epoch=EPOCH, rank=Rank(rank), token=IncarnationToken(f"t{rank}")
            ),
            machine=MachineName(f"m{rank}"), address="127.0.0.1", phase=phase, ordered_at=0.0,
        )
        for rank in range(2)
    }  # fmt: skip
    plan = RunPlan(name=RunName("r"), command=("true",), nodes=2)
    return Gang(
        uid=UID, plan=plan, created_at=0.0, state=RunState.RUNNING if barrier_open else RunState.ASSEMBLING,
        epoch=EPOCH, members=members, barrier_open=barrier_open,
    )  # fmt: skip


def incarnation(rank: int, life: str = "t") -> Incarnation:
    return Incarnation(run_uid=UID, epoch=EPOCH, rank=Rank(rank), token=IncarnationToken(f"{life}{rank}"))


class Ears:
    """The coordinator: knows its gangs, hears what the store says; deaf while `is_full`."""

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.heard: list[GangEvent] = []
        self.is_full = False

    def post(self, uid: RunUid, event: GangEvent) -> None:
        if self.is_full:
            self.is_full = False
            raise asyncio.QueueFull
        self.heard.append(event)

    def live_gangs(self) -> list[Gang]:
        return [self.gang]

    async def hears(self, kind: type[GangEvent], rank: int | None = None) -> None:
        def is_it(event: GangEvent) -> bool:
            incarnation: Incarnation | None = getattr(event, "incarnation", None)
            return isinstance(event, kind) and (
                rank is None or (incarnation is not None and incarnation.rank == rank)
            )

        await until(lambda: any(is_it(event) for event in self.heard))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.fixture
async def store() -> AsyncIterator[ListeningStore]:
    store = await ListeningStore().start()
    yield store
    await store.stop()
    await store.server.stop("the test is over")


async def restart(store: ListeningStore) -> None:
    await store.server.stop("restart")
    store.server = StoreServer(
        host="127.0.0.1", port=store.endpoint.port, admin_secret=ADMIN, member_secret=MEMBER
    )
    await store.server.start()


class Line:
    """A link that is up. Leaving it is a crash of the coordinator: nothing is said to the store."""

    def __init__(self, store: ListeningStore, ears: Ears) -> None:
        endpoint: Endpoint = replace(store.endpoint, secret=ADMIN)
        self.new_stores: list[int] = []
        self.link = StoreLink(
            endpoint,
            lease_ttl_s=TTL_S,
            lease_guard_s=GUARD_S,
            on_new_store=lambda: self.new_stores.append(1),
        )
        self._ears = ears

    async def __aenter__(self) -> StoreLink:
        self.link.start(self._ears)
        return self.link

    async def __aexit__(self, *_: object) -> None:
        await self.link.stop()


async def insist(link: StoreLink, *, is_new: bool) -> None:
    """As the gang's driver does."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await link.open_epoch(UID, EPOCH, 2, is_new=is_new)
            except TransportError:
                await asyncio.sleep(0.01)


async def test_a_store_that_knew_the_epoch_from_its_beginning_is_believed(store: ListeningStore) -> None:
    async with Line(store, Ears(gang_of(MemberPhase.ORDERED, barrier_open=False))) as link:
        await insist(link, is_new=True)
        assert await link.close_barrier(UID, EPOCH) is False


async def test_a_coordinator_that_came_back_believes_a_store_that_did_not_have_to(
    store: ListeningStore,
) -> None:
    ears = Ears(gang_of(MemberPhase.ARRIVED, barrier_open=False))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
    async with Line(store, ears) as link:
        await insist(link, is_new=False)
        assert await link.revoke(UID, incarnation(0)) is False
        assert await link.close_barrier(UID, EPOCH) is False


async def test_who_takes_its_lease_while_the_store_is_asked_is_not_taken_for_gone(
    store: ListeningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 1015801: its report overtook the snapshot, which is older. Five seconds later it was given up, alive."""
    ears = Ears(gang_of(MemberPhase.ORDERED, barrier_open=False))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
    is_asked = asyncio.Event()
    snapshot = StoreClient.snapshot

    async def overtaken(client: StoreClient, gang: RunUid) -> ms.GangSnapshot:
        answer = await snapshot(client, gang)
        for rank, member in list(ears.gang.members.items()):
            ears.gang.members[rank] = replace(member, phase=MemberPhase.REGISTERED)
        is_asked.set()
        return answer

    monkeypatch.setattr(StoreClient, "snapshot", overtaken)
    async with Line(store, ears) as link:
        async with asyncio.timeout(DEADLINE_S):
            await is_asked.wait()
        await insist(link, is_new=False)
        assert not [event for event in ears.heard if isinstance(event, LeaseGone)]


async def test_a_coordinator_that_came_back_does_not_believe_that_a_barrier_never_opened(
    store: ListeningStore,
) -> None:
    """The one before it told a store that was restarted, perhaps after the barrier had opened."""
    ears = Ears(gang_of(MemberPhase.ARRIVED, barrier_open=False))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
        await restart(store)
        await until(lambda: UID in store.server.state.books.gangs)
    async with Line(store, ears) as link:
        await insist(link, is_new=False)
        assert await link.close_barrier(UID, EPOCH) is True
        await ears.hears(LeaseLapsed, rank=0)
        await ears.hears(LeaseLapsed, rank=1)


async def test_a_repeated_opening_does_not_make_a_restarted_store_trusted(store: ListeningStore) -> None:
    async with Line(store, Ears(gang_of(MemberPhase.ORDERED, barrier_open=False))) as link:
        await insist(link, is_new=True)
        await restart(store)
        await until(lambda: UID in store.server.state.books.gangs)
        await insist(link, is_new=True)
        assert await link.close_barrier(UID, EPOCH) is True


async def test_when_store_and_coordinator_were_both_restarted_a_dead_member_is_still_found(
    store: ListeningStore,
) -> None:
    """Nobody holds a lease then that could lapse: members that must hold one are given it."""
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
    await restart(store)
    async with Line(store, ears) as link:
        await insist(link, is_new=False)
        living = await store.connect(ms.Role.MEMBER)

        async def renew() -> None:
            while True:
                await living.grant_lease(
                    UID, EPOCH, Rank(0), IncarnationToken("t0"), ttl_s=TTL_S, guard_s=GUARD_S
                )
                await asyncio.sleep(TTL_S / 8)

        renewing = asyncio.create_task(renew())
        await ears.hears(LeaseLapsed, rank=1)
        renewing.cancel()
        await asyncio.wait([renewing])


async def test_what_a_full_inbox_could_not_take_is_made_up_for(store: ListeningStore) -> None:
    ears = Ears(gang_of(MemberPhase.REGISTERED, barrier_open=False))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
        members = [await store.connect(ms.Role.MEMBER) for _ in range(2)]
        ears.is_full = True
        for rank, member in enumerate(members):
            token = IncarnationToken(f"t{rank}")
            await member.grant_lease(UID, EPOCH, Rank(rank), token, ttl_s=60.0, guard_s=1.0)
        arrivals = [
            member.arrive(
                UID, EPOCH, Rank(rank), IncarnationToken(f"t{rank}"), payload=b"", timeout_s=DEADLINE_S
            )
            for rank, member in enumerate(members)
        ]
        await asyncio.gather(*arrivals)
        await ears.hears(BarrierOpened)
        assert not [event for event in ears.heard if isinstance(event, LeaseGone)]


async def test_a_store_that_was_told_again_by_a_coordinator_that_died_then_ends_no_living_member(
    store: ListeningStore,
) -> None:
    """The floor was told and no lease given yet: that nobody holds one there is no news of the members."""
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
    await restart(store)
    dying = await store.connect(ms.Role.ADMIN)
    await dying.set_floor(UID, EPOCH, 2)
    async with Line(store, ears):
        told = store.server.state.books.gangs[UID]
        await until(lambda: len(told.leases) == 2)
        assert told.barriers[ms.START_BARRIER].is_closed, (
            "whoever was admitted by the store before waits for nothing"
        )
        assert not [event for event in ears.heard if isinstance(event, LeaseGone)]
        await ears.hears(LeaseLapsed, rank=0)
        await ears.hears(LeaseLapsed, rank=1)


async def test_a_barrier_that_had_opened_opens_no_second_time_in_a_restarted_store(
    store: ListeningStore,
) -> None:
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
        await restart(store)
        await until(lambda: UID in store.server.state.books.gangs)
        late = await store.connect()
        await lease(late, 0)
        with pytest.raises(ConflictError):
            await arrive(late, 0)


async def test_closing_a_barrier_renews_no_lease_that_is_there(store: ListeningStore) -> None:
    """A dead member's would run out later by that, and it would look as if it had lived until then."""
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
        await restart(store)
        await until(lambda: len(getattr(store.server.state.books.gangs.get(UID), "leases", ())) == 2)
        leases = store.server.state.books.gangs[UID].leases
        ends = {rank: lease.deadline for rank, lease in leases.items()}
        assert await link.close_barrier(UID, EPOCH), "that store cannot say that it never opened"
        assert {rank: lease.deadline for rank, lease in leases.items()} == ends


async def test_another_store_is_noticed_and_a_connection_that_broke_is_not(store: ListeningStore) -> None:
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    line = Line(store, ears)
    async with line as link:
        await insist(link, is_new=True)
        link._client.abort()  # type: ignore[union-attr]
        link._lost.set()
        await insist(link, is_new=False)
        assert line.new_stores == []
        await restart(store)
        await until(lambda: line.new_stores == [1])


# ---- suspicion ----------------------------------------------------------------------------------------


async def test_a_member_whose_connection_closes_is_suspected_at_once(store: ListeningStore) -> None:
    """Its lease would only tell after its whole length."""
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
        keeper = await store.connect()
        await lease(keeper, 1)
        keeper.abort()
        await ears.hears(MemberSuspected, rank=1)
        assert not [event for event in ears.heard if isinstance(event, LeaseLapsed | LeaseGone)]


async def test_a_coordinator_that_came_back_suspects_whoever_has_no_connection(store: ListeningStore) -> None:
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
    alive, dead = await store.connect(), await store.connect()
    await lease(alive, 0)
    await lease(dead, 1)
    dead.abort()
    await until(lambda: store.server.state.books.gangs[UID].leases[Rank(1)].connection is None)
    async with Line(store, ears):
        await ears.hears(MemberSuspected, rank=1)
        assert [event.incarnation.rank for event in ears.heard if isinstance(event, MemberSuspected)] == [1]


# ---- giving one incarnation up ------------------------------------------------------------------------


def replaced(gang: Gang, rank: int) -> None:
    """As the core does it: the old member is among the attempts, another token has its rank."""
    old = gang.members[Rank(rank)]
    gang.attempts.append(old)
    gang.members[Rank(rank)] = replace(old, incarnation=incarnation(rank, "u"), phase=MemberPhase.ORDERED)


async def lease(client: StoreClient, rank: int, life: str = "t") -> None:
    me = incarnation(rank, life)
    await client.grant_lease(UID, EPOCH, me.rank, me.token, ttl_s=30.0, guard_s=GUARD_S)


async def arrive(client: StoreClient, rank: int, life: str = "t") -> None:
    me = incarnation(rank, life)
    await client.arrive(UID, EPOCH, me.rank, me.token, payload=b"", timeout_s=DEADLINE_S)


async def test_a_replacement_takes_the_rank_of_a_revoked_incarnation(store: ListeningStore) -> None:
    ears = Ears(gang_of(MemberPhase.REGISTERED, barrier_open=False))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
        client = await store.connect()
        await lease(client, 0)
        await lease(client, 1)
        assert await link.revoke(UID, incarnation(0)) is False
        with pytest.raises(LeaseLostError):
            await lease(client, 0)
        await lease(client, 0, "u")
        await asyncio.gather(arrive(client, 0, "u"), arrive(client, 1))
        await ears.hears(BarrierOpened)
        assert [event.tokens for event in ears.heard if isinstance(event, BarrierOpened)] == [("u0", "t1")]
        assert await link.revoke(UID, incarnation(0, "u")) is True, "it has passed"
        await lease(client, 0, "u")


async def test_a_coordinator_that_came_back_hears_with_which_incarnations_the_barrier_opened(
    store: ListeningStore,
) -> None:
    ears = Ears(gang_of(MemberPhase.REGISTERED, barrier_open=False))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
    client = await store.connect()
    await lease(client, 0)
    await lease(client, 1)
    await asyncio.gather(arrive(client, 0), arrive(client, 1))
    async with Line(store, ears):
        await ears.hears(BarrierOpened)
        assert [event.tokens for event in ears.heard if isinstance(event, BarrierOpened)] == [("t0", "t1")]


@pytest.mark.parametrize("has_heard", [True, False], ids=["by the journal", "by the link itself"])
async def test_a_restarted_store_is_told_the_revocations_before_anybody_can_take_a_lease(
    store: ListeningStore, has_heard: bool
) -> None:
    """The gang's core may hear of the answer only after the store has died: the link remembers it."""
    gang = gang_of(MemberPhase.REGISTERED, barrier_open=False)
    ears = Ears(gang)
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
        assert await link.revoke(UID, incarnation(0)) is False
        if has_heard:
            replaced(gang, 0)
        await restart(store)
        await until(lambda: UID in store.server.state.books.gangs)
        client = await store.connect()
        with pytest.raises(LeaseLostError):
            await lease(client, 0)
        assert await link.revoke(UID, incarnation(1)) is None, "that store has not seen all of the epoch"
        assert store.server.state.books.gangs[UID].revoked == {0: {"t0"}}, "so nothing was changed"


async def test_both_restarted_and_the_store_is_told_the_revocations_of_the_journal(
    store: ListeningStore,
) -> None:
    gang = gang_of(MemberPhase.REGISTERED, barrier_open=False)
    async with Line(store, Ears(gang)) as link:
        await insist(link, is_new=True)
        assert await link.revoke(UID, incarnation(0)) is False
    replaced(gang, 0)
    await restart(store)
    async with Line(store, Ears(gang)) as link:
        await insist(link, is_new=False)
        client = await store.connect()
        with pytest.raises(LeaseLostError):
            await lease(client, 0)
        await lease(client, 0, "u")


async def test_an_epoch_that_is_gone_has_nobody_to_be_given_up(store: ListeningStore) -> None:
    async with Line(store, Ears(gang_of(MemberPhase.ORDERED, barrier_open=False))) as link:
        await insist(link, is_new=True)
        admin = await store.connect(ms.Role.ADMIN)
        await admin.set_floor(UID, Epoch(2), 2)
        assert await link.revoke(UID, incarnation(0)) is None


async def test_a_rank_is_admitted_once_its_life_before_is_over(store: ListeningStore) -> None:
    async with Line(store, Ears(gang_of(MemberPhase.ARRIVED, barrier_open=False))) as link:
        await insist(link, is_new=True)
        client = await store.connect()
        await lease(client, 0)
        await lease(client, 1)
        await asyncio.gather(arrive(client, 0), arrive(client, 1))
        with pytest.raises(RendezvousError, match="not over yet"):
            await link.admit(UID, incarnation(1, "u"), instead_of=incarnation(1).token, alive_within_s=inf)
        await client.release_lease(UID, EPOCH, Rank(1), incarnation(1).token)
        assert (
            await link.admit(UID, incarnation(1, "u"), instead_of=incarnation(1).token, alive_within_s=inf)
            is True
        )
        await lease(client, 1, "u")
        await arrive(client, 1, "u")


async def test_a_store_that_has_not_seen_the_opening_admits_nobody(store: ListeningStore) -> None:
    async with Line(store, Ears(gang_of(MemberPhase.STARTED, barrier_open=True))) as link:
        await insist(link, is_new=False)
        assert (
            await link.admit(UID, incarnation(1, "u"), instead_of=incarnation(1).token, alive_within_s=inf)
            is False
        )


# ---- the store's silence ------------------------------------------------------------------------------


async def test_a_store_that_stands_still_is_told_with_since_when_and_when_it_is_heard_again(
    store: ListeningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its connections, and answers nothing; then all at once."""
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
        unread: list[tuple[StoreConnection, bytes]] = []
        receive = StoreConnection.data_received
        with monkeypatch.context() as patch:
            patch.setattr(StoreConnection, "data_received", lambda self, data: unread.append((self, data)))
            await ears.hears(StoreSilent)
        (silent,) = [event for event in ears.heard if isinstance(event, StoreSilent)]
        assert time.monotonic() - silent.since >= SILENT_S
        for connection, data in unread:
            receive(connection, data)
        await ears.hears(StoreHeard)
        assert [type(e) for e in ears.heard if isinstance(e, StoreSilent | StoreHeard)] == [
            StoreSilent,
            StoreHeard,
        ]


async def test_a_store_that_nobody_finds_is_silent_from_the_first_moment(store: ListeningStore) -> None:
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    await store.server.stop("nobody is there")
    async with Line(store, ears):
        await ears.hears(StoreSilent)


async def renew_as_a_keeper_does(store: ListeningStore, rank: int) -> float:
    """Twice, the second time having seen the first answer. Returns when it had."""
    terms = LeaseTerms(ttl_s=TTL_S, guard_s=GUARD_S, heartbeat_s=TTL_S / 4)
    renewal = lease_wire.request("renew", request_id=1, incarnation=incarnation(rank), terms=terms)
    reader, writer = await asyncio.open_connection(store.endpoint.host, store.endpoint.port)
    answered_at = 0.0
    for frame in (lease_wire.hello(secret=MEMBER), renewal, renewal):
        answered_at = time.monotonic()
        writer.write(frame)
        size = int.from_bytes(await reader.readexactly(4), "big")
        await reader.readexactly(size)
    writer.close()
    await writer.wait_closed()
    return answered_at


async def test_a_lapse_is_no_younger_than_what_the_store_answered_before(store: ListeningStore) -> None:
    ears = Ears(gang_of(MemberPhase.STARTED, barrier_open=True))
    async with Line(store, ears) as link:
        await insist(link, is_new=True)
        granted_at = await renew_as_a_keeper_does(store, 0)
        await ears.hears(LeaseLapsed, 0)
        (lapsed,) = [event for event in ears.heard if isinstance(event, LeaseLapsed)]
        assert lapsed.said_after is not None and lapsed.silent_s is not None
        assert lapsed.said_after - lapsed.silent_s <= granted_at
