"""Admitting another incarnation of one rank after the start barrier has opened: who is, when, and who is not."""

from __future__ import annotations

from math import inf

from mesh.ids import Rank
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.books import Output
from tests.unit.test_store_revoke import (
    ADMIN,
    E1,
    E2,
    FIRST,
    GANG,
    THIRD,
    Store,
    kinds,
    number,
    reason,
    token,
)


def opened() -> Store:
    """Both ranks have passed; rank 1's first life is over."""
    store = Store()
    store.open()
    release(store, 1)
    return store


def admit(
    store: Store, life: str, *, instead_of: str, rank: int = 1, epoch: int = 1, alive_within_s: float = inf
) -> list[Output]:
    names = token(rank, life), token(rank, instead_of)
    return store.ask(ADMIN, ms.Admit, GANG, epoch, Rank(rank), *names, alive_within_s)


def release(store: Store, rank: int, life: str = "a") -> None:
    store.ask(FIRST, ms.ReleaseLease, GANG, E1, Rank(rank), token(rank, life))


def test_nobody_is_admitted_before_the_opening_or_beside_a_life_that_goes_on() -> None:
    store = Store()
    assert reason(admit(store, "b", instead_of="a")) is Reason.CONFLICT
    store.open()
    assert number(admit(store, "b", instead_of="a")) == 0, "it still holds its lease"
    assert reason(store.lease(THIRD, 1, "b")) is Reason.CONFLICT
    release(store, 1)
    assert reason(store.lease(THIRD, 1, "b")) is Reason.CONFLICT, "the refused admissions left nothing behind"
    assert number(admit(store, "b", instead_of="a")) == 1


def test_one_is_admitted_in_place_of_the_present_one_only() -> None:
    """An admission that was sent long ago and comes late, from a coordinator that has died since, changes nothing."""
    store = opened()
    admit(store, "b", instead_of="a")
    store.lease(THIRD, 1, "b")
    release(store, 1, "b")
    assert number(admit(store, "c", instead_of="b")) == 1
    assert reason(admit(store, "b", instead_of="a")) is Reason.CONFLICT
    assert reason(admit(store, "x", instead_of="a")) is Reason.CONFLICT
    assert reason(store.lease(THIRD, 1, "b")) is Reason.LEASE_LOST
    assert reason(store.lease(THIRD, 1, "a")) is Reason.CONFLICT
    assert kinds(store.lease(THIRD, 1, "c")) == [ms.Done]


def test_a_life_that_is_over_is_not_admitted_again() -> None:
    store = opened()
    admit(store, "b", instead_of="a")
    store.lease(THIRD, 1, "b")
    release(store, 1, "b")
    assert number(admit(store, "b", instead_of="a")) == 1, "asked again, it was done"
    assert reason(store.lease(THIRD, 1, "b")) is Reason.LEASE_LOST
    assert reason(admit(store, "a", instead_of="b")) is Reason.CONFLICT


def test_one_whose_lease_has_lapsed_is_over_too() -> None:
    store = Store()
    store.open()
    while store.now < 104.0:
        store.now += 0.1
        store.state.tick(store.now)
    assert number(admit(store, "b", instead_of="a")) == 1
    assert kinds(store.lease(THIRD, 1, "b")) == [ms.Done]


def test_a_closed_barrier_lets_no_admitted_one_through() -> None:
    store = opened()
    admit(store, "b", instead_of="a")
    store.lease(THIRD, 1, "b")
    assert number(store.ask(ADMIN, ms.CloseBarrier, GANG, E1, "start")) == 1
    assert reason(store.arrive(THIRD, 1, "b")) is Reason.CANCELLED
    assert number(store.revoke(1, "b")) == 0, "it has not passed, and never will"
    assert reason(store.lease(THIRD, 1, "b")) is Reason.LEASE_LOST


def test_one_that_was_given_up_before_it_came_never_comes() -> None:
    store = opened()
    admit(store, "b", instead_of="a")
    assert number(store.revoke(1, "b")) == 0
    assert reason(store.lease(THIRD, 1, "b")) is Reason.LEASE_LOST
    assert number(admit(store, "c", instead_of="b")) == 1, "another one may"


def test_what_is_remembered_of_a_rank_does_not_grow_with_its_lives() -> None:
    store = opened()
    for number_ in range(200):
        before, life = (f"l{number_ - 1}" if number_ else "a"), f"l{number_}"
        assert number(admit(store, life, instead_of=before)) == 1
        assert kinds(store.lease(THIRD, 1, life)) == [ms.Done]
        assert kinds(store.arrive(THIRD, 1, life)) == [ms.Opened]
        release(store, 1, life)
    gang = store.state.books.gangs[GANG]
    assert len(gang.ended[Rank(1)]) == 2 and len(gang.admitted) == 1 and not gang.revoked


def test_ranks_epochs_and_stores_that_do_not_know_are_refused() -> None:
    store = opened()
    assert reason(admit(store, "b", instead_of="a", rank=2)) is Reason.CONFLICT
    assert reason(admit(store, "x" * 600, instead_of="a")) is Reason.LIMIT_EXCEEDED
    assert reason(admit(store, "b", instead_of="a", epoch=E2)) is Reason.UNKNOWN_GANG
    store.ask(ADMIN, ms.SetFloor, GANG, E2, 2)
    assert reason(admit(store, "b", instead_of="a")) is Reason.STALE_EPOCH


def test_nobody_is_admitted_before_every_other_rank_has_shown_that_it_lives() -> None:
    """A machine that was silent when the rank failed may be why: its lease tells, or its next renewal."""
    store = opened()
    store.now += 1.0
    store.lease(FIRST, 0)
    assert number(admit(store, "b", instead_of="a", alive_within_s=0.9)) == 0, (
        "that renewal may have travelled long"
    )
    store.now += 0.5
    store.lease(FIRST, 0)
    assert number(admit(store, "b", instead_of="a", alive_within_s=0.4)) == 0
    assert number(admit(store, "b", instead_of="a", alive_within_s=0.6)) == 1
    store.now += 0.5
    assert number(admit(store, "b", instead_of="a", alive_within_s=0.1)) == 1, "once admitted, admitted"


def test_who_has_ended_and_given_its_lease_back_need_not_live() -> None:
    store = opened()
    release(store, 0)
    assert number(admit(store, "b", instead_of="a", alive_within_s=0.1)) == 1
