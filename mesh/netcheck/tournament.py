"""Who measures whom in which round: a round-robin tournament, so that no link is measured while its end is busy.

The circle method (Kirkman, 1847): n - 1 rounds for an even n, n rounds for an odd one, in which each member sits out
once. In a round every member meets at most one other.
"""

from __future__ import annotations

from collections.abc import Collection

Pair = tuple[int, int]
"""Two members by rank, the lower one first."""


def rounds(members: int) -> list[list[Pair]]:
    """Every pair once, in rounds of pairs that share no member."""
    places: list[int | None] = [*range(members)]
    if members % 2:
        places.append(None)
    half = len(places) // 2
    found: list[list[Pair]] = []
    for _ in range(len(places) - 1):
        meetings = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([_pair(a, b) for a, b in meetings if a is not None and b is not None])
        places[1:] = [places[-1], *places[1:-1]]
    return found


def rounds_of(pairs: Collection[Pair], *, members: int) -> list[list[Pair]]:
    """The same for some pairs only; rounds without any are left out."""
    chosen = [[pair for pair in meetings if pair in pairs] for meetings in rounds(members)]
    return [meetings for meetings in chosen if meetings]


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)
