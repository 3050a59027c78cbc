"""Which nodes are looked at when, and how many workers are started there: a state is kept, uses are not counted."""

from __future__ import annotations

from coordinator.warm_workers import COME_UP_S, LOOK_AGAIN_S, MAKE_UP_S, SpareWorkers, WorkerNode

NODE = WorkerNode(node_id="n", raylet="10.0.0.1:1", wanted=2)
OTHER = WorkerNode(node_id="o", raylet="10.0.0.2:1", wanted=2)


def workers(count: int, *, since: int = 0) -> frozenset[bytes]:
    """So many that wait, the first of them that has this number."""
    return frozenset(b"%d" % number for number in range(since, since + count))


def seen(*nodes: WorkerNode) -> SpareWorkers:
    spares = SpareWorkers()
    spares.seen(nodes, 0.0)
    return spares


def warm() -> SpareWorkers:
    """One node, looked at and found well at 0."""
    spares = seen(NODE)
    assert spares.take_due(0.0) == [NODE]
    assert spares.counted("n", workers(2), 0.0) == 0
    return spares


def test_a_node_that_is_new_is_looked_at_at_once_and_gets_what_is_missing() -> None:
    spares = seen(NODE, OTHER)
    assert spares.take_due(0.0) == [NODE, OTHER]
    assert spares.counted("n", workers(0), 0.0) == 2
    assert spares.counted("o", workers(1), 0.0) == 1
    assert spares.take_due(0.0) == []


def test_a_node_whose_raylet_starts_its_own_is_given_the_time() -> None:
    spares = seen(WorkerNode(node_id="n", raylet="r", wanted=1, first_look_s=8.0))
    assert spares.take_due(7.9) == []
    assert len(spares.take_due(8.0)) == 1


def test_what_was_asked_for_counts_until_it_could_have_come_up() -> None:
    spares = seen(NODE)
    spares.take_due(0.0)
    assert spares.counted("n", workers(0), 0.0) == 2
    spares.look_at("n", 1.0)  # a run was cancelled
    assert spares.take_due(1.0) == [NODE]
    assert spares.counted("n", workers(0), 1.0) == 0
    due_s = spares.next_due_s()
    assert due_s is not None
    assert due_s < COME_UP_S  # whether they have
    assert spares.counted("n", workers(1), due_s) == 0
    assert spares.counted("n", workers(1), COME_UP_S) == 1  # the other one did not


def test_one_that_came_up_and_was_taken_is_made_up_for_while_the_other_is_coming() -> None:
    spares = seen(NODE)
    assert spares.counted("n", workers(0), 0.0) == 2
    assert spares.counted("n", workers(1), 2.0) == 0
    assert spares.counted("n", workers(0), 4.0) == 1
    assert spares.counted("n", workers(2, since=1), 6.0) == 0


def test_what_came_up_and_was_taken_does_not_count_as_coming() -> None:
    spares = seen(NODE)
    assert spares.counted("n", workers(0), 0.0) == 2
    assert spares.counted("n", workers(2), 2.0) == 0
    assert spares.counted("n", workers(0), 3.0) == 2
    spares.used("n", "a", 4.0)
    assert spares.counted("n", workers(0), 4.0 + MAKE_UP_S) == 2


def test_a_well_node_is_looked_at_again_in_a_while() -> None:
    spares = warm()
    assert spares.take_due(LOOK_AGAIN_S - 1) == []
    assert spares.take_due(LOOK_AGAIN_S) == [NODE]


def test_a_machine_that_is_kept_is_left_alone_while_its_command_begins() -> None:
    spares = warm()
    spares.used("n", "a", LOOK_AGAIN_S - 1)
    assert spares.take_due(LOOK_AGAIN_S) == []
    assert spares.next_due_s() == LOOK_AGAIN_S - 1 + MAKE_UP_S
    spares.used("n", "a", LOOK_AGAIN_S + 1)  # ordered again
    assert spares.next_due_s() == LOOK_AGAIN_S - 1 + MAKE_UP_S
    spares.used("n", "b", LOOK_AGAIN_S + 1)
    assert spares.next_due_s() == LOOK_AGAIN_S + 1 + MAKE_UP_S


def test_a_machine_that_is_given_back_is_looked_at_at_once() -> None:
    spares = warm()
    spares.used("n", "a", 1.0)
    spares.look_at("n", 2.0)
    assert spares.take_due(2.0) == [NODE]
    assert spares.counted("n", workers(0), 2.0) == 2


def test_more_than_are_wanted_are_left_alone() -> None:
    assert warm().counted("n", workers(5), 1.0) == 0


def test_a_node_that_cannot_be_told_to_start_is_asked_again_soon() -> None:
    spares = seen(NODE)
    spares.take_due(0.0)
    assert spares.counted("n", workers(0), 0.0) == 2
    spares.no_answer("n", 1.0, not_started=2)
    due_s = spares.next_due_s()
    assert due_s is not None
    assert due_s < LOOK_AGAIN_S
    assert spares.take_due(due_s) == [NODE]
    assert spares.counted("n", workers(0), due_s) == 2


def test_what_was_asked_for_still_counts_when_the_node_does_not_answer_the_next_question() -> None:
    spares = seen(NODE)
    assert spares.counted("n", workers(0), 0.0) == 2
    spares.no_answer("n", 2.0, not_started=0)
    assert spares.counted("n", workers(0), 7.0) == 0


def test_a_node_that_is_being_looked_at_is_not_due_and_its_change_is_not_forgotten() -> None:
    spares = warm()
    spares.look_at("n", 1.0)
    assert spares.take_due(1.0, busy={"n"}) == []
    assert spares.next_due_s(busy={"n"}) is None
    assert spares.take_due(1.0) == [NODE]


def test_a_node_that_is_gone_is_forgotten_whoever_still_speaks_of_it() -> None:
    spares = seen(NODE)
    spares.seen([OTHER], 1.0)
    spares.look_at("n", 1.0)
    spares.used("n", "a", 1.0)
    spares.no_answer("n", 1.0, not_started=0)
    assert spares.counted("n", workers(0), 1.0) == 0
    assert spares.take_due(1.0) == [OTHER]
