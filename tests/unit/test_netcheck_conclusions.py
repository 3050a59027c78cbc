"""What follows from a check: whose machine goes, what is kept of providers, and how long an all-reduce would take."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import SpecError
from mesh.netcheck import path_book, words
from mesh.netcheck.estimate import all_reduce_s, parse_model_size
from mesh.netcheck.measurements import Dialled, MemberFacts, Push, Reach, Seen, Way
from mesh.netcheck.path_book import PathBook, PathLine
from mesh.netcheck.refusals import refusals
from mesh.netcheck.verdict import Finding, FindingKind, judge
from mesh.states import Transport

OPEN = Reach(rendezvous=Dialled.ANSWERED, ephemeral=Dialled.ANSWERED, round_trip_s=0.01, offset_s=0.0)
SILENT = Reach(rendezvous=Dialled.SILENT, ephemeral=Dialled.SILENT)


def finding(*ranks: int, is_fault: bool = True) -> Finding:
    return Finding(
        kind=FindingKind.ONE_WAY, ranks=ranks, message=f"{ranks} is bad.", hint="Mend it.", is_fault=is_fault
    )


# ---- whose machine goes ---------------------------------------------------------------------------------


def gone(
    *findings: Finding, fresh: tuple[int, ...] = (0, 1, 2, 3), suspects: tuple[int, ...] = ()
) -> list[int]:
    return [refusal.rank for refusal in refusals(findings, fresh=fresh, suspects=suspects)]


def test_nothing_wrong_or_only_warnings_cost_nobody_a_machine() -> None:
    assert gone() == []
    assert gone(finding(0, 1, is_fault=False), finding(2, is_fault=False)) == []


def test_who_is_bad_towards_everybody_goes_and_its_pairs_need_no_other() -> None:
    assert gone(finding(0), finding(0, 1), finding(3, 0)) == [0]


def test_of_one_bad_pair_the_newer_end_goes_then_the_higher_rank() -> None:
    assert gone(finding(0, 1)) == [1]
    assert gone(finding(1, 0), fresh=(0,)) == [0]


def test_who_is_in_the_most_bad_pairs_goes() -> None:
    assert gone(finding(0, 1), finding(0, 2), finding(3, 0), finding(1, 2)) == [0, 2]


def test_who_was_one_end_of_a_bad_pair_before_is_the_bad_one_now() -> None:
    [first] = refusals([finding(0, 1)], fresh=(0, 1))
    assert (first.rank, first.peers) == (1, (0,))
    assert gone(finding(0, 1), fresh=(1,), suspects=first.peers) == [0]


def test_a_refusal_names_what_is_wrong_and_the_remedy_and_stays_short() -> None:
    [one] = refusals([finding(1)], fresh=())
    assert (one.message, one.peers) == ("(1,) is bad. Mend it.", ())
    [many] = refusals([finding(0, other) for other in range(1, 9)], fresh=())
    assert many.message.count("Mend it.") == 3
    assert many.message.endswith("And 5 more faults of this machine.")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda way: way[0] != way[1])))
def test_who_is_left_has_no_fault_with_anybody_who_is_left(ways: list[Way]) -> None:
    left = set(range(7)) - set(gone(*(finding(*way) for way in ways)))
    assert not any(set(way) <= left for way in ways)


# ---- what is kept of providers --------------------------------------------------------------------------


def look(places: str, *, bad: set[Way] = frozenset(), lossy: set[Way] = frozenset()) -> Seen:  # type: ignore[assignment]
    """One member for each letter: its provider."""
    ways = {(a, b) for a in range(len(places)) for b in range(len(places)) if a != b}
    return Seen(
        members={
            rank: MemberFacts(
                rank=rank, machine=f"m{rank}", address=f"10.0.0.{rank + 1}", rendezvous_port=29500,
                ephemeral_port=40000, place=f"{place}/west",
            )
            for rank, place in enumerate(places)
        },
        asked=ways,
        reach={way: SILENT if way in bad else OPEN for way in ways},
        push={way: Push(bytes_per_s=None if way in lossy else 1e8) for way in ways - bad},
        pushes=Counter(dict.fromkeys(ways - bad, 3)),
    )  # fmt: skip


def noted(book: PathBook, seen: Seen, at: float = 1.0) -> dict[tuple[str, str], PathLine]:
    book.note(seen, judge(seen), at=at)
    return {line.providers: line for line in book.lines()}


def test_each_pair_of_providers_has_a_line_with_what_was_measured_last() -> None:
    lines = noted(PathBook(), look("abb"))
    assert set(lines) == {("a", "b"), ("b", "b")}
    line = lines["a", "b"]
    assert (line.passed, line.failed, line.passed_at) == (1, 0, 1.0)
    assert (line.round_trip_s, line.bytes_per_s) == (0.01, 1e8)


def test_two_providers_that_never_passed_are_not_offered_until_they_do() -> None:
    book, apart = PathBook(), look("ab", bad={(0, 1)})
    noted(book, apart)
    assert book.unoffered() == {}, "one failure may be a passing one"
    lines = noted(book, apart, at=2.0)
    assert book.unoffered() == {frozenset("ab"): lines["a", "b"]}
    assert (lines["a", "b"].failed, lines["a", "b"].failed_at) == (2, 2.0)
    assert "m0, 10.0.0.1) does not reach rank 1" in lines["a", "b"].fault
    assert "Admit all TCP ports" in lines["a", "b"].fault
    noted(book, look("ab"))
    assert book.unoffered() == {}


def test_packets_that_are_lost_are_a_failure_too() -> None:
    assert noted(PathBook(), look("ab", lossy={(1, 0)}))["a", "b"].failed == 1


def test_one_bad_machine_says_nothing_of_its_provider() -> None:
    bad = {(0, 1), (1, 0), (1, 2), (2, 1)}
    lines = noted(PathBook(), look("aab", bad=bad))
    assert lines["a", "b"].passed == 1
    assert (lines["a", "a"].passed, lines["a", "a"].failed) == (0, 1)


def test_machines_of_one_provider_are_always_offered() -> None:
    book = PathBook()
    for at in range(5):
        noted(book, look("aa", bad={(0, 1)}), at=float(at))
    assert book.unoffered() == {}


def test_another_path_between_the_two_is_enough() -> None:
    book, apart = PathBook(), look("ab", bad={(0, 1)})
    for _ in range(3):
        noted(book, apart)
    relayed = look("ab")
    relayed.members[1] = replace(relayed.members[1], path=Transport.RELAYED)
    book.note(relayed, [], at=3.0)
    assert [(line.path, line.passed) for line in book.lines()] == [("private", 0), ("relayed", 1)]
    assert book.unoffered() == {}


def test_a_check_that_was_cut_short_is_no_failure() -> None:
    seen = look("ab")
    seen.push.clear()
    assert noted(PathBook(), seen)["a", "b"].failed == 0
    seen.reach.clear()
    assert noted(PathBook(), seen) == {}


def test_the_book_is_bounded_and_what_was_measured_longest_ago_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(path_book, "LINES_MAX", 2)
    book = PathBook()
    for at, places in enumerate(("ab", "cd", "ab", "ef"), start=1):
        noted(book, look(places), at=float(at))
    assert [line.providers for line in book.lines()] == [("a", "b"), ("e", "f")]


def test_the_book_is_read_back_as_it_was() -> None:
    book = PathBook()
    noted(book, look("ab", bad={(0, 1)}))
    again = PathBook.from_record(json.loads(json.dumps(book.to_record())))
    assert again.lines() == book.lines()


# ---- how long an all-reduce takes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parameters"), [("7B", 7e9), ("350M", 3.5e8), ("1.3b", 1.3e9), ("1000", 1e3), ("2 T", 2e12)]
)
def test_a_model_s_size_is_read(text: str, parameters: float) -> None:
    assert parse_model_size(text) == parameters


@pytest.mark.parametrize("text", ["", "B", "7G", "-1B", "0", "nan", "1e9", "999T"])
def test_what_is_no_size_is_said_to_be_none(text: str) -> None:
    with pytest.raises(SpecError, match="number of parameters"):
        parse_model_size(text)


@pytest.mark.parametrize(
    ("members", "bytes_per_s", "round_trip_s", "seconds"),
    [
        (2, 125e6, 0.0, 14e9 / 125e6),  # two members exchange the whole once: 112 s over 1 Gbit/s
        (2, 12.5e9, 0.0, 1.12),
        (4, 125e6, 0.0, 168.0),
        (2, 125e6, 0.1, 112.1),
        (8, 125e6, 0.1, 7 / 4 * 112 + 0.7),
    ],
)
def test_an_all_reduce_of_seven_billion(
    members: int, bytes_per_s: float, round_trip_s: float, seconds: float
) -> None:
    took = all_reduce_s(7e9, members=members, bytes_per_s=bytes_per_s, round_trip_s=round_trip_s)
    assert took == pytest.approx(seconds)


def test_without_a_way_or_a_peer_there_is_no_all_reduce() -> None:
    for members, bytes_per_s in ((1, 1.0), (2, 0.0)):
        with pytest.raises(ValueError, match="two members"):
            all_reduce_s(1e9, members=members, bytes_per_s=bytes_per_s, round_trip_s=0.0)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (112.0, "112 s"),
        (168.0, "2.8 min"),
        (8640.0, "2.4 h"),
        (2e5, "2.31 days"),
    ],
)
def test_the_length_of_an_all_reduce_is_told_in_a_fitting_unit(seconds: float, told: str) -> None:
    assert words.length(seconds) == told


def test_what_was_measured_is_told_by_its_extremes() -> None:
    assert words.summary(look("ab")) == "round trips up to 10 ms, 800 Mbit/s or more"
    assert words.summary(Seen()) == ""
