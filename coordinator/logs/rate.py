"""How fast one rank may print: a token bucket, pure."""

from __future__ import annotations

RATE_BYTES_PER_S = 16 * 1024 * 1024
BURST_BYTES = 32 * 1024 * 1024


class TokenBucket:
    """Lets `burst` through at once and `rate_per_s` for ever. Times are monotonic seconds.

    Invariant: `_level <= burst`. A negative level is a debt that the taker waits off.
    """

    def __init__(self, *, rate_per_s: float = RATE_BYTES_PER_S, burst: float = BURST_BYTES) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = burst
        self._at: float | None = None

    def take(self, amount: float, *, now: float) -> float:
        """Takes what has already arrived; returns how long to wait before taking more, in seconds."""
        if self._at is not None:
            self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._rate_per_s)
        self._at = now
        self._level -= amount
        return max(0.0, -self._level / self._rate_per_s)
