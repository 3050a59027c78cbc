"""The pure store: time, stalls, limits, and what only a clock that a test holds can show."""

from __future__ import annotations

import pytest

from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.books import ConnectionId, Output
from mesh.store.limits import STALL_SHARE, TICK_S_MAX, StoreLimits
from mesh.store.state import StoreState

GANG, E1, E2 = RunUid("a" * 16), Epoch(1), Epoch(2)
ADMIN, WATCHER, FIRST, SECOND = (ConnectionId(number) for number in range(1, 5))
TTL_S, GUARD_S = 3.0, 0.3


class Store:
    """A store with two members' connections, an admin's and a watcher's; `now` is its clock."""

    def __init__(self, *, size: int = 2, **limits: float) -> None:
        self.state = StoreState(instance="test", limits=StoreLimits(**limits))  # type: ignore[arg-type]
        self.now = 100.0
        self._id = 0
        for connection in (ADMIN, WATCHER):
            self.state.connected(connection, ms.Role.ADMIN, hello_id=1)
        for connection in (FIRST, SECOND):
            self.state.connected(connection, ms.Role.MEMBER, hello_id=1)
        self.state.tick(self.now)
        self.ask(ADMIN, ms.SetFloor, GANG, E1, size)
        self.ask(WATCHER, ms.Watch)

    def ask(self, connection: ConnectionId, kind: type, *fields: object) -> list[Output]:
        self._id += 1
        return self.state.handle(kind(self._id, *fields), connection, self.now)

    def lease(
        self, connection: ConnectionId, rank: int, life: str = "a", *, request_id: int = 1
    ) -> list[Output]:
        """With the same id again, as a holder does that has seen the answer to the one before."""
        request = ms.GrantLease(request_id, GANG, E1, Rank(rank), token(rank, life), TTL_S, GUARD_S)
        return self.state.handle(request, connection, self.now)

    def arrive(self, connection: ConnectionId, rank: int, life: str = "a") -> list[Output]:
        payload = b"%d" % rank
        return self.ask(connection, ms.Arrive, GANG, E1, Rank(rank), token(rank, life), "start", payload)

    def tick_until(self, end: float) -> list[Output]:
        """As a healthy server does: never later than it was asked to."""
        outputs: list[Output] = []
        while self.now < end:
            deadline = self.state.next_deadline()
            assert deadline is not None
            self.now = min(end, max(self.now, deadline))
            outputs += self.state.tick(self.now)
        return outputs

    def stall(self, seconds: float) -> list[Output]:
        """No tick for a while, then one."""
        self.now += seconds
        return self.state.tick(self.now)


def token(rank: int, life: str = "a") -> IncarnationToken:
    return IncarnationToken(f"{life}{rank}")


def the(outputs: list[Output]) -> ms.Message:
    (output,) = outputs
    return output[1]


def reason(outputs: list[Output]) -> Reason:
    message = outputs[0][1]
    assert isinstance(message, ms.Refused)
    return message.reason


def lapses(outputs: list[Output]) -> list[int]:
    return [message.rank for _, message in outputs if isinstance(message, ms.LeaseLapsed)]


def silences(outputs: list[Output]) -> dict[int, float | None]:
    return {message.rank: message.silent_s for _, message in outputs if isinstance(message, ms.LeaseLapsed)}


# ---- leases -------------------------------------------------------------------------------------------


def test_a_lease_lapses_at_ttl_plus_guard_from_receipt_and_not_earlier() -> None:
    store = Store()
    store.lease(FIRST, 0)
    assert store.tick_until(100.0 + TTL_S + GUARD_S - 0.001) == []
    assert store.tick_until(100.0 + TTL_S + GUARD_S) == [
        (WATCHER, ms.LeaseLapsed(GANG, E1, Rank(0), token(0), None))
    ]
    assert store.tick_until(200.0) == []


def test_a_renewal_counts_from_when_it_was_received() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.tick_until(102.0)
    store.lease(FIRST, 0)
    assert lapses(store.tick_until(102.0 + TTL_S + GUARD_S - 0.001)) == []
    assert lapses(store.tick_until(102.0 + TTL_S + GUARD_S)) == [0]


def test_a_renewal_that_comes_after_the_end_but_before_the_tick_is_the_end() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.tick_until(100.0 + TTL_S + GUARD_S - 0.01)
    store.now += 0.02
    outputs = store.lease(FIRST, 0)
    assert reason(outputs) is Reason.LEASE_LOST
    assert lapses(outputs) == [0]
    assert lapses(store.tick_until(110.0)) == []


