"""Giving up one incarnation of a rank within an epoch: what is certain then, and what stays as it is."""

from __future__ import annotations

from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.books import ConnectionId, Output
from mesh.store.limits import StoreLimits
from mesh.store.state import StoreState

GANG, E1, E2 = RunUid("a" * 16), Epoch(1), Epoch(2)
ADMIN, FIRST, SECOND, THIRD = (ConnectionId(number) for number in range(1, 5))


def token(rank: int, life: str = "a") -> IncarnationToken:
    return IncarnationToken(f"{life}{rank}")


class Store:
    """Two ranks; the admin watches."""

    def __init__(self, **limits: int) -> None:
        self.state = StoreState(instance="test", limits=StoreLimits(**limits))
        self.now, self._id = 100.0, 0
        self.state.connected(ADMIN, ms.Role.ADMIN, hello_id=1)
        for connection in (FIRST, SECOND, THIRD):
            self.state.connected(connection, ms.Role.MEMBER, hello_id=1)
        self.state.tick(self.now)
        self.ask(ADMIN, ms.SetFloor, GANG, E1, 2, True, ())
        self.ask(ADMIN, ms.Watch)

    def ask(self, connection: ConnectionId, kind: type, *fields: object) -> list[Output]:
        self._id += 1
        return self.state.handle(kind(self._id, *fields), connection, self.now)

    def lease(self, connection: ConnectionId, rank: int, life: str = "a") -> list[Output]:
        """With the same id each time, as a keeper that has seen the answer before."""
        request = ms.GrantLease(1, GANG, E1, Rank(rank), token(rank, life), 3.0, 0.3)
        return self.state.handle(request, connection, self.now)

    def arrive(self, connection: ConnectionId, rank: int, life: str = "a") -> list[Output]:
        return self.ask(connection, ms.Arrive, GANG, E1, Rank(rank), token(rank, life), "start", b"%d" % rank)

    def revoke(self, rank: int, life: str = "a", *, epoch: Epoch = E1) -> list[Output]:
        return self.ask(ADMIN, ms.Revoke, GANG, epoch, Rank(rank), token(rank, life))

    def expire(self, rank: int, life: str = "a", *, epoch: Epoch = E1, ttl_s: float = 3.0) -> list[Output]:
        return self.ask(ADMIN, ms.Expire, GANG, epoch, Rank(rank), token(rank, life), ttl_s, 0.3)

    def pass_time(self) -> list[Output]:
        """It has ticked all the while."""
        self.state.books.last_tick = self.now
        return self.state.tick(self.now)

    def open(self) -> None:
        self.lease(FIRST, 0)
        self.lease(SECOND, 1)
        self.arrive(FIRST, 0)
        assert len(self.arrive(SECOND, 1)) == 3


def kinds(outputs: list[Output]) -> list[type]:
    return [type(message) for _, message in outputs]


def number(outputs: list[Output]) -> int:
    message = outputs[0][1]
    assert isinstance(message, ms.Number)
    return message.value


def reason(outputs: list[Output]) -> Reason:
    message = outputs[0][1]
    assert isinstance(message, ms.Refused)
    return message.reason


def test_a_revoked_incarnation_leaves_the_barrier_and_another_one_takes_its_place() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.lease(SECOND, 1)
    store.arrive(FIRST, 0)
    outputs = store.revoke(0)
    assert number(outputs) == 0
    assert [(to, type(message)) for to, message in outputs] == [(ADMIN, ms.Number), (FIRST, ms.Refused)]
    assert reason(outputs[1:]) is Reason.LEASE_LOST
    assert reason(store.lease(FIRST, 0)) is Reason.LEASE_LOST, "its next renewal"
    assert reason(store.arrive(FIRST, 0)) is Reason.LEASE_LOST
    assert store.arrive(SECOND, 1) == [], "the barrier is not complete without it"
    assert kinds(store.lease(THIRD, 0, "b")) == [ms.Done]
    opened = store.arrive(THIRD, 0, "b")
    assert kinds(opened) == [ms.Opened, ms.Opened, ms.BarrierOpened]
    assert opened[-1][1] == ms.BarrierOpened(GANG, E1, "start", (token(0, "b"), token(1)))


