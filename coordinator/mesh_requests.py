"""What is read the same way in every request of who joins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.errors import AuthenticationError, SpecError
from mesh.net.clock import is_skewed, skew_text, wall_clock
from mesh.reasons import Reason


def check_clock(request: Mapping[str, Any]) -> None:
    """Raises AuthenticationError (ClockSkew), SpecError."""
    clock = request.get("clock")
    if not isinstance(clock, int | float) or isinstance(clock, bool):
        raise SpecError("A machine says what time it is there.", field="clock", got=str(clock)[:80])
    now = wall_clock()
    if is_skewed(ours=clock, theirs=now):
        raise AuthenticationError(
            f"{skew_text(ours=clock, theirs=now, them='the head')} Certificates would not be valid.",
            hint="Set the clock of the one that is wrong (`timedatectl`, an NTP service), and join again.",
            reason=Reason.CLOCK_SKEW,
        )


def text_of(request: Mapping[str, Any], key: str) -> str:
    """Raises SpecError."""
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise SpecError(f"The request has no {key}.", field=key)
    return value
