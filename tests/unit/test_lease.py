"""A lease as its holder sees it: tables of times, and the holder that was not running."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agents.core import lease as ls
from agents.core import lease_events as le
from agents.core.lease import Lease, LeasePhase, LeaseTerms
from mesh.reasons import Reason
from mesh.store.limits import STALL_SHARE, TICK_S_MAX

TERMS = LeaseTerms(ttl_s=3.0, guard_s=0.3, heartbeat_s=0.5)
START = 0.0


class Holder:
    """A lease and its clock; `now` counts from the start."""

    def __init__(self, terms: LeaseTerms = TERMS) -> None:
        self.lease = Lease(terms=terms, started_at=START)
        self.effects: list[le.LeaseEffect] = list(self.lease.start())

    def tell(self, event: le.LeaseEvent, at: float) -> list[le.LeaseEffect]:
        effects = self.lease.handle(event, START + at)
        self.effects += effects
        return effects

    def confirm(self, at: float) -> list[le.LeaseEffect]:
        return self.tell(le.Confirmed(request_id=self.lease.state.request_id), at)

    def deny(self, at: float, *, reason: Reason, final: bool) -> list[le.LeaseEffect]:
        return self.tell(
            le.Denied(
                request_id=self.lease.state.request_id, reason=reason, message=str(reason), is_final=final
            ),
            at,
        )

    @property
    def deadline(self) -> float | None:
        deadline = self.lease.next_deadline()
        return None if deadline is None else deadline - START

    @property
    def phase(self) -> LeasePhase:
        return self.lease.state.phase


def holding() -> Holder:
    """Granted at 0.0 by a store that answered at 0.1."""
    holder = Holder()
    holder.tell(le.Connected(), 0.0)
    holder.confirm(0.1)
    assert holder.phase is LeasePhase.HOLDING
    return holder


def words(effects: list[le.LeaseEffect]) -> list[str]:
    return [e.word if isinstance(e, le.Tell) else type(e).__name__ for e in effects]


def run_until_over(holder: Holder) -> float:
    """Wakes it exactly at its deadlines, nothing else happening; answers when the lease was over."""
    at = 0.0
    for _ in range(2000):
        deadline = holder.lease.next_deadline()
        if deadline is None:
            return round(at, 6)
        at = max(at, deadline)
        holder.tell(le.Woke(), at)
    raise AssertionError("It wakes and wakes, and time does not pass.")


def test_a_grant_counts_from_when_it_was_sent_not_from_when_it_was_answered() -> None:
    holder = Holder()
    holder.tell(le.Connected(), 2.0)
    assert words(holder.confirm(2.4)) == ["granted"]
    assert holder.lease.end_at == pytest.approx(START + 2.0 + 2.7)


def test_a_renewal_is_sent_every_heartbeat_from_the_last_one_sent() -> None:
    holder = holding()
    assert holder.deadline == pytest.approx(0.5)
    (renew,) = holder.tell(le.Woke(), 0.5)
    assert renew == le.Request(op="renew", request_id=1)
    holder.confirm(0.55)
    assert holder.deadline == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ttl_s", "guard_s", "heartbeat_s", "over_at"),
    [(3.0, 0.3, 0.5, 2.7), (1.0, 0.1, 0.2, 0.9), (10.0, 1.0, 2.0, 9.0), (3.0, 0.0, 0.5, 3.0)],
)
def test_without_any_answer_it_is_over_at_ttl_minus_guard(
    ttl_s: float, guard_s: float, heartbeat_s: float, over_at: float
) -> None:
    holder = Holder(LeaseTerms(ttl_s=ttl_s, guard_s=guard_s, heartbeat_s=heartbeat_s))
    holder.tell(le.Connected(), 0.0)
    holder.confirm(0.05)
    assert run_until_over(holder) == over_at
    assert words(holder.effects)[-3:] == ["lost", "KillTree", "End"]


@pytest.mark.parametrize("confirmed_at", [0.6, 1.5, 2.69])
def test_every_confirmed_renewal_moves_the_end(confirmed_at: float) -> None:
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    holder.tell(le.Confirmed(request_id=1), min(confirmed_at, 1.39))
    assert holder.lease.end_at == pytest.approx(START + 0.5 + 2.7)


def test_an_answer_that_is_read_late_still_counts_from_its_sending() -> None:
    """The loop was held up past the end of the first grant, with the answer waiting in the socket."""
    holder = holding()
    holder.tell(le.Woke(), 2.0)
    assert words(holder.confirm(2.9)) == ["Request"]
    assert holder.phase is LeasePhase.HOLDING
    assert holder.lease.end_at == pytest.approx(START + 2.0 + 2.7)


@pytest.mark.parametrize("request_id", [0, 2])
def test_an_answer_to_another_request_is_not_believed(request_id: int) -> None:
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    holder.tell(le.Confirmed(request_id=request_id), 0.6)
    assert holder.lease.end_at == pytest.approx(START + 2.7)


def test_an_older_epoch_is_over_at_once() -> None:
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    effects = holder.deny(0.6, reason=Reason.STALE_EPOCH, final=True)
    assert words(effects) == ["lost", "KillTree", "End"]
    assert isinstance(effects[0], le.Tell)
    assert effects[0].reason is Reason.STALE_EPOCH


def test_a_lost_connection_is_made_again_and_renewed_within_the_lease() -> None:
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    assert holder.tell(le.ConnectionLost(), 0.6) == []
    assert holder.tell(le.Woke(), 0.65) == [le.Connect()]
    assert holder.tell(le.ConnectionLost(), 0.65) == []
    assert holder.tell(le.Woke(), 0.701) == [le.Connect()]
    assert words(holder.tell(le.Connected(), 0.9)) == ["Request"]
    holder.confirm(1.0)
    assert holder.lease.end_at == pytest.approx(START + 0.9 + 2.7)


def test_a_connection_that_says_nothing_is_replaced_while_there_is_time() -> None:
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    assert holder.deadline == pytest.approx(1.4)
    assert holder.tell(le.Woke(), 1.401) == [le.Connect()]
    assert holder.deadline == pytest.approx(2.301)
    assert holder.tell(le.Woke(), 2.302) == [le.Connect()]
    assert words(holder.tell(le.Woke(), 2.7)) == ["lost", "KillTree", "End"]


def test_a_restarted_store_that_does_not_know_the_gang_yet_is_asked_until_the_end() -> None:
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    holder.deny(0.6, reason=Reason.UNKNOWN_GANG, final=False)
    assert holder.phase is LeasePhase.HOLDING
    assert holder.deadline == pytest.approx(0.7)
    assert words(holder.tell(le.Woke(), 0.7)) == ["Request"]
    holder.confirm(0.75)
    assert holder.lease.end_at == pytest.approx(START + 0.7 + 2.7)


def test_a_store_that_never_learns_of_the_gang_costs_the_lease_in_time() -> None:
    holder = holding()
    at = 0.5
    for _ in range(200):
        if holder.phase is not LeasePhase.HOLDING:
            break
        sent = [e for e in holder.tell(le.Woke(), at) if isinstance(e, le.Request)]
        if sent:
            holder.deny(at, reason=Reason.UNKNOWN_GANG, final=False)
        at = holder.deadline or at
    assert at == pytest.approx(2.7)
    assert isinstance(holder.effects[-3], le.Tell)
    assert "UnknownGang" in holder.effects[-3].message


@pytest.mark.parametrize(
    ("slept_until", "first"),
    [(2.75, "lost"), (3.1, "lost"), (3.3, "FreezeTree"), (60.0, "FreezeTree"), (90_000.0, "FreezeTree")],
)
def test_only_who_was_not_running_may_ask_before_it_kills(slept_until: float, first: str) -> None:
    """The last deadline that it asked for is the end itself, at 2.7: later by more than 0.5 s means asleep."""
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    holder.tell(le.ConnectionLost(), 0.6)
    for at in (0.651, 1.552, 2.453):
        assert holder.tell(le.Woke(), at) == [le.Connect()]
    assert holder.deadline == pytest.approx(2.7)
    assert words(holder.tell(le.Woke(), slept_until))[0] == first


def asking() -> Holder:
    """Held until 2.7, slept until 60."""
    holder = holding()
    assert words(holder.tell(le.Woke(), 60.0)) == ["FreezeTree", "frozen", "Request"]
    assert holder.phase is LeasePhase.ASKING
    return holder


def test_who_slept_and_is_renewed_goes_on() -> None:
    holder = asking()
    assert words(holder.confirm(60.1)) == ["ThawTree", "thawed"]
    assert holder.phase is LeasePhase.HOLDING
    assert holder.lease.end_at == pytest.approx(START + 60.0 + 2.7)


def test_who_slept_and_is_refused_kills() -> None:
    holder = asking()
    assert words(holder.deny(60.1, reason=Reason.STALE_EPOCH, final=True)) == ["lost", "KillTree", "End"]


def test_who_slept_and_gets_no_answer_kills_within_the_short_limit() -> None:
    holder = asking()
    assert run_until_over(holder) == 60.0 + ls.ASK_LIMIT_S
    assert words(holder.effects)[-3:] == ["lost", "KillTree", "End"]
    assert le.Connect() in holder.effects[-6:]  # a dead connection was replaced before giving up


def test_an_answer_from_before_the_sleep_thaws_nothing() -> None:
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    assert words(holder.tell(le.Woke(), 60.0))[0] == "FreezeTree"
    assert holder.tell(le.Confirmed(request_id=1), 60.01) == []
    assert holder.phase is LeasePhase.ASKING
    assert words(holder.tell(le.Confirmed(request_id=2), 60.02)) == ["ThawTree", "thawed"]


def test_the_parent_that_dies_takes_the_tree_with_it_and_nothing_is_released() -> None:
    holder = holding()
    assert words(holder.tell(le.ParentDied(), 0.2)) == ["KillTree", "End"]


def test_a_release_is_confirmed_and_ends_without_a_kill() -> None:
    holder = holding()
    (release,) = holder.tell(le.ReleaseAsked(), 0.2)
    assert release == le.Request(op="release", request_id=1)
    assert words(holder.confirm(0.3)) == ["released", "End"]
    assert le.KillTree() not in holder.effects


@pytest.mark.parametrize("event", [le.ConnectionLost(), le.Woke()])
def test_a_release_that_nobody_answers_ends_all_the_same(event: le.LeaseEvent) -> None:
    holder = holding()
    holder.tell(le.ReleaseAsked(), 0.2)
    assert words(holder.tell(event, 0.2 + ls.ASK_LIMIT_S)) == ["End"]
    assert le.KillTree() not in holder.effects


def test_a_refused_release_ends_all_the_same() -> None:
    holder = holding()
    holder.tell(le.ReleaseAsked(), 0.2)
    assert words(holder.deny(0.3, reason=Reason.STALE_EPOCH, final=True)) == ["End"]


def test_a_release_before_any_grant_just_ends() -> None:
    assert words(Holder().tell(le.ReleaseAsked(), 0.1)) == ["End"]


def test_a_lease_that_is_refused_is_told_with_its_reason() -> None:
    holder = Holder()
    holder.tell(le.Connected(), 0.0)
    effects = holder.deny(0.1, reason=Reason.STALE_EPOCH, final=True)
    assert words(effects) == ["refused", "End"]


def test_a_store_that_is_away_from_the_start_is_waited_for_with_a_limit() -> None:
    holder = Holder()
    assert run_until_over(holder) == ls.ACQUIRE_LIMIT_S
    assert words(holder.effects)[-2:] == ["refused", "End"]
    assert le.KillTree() not in holder.effects


@pytest.mark.parametrize(
    "event",
    [
        le.Connected(),
        le.ConnectionLost(),
        le.Confirmed(request_id=1),
        le.Denied(request_id=1, reason=Reason.STALE_EPOCH, message="", is_final=True),
        le.ReleaseAsked(),
        le.ParentDied(),
        le.Woke(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_nothing_changes_a_lease_that_is_over(event: le.LeaseEvent) -> None:
    holder = holding()
    holder.tell(le.ParentDied(), 0.2)
    before = holder.lease.snapshot()
    assert holder.tell(event, 0.3) == []
    assert holder.lease.snapshot() == before
    assert holder.deadline is None


def test_a_connection_that_nobody_asked_for_is_ignored() -> None:
    holder = holding()
    before = holder.lease.snapshot()
    assert holder.tell(le.Connected(), 0.2) == []
    assert holder.lease.snapshot() == before


def test_a_second_loss_of_one_connection_is_ignored() -> None:
    holder = holding()
    holder.tell(le.ConnectionLost(), 0.2)
    before = holder.lease.snapshot()
    assert holder.tell(le.ConnectionLost(), 0.21) == []
    assert holder.lease.snapshot() == before


@pytest.mark.parametrize("heartbeat_s", [0.0, 2.7, 5.0])
def test_terms_that_cannot_work_are_refused(heartbeat_s: float) -> None:
    with pytest.raises(ValueError, match="heartbeat"):
        LeaseTerms(ttl_s=3.0, guard_s=0.3, heartbeat_s=heartbeat_s)


def test_the_holder_is_dead_before_the_store_may_let_go() -> None:
    """Whatever the delays: the store counts from receipt, which is not before sending, and adds the guard."""
    for sent in (0.0, 0.4, 1.0):
        for delay in (0.0, 0.2, 0.8):
            holder = Holder()
            holder.tell(le.Connected(), sent)
            holder.confirm(sent + delay)
            store_lets_go = sent + delay / 2 + TERMS.ttl_s + TERMS.guard_s
            assert run_until_over(holder) <= store_lets_go - 2 * TERMS.guard_s + 1e-9


def test_a_secret_that_the_store_refuses_is_told_at_once() -> None:
    holder = Holder()
    effects = holder.tell(le.ConnectionLost(message="The secret is wrong.", is_final=True), 0.1)
    assert words(effects) == ["refused", "End"]
    assert isinstance(effects[0], le.Tell)
    assert effects[0].reason is Reason.UNAUTHENTICATED


def test_a_store_that_refuses_the_secret_later_does_not_end_a_lease_before_its_time() -> None:
    """A restarted store may not have been told everything yet; the end of the lease is near anyway."""
    holder = holding()
    holder.tell(le.ConnectionLost(message="The secret is wrong.", is_final=True), 0.1)
    assert holder.phase is LeasePhase.HOLDING


def test_a_denial_of_another_request_changes_nothing() -> None:
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    before = holder.lease.snapshot()
    denied = le.Denied(request_id=7, reason=Reason.STALE_EPOCH, message="", is_final=True)
    assert holder.tell(denied, 0.6) == []
    assert holder.lease.snapshot() == before


def test_a_release_that_is_asked_for_twice_is_sent_once() -> None:
    holder = holding()
    holder.tell(le.ReleaseAsked(), 0.2)
    assert holder.tell(le.ReleaseAsked(), 0.21) == []


# ---- what can be seen of a store on the same machine --------------------------------------------------


def renewing() -> Holder:
    """A renewal was sent at 0.5 and has no answer."""
    holder = holding()
    holder.tell(le.Woke(), 0.5)
    return holder


def looking_on(holder: Holder, event: Callable[[float], le.LeaseEvent], until: float) -> float:
    """Looks whenever it wakes, as the keeper does; answers when the lease was over, or `until`."""
    at = 0.5
    while at < until:
        deadline = holder.lease.next_deadline()
        if deadline is None:
            return at
        at = min(max(at, deadline), at + TERMS.heartbeat_s)
        for heard in (event(at), le.Woke()):
            holder.tell(heard, at)
    return until


def test_a_store_that_does_not_run_declares_nobody_lost_so_its_holders_go_on() -> None:
    holder = renewing()
    assert looking_on(holder, lambda at: le.StoreStoodStill(since=0.5, seen_at=at), 60.0) == 60.0
    assert "Connect" not in words(holder.effects[2:]), "the connection is not dead, its store stands"
    holder.confirm(60.0)
    assert holder.lease.end_at == pytest.approx(START + 60.0 + 2.7, abs=0.6), (
        "an old request's answer takes nothing"
    )
    assert holder.deadline == pytest.approx(60.5, abs=0.5)


def test_a_store_that_stands_for_less_than_it_would_notice_itself_carries_no_lease() -> None:
    holder = renewing()
    short_s = TERMS.still_s - 0.01
    assert looking_on(holder, lambda at: le.StoreStoodStill(since=at - short_s, seen_at=at), 60.0) == 2.7


def test_what_a_store_forgives_itself_is_no_longer_than_what_a_holder_waits_to_see() -> None:
    """The holder's side of `Books.absolve_stall`."""
    store_notices_s = TICK_S_MAX + STALL_SHARE * TERMS.ttl_s
    assert TERMS.still_s >= store_notices_s + TERMS.guard_s
    assert TERMS.still_s < TERMS.usable_s - TERMS.heartbeat_s, "and it is seen before the lease is over"


