"""A pipe that is read too often rests for a moment, and only one at a time."""

from __future__ import annotations

from agents.output_rest import MUCH_BYTES, NEVER, NOBODY, OFTEN, REST_S, WINDOW_S, OutputRest

OUT, ERR = 5, 6


def busy(rest: OutputRest, file: int, *, since: float) -> bool:
    """Reads it OFTEN times in a short while."""
    return [rest.begins(file, size=1, now=since + number * 0.01) for number in range(OFTEN)][-1]


def test_a_pipe_that_is_read_now_and_then_never_rests() -> None:
    rest = OutputRest()
    assert not any(rest.begins(OUT, size=1, now=number * WINDOW_S / (OFTEN - 2)) for number in range(100))
    assert rest.until == NEVER


def test_a_busy_one_rests_and_goes_on_while_it_is_busy() -> None:
    rest = OutputRest()
    assert busy(rest, OUT, since=0.0)
    now = rest.until
    for _ in range(20):
        assert rest.end() == OUT
        assert rest.begins(OUT, size=1, now=now)
        assert rest.until == now + REST_S
        now = rest.until
    assert rest.end() == OUT
    assert not rest.begins(OUT, size=1, now=now + WINDOW_S)


def test_only_one_rests_at_a_time() -> None:
    rest = OutputRest()
    assert busy(rest, OUT, since=0.0)
    assert not busy(rest, ERR, since=0.0)
    assert rest.end() == OUT
    assert rest.end() == NOBODY
    assert rest.begins(ERR, size=1, now=0.2)


def test_one_out_of_which_much_comes_or_nothing_never_rests() -> None:
    rest = OutputRest()
    for size in (MUCH_BYTES, 0):
        assert not any(rest.begins(OUT, size=size, now=0.0) for _ in range(2 * OFTEN))
