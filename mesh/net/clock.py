"""Whose clock is wrong, in words. Wall-clock seconds since 1970 go in."""

from __future__ import annotations

import time

SKEW_MAX_S = 60.0
"""Clocks may differ by this much: certificates are valid this much before and after they say."""


def skew_text(*, ours: float, theirs: float, them: str) -> str:
    """Says how far this machine's clock is ahead of or behind somebody's, as a sentence."""
    seconds = ours - theirs
    direction = "ahead of" if seconds > 0 else "behind"
    return f"This machine's clock is {_length(abs(seconds))} {direction} {them}'s."


def is_skewed(*, ours: float, theirs: float) -> bool:
    return abs(ours - theirs) > SKEW_MAX_S


def _length(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.0f} days"


def wall_clock() -> float:
    """Seconds since 1970: for certificates and for telling skew, never for waiting."""
    return time.time()
