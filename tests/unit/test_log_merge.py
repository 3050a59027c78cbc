"""Which line comes next, of several ranks'."""

from __future__ import annotations

from pathlib import Path

from coordinator.logs.layout import AttemptKey
from coordinator.logs.merge import HOLD_S, Source, choose, to_fill
from coordinator.logs.render import START, Line
from coordinator.logs.scan import LineScanner


def source(
    *, rank: int, epoch: int = 1, at: float | None = None, live: bool = False, live_from: int = 0
) -> Source:
    """A source with one line at a time, or with none."""
    made = Source(key=AttemptKey(epoch, rank), scanner=LineScanner(Path("nowhere")), live_from=live_from)
    made.is_live = live
    if at is not None:
        made.lines.append(Line(at, "stdout", "x", False, False, START))
    return made


def test_the_older_line_comes_first() -> None:
    old, new = source(rank=1, at=1.0), source(rank=0, at=2.0)
    assert choose([new, old], now=0.0) is old


def test_at_the_same_time_the_lower_rank_comes_first() -> None:
    low, high = source(rank=0, at=1.0), source(rank=1, at=1.0)
    assert choose([high, low], now=0.0) is low


def test_the_older_epoch_comes_first_whatever_the_time() -> None:
    old, new = source(rank=0, epoch=1, at=9.0), source(rank=0, epoch=2, at=1.0)
    assert choose([new, old], now=0.0) is old


def test_there_is_nothing_to_choose_without_lines() -> None:
    assert choose([source(rank=0)], now=0.0) is None


def test_a_live_line_is_held_back_behind_anothers_backlog_only_so_long() -> None:
    backlog, whisper = source(rank=0, at=1.0, live=True), source(rank=1, at=99.0, live=True)
    backlog.filled_at = 10.0
    whisper.filled_at = 10.0 - HOLD_S / 2
    assert choose([backlog, whisper], now=10.0) is backlog
    assert choose([backlog, whisper], now=10.0 + HOLD_S / 2) is whisper


def test_history_is_never_let_through_out_of_order() -> None:
    early, late = source(rank=0, at=1.0), source(rank=1, at=99.0)
    assert choose([early, late], now=1e9) is early


def test_history_of_a_later_epoch_is_not_read_before_its_turn() -> None:
    first, second = source(rank=0, epoch=1, at=1.0), source(rank=0, epoch=2, live_from=1000)
    assert to_fill([first, second]) == []
    first.lines.clear()
    first.may_have_more = False
    assert to_fill([first, second]) == [second]


def test_a_later_epoch_that_begins_while_we_follow_is_read_at_once() -> None:
    first, second = source(rank=0, epoch=1, at=1.0), source(rank=0, epoch=2, live_from=0)
    assert to_fill([first, second]) == [second]
