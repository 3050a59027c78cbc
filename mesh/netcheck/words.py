"""What was measured, for people."""

from __future__ import annotations

from mesh.netcheck.measurements import Seen


def rate(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def round_trip(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def length(seconds: float) -> str:
    """How long something takes, from milliseconds to days."""
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def summary(seen: Seen) -> str:
    """The extremes of what was measured; empty when nothing was."""
    trips = [reach.round_trip_s for reach in seen.reach.values() if reach.round_trip_s is not None]
    rates = [push.bytes_per_s for push in seen.push.values() if push.bytes_per_s is not None]
    words = []
    if trips:
        words.append(f"round trips up to {round_trip(max(trips))}")
    if rates:
        words.append(f"{rate(min(rates))} or more")
    return ", ".join(words)
