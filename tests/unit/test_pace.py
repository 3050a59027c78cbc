"""A coordinator that stood still listens before it concludes."""

from __future__ import annotations

import pytest

from coordinator.core.pace import STALLED_S, has_stalled


@pytest.mark.parametrize(
    ("deadline", "waiting_since", "now", "stalled"),
    [
        (10.0, 5.0, 10.0, False),
        (10.0, 5.0, 10.0 + STALLED_S, False),
        (10.0, 5.0, 10.0 + STALLED_S + 0.01, True),
        (10.0, 5.0, 20.0, True),
        (10.0, 20.0, 20.1, False),
        (10.0, 20.0, 30.0, True),
    ],
    ids=["in time", "a busy machine", "late", "very late", "the journal was slow", "both"],
)
def test_who_woke_late_stood_still(deadline: float, waiting_since: float, now: float, stalled: bool) -> None:
    assert has_stalled(deadline=deadline, waiting_since=waiting_since, now=now) is stalled