def test_a_store_that_was_stalled_buries_nobody() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.lease(SECOND, 1)
    assert store.stall(60.0) == []
    assert lapses(store.tick_until(160.0 + TTL_S + GUARD_S - 0.001)) == []
    assert lapses(store.tick_until(160.0 + TTL_S + GUARD_S)) == [0, 1]


def test_what_a_stall_forgave_does_not_make_a_silent_member_look_younger() -> None:
    """The gang judges by it whether the machine fell silent before or after somebody failed."""
    store = Store()
    store.lease(FIRST, 0)
    store.lease(FIRST, 0)
    assert store.stall(10.0) == []
    assert silences(store.tick_until(200.0)) == {0: pytest.approx(10.0 + TTL_S + GUARD_S)}


@pytest.mark.parametrize(
    "ticks_first", [True, False], ids=["the tick comes first", "the renewals come first"]
)
def test_a_renewal_that_lay_unread_while_the_store_stood_still_proves_no_life_since(
    ticks_first: bool,
) -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.lease(SECOND, 1)
    store.tick_until(100.5)
    store.now += 10.0  # both had sent one more; then the first one died
    if ticks_first:
        assert store.state.tick(store.now) == []
    assert [store.lease(connection, rank) for connection, rank in ((FIRST, 0), (SECOND, 1))]
    store.tick_until(store.now + 0.5)
    store.lease(SECOND, 1)
    lapsed = silences(store.tick_until(200.0))
    assert lapsed[0] == pytest.approx(10.5 + TTL_S + GUARD_S), "not heard of since before the stall"
    assert lapsed[1] == pytest.approx(0.5 + TTL_S + GUARD_S), "it had seen the answer of that moment"


def test_a_member_that_only_the_coordinator_spoke_for_was_never_heard() -> None:
    store = Store()
    store.lease(ADMIN, 0)
    store.lease(ADMIN, 1)
    store.tick_until(101.0)
    store.lease(FIRST, 1)
    store.tick_until(101.5)
    store.lease(FIRST, 1)
    store.lease(ADMIN, 1)
    assert silences(store.tick_until(200.0)) == {0: None, 1: pytest.approx(0.5 + TTL_S + GUARD_S)}


def test_a_renewal_that_travelled_for_long_proves_no_life_when_it_is_received() -> None:
    """Its sender may have died long before, and made the others fail: they would be blamed for it."""
    store = Store()
    store.lease(FIRST, 0)
    store.tick_until(101.0)
    store.lease(FIRST, 0)
    store.tick_until(103.0)
    store.lease(FIRST, 0)  # sent at 101.5 at the earliest: it follows upon the answer of 101.0
    assert silences(store.tick_until(200.0)) == {0: pytest.approx(2.0 + TTL_S + GUARD_S)}


@pytest.mark.parametrize(("connection", "request_id"), [(SECOND, 1), (FIRST, 2)])
def test_nor_does_one_that_follows_upon_no_answer(connection: ConnectionId, request_id: int) -> None:
    """It was sent anew, as another request or over another connection, and both arrive late together."""
    store = Store()
    store.lease(FIRST, 0)
    store.tick_until(101.0)
    store.lease(FIRST, 0)
    store.tick_until(103.0)
    store.lease(FIRST, 0)
    store.lease(connection, 0, request_id=request_id)
    assert silences(store.tick_until(200.0)) == {0: pytest.approx(2.0 + TTL_S + GUARD_S)}


def test_a_stalled_store_that_reads_a_late_renewal_before_its_tick_buries_nobody() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.lease(SECOND, 1)
    store.now += 60.0
    assert isinstance(the(store.lease(FIRST, 0)), ms.Done)
    assert lapses(store.tick_until(store.now + TTL_S)) == []


def test_ticks_that_are_a_little_late_are_no_stall() -> None:
    store = Store()
    store.lease(FIRST, 0)
    late = TICK_S_MAX + TTL_S * STALL_SHARE - 0.01
    heard: list[int] = []
    while not heard:
        heard = lapses(store.stall(late))
        assert store.now < 110
    assert heard == [0]


def test_a_barrier_that_was_complete_during_a_stall_opens_after_it() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.tick_until(103.25)
    store.lease(SECOND, 1)
    store.arrive(FIRST, 0)
    store.now = 103.31  # rank 0's lease is over by now, but no tick has said so
    assert store.arrive(SECOND, 1) == []
    outputs = store.stall(60.0)
    assert [type(message) for _, message in outputs] == [ms.Opened, ms.Opened, ms.BarrierOpened]


