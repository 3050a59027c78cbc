"""What a coordinator tells a store that may have been restarted, and what it believes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.events import BarrierOpened, LeaseGone, LeaseLapsed, MemberSuspected
from coordinator.core.gang_state import Gang, MemberPhase, MemberRecord, Settlement
from coordinator.core.resync import StoreView, missed_events, unaccounted
from coordinator.core.store_trust import CatchUp, StoreTrust
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.plan import RunPlan
from mesh.states import RunState

UID, E1, E2 = RunUid("run"), Epoch(1), Epoch(2)
KEY = (UID, E1)


def incarnation(rank: int, life: str = "t", epoch: Epoch = E1) -> Incarnation:
    return Incarnation(run_uid=UID, epoch=epoch, rank=Rank(rank), token=IncarnationToken(f"{life}{rank}"))


def member(me: Incarnation, phase: MemberPhase = MemberPhase.REGISTERED) -> MemberRecord:
    return MemberRecord(
        incarnation=me, machine=MachineName("m"), address="127.0.0.1", phase=phase, ordered_at=0.0
    )


def gang(*, barrier_open: bool = False, phase: MemberPhase = MemberPhase.REGISTERED) -> Gang:
    return Gang(
        uid=UID, plan=RunPlan(name=RunName("r"), command=("true",), nodes=2), created_at=0.0, epoch=E1,
        state=RunState.RUNNING if barrier_open else RunState.ASSEMBLING, barrier_open=barrier_open,
        members={Rank(rank): member(incarnation(rank), phase) for rank in range(2)},
    )  # fmt: skip


def told_first(trust: StoreTrust, instance: str = "A") -> None:
    assert trust.ask(KEY, is_new=True)
    trust.learn(KEY, instance, from_start=True)


# ---- whom to believe ----------------------------------------------------------------------------------


def test_the_store_that_was_told_first_is_believed_and_no_other() -> None:
    trust = StoreTrust()
    told_first(trust)
    assert trust.is_believed(KEY, "A")
    assert not trust.is_believed(KEY, "B")
    assert not trust.is_believed((UID, E2), "A")
    assert not trust.may_have_opened(KEY, "A", was_open=False)
    assert trust.may_have_opened(KEY, "A", was_open=True)
    assert trust.may_have_opened(KEY, "B", was_open=False)


def test_only_the_first_telling_of_a_new_epoch_is_the_first() -> None:
    """The answer to an earlier one may have been lost together with the store that gave it."""
    trust = StoreTrust()
    assert trust.ask(KEY, is_new=True)
    assert not trust.ask(KEY, is_new=True)
    assert trust.ask((UID, E2), is_new=True)


def test_a_coordinator_that_came_back_is_never_the_first_but_believes_a_store_that_was() -> None:
    trust = StoreTrust()
    assert not trust.ask(KEY, is_new=False)
    assert trust.catch_up(gang(), "A", {KEY: True}) is CatchUp.COMPARE
    assert trust.is_believed(KEY, "A")


def test_a_store_that_was_told_again_is_not_believed() -> None:
    trust = StoreTrust()
    told_first(trust)
    trust.learn(KEY, "B", from_start=False)
    assert trust.catch_up(gang(), "B", {KEY: False}) is CatchUp.COMPARE
    assert not trust.is_believed(KEY, "B")


# ---- what to tell -------------------------------------------------------------------------------------


def test_an_epoch_is_told_again_only_after_the_gang_has_asked_for_it() -> None:
    trust = StoreTrust()
    assert trust.catch_up(gang(), "A", {}) is CatchUp.LEAVE
    trust.ask(KEY, is_new=False)
    assert trust.catch_up(gang(), "A", {}) is CatchUp.TELL
    assert trust.catch_up(gang(), "A", {(UID, E2): True}) is CatchUp.TELL


def test_a_store_that_is_told_again_hears_who_was_given_up_by_the_journal_and_since() -> None:
    trust, of = StoreTrust(), gang()
    of.attempts = [member(incarnation(0, "old")), member(incarnation(1, "gone", E2))]
    trust.gave_up(incarnation(1, "now"))
    telling = trust.telling(KEY, of, is_first=False)
    assert telling.revoked == ((0, "old0"), (1, "now1"))
    assert trust.telling((UID, E2), of, is_first=True).revoked == ((1, "gone1"),)
    assert trust.telling(KEY, None, is_first=False).revoked == ((1, "now1"),)


@pytest.mark.parametrize("barrier_open", [True, False])
def test_a_barrier_that_had_opened_is_not_to_open_a_second_time(barrier_open: bool) -> None:
    trust = StoreTrust()
    assert trust.telling(KEY, gang(barrier_open=barrier_open), is_first=False).has_opened is barrier_open
    assert not trust.telling((UID, E2), gang(barrier_open=True), is_first=True).has_opened


def test_a_gang_that_is_over_is_forgotten_with_every_epoch() -> None:
    trust = StoreTrust()
    told_first(trust)
    trust.gave_up(incarnation(0))
    trust.ask((UID, E2), is_new=True)
    trust.forget(UID, E2)
    assert not trust.is_believed(KEY, "A")
    assert trust.telling(KEY, None, is_first=False).revoked == ()
    assert trust.catch_up(gang(), "A", {}) is CatchUp.LEAVE


def test_what_is_forgotten_late_leaves_the_epoch_that_has_begun_meanwhile() -> None:
    trust = StoreTrust()
    assert trust.ask((UID, E2), is_new=True)
    trust.learn((UID, E2), "A", from_start=True)
    trust.forget(UID, E1)
    assert trust.is_believed((UID, E2), "A")
    assert not trust.ask((UID, E2), is_new=True)


def test_a_store_that_is_told_again_hears_of_every_lease_that_is_proof_that_nothing_acts() -> None:
    """It would give it anew to a machine that stood still: its tree would go on, and the next epoch has begun."""
    of = gang(barrier_open=True, phase=MemberPhase.STARTED)
    of.members[Rank(1)] = replace(of.members[Rank(1)], settlement=Settlement.LEASE_LAPSED)
    telling = StoreTrust().telling(KEY, of, is_first=False)
    assert telling.revoked == ((1, "t1"),)


@pytest.mark.parametrize("settlement", [Settlement.NEVER_STARTED, Settlement.REVOKED])
def test_it_hears_of_members_whose_barrier_never_opens_as_well(settlement: Settlement) -> None:
    of = gang()
    of.members[Rank(0)] = replace(of.members[Rank(0)], settlement=settlement)
    assert StoreTrust().telling(KEY, of, is_first=False).revoked == ((0, "t0"),)


@pytest.mark.parametrize(
    "event", [LeaseLapsed(incarnation=incarnation(1)), LeaseGone(incarnation=incarnation(1))]
)
def test_it_hears_of_a_lapse_that_the_gang_has_not_heard_of_yet(event: LeaseLapsed | LeaseGone) -> None:
    """A lease that is gone is taken for a lapse 5 s later, and a journal that cannot be written takes its time."""
    trust = StoreTrust()
    trust.heard(event)
    assert trust.telling(KEY, gang(barrier_open=True), is_first=False).revoked == ((1, "t1"),)
    trust.heard(MemberSuspected(incarnation=incarnation(0)))
    assert trust.telling(KEY, None, is_first=False).revoked == ((1, "t1"),)


def test_it_hears_of_everybody_when_the_barrier_was_closed_before_it_had_opened() -> None:
    """The gang takes that for the proof that no command has started; it may have heard of it after the store's end."""
    trust = StoreTrust()
    trust.never_opens(KEY)
    assert trust.telling(KEY, gang(), is_first=False).revoked == ((0, "t0"), (1, "t1"))
    assert trust.telling((UID, E2), gang(), is_first=False).revoked == ()
    trust.forget(UID, E1)
    assert trust.telling(KEY, gang(), is_first=False).revoked == ()


