"""Whose clock is wrong, in words. Wall-clock seconds since 1970 go in."""

from __future__ import annotations

import time

from mesh.errors import AuthenticationError
from mesh.reasons import Reason

SKEW_MAX_S = 60.0
"""Clocks may differ by this much: certificates are valid this much before and after they say."""


def skew_text(*, ours: float, theirs: float, them: str) -> str:
    """Says how far this machine's clock is ahead of or behind somebody's, as a sentence."""
    seconds = ours - theirs
    direction = "ahead of" if seconds > 0 else "behind"
    return f"This machine's clock is {length_text(abs(seconds))} {direction} {them}'s."


def is_skewed(*, ours: float, theirs: float) -> bool:
    return abs(ours - theirs) > SKEW_MAX_S


def check_against_head(*, ours: float, theirs: float) -> None:
    """Whether a machine (`ours`) may join its head by these clocks. Raises AuthenticationError (ClockSkew)."""
    if is_skewed(ours=ours, theirs=theirs):
        raise AuthenticationError(
            f"{skew_text(ours=ours, theirs=theirs, them='the head')} Certificates would not be valid.",
            hint="Set the clock of the one that is wrong (`timedatectl`, an NTP service), and join again.",
            reason=Reason.CLOCK_SKEW,
        )


def length_text(seconds: float) -> str:
    """From 0 s up, in the unit that a reader would take."""
    if seconds < 10:
        return f"{seconds:.3g} s"
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
