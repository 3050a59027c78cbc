"""Bytes to lines: what a person sees of what a rank printed. Names the cases of the field (34, 37)."""

from __future__ import annotations

import pytest

from coordinator.logs.render import LINE_BYTES_MAX, PARTIAL_BYTES_MAX, LineRenderer
from mesh.printable import printable
from tests.fakes.log_stream import err, out, render, texts

BOUNDARIES = [4096, 65_536]


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("character", ["é", "€", "🚀"])
@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_character_across_a_read_boundary_comes_out_whole(boundary: int, character: str, back: int) -> None:
    text = "a" * (boundary - back) + character + "end"
    data = text.encode() + b"\n"
    pieces = out(*(data[i : i + boundary] for i in range(0, len(data), boundary)))
    assert texts(render(pieces)) == [text]


def test_bytes_that_are_not_utf8_are_shown_as_what_they_are() -> None:
    assert texts(render(out(b"\xff\xfe\n", b"caf\xe9\n"))) == ["\\xff\\xfe", "caf\\xe9"]


def test_control_characters_are_shown_and_do_nothing() -> None:
    assert texts(render(out(b"a\x00b\x07c\x7f\n"))) == ["a\\x00b\\x07c\\x7f"]


def test_control_characters_above_ascii_do_nothing_either() -> None:
    assert texts(render(out("a\x9b31mb\n"))) == ["a\\u009b31mb"]


def test_colours_and_tabs_stay() -> None:
    line = "\x1b[1;31merror\x1b[0m\tdone"
    assert texts(render(out(line + "\n"))) == [line]


@pytest.mark.parametrize(
    "sequence",
    [
        "\x1b[2K",
        "\x1b[3A",
        "\x1b[?25l",
        "\x1b]0;title\x07",
        "\x1b]8;;http://x\x1b\\",
        "\x1b(B",
        "\x1b7",
        "\x1bc",
    ],
)
def test_sequences_that_move_or_change_the_terminal_are_left_out(sequence: str) -> None:
    assert texts(render(out(f"a{sequence}b\n"))) == ["ab"]


def test_a_lone_escape_is_shown() -> None:
    assert printable(b"a\x1b") == "a\\x1b"


def test_crlf_gives_no_blank_lines() -> None:
    assert texts(render(out(b"a\r\nb\r", b"\nc\r\r\n", b"\r\n"))) == ["a", "b", "c", ""]


def test_a_progress_bar_is_one_line_its_last_state() -> None:
    pieces = err(*(f"\rstep {n} of 200" for n in range(1, 201)))
    assert texts(render(pieces)) == ["step 200 of 200"]
    assert texts(render([*pieces, *err("\n")])) == ["step 200 of 200"]


def test_a_progress_bar_is_seen_while_it_runs() -> None:
    previews = render(err("\rstep 1 of 9", "\rstep 2 of 9"), flush=False)
    assert [(p.text, p.partial) for p in previews] == [("step 2 of 9", True)]


def test_a_progress_bar_of_days_takes_no_memory_and_is_resumed_from_its_last_state() -> None:
    renderer = LineRenderer()
    offset = 0
    for n in range(10_000):
        data = f"\rstep {n}".encode()
        end = offset + 13 + len(data)
        renderer.feed(offset=offset, end=end, at=1.0, stream=2, data=data)
        position, last = renderer.position(), offset
        offset = end
    assert position.scan == last


def test_a_spinner_takes_back_its_characters() -> None:
    assert texts(render(out("wait |\b/\b-\b\\\bdone\n"))) == ["wait done"]


def test_stderr_between_two_halves_of_a_stdout_line_does_not_cut_it() -> None:
    pieces = [*out("half "), *err("warning\n"), *out("line\n")]
    assert [(line.stream, line.text) for line in render(pieces)] == [
        ("stderr", "warning"),
        ("stdout", "half line"),
    ]


def test_the_last_words_without_a_newline_are_a_line() -> None:
    lines = render([*out("step 1\n"), *err("FATAL xyz")])
    assert [(line.text, line.partial) for line in lines] == [("step 1", False), ("FATAL xyz", False)]


def test_a_line_of_ten_megabytes_comes_in_pieces_that_make_it_up() -> None:
    text = "0123456789abcdef" * (640 * 1024)
    data = text.encode() + b"\n"
    pieces = out(*(data[i : i + 65_536] for i in range(0, len(data), 65_536)))
    lines = render(pieces)
    assert [line.continued for line in lines] == [True] * 9 + [False]
    assert max(len(line.text) for line in lines) <= LINE_BYTES_MAX
    assert "".join(texts(lines)) == text


def test_a_line_is_never_cut_within_a_character() -> None:
    text = "€" * 100
    lines = render(out(text + "\n"), line_bytes_max=100)
    assert len(lines) > 1
    assert "".join(texts(lines)) == text


def test_a_line_is_never_cut_within_a_colour() -> None:
    text = "x" * 97 + "\x1b[31m" + "red"
    lines = render(out(text + "\n"), line_bytes_max=100)
    assert texts(lines) == ["x" * 97, "\x1b[31mred"]


def test_a_line_of_exactly_the_limit_is_not_cut() -> None:
    lines = render(out("x" * 100, "\n"), line_bytes_max=100)
    assert [(len(line.text), line.continued) for line in lines] == [(100, False)]


def test_a_preview_shows_the_end_of_a_long_line_and_no_half_character() -> None:
    (preview,) = render(out("€" * 5000 + "🚀"[:0], "€".encode()[:2]), flush=False)
    assert len(preview.text.encode()) <= PARTIAL_BYTES_MAX
    assert set(preview.text) == {"€"}


def test_what_is_missing_is_said_and_joins_nothing() -> None:
    renderer = LineRenderer()
    renderer.feed(offset=0, end=17, at=1.0, stream=1, data=b"half")
    lines = renderer.skip_to(1000, at=2.0, notice="lost")
    lines += renderer.feed(offset=1000, end=1018, at=2.0, stream=1, data=b"line\n")
    assert [(line.stream, line.text) for line in lines] == [
        ("stdout", "half"),
        ("system", "lost"),
        ("stdout", "line"),
    ]


def test_a_line_has_the_time_of_its_end() -> None:
    lines = render([*out("a"), *err("b\n"), *out("c\n")], at=10.0)
    assert [(line.text, line.at) for line in lines] == [("b", 11.0), ("ac", 12.0)]
