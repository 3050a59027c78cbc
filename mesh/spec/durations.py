"""Lengths of time as people write them: `15m`, `900s`, `1h30m`, `900`, `1.5`.

A number without a unit is in seconds. Units are d, h, m, s and ms, largest first, each at most once; only the last
number may have a fraction. The canonical text (`format_duration`) uses the same units and reads back as the same
length.
"""

from __future__ import annotations

import re

_UNIT_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_PART = re.compile(r"(\d{1,12})(?:\.(\d{1,3}))?(d|h|ms|m|s)", re.ASCII)
_BARE = re.compile(r"(\d{1,12})(?:\.(\d{1,3}))?", re.ASCII)

DURATION_TAKES = 'a duration such as "15m", "900s", "1h30m" or a number of seconds'


def parse_duration(text: str) -> float:
    """Seconds, to the millisecond. Raises ValueError when the text is not a duration."""
    text = text.strip().lower()
    if bare := _BARE.fullmatch(text):
        return _milliseconds(bare[1], bare[2], "s") / 1000
    total_ms = 0.0
    position = 0
    smallest_unit_ms = _UNIT_MS["d"] + 1
    fraction_seen = False
    while position < len(text):
        part = _PART.match(text, position)
        if part is None or fraction_seen or _UNIT_MS[part[3]] >= smallest_unit_ms:
            raise ValueError(f"{text!r} is not {DURATION_TAKES}")
        smallest_unit_ms = _UNIT_MS[part[3]]
        fraction_seen = part[2] is not None
        total_ms += _milliseconds(part[1], part[2], part[3])
        position = part.end()
    if position == 0:
        raise ValueError(f"an empty text is not {DURATION_TAKES}")
    return round(total_ms) / 1000


def format_duration(seconds: float) -> str:
    """The canonical text of a length of time, exact to the millisecond: `15m`, `1h30m`, `0s`, `1m500ms`."""
    rest_ms = round(seconds * 1000)
    parts = []
    for unit, unit_ms in _UNIT_MS.items():
        count, rest_ms = divmod(rest_ms, unit_ms)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _milliseconds(whole: str, fraction: str | None, unit: str) -> float:
    return float(f"{whole}.{fraction or 0}") * _UNIT_MS[unit]
