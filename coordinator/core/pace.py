"""Whether this coordinator itself did not run for a while, and what it may conclude then.

Rules of this file:
1. A deadline that is noticed late was not missed by those whom it was set for: what they said meanwhile may lie unread
   in this process's sockets. So whoever finds that it did not run listens first, for `HEAR_FIRST_S`, and only
   then lets the deadline count.
2. Late is counted from when one could have noticed: from the deadline, or from when one began to wait for it, if that
   was later (a slow journal is no stall: the loop ran, and what was said is in the inbox).
"""

from __future__ import annotations

STALLED_S = 0.5
"""Waking later than this means that this process did not run; less is a busy machine."""
HEAR_FIRST_S = 1.0
"""Long enough to read what the store, the members' reports and Ray have queued up."""


def has_stalled(*, deadline: float, waiting_since: float, now: float) -> bool:
    """True when whoever waited for the deadline woke so late that it must have stood still."""
    return now - max(deadline, waiting_since) > STALLED_S
