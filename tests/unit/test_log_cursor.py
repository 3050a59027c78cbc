"""A reader's place as a text: opaque, short, exact, and refused when it is not ours."""

from __future__ import annotations

import re

import pytest

from coordinator.logs.cursor import Cursor
from coordinator.logs.layout import AttemptKey
from coordinator.logs.render import Position
from mesh.errors import SpecError
from tests.fakes.log_stream import UID


def test_a_cursor_comes_back_as_it_went_out() -> None:
    cursor = Cursor(UID)
    cursor.finish(AttemptKey(1, 0))
    cursor.finish(AttemptKey(1, 7))
    cursor.advance(AttemptKey(2, 0), Position(100, 130, 170))
    cursor.advance(AttemptKey(2, 1, 1), Position(0, 5, 0))
    again = Cursor.parse(cursor.text(), uid=UID)
    assert again.text() == cursor.text()
    assert again.position(AttemptKey(2, 0)) == Position(100, 130, 170)
    assert again.position(AttemptKey(2, 1, 1)) == Position(0, 5, 0)
    assert [again.is_done(AttemptKey(1, rank)) for rank in (0, 1, 7)] == [True, False, True]


def test_a_rank_that_is_not_in_it_is_read_from_its_start() -> None:
    cursor = Cursor.parse(Cursor(UID).text(), uid=UID)
    assert cursor.position(AttemptKey(1, 0)) is None
    assert not cursor.is_done(AttemptKey(1, 0))


def test_many_finished_epochs_keep_a_short_cursor() -> None:
    cursor = Cursor(UID)
    for epoch in range(1, 21):
        for rank in range(8):
            cursor.advance(AttemptKey(epoch, rank), Position(10**9, 10**9, 10**9))
            cursor.finish(AttemptKey(epoch, rank))
    assert len(cursor.text()) < 150


def test_a_cursor_needs_no_quoting_in_a_url() -> None:
    cursor = Cursor(UID)
    cursor.finish(AttemptKey(1, 0))
    cursor.advance(AttemptKey(2, 1), Position(1, 2, 3))
    assert re.fullmatch(r"[A-Za-z0-9._-]+", cursor.text())


def test_a_cursor_of_another_run_is_refused() -> None:
    with pytest.raises(SpecError, match="another run"):
        Cursor.parse(Cursor("f" * 16).text(), uid=UID)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "1.00c0ffee_",
        "1.00c0ffee_1.2.3",
        "1.00c0ffee_1.0.0.-1.0.0",
        "2.00c0ffee",
        "_",
        "1.00c0ffee" + "_1-1" * 99_999,
    ],
)
def test_what_is_no_cursor_is_refused_by_name(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Cursor.parse(text, uid=UID)
    assert caught.value.details["field"] == "cursor"


def test_offsets_out_of_all_range_are_refused() -> None:
    with pytest.raises(SpecError):
        Cursor.parse("1.00c0ffee_1.0.0.ffffffffffffffff.0.0", uid=UID)


def test_the_largest_cursor_is_read_in_one_go() -> None:
    """Rank by rank it held up everything in the head for twelve seconds."""
    text = "_".join([f"1.{UID[:8]}", *(f"{epoch}-{'f' * 16_384}" for epoch in (1, 2, 3))])
    cursor = Cursor.parse(text, uid=UID)
    assert cursor.text() == text
    assert cursor.is_done(AttemptKey(3, 65_535)) and not cursor.is_done(AttemptKey(4, 0))
