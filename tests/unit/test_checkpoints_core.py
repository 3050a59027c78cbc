"""Which parts make a gang checkpoint: the pure core of the coordinator."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.checkpoints import (
    KEEP,
    PARTS_MAX,
    AskAboutPart,
    CheckpointEffect,
    Checkpoints,
    CleanCheckpointStore,
    CommitCheckpoint,
    Committed,
    PartFact,
    RetakePart,
)
from mesh.ids import Epoch, Rank

E1, E2 = Epoch(1), Epoch(2)


def part(number: int, *steps: int, digest: str = "", files: int = 1) -> PartFact:
    digest = digest or f"d{number}-{steps}"
    return PartFact(
        number=number, digest=digest, content=f"of {digest}", steps=steps, files=files, size_bytes=10 * files
    )


def empty(number: int = 1) -> PartFact:
    return part(number, digest="empty", files=0)


def gang(size: int = 2, epoch: Epoch = E1) -> Checkpoints:
    core = Checkpoints(world_size=size)
    core.begin_epoch(epoch)
    return core


def tell(core: Checkpoints, rank: int, fact: PartFact, epoch: Epoch = E1) -> list[CheckpointEffect]:
    return core.part_stored(epoch=epoch, rank=Rank(rank), part=fact)


def answer(core: Checkpoints, ask: CheckpointEffect, holds: bool = True, epoch: Epoch = E1):  # type: ignore[no-untyped-def]
    assert isinstance(ask, AskAboutPart)
    return core.answered(epoch=epoch, rank=ask.rank, question=ask.question, digest=ask.digest, holds=holds)


def commit(core: Checkpoints) -> Committed:
    assert core.wish is not None
    core.committed_as(number=core.wish.number, uri=f"u{core.wish.number}", size_bytes=20, created_at=1.0)
    return core.committed[-1]


def test_parts_of_the_same_step_of_all_ranks_are_committed() -> None:
    core = gang()
    assert tell(core, 0, part(1, 100)) == []
    (wish,) = tell(core, 1, part(1, 100, digest="other"))
    assert wish == CommitCheckpoint(
        number=1, epoch=E1, step=100, parts=("d1-(100,)", "other"), contents=("of d1-(100,)", "of other")
    )
    assert core.newest is None, "a wish is not a checkpoint"
    effects = core.committed_as(number=1, uri="u", size_bytes=20, created_at=5.0)
    assert effects == [CleanCheckpointStore(numbers=(1,), parts=("d1-(100,)", "other"))]
    newest = core.newest
    assert newest is not None
    assert (newest.id, newest.step, newest.uri, core.is_progress(newest)) == ("e1-c000001", 100, "u", True)


def test_the_largest_step_that_all_have_is_taken_however_far_some_are() -> None:
    core = gang()
    for number, steps in enumerate([(100,), (100, 200), (200, 300)], start=1):
        assert tell(core, 0, part(number, *steps)) == []
    (wish,) = tell(core, 1, part(1, 100, 200))
    assert isinstance(wish, CommitCheckpoint)
    assert (wish.step, wish.parts[0]) == (200, "d3-(200, 300)")


def test_a_rank_that_writes_nothing_is_asked_whether_it_still_does_not() -> None:
    core = gang()
    assert tell(core, 1, empty()) == []
    (ask,) = tell(core, 0, part(1, 100))
    assert ask == AskAboutPart(rank=Rank(1), question=1, digest="empty")
    (wish,) = answer(core, ask)
    assert isinstance(wish, CommitCheckpoint)
    assert (wish.step, wish.parts) == (100, ("d1-(100,)", "empty"))


def test_a_rank_that_has_begun_to_write_is_waited_for() -> None:
    core = gang()
    tell(core, 1, empty())
    (ask,) = tell(core, 0, part(1, 100))
    assert answer(core, ask, holds=False) == []
    assert core.wish is None
    (wish,) = tell(core, 1, part(2, 100))
    assert isinstance(wish, CommitCheckpoint)


def test_where_nobody_has_written_anything_there_is_nothing_to_commit() -> None:
    core = gang()
    assert tell(core, 0, empty()) == []
    assert tell(core, 1, empty()) == []


def test_parts_without_steps_are_committed_when_all_say_that_they_still_hold() -> None:
    core = gang(3)
    tell(core, 0, part(1, digest="a"))
    tell(core, 1, empty())
    asks = tell(core, 2, part(1, digest="c"))
    assert [ask.rank for ask in asks if isinstance(ask, AskAboutPart)] == [0, 1, 2]
    assert answer(core, asks[2]) == []
    assert answer(core, asks[2]) == [], "an answer twice is one"
    assert answer(core, asks[0]) == []
    (wish,) = answer(core, asks[1])
    assert isinstance(wish, CommitCheckpoint)
    assert (wish.step, wish.parts) == (None, ("a", "empty", "c"))


def test_a_step_on_one_rank_and_none_on_another_asks_both() -> None:
    core = gang()
    tell(core, 0, part(1, 100, digest="a"))
    asks = tell(core, 1, part(1, digest="rng"))
    assert [ask.rank for ask in asks if isinstance(ask, AskAboutPart)] == [0, 1]


def test_a_new_part_makes_the_question_before_it_void() -> None:
    core = gang()
    tell(core, 0, part(1, digest="a"))
    old = tell(core, 1, part(1, digest="b"))
    new = tell(core, 1, part(2, digest="b2"))
    assert [answer(core, ask) for ask in old] == [[], []]
    answer(core, new[0])
    (wish,) = answer(core, new[1])
    assert isinstance(wish, CommitCheckpoint)
    assert wish.parts == ("a", "b2")


def test_numbers_that_count_the_ranks_are_no_steps() -> None:
    core = gang()
    tell(core, 0, part(1, 0, digest="a"))
    asks = tell(core, 1, part(1, 1, digest="b"))
    assert len(asks) == 2
    answer(core, asks[0])
    (wish,) = answer(core, asks[1])
    assert isinstance(wish, CommitCheckpoint)
    assert wish.step is None


def test_the_same_content_is_not_committed_again_and_a_smaller_step_never() -> None:
    core = gang(1)
    tell(core, 0, part(1, 100, digest="a"))
    commit(core)
    assert tell(core, 0, part(2, 100, digest="a")) == []
    assert tell(core, 0, part(3, 50, digest="b")) == []
    core.begin_epoch(E2)
    assert tell(core, 0, part(1, 50, digest="b"), epoch=E2) == [], "also when it is all that this epoch has"


def test_parts_that_differ_in_logs_only_are_no_other_checkpoint() -> None:
    core = gang(1)
    tell(core, 0, part(1, digest="a"))
    answer(core, AskAboutPart(rank=Rank(0), question=1, digest="a"))
    commit(core)
    more_log = PartFact(number=2, digest="b", content="of a", files=1, size_bytes=20)
    assert tell(core, 0, more_log) == []


def test_more_of_the_same_step_is_committed_and_is_no_progress() -> None:
    core = gang(1)
    tell(core, 0, part(1, 100, digest="half"))
    commit(core)
    assert len(tell(core, 0, part(2, 100, digest="all"))) == 1
    assert not core.is_progress(commit(core))
    tell(core, 0, part(3, 200))
    assert core.is_progress(commit(core))


def test_parts_of_another_epoch_and_of_no_rank_change_nothing() -> None:
    core = gang(1, epoch=E2)
    before = core.to_record()
    assert tell(core, 0, part(1, 100), epoch=E1) == []
    assert tell(core, 7, part(1, 100), epoch=E2) == []
    assert core.to_record() == before
    tell(core, 0, part(1, 100), epoch=E2)
    assert tell(core, 0, part(1, 100, digest="twice"), epoch=E2) == []


def test_a_new_epoch_makes_a_wish_void_and_its_number_is_not_used_again() -> None:
    core = gang(1)
    tell(core, 0, part(1, 100))
    assert core.begin_epoch(E2) is None
    assert core.committed_as(number=1, uri="ghost", size_bytes=1, created_at=1.0) == []
    assert core.newest is None
    (wish,) = tell(core, 0, part(1, 100), epoch=E2)
    assert isinstance(wish, CommitCheckpoint)
    assert wish.number == 2


def test_one_wish_at_a_time_and_what_came_meanwhile_follows() -> None:
    core = gang(1)
    tell(core, 0, part(1, 100))
    assert tell(core, 0, part(2, 200)) == []
    effects = core.committed_as(number=1, uri="u", size_bytes=1, created_at=1.0)
    assert isinstance(effects[1], CommitCheckpoint)
    assert effects[1].step == 200


def test_a_part_that_the_store_lacks_is_none() -> None:
    core = gang()
    tell(core, 0, part(1, 100, digest="a"))
    tell(core, 1, part(1, 100, digest="b"))
    assert core.not_committed(number=1, lacking=["b"]) == [RetakePart(rank=Rank(1), digest="b")]
    assert core.wish is None
    (wish,) = tell(core, 1, part(2, 100, digest="b"))
    assert isinstance(wish, CommitCheckpoint)
    assert core.not_committed(number=99, lacking=[]) == []


def test_a_damaged_one_is_not_offered_and_the_one_before_is() -> None:
    core = gang(1)
    for step in (100, 200):
        tell(core, 0, part(step, step))
        commit(core)
    reference = core.begin_epoch(E2)
    assert reference is not None
    assert (reference.number, core.restored) == (2, 2)
    assert core.found_damaged(number=2, why="blob missing") is not None
    assert core.found_damaged(number=2, why="again") is None
    earlier = core.begin_epoch(Epoch(3))
    assert earlier is not None
    assert (earlier.step, earlier.number) == (100, 1)
    assert len(tell(core, 0, part(1, 150), epoch=Epoch(3))) == 1, "steps may grow from the one before"
    core.begin_epoch(Epoch(4))
    core.found_damaged(number=1, why="too")
    assert core.begin_epoch(Epoch(5)) is None


def test_the_newest_stay_and_what_the_epoch_began_with() -> None:
    core = gang(1)
    tell(core, 0, part(1, 1))
    commit(core)
    core.begin_epoch(E2)
    for step in range(2, 9):
        tell(core, 0, part(step, step), epoch=E2)
        commit(core)
    assert [one.number for one in core.committed] == [1, *range(9 - KEEP, 9)]
    core.begin_epoch(Epoch(3))
    tell(core, 0, part(1, 9), epoch=Epoch(3))
    commit(core)
    assert [one.number for one in core.committed] == [7, 8, 9]


def test_parts_of_a_rank_are_bounded() -> None:
    core = gang()
    for number in range(1, 100):
        tell(core, 0, part(number, number))
    assert len(core.to_record()["parts"]) == PARTS_MAX


def test_after_a_crash_what_may_not_have_happened_is_asked_for_again() -> None:
    core = gang()
    tell(core, 1, empty())
    asks = tell(core, 0, part(1, 100))
    again = Checkpoints.from_record(json.loads(json.dumps(core.to_record())))
    (ask,) = again.recovered()
    assert isinstance(ask, AskAboutPart)
    assert ask.question != asks[0].question  # type: ignore[union-attr]
    assert answer(again, asks[0]) == [], "an answer to the question before the crash"
    (wish,) = answer(again, ask)
    third = Checkpoints.from_record(json.loads(json.dumps(again.to_record())))
    assert third.recovered() == [wish]
    commit(third)
    fourth = Checkpoints.from_record(json.loads(json.dumps(third.to_record())))
    assert fourth.committed == third.committed
    assert fourth.recovered() == []
    assert fourth.snapshot() == fourth


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_order_in_which_ranks_report_makes_no_difference(order: tuple[int, ...]) -> None:
    core = gang(3)
    for rank in order:
        effects = tell(core, rank, part(1, 100, digest=f"r{rank}"))
    (wish,) = effects
    assert isinstance(wish, CommitCheckpoint)
    assert (wish.step, wish.parts) == (100, ("r0", "r1", "r2"))


REPORTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 5), st.booleans()), max_size=40
)


@given(reports=REPORTS, data=st.data())
@settings(deadline=None)
def test_what_is_committed_is_always_one_part_of_every_rank_at_one_step(
    reports: list[tuple[int, int, int, bool]], data: st.DataObject
) -> None:
    """Any ranks, any epochs (ghosts too), any steps, any answers, in any order; the journal in between."""
    core = gang(3)
    told: dict[str, tuple[int, int, int]] = {}
    steps: list[int] = []
    for number, (rank, epoch, step, crash) in enumerate(reports, start=1):
        if epoch > core.epoch:
            core.begin_epoch(Epoch(epoch))
        digest = f"p{number}"
        told[digest] = (rank, epoch, step)
        effects = tell(core, rank, part(number, step, digest=digest), epoch=Epoch(epoch))
        if crash:
            core = Checkpoints.from_record(json.loads(json.dumps(core.to_record())))
            effects = core.recovered()
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, AskAboutPart):
                effects += answer(core, effect, data.draw(st.booleans()), epoch=core.epoch)
            elif isinstance(effect, CommitCheckpoint):
                facts = [told[digest] for digest in effect.parts]
                assert [rank for rank, _, _ in facts] == [0, 1, 2]
                assert {of for _, of, _ in facts} == {core.epoch}, "a ghost's part"
                if effect.step is not None:
                    assert {at for _, _, at in facts} == {effect.step}
                    steps.append(effect.step)
                if data.draw(st.booleans()):
                    effects += core.committed_as(number=effect.number, uri="u", size_bytes=1, created_at=0.0)
    numbers = [one.number for one in core.committed]
    assert numbers == sorted(set(numbers))
    whole = [one.step for one in core.committed if one.step is not None]
    assert whole == sorted(whole)