def test_a_stall_opens_no_barrier_that_was_not_complete() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.arrive(FIRST, 0)
    assert store.stall(60.0) == []
    assert store.state.books.waiters_count == 1


def test_a_barrier_does_not_open_over_a_lease_that_is_over_though_no_tick_has_said_so() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.tick_until(103.25)
    store.lease(SECOND, 1)
    store.arrive(FIRST, 0)
    store.now = 103.31
    assert store.arrive(SECOND, 1) == []
    outputs = store.state.tick(103.32)
    assert reason(outputs) is Reason.LEASE_LOST
    assert lapses(outputs) == [0]


def test_an_arrival_under_a_lease_that_is_over_is_refused_though_no_tick_has_said_so() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.tick_until(103.25)
    store.now = 103.31
    assert reason(store.arrive(FIRST, 0)) is Reason.LEASE_LOST
    store.now = 163.0
    assert store.arrive(FIRST, 0) == [], "the store was stalled: its lease has started over"


def test_before_its_first_tick_a_store_has_no_deadline_and_after_it_always_one() -> None:
    state = StoreState(instance="test")
    assert state.next_deadline() is None
    state.connected(ADMIN, ms.Role.ADMIN, hello_id=1)
    state.handle(ms.SetFloor(1, GANG, E1, 1), ADMIN, 5.0)
    state.handle(ms.GrantLease(2, GANG, E1, Rank(0), token(0), TTL_S, GUARD_S), ADMIN, 5.0)
    (snapshot,) = state.handle(ms.Snapshot(3, GANG), ADMIN, 5.0)
    assert snapshot[1].leases[0].remaining_s == TTL_S
    state.tick(5.0)
    assert state.next_deadline() == pytest.approx(5.0 + TICK_S_MAX)


def test_the_store_never_asks_for_a_tick_later_than_its_regular_one() -> None:
    store = Store()
    assert store.state.next_deadline() == pytest.approx(100.0 + TICK_S_MAX)
    store.lease(FIRST, 0)
    store.tick_until(103.25)
    assert store.state.next_deadline() == pytest.approx(103.3)


def test_a_clock_that_stands_still_or_goes_back_ends_nothing() -> None:
    store = Store()
    store.lease(FIRST, 0)
    assert store.state.tick(50.0) == []
    assert store.state.tick(100.0) == []
    assert store.state.next_deadline() == pytest.approx(100.0 + TICK_S_MAX)


@pytest.mark.parametrize(
    ("rank", "ttl_s", "guard_s"), [(2, 3.0, 0.3), (0, 0.01, 0.3), (0, 1e9, 0.3), (0, 3.0, -1.0)]
)
def test_a_lease_of_no_rank_or_of_a_senseless_length_is_refused(
    rank: int, ttl_s: float, guard_s: float
) -> None:
    store = Store()
    outputs = store.ask(FIRST, ms.GrantLease, GANG, E1, Rank(rank), token(0), ttl_s, guard_s)
    assert reason(outputs) is Reason.CONFLICT
    assert store.state.books.next_deadline() is None


def test_releasing_what_was_never_held_is_told_so() -> None:
    store = Store()
    assert reason(store.ask(FIRST, ms.ReleaseLease, GANG, E1, Rank(0), token(0))) is Reason.LEASE_LOST


def test_a_restarted_store_learns_its_leases_from_the_next_heartbeats() -> None:
    before, after = Store(), Store()
    before.lease(FIRST, 0)
    after.state.books.gangs.clear()
    assert reason(after.lease(FIRST, 0)) is Reason.UNKNOWN_GANG
    after.ask(ADMIN, ms.SetFloor, GANG, E1, 2)
    assert isinstance(the(after.lease(FIRST, 0)), ms.Done)


def test_the_leases_of_an_older_epoch_lapse_in_silence() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.ask(ADMIN, ms.SetFloor, GANG, E2, 2)
    assert store.tick_until(120.0) == []
    assert store.state.disconnected(FIRST) == []


def test_an_incarnation_takes_its_rank_only_after_the_one_before_it_is_over() -> None:
    store = Store()
    store.lease(FIRST, 0)
    assert reason(store.lease(SECOND, 0, "b")) is Reason.CONFLICT
    store.ask(FIRST, ms.ReleaseLease, GANG, E1, Rank(0), token(0))
    assert isinstance(the(store.lease(SECOND, 0, "b")), ms.Done)
    assert reason(store.arrive(FIRST, 0)) is Reason.LEASE_LOST


# ---- barriers, connections ----------------------------------------------------------------------------


