"""How an end is put into words."""

from __future__ import annotations

import signal

import pytest

from mesh.exits import describe_exit, short_exit, signal_behind, signal_name


@pytest.mark.parametrize(
    ("code", "number", "words", "short", "behind"),
    [
        (42, None, "exit code 42", "exit 42", None),
        (137, None, "exit code 137 (128 + SIGKILL)", "exit 137", 9),
        (255, None, "exit code 255", "exit 255", None),
        (128, None, "exit code 128", "exit 128", None),
        (None, 11, "SIGSEGV (signal 11)", "SIGSEGV", 11),
        (None, 64, "signal 64", "signal 64", 64),
    ],
)
def test_an_end_has_one_wording(
    code: int | None, number: int | None, words: str, short: str, behind: int | None
) -> None:
    assert describe_exit(code=code, signal=number) == words
    assert short_exit(code=code, signal=number) == short
    assert signal_behind(code=code, signal=number) == behind


def test_the_names_are_this_systems() -> None:
    for number in signal.Signals:
        if number < 32:
            assert signal_name(number) == number.name
