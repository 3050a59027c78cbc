"""Whether this coordinator hears the store itself, and what that says of a member that stopped for want of a renewal.

Rules of this file:
1. Silence is counted from the store's last answer, whoever stood still: the store, the way to it, or this coordinator.
   In all three nobody here can tell that it was the member's machine.
2. A member that stopped itself because its lease was not renewed is excused when the store had been silent here as
   well, for as long as it takes to run out of a lease; else it is its machine that was cut off.
3. What the store pushes was said after it had answered the question before: that bounds how old a word is that is
   read late.

Theory of operation. `coordinator.store_link` asks the store for a sign of life every `PULSE_S`, and tells the gangs
when there is none (`StoreSilent`) and when there is one again (`StoreHeard`). Times are monotonic, of one coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.core.events import StoreHeard, StoreSilent
from mesh.messages import LEASE_TTL_S

PULSE_S = 0.25
SILENT_S = 1.0
"""Silence that is told: less is a busy store. Well before a member can have run out of its lease for it."""
EXPLAINS_S = LEASE_TTL_S / 2
"""Silence that a member can have run out of its lease for: ttl - guard - a heartbeat, and what pulses blur."""
HEARD_LATE_S = 60.0
"""How long after the silence a member's own word may come: first it hands over its output."""


@dataclass(slots=True, kw_only=True)
class StoreSilence:
    """The last time in which nothing was heard of the store."""

    since: float
    until: float | None = None
    """None while it lasts."""

    def explains(self, stopped_at: float) -> bool:
        """Whether a member that had lost its lease, and was heard of that at `stopped_at`, may be excused by it."""
        until = stopped_at if self.until is None else self.until
        return until - self.since >= EXPLAINS_S and self.since <= stopped_at <= until + HEARD_LATE_S

    def length_s(self, now: float) -> float:
        """So far."""
        return (now if self.until is None else self.until) - self.since


class StorePulse:
    """What one life of the coordinator hears of the store.

    Args:
        now: when it began to listen.
    """

    def __init__(self, now: float) -> None:
        self.heard_at = now
        """When the store answered last."""
        self.said_after = now
        """What is read now the store has said after this moment."""
        self._is_silent = False

    def answered(self, *, asked_at: float, now: float) -> StoreHeard | None:
        """The store has answered a question that was asked then."""
        self.heard_at, self.said_after = now, asked_at
        was_silent, self._is_silent = self._is_silent, False
        return StoreHeard() if was_silent else None

    def look(self, now: float) -> StoreSilent | None:
        """Every `PULSE_S`."""
        if self._is_silent or now - self.heard_at < SILENT_S:
            return None
        self._is_silent = True
        return StoreSilent(since=self.heard_at)