def test_one_step_opens_the_barrier_and_tells_waiters_before_watchers() -> None:
    store = Store()
    store.lease(FIRST, 0)
    store.lease(SECOND, 1)
    assert store.arrive(SECOND, 1) == []
    outputs = store.arrive(FIRST, 0)
    assert [connection for connection, _ in outputs] == [FIRST, SECOND, WATCHER]
    assert [message.payloads for _, message in outputs[:2]] == [(b"0", b"1")] * 2
    assert store.state.books.waiters_count == 0


def test_who_was_not_at_the_barrier_when_it_opened_is_refused() -> None:
    store = Store(size=1)
    store.lease(FIRST, 0)
    store.arrive(FIRST, 0)
    assert reason(store.arrive(SECOND, 0, "b")) is Reason.CONFLICT
    assert reason(store.arrive(SECOND, 7)) is Reason.CONFLICT


def test_a_request_number_that_still_waits_cannot_be_used_again() -> None:
    store = Store()
    store.lease(FIRST, 0)
    first = ms.Wait(50, GANG, E1, ("never",))
    assert store.state.handle(first, FIRST, store.now) == []
    assert reason(store.state.handle(first, FIRST, store.now)) is Reason.CONFLICT
    arrival = ms.Arrive(50, GANG, E1, Rank(0), token(0), "start", b"")
    assert reason(store.state.handle(arrival, FIRST, store.now)) is Reason.CONFLICT
    assert store.state.books.waiters_count == 1


def test_cancelling_what_does_not_wait_is_done_already() -> None:
    store = Store()
    assert isinstance(the(store.ask(FIRST, ms.Cancel, 999)), ms.Done)


def test_a_connection_that_ends_takes_its_waiters_and_its_watch_along() -> None:
    store = Store()
    store.ask(FIRST, ms.Wait, GANG, E1, ("never",))
    store.state.disconnected(FIRST)
    store.state.disconnected(WATCHER)
    assert store.state.books.waiters_count == 0
    assert store.state.books.gangs[GANG].key_waiters == {}
    store.lease(SECOND, 0)
    assert store.tick_until(120.0) == []
    assert store.state.disconnected(WATCHER) == []


def test_saying_hello_twice_is_refused() -> None:
    store = Store()
    assert reason(store.ask(FIRST, ms.Hello, "secret", 1)) is Reason.CONFLICT


def test_a_second_watch_of_one_connection_is_the_first() -> None:
    store = Store(watchers_max=1)
    assert isinstance(the(store.ask(WATCHER, ms.Watch)), ms.Done)
    assert reason(store.ask(ADMIN, ms.Watch)) is Reason.LIMIT_EXCEEDED


# ---- limits -------------------------------------------------------------------------------------------


def test_each_limit_refuses_by_its_name_and_leaves_things_as_they_are() -> None:
    store = Store(
        gangs_max=1, keys_per_gang_max=2, value_bytes_max=10, gang_bytes_max=15, name_chars_max=20,
        keys_per_wait_max=2, waiters_max=1, barriers_per_gang_max=1, payload_bytes_max=4, tokens_per_rank_max=1,
    )  # fmt: skip
    store.lease(FIRST, 0)
    store.ask(FIRST, ms.Set, b"x" * 10, GANG, E1, "one")
    refusals = {
        "gangs": (ADMIN, ms.SetFloor, RunUid("other"), E1, 1),
        "characters in a gang's name": (ADMIN, ms.SetFloor, RunUid("g" * 21), E1, 1),
        "bytes in one value": (FIRST, ms.Set, b"x" * 11, GANG, E1, "two"),
        "bytes in all values": (FIRST, ms.Set, b"x" * 6, GANG, E1, "two"),
        "characters in a key": (FIRST, ms.Set, b"", GANG, E1, "k" * 21),
        "keys in one wait": (FIRST, ms.Wait, GANG, E1, ("a", "b", "c")),
        "characters in a token": (
            SECOND, ms.GrantLease, GANG, E1, Rank(1), IncarnationToken("t" * 21), TTL_S, GUARD_S,
        ),
        "bytes that a rank brings": (
            FIRST, ms.Arrive, GANG, E1, Rank(0), token(0), "start", b"12345",
        ),
        "characters in a barrier's name": (
            FIRST, ms.Arrive, GANG, E1, Rank(0), token(0), "n" * 21, b"",
        ),
    }  # fmt: skip
    for name, (connection, kind, *fields) in refusals.items():
        message = the(store.ask(connection, kind, *fields))
        assert isinstance(message, ms.Refused), name
        assert message.reason is Reason.LIMIT_EXCEEDED, name
        assert name in message.message
    gang = store.state.books.gangs[GANG]
    assert (gang.keys, gang.bytes_held, gang.barriers) == ({"one": b"x" * 10}, 10, {})