def test_a_store_whose_process_is_dead_and_not_replaced_declares_nobody_lost_either() -> None:
    holder = holding()
    holder.tell(le.ConnectionLost(message="Last: Connection reset by peer."), 0.4)

    def refused(at: float) -> le.LeaseEvent:
        return le.StoreGone(seen_at=at - 0.01)

    at = 0.5
    while at < 30.0:
        holder.tell(refused(at), at)
        holder.tell(le.ConnectionLost(), at)
        holder.tell(le.Woke(), at)
        at += 0.05
    assert holder.phase is LeasePhase.HOLDING
    holder.tell(le.Connected(), at)
    holder.deny(at, reason=Reason.UNKNOWN_GANG, final=False)
    holder.tell(le.Woke(), at + 2.6)
    assert holder.phase is LeasePhase.HOLDING, "the store that came back may be told late"
    holder.tell(le.Woke(), at + 2.71)
    assert holder.deadline is None, "but not for ever"


def test_a_sight_counts_from_when_it_was_seen_not_from_when_it_was_told() -> None:
    holder = holding()
    holder.tell(le.StoreGone(seen_at=1.0), 2.0)
    assert holder.lease.end_at == pytest.approx(START + 1.0 + 2.7)


def test_a_sight_that_is_older_than_the_last_renewal_takes_nothing() -> None:
    holder = renewing()
    holder.confirm(0.6)
    holder.tell(le.StoreGone(seen_at=0.2), 0.7)
    assert holder.lease.end_at == pytest.approx(START + 0.5 + 2.7)