def test_who_was_seen_to_have_ended_everything_needs_no_door_that_is_shut() -> None:
    """Each life of a rank that starts again alone gives its lease back, and there may be very many of them."""
    trust, of = StoreTrust(), beginning_again()
    trust.heard(LeaseGone(incarnation=of.attempts[0].incarnation))
    assert trust.telling(KEY, of, is_first=False).revoked == ()


def test_a_rank_that_has_begun_again_alone_a_thousand_times_is_told_of_by_its_last_life() -> None:
    """A store takes so many revocations of one rank only, and the oldest lives are in the gang's history no more."""
    trust, of = StoreTrust(), beginning_again()
    for life in range(1000):
        trust.heard(LeaseGone(incarnation=incarnation(1, f"life{life}-")))
    trust.heard(LeaseGone(incarnation=incarnation(1, "u")))
    trust.heard(LeaseGone(incarnation=incarnation(0)))
    assert trust.telling(KEY, of, is_first=False).revoked == ((0, "t0"), (1, "u1"))


def test_what_was_heard_of_an_epoch_is_kept_until_the_next() -> None:
    trust = StoreTrust()
    trust.heard(LeaseLapsed(incarnation=incarnation(1)))
    trust.ask((UID, E2), is_new=True)
    assert trust.telling(KEY, None, is_first=False).revoked == ()


