"""How many whole gang lives the simulation lives in a second, and what they are made of."""

from __future__ import annotations

import time
from typing import Any

from tests.sim.world import Faults, World

TARGET = "≥ 1,000 lives/s"


def run(quick: bool) -> list[dict[str, Any]]:
    """Lives of one gang of two with the default mix of faults, and without any."""
    count = 500 if quick else 5_000
    rows = []
    for name, faults in (
        ("simulated lives, all faults", None),
        ("simulated lives, no faults", Faults(**_NONE)),
    ):
        started = time.perf_counter()
        for seed in range(count):
            World(seed, faults=faults).run()
        rate = count / (time.perf_counter() - started)
        rows.append(
            {
                "name": name, "ours": rate, "theirs": None, "ratio": rate / 1_000, "unit": "lives/s",
                "target": TARGET, "ok": rate >= 1_000,
            }
        )  # fmt: skip
    return rows


_NONE = {
    "exit_badly": 0.0, "start_failure": 0.0, "never_arrives": 0.0, "slow_preparation": 0.0,
    "preparation_failure": 0.0, "ignores_term": 0.0, "machine_loss": 0.0, "cancel": 0.0, "crash_at_write": 0.0,
}  # fmt: skip
