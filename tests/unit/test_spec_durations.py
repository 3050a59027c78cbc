"""Lengths of time as people write them."""

from __future__ import annotations

import pytest

from mesh.spec.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15m", 900.0),
        ("900s", 900.0),
        ("900", 900.0),
        ("1h30m", 5400.0),
        (" 1H ", 3600.0),
        ("1.5h", 5400.0),
        ("0.25", 0.25),
        ("0s", 0.0),
        ("1d2h3m4s5ms", 93784.005),
        ("500ms", 0.5),
    ],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "  ", "m", "-5m", "15 m", "5m1h", "1m1m", "1.5h30m", "15x", "1e3", "five", "٥m"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(900.0, "15m"), (5400.0, "1h30m"), (0.0, "0s"), (60.5, "1m500ms"), (86400.0, "1d")]
)
def test_a_duration_is_written_in_its_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
