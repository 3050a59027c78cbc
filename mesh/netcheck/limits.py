"""How long a check may take."""

from __future__ import annotations

CHECK_LIMIT_S = 10.0
"""For up to 8 members; more get as much more as their rounds take."""
ROUND_S = 0.5
MEMBERS_WITHIN_LIMIT = 8
START_LIMIT_S = 20.0
"""By when both ends have to be there: a process start on every machine, in parallel. It is not part of the above."""
CHECK_CALL_LIMIT_S = 60.0
"""By when somebody who asks for a check of up to 16 machines has an answer."""


def check_limit_s(members: int) -> float:
    """How long so many may measure."""
    return CHECK_LIMIT_S + ROUND_S * max(0, members - MEMBERS_WITHIN_LIMIT)