def test_an_incarnation_that_was_never_heard_of_is_revoked_as_well() -> None:
    store = Store()
    assert number(store.revoke(0)) == 0
    assert reason(store.lease(FIRST, 0)) is Reason.LEASE_LOST
    assert kinds(store.lease(FIRST, 0, "b")) == [ms.Done]


def test_one_that_passed_the_open_barrier_is_not_touched() -> None:
    store = Store()
    store.open()
    assert number(store.revoke(0)) == 1
    assert kinds(store.lease(FIRST, 0)) == [ms.Done], "it keeps its lease"
    assert number(store.revoke(0, "b")) == 0, "but no other token passed"
    (snapshot,) = store.ask(ADMIN, ms.Snapshot, GANG)
    assert snapshot[1].barriers[0].tokens == (token(0), token(1))  # type: ignore[union-attr]


def test_one_that_arrived_at_another_barrier_only_has_not_passed() -> None:
    store = Store()
    for connection, rank in ((FIRST, 0), (SECOND, 1)):
        store.lease(connection, rank)
        store.ask(connection, ms.Arrive, GANG, E1, Rank(rank), token(rank), "network", b"")
    assert number(store.revoke(0)) == 0


def test_revoking_twice_is_once() -> None:
    store = Store()
    store.lease(FIRST, 0)
    assert [number(store.revoke(0)), number(store.revoke(0))] == [0, 0]
    assert len(store.revoke(0)) == 1


def test_what_a_revoked_incarnation_gives_back_is_already_so() -> None:
    store = Store()
    store.revoke(0)
    assert kinds(store.ask(FIRST, ms.ReleaseLease, GANG, E1, Rank(0), token(0))) == [ms.Done]


def test_another_incarnation_that_holds_the_lease_is_not_touched() -> None:
    store = Store()
    store.lease(FIRST, 0, "b")
    assert number(store.revoke(0)) == 0
    assert kinds(store.lease(FIRST, 0, "b")) == [ms.Done]


def test_no_lapse_is_told_of_a_lease_that_was_revoked() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.revoke(0)
    while store.now < 110.0:
        store.now += 0.1
        assert store.state.tick(store.now) == []


def test_ranks_and_epochs_that_do_not_exist_are_refused() -> None:
    store = Store()
    assert reason(store.revoke(2)) is Reason.CONFLICT
    assert reason(store.revoke(0, epoch=E2)) is Reason.UNKNOWN_GANG
    assert reason(store.revoke(0, "x" * 600)) is Reason.LIMIT_EXCEEDED
    store.ask(ADMIN, ms.SetFloor, GANG, E2, 2)
    assert reason(store.revoke(0)) is Reason.STALE_EPOCH


def test_revocations_have_a_limit_of_their_own_and_are_never_forgotten() -> None:
    store = Store(tokens_per_rank_max=1, revocations_per_rank_max=2)
    store.lease(FIRST, 0, "used")
    store.ask(FIRST, ms.ReleaseLease, GANG, E1, Rank(0), token(0, "used"))
    assert reason(store.lease(FIRST, 0, "more")) is Reason.LIMIT_EXCEEDED
    assert [number(store.revoke(0, life)) for life in "xyx"] == [0, 0, 0]
    assert reason(store.revoke(0, "z")) is Reason.LIMIT_EXCEEDED
    assert [reason(store.lease(FIRST, 0, life)) for life in "xy"] == [Reason.LEASE_LOST, Reason.LEASE_LOST]


def test_a_restarted_store_is_told_with_the_epoch_who_was_given_up() -> None:
    store = Store()
    store.state.books.gangs.clear()
    told = store.ask(ADMIN, ms.SetFloor, GANG, E1, 2, False, ((Rank(0), token(0)),))
    assert number(told) == 0, "it has not seen all of the epoch"
    assert reason(store.lease(FIRST, 0)) is Reason.LEASE_LOST
    assert kinds(store.lease(FIRST, 0, "b")) == [ms.Done]
    assert number(store.ask(ADMIN, ms.SetFloor, GANG, E1, 2, True, ())) == 0, "nor after it was told twice"


