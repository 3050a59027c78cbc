"""`python -m tests.sim`: many more lives than a test run has time for, or one of them step by step.

python -m tests.sim --seeds 100000 [--first 0] [--jobs 2]
python -m tests.sim --seed 4711
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from mesh.states import RunState
from tests.sim.faults import shape_of
from tests.sim.world import Violation, World


def main() -> int:
    """Returns 1 when a seed broke an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100_000, help="how many lives (default 100,000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="tell one life, step by step")
    options = parser.parse_args()
    if options.seed is not None:
        return tell(options.seed)
    return live(options.first, options.seeds)


def tell(seed: int) -> int:
    """One life with its story."""
    world = World(seed, **shape_of(seed))
    world.keeps_log = True
    try:
        world.run()
    except Violation as violation:
        print("\n".join(world.log))
        print(f"VIOLATION {violation}")
        return 1
    print("\n".join(world.log))
    print({uid: str(state) for uid, state in world.final_states().items()})
    return 0


def live(first: int, seeds: int) -> int:
    """Many lives; every broken one is named."""
    started = time.perf_counter()
    ends: Counter[RunState] = Counter()
    crashes = steps = 0
    broken = []
    for seed in range(first, first + seeds):
        world = World(seed, **shape_of(seed))
        try:
            world.run()
        except Violation as violation:
            broken.append(seed)
            print(f"seed {seed}: {violation}")
            continue
        ends.update(world.final_states().values())
        crashes += world.coordinator.crashes
        steps += world.steps
    took_s = time.perf_counter() - started
    lives = sum(ends.values())
    print(
        f"{seeds:,} worlds, {lives:,} gang lives in {took_s:.1f} s ({lives / took_s:,.0f} a second; {steps / max(1, lives):.0f} steps)"
    )
    print(
        f"ends: { ({str(state): count for state, count in ends.items()}) }; coordinator crashes: {crashes:,}"
    )
    print(f"{lives} passed, {len(broken)} failed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
