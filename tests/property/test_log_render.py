"""Lines depend on the bytes alone, and every position is a place to go on from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.logs.render import Line
from tests.fakes.log_stream import Piece, render

LIMIT = 48
"""A small line limit, so that pieces are common."""

fragments = st.sampled_from(
    [
        b"\n",
        b"\r",
        b"\r\n",
        b"a",
        b"step 12",
        "é€🚀".encode(),
        b"\xff",
        b"\x00",
        b"\x1b[31m",
        b"\x1b[2K",
        b"x" * 40,
        b"\b",
    ]
)
output = st.lists(
    st.tuples(st.sampled_from([1, 2]), st.lists(fragments, max_size=8).map(b"".join)), max_size=12
)


def split(pieces: list[Piece], cuts: list[int]) -> list[Piece]:
    """The same output, as smaller reads."""
    result: list[Piece] = []
    steps = iter(cuts)
    for stream, data in pieces:
        while data:
            step = next(steps, len(data))
            result.append((stream, data[:step]))
            data = data[step:]
    return result


def content(lines: list[Line]) -> dict[str, list[tuple[str, bool]]]:
    found: dict[str, list[tuple[str, bool]]] = {"stdout": [], "stderr": []}
    for line in lines:
        found[line.stream].append((line.text, line.continued))
    return found


@given(output, st.lists(st.integers(1, 9), max_size=200))
def test_however_output_is_cut_into_records_the_lines_are_the_same(
    pieces: list[Piece], cuts: list[int]
) -> None:
    assert content(render(split(pieces, cuts), line_bytes_max=LIMIT)) == content(
        render(pieces, line_bytes_max=LIMIT)
    )


@given(output, st.lists(st.integers(1, 9), max_size=200))
def test_reading_on_from_any_line_gives_exactly_the_rest(pieces: list[Piece], cuts: list[int]) -> None:
    cut_up = split(pieces, cuts)
    lines = render(cut_up, line_bytes_max=LIMIT)
    for index, line in enumerate(lines):
        rest = render(cut_up, position=line.position, line_bytes_max=LIMIT)
        assert rest == lines[index + 1 :]


@given(output)
def test_what_is_rendered_is_safe_to_show_and_to_encode(pieces: list[Piece]) -> None:
    for line in render(pieces, line_bytes_max=LIMIT):
        line.text.encode()
        shown = line.text.replace("\x1b[31m", "")
        assert not any(ord(c) < 0x20 and c != "\t" for c in shown)


@given(output)
def test_a_preview_position_gives_the_whole_line_later(pieces: list[Piece]) -> None:
    lines = render(pieces, line_bytes_max=LIMIT)
    previews = render(pieces, line_bytes_max=LIMIT, flush=False)
    done = [line for line in previews if not line.partial]
    for preview in previews[len(done) :]:
        assert render(pieces, position=preview.position, line_bytes_max=LIMIT) == lines[len(done) :]