def test_limits_on_counts_refuse_the_one_too_many() -> None:
    store = Store(keys_per_gang_max=1, waiters_max=1, barriers_per_gang_max=1, tokens_per_rank_max=1)
    store.ask(FIRST, ms.Set, b"", GANG, E1, "one")
    for refused in (
        store.ask(FIRST, ms.Add, GANG, E1, "two", 1),
        store.ask(FIRST, ms.CompareAndSet, GANG, E1, "two", None, b""),
    ):
        assert reason(refused) is Reason.LIMIT_EXCEEDED
    store.lease(FIRST, 0)
    assert store.arrive(FIRST, 0) == []
    assert reason(store.ask(SECOND, ms.Wait, GANG, E1, ("never",))) is Reason.LIMIT_EXCEEDED
    store.lease(SECOND, 1)
    other = (ms.Arrive, GANG, E1, Rank(1), token(1), "other", b"")
    assert reason(store.ask(SECOND, *other)) is Reason.LIMIT_EXCEEDED
    assert reason(store.ask(ADMIN, ms.CloseBarrier, GANG, E1, "other")) is Reason.LIMIT_EXCEEDED
    assert reason(store.arrive(SECOND, 1)) is Reason.LIMIT_EXCEEDED
    store.ask(SECOND, ms.ReleaseLease, GANG, E1, Rank(1), token(1))
    assert reason(store.lease(SECOND, 1, "b")) is Reason.LIMIT_EXCEEDED


@pytest.mark.parametrize(("epoch", "size"), [(0, 1), (1, 0)])
def test_epochs_and_sizes_start_at_one(epoch: int, size: int) -> None:
    store = Store()
    assert reason(store.ask(ADMIN, ms.SetFloor, RunUid("new"), epoch, size)) is Reason.CONFLICT


@pytest.mark.parametrize("number", [-1, 2**31, 2**63, 2**64 - 1])
def test_numbers_of_any_size_are_refused_where_they_make_no_sense(number: int) -> None:
    store = Store()
    rank, epoch = Rank(number), Epoch(number)
    for outputs in (
        store.ask(FIRST, ms.GrantLease, GANG, E1, rank, token(0), TTL_S, GUARD_S),
        store.ask(FIRST, ms.Arrive, GANG, E1, rank, token(0), "start", b""),
        store.ask(FIRST, ms.Get, GANG, epoch, "key"),
        store.ask(ADMIN, ms.SetFloor, GANG, Epoch(9), number),
    ):
        assert isinstance(the(outputs), ms.Refused)
    assert isinstance(the(store.ask(FIRST, ms.Cancel, number)), ms.Done)
    added = the(store.ask(FIRST, ms.Add, GANG, E1, "n", number))
    assert isinstance(added, ms.Refused if number >= 2**63 else ms.Number)


def test_bytes_are_given_back_when_a_value_shrinks_or_goes() -> None:
    store = Store()
    held = store.state.books.gangs[GANG]
    store.ask(FIRST, ms.Set, b"12345", GANG, E1, "key")
    store.ask(FIRST, ms.Set, b"12", GANG, E1, "key")
    assert held.bytes_held == 2
    store.ask(FIRST, ms.Add, GANG, E1, "key", 1)
    assert held.bytes_held == 0
    store.ask(FIRST, ms.Set, b"12", GANG, E1, "key")
    store.ask(FIRST, ms.Delete, GANG, E1, "key")
    assert held.bytes_held == 0


def test_an_amount_that_leaves_the_range_changes_nothing() -> None:
    store = Store()
    store.ask(FIRST, ms.Add, GANG, E1, "n", 2**63 - 1)
    assert reason(store.ask(FIRST, ms.Add, GANG, E1, "n", 1)) is Reason.CONFLICT
    assert the(store.ask(FIRST, ms.Add, GANG, E1, "n", -1))[1] == 2**63 - 2


def test_a_value_of_the_same_length_takes_the_place_of_the_one_before() -> None:
    store = Store()
    for value in (b"one", b"two"):
        assert isinstance(the(store.ask(FIRST, ms.Set, value, GANG, E1, "k")), ms.Done)
    assert the(store.ask(FIRST, ms.Get, GANG, E1, "k")) == ms.Value(store._id, b"two")
    assert store.state.books.gangs[GANG].bytes_held == 3