def test_a_floor_with_senseless_revocations_changes_nothing() -> None:
    store = Store(revocations_per_rank_max=1)
    for revoked, why in (
        (((Rank(2), token(2)),), Reason.CONFLICT),
        (((Rank(0), IncarnationToken("x" * 600)),), Reason.LIMIT_EXCEEDED),
        (((Rank(0), token(0)), (Rank(0), token(0, "b"))), Reason.LIMIT_EXCEEDED),
    ):
        assert reason(store.ask(ADMIN, ms.SetFloor, GANG, E2, 2, False, revoked)) is why
    (gangs,) = store.ask(ADMIN, ms.Gangs)
    assert gangs[1].gangs == (ms.GangFloor(GANG, E1, 2, True),)  # type: ignore[union-attr]


# ---- a lease that is renewed no more ----------------------------------------------------------------


def test_an_expiring_lease_is_renewed_no_more_and_lapses_by_its_own_time() -> None:
    store = Store()
    store.open()
    assert number(store.expire(0)) == 0
    store.now += 1.0
    assert store.pass_time() == []
    assert reason(store.lease(FIRST, 0)) is Reason.LEASE_LOST, "so that its keeper kills its tree at once"
    assert reason(store.lease(ADMIN, 0)) is Reason.LEASE_LOST, "nor by the coordinator"
    assert kinds(store.lease(SECOND, 1)) == [ms.Done], "nobody else's"
    store.now += 2.2
    assert store.pass_time() == [], "a refusal is no proof: its holder may not have heard it"
    assert number(store.expire(0)) == 0, "asked again, it changes nothing"
    store.now += 0.2
    assert store.pass_time() == [(ADMIN, ms.LeaseLapsed(GANG, E1, Rank(0), token(0), None))]
    assert number(store.expire(0)) == 1, "it is over"
    assert reason(store.lease(FIRST, 0)) is Reason.LEASE_LOST


def test_an_expiring_lease_may_be_given_back() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.expire(0)
    outputs = store.ask(FIRST, ms.ReleaseLease, GANG, E1, Rank(0), token(0))
    assert kinds(outputs) == [ms.Done, ms.LeaseReleased]


def test_a_store_that_knows_no_lease_of_it_lets_one_run_out() -> None:
    store = Store()
    assert number(store.expire(0)) == 0, "it may hold one of this store's earlier life"
    assert reason(store.lease(FIRST, 0)) is Reason.LEASE_LOST
    store.now += 3.2
    assert store.pass_time() == []
    store.now += 0.2
    assert store.pass_time() == [(ADMIN, ms.LeaseLapsed(GANG, E1, Rank(0), token(0), None))]


def test_a_stall_of_the_store_gives_an_expiring_lease_its_time_as_well() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.expire(0)
    store.now += 10.0
    assert store.state.tick(store.now) == [], "its holder may have seen that the store stood still"
    store.now += 3.3
    assert kinds(store.pass_time()) == [ms.LeaseLapsed]


def test_what_cannot_expire_is_refused() -> None:
    store = Store()
    store.lease(FIRST, 0)
    assert reason(store.expire(0, "b")) is Reason.CONFLICT, "another incarnation holds it"
    assert reason(store.expire(2)) is Reason.CONFLICT
    assert reason(store.expire(1, "x" * 600)) is Reason.LIMIT_EXCEEDED
    assert reason(store.expire(1, ttl_s=1e9)) is Reason.CONFLICT
    assert reason(store.expire(0, epoch=E2)) is Reason.UNKNOWN_GANG
    assert kinds(store.lease(FIRST, 0)) == [ms.Done], "nothing was changed"
    store.revoke(1)
    assert number(store.expire(1)) == 1, "one that was given up is over"