def test_a_store_that_never_comes_back_carries_a_lease_for_a_bounded_time() -> None:
    holder = renewing()
    over_at = looking_on(holder, lambda at: le.StoreStoodStill(since=0.5, seen_at=at), 2000.0)
    assert ls.STORE_GONE_LIMIT_S < over_at < ls.STORE_GONE_LIMIT_S + 2 * TERMS.ttl_s


def test_whoever_overslept_stays_frozen_while_the_store_stands() -> None:
    holder = holding()
    holder.tell(le.Woke(), 60.0)
    assert holder.phase is LeasePhase.ASKING
    for tenth in range(40):
        at = 60.0 + tenth / 10
        holder.tell(le.StoreStoodStill(since=60.0, seen_at=at), at)
        holder.tell(le.Woke(), at)
    assert holder.phase is LeasePhase.ASKING
    assert "ThawTree" not in words(holder.effects)
    holder.confirm(64.1)
    assert "ThawTree" in words(holder.effects)


def test_nothing_is_seen_before_the_first_grant() -> None:
    holder = Holder()
    holder.tell(le.Connected(), 0.1)
    holder.tell(le.StoreStoodStill(since=0.1, seen_at=5.0), 5.0)
    holder.tell(le.StoreGone(seen_at=5.0), 5.0)
    assert holder.lease.end_at is None