# ---- what follows from a snapshot ---------------------------------------------------------------------


def view(
    *holders: int, from_start: bool = True, has_opened: bool = False, unconnected: int | None = None
) -> StoreView:
    return StoreView(
        epoch=E1,
        holders=frozenset((Rank(rank), IncarnationToken(f"t{rank}")) for rank in holders),
        has_opened=has_opened,
        tokens=(IncarnationToken("t0"), IncarnationToken("t1")) if has_opened else (),
        unconnected=frozenset()
        if unconnected is None
        else frozenset({(Rank(unconnected), IncarnationToken(f"t{unconnected}"))}),
        from_start=from_start,
    )


def test_no_lease_in_a_store_that_has_seen_everything_is_the_end_of_a_member() -> None:
    of = gang()
    assert missed_events(of, view(0)) == [LeaseGone(incarnation=incarnation(1))]
    assert unaccounted(of, view(0)) == []


def test_no_lease_in_a_store_that_was_told_again_is_nothing_and_is_to_be_given() -> None:
    """Whoever told it may have died before it had given the leases; its members run."""
    of = gang(barrier_open=True)
    assert missed_events(of, view(0, from_start=False)) == []
    assert unaccounted(of, view(0, from_start=False)) == [of.members[Rank(1)]]


def test_a_member_that_was_never_heard_of_needs_no_lease_before_the_barrier_has_opened() -> None:
    of = gang(phase=MemberPhase.ORDERED)
    assert missed_events(of, view()) == []
    assert unaccounted(of, view(from_start=False)) == []
    assert len(unaccounted(of, view(from_start=False, has_opened=True))) == 2
    assert missed_events(of, view(0, has_opened=True)) == [
        BarrierOpened(epoch=E1, tokens=(IncarnationToken("t0"), IncarnationToken("t1"))),
        LeaseGone(incarnation=incarnation(1)),
    ]


def test_a_lease_without_a_connection_is_a_suspicion() -> None:
    of = gang()
    assert missed_events(of, view(0, 1, unconnected=1)) == [MemberSuspected(incarnation=incarnation(1))]
    of.members[Rank(1)] = replace(of.members[Rank(1)], incarnation=incarnation(1, "u"))
    assert MemberSuspected(incarnation=incarnation(1)) not in missed_events(of, view(0, 1, unconnected=1))


def test_a_store_at_another_epoch_and_a_gang_that_is_over_tell_nothing() -> None:
    of = gang(barrier_open=True)
    other = replace(view(from_start=False), epoch=E2)
    assert not missed_events(of, other) and not unaccounted(of, other)
    of.state = RunState.SUCCEEDED
    assert not missed_events(of, view()) and not unaccounted(of, view(from_start=False))


# ---- a rank that starts again alone -------------------------------------------------------------------


def beginning_again() -> Gang:
    """Rank 1 was ordered anew, and may not have taken its lease yet."""
    found = gang(barrier_open=True, phase=MemberPhase.STARTED)
    ended = {"phase": MemberPhase.EXITED, "settlement": Settlement.CONFIRMED}
    found.attempts.append(replace(found.members[Rank(1)], **ended))
    again = replace(member(incarnation(1, "u"), MemberPhase.ORDERED), instead_of=incarnation(1).token)
    found.members[Rank(1)] = again
    return found


@pytest.mark.parametrize("from_start", [True, False])
def test_one_that_was_admitted_may_still_come_and_is_not_missed(from_start: bool) -> None:
    view = StoreView(
        epoch=E1, holders=frozenset({(Rank(0), incarnation(0).token)}), has_opened=True, from_start=from_start
    )
    found = beginning_again()
    assert missed_events(found, view) == [] and unaccounted(found, view) == []
    found.members[Rank(1)] = replace(found.members[Rank(1)], phase=MemberPhase.REGISTERED)
    assert len(missed_events(found, view) + unaccounted(found, view)) == 1


def test_lives_that_had_passed_the_barrier_are_not_among_those_that_were_given_up() -> None:
    """There may be very many of them; and a barrier that has opened is closed in a store that has not seen it."""
    telling = StoreTrust().telling(KEY, beginning_again(), is_first=False)
    assert telling.revoked == () and telling.has_opened
