"""Every labelled case of blame has one verdict, in whatever order its evidence is heard."""

from __future__ import annotations

import random

import pytest

from tests.unit.blame_cases import CASES, Case, Expected
from tests.unit.blame_player import Found, Player

ORDERS_MAX = 80
"""Of one case: all of them when there are no more, else so many in turn and so many by chance."""
CRASHES = 40
"""Lives of one case in which the coordinator crashes somewhere and reports come twice."""


class Orders:
    """Walks through every order: `choose` follows a path, `next_path` is the one after it, depth first."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []
        self._depth = 0

    def choose(self, count: int) -> int:
        if self._depth == len(self._path):
            self._path.append((0, count))
        choice, _ = self._path[self._depth]
        self._depth += 1
        return choice

    def next_path(self) -> bool:
        self._depth = 0
        while self._path:
            choice, count = self._path.pop()
            if choice + 1 < count:
                self._path.append((choice + 1, count))
                return True
        return False


def verify(found: Found, expected: Expected) -> None:
    said = (found.kind, found.cause.rank, found.cause.reason, found.victims, found.lost)
    assert said == (expected.kind, expected.rank, expected.reason, expected.victims, expected.lost), (
        found.story
    )
    for words in expected.says:
        assert words in found.story
    for words in expected.says_not:
        assert words not in found.story
    assert expected.hint in found.cause.evidence.hint


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_a_case_has_one_verdict_in_every_order(case: Case, seed: int) -> None:
    orders = Orders()
    for _ in range(ORDERS_MAX):
        verify(Player(choose=orders.choose).play(case), case.expected)
        if not orders.next_path():
            return
    for number in range(ORDERS_MAX):
        by_chance = random.Random(f"{seed}/{case.name}/{number}")
        verify(Player(choose=by_chance.randrange).play(case), case.expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_reports_that_come_twice_and_crashes_in_between_change_no_verdict(case: Case, seed: int) -> None:
    for number in range(CRASHES):
        by_chance = random.Random(f"{seed}/{case.name}/crash {number}")
        player = Player(
            choose=by_chance.randrange,
            crash=lambda: case.survives_crashes and by_chance.random() < 0.3,
            repeat=lambda: by_chance.random() < 0.3,
        )
        verify(player.play(case), case.expected)