def lost_by(holder: Holder) -> str:
    run_until_over(holder)
    (lost,) = [e for e in holder.effects if isinstance(e, le.Tell) and e.word == "lost"]
    assert lost.reason is Reason.STORE_UNREACHABLE, "the store or the way to it, not this rank"
    return lost.message


def test_a_lost_lease_tells_that_the_connection_was_open_and_silent() -> None:
    holder = renewing()
    while holder.deadline is not None and holder.deadline < 2.7:
        holder.tell(le.Woke(), holder.deadline)
        if not holder.lease.state.connected:
            holder.tell(le.Connected(), holder.deadline - 0.8)  # a proxy accepts, and nothing else comes
    assert "No renewal was confirmed for 2.7 s: the connection to the rendezvous store is open, " in lost_by(
        holder
    )


def test_a_lost_lease_tells_that_there_was_no_connection_and_why() -> None:
    holder = holding()
    holder.tell(le.ConnectionLost(message="Last: No route to host."), 0.2)
    message = lost_by(holder)
    assert "there is no connection to the rendezvous store, and nothing was heard for 2.6 s." in message
    assert message.endswith("Last: No route to host.")


def test_a_lost_lease_tells_that_the_store_answered_and_did_not_know_the_gang() -> None:
    holder = holding()
    at = 0.5
    while at < 2.7:
        holder.tell(le.Woke(), at)
        holder.deny(at, reason=Reason.UNKNOWN_GANG, final=False)
        at += 0.1
    assert lost_by(holder).endswith("the rendezvous store answers, but does not grant it. UnknownGang")


def test_whoever_gives_its_lease_back_waits_no_longer_for_a_store_that_stands() -> None:
    holder = holding()
    holder.tell(le.ReleaseAsked(), 0.6)
    assert holder.phase is LeasePhase.RELEASING
    holder.tell(le.StoreStoodStill(since=0.6, seen_at=5.0), 1.0)
    assert run_until_over(holder) == pytest.approx(0.6 + ls.ASK_LIMIT_S)
