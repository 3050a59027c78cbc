"""`python -m tests.sim`: many more lives than a test run has time for, or one of them step by step.

python -m tests.sim --seeds 100000 [--first 0] [--jobs 2]
python -m tests.sim --seed 4711
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import starmap

from tests.sim.faults import shape_of
from tests.sim.truth import Violation
from tests.sim.world import World

CHUNK = 1_000
"""Seeds that a process lives at a time."""
TOLD_MAX = 20
"""Broken seeds whose violation is printed."""


@dataclass
class Tally:
    """What became of many lives."""

    worlds: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, other: Tally) -> None:
        self.worlds += other.worlds
        self.ends += other.ends
        self.happened += other.happened
        self.broken += other.broken
        self.cpu_s += other.cpu_s


def main() -> int:
    """Returns 1 when a seed broke an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100_000, help="how many worlds (default 100,000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="tell one life, step by step")
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cpus, help=f"processes (default {cpus}, one per CPU)")
    options = parser.parse_args()
    if options.seed is not None:
        return tell(options.seed)
    return live(options.first, options.seeds, max(1, options.jobs))


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


def lives(first: int, last: int) -> Tally:
    """Some lives; every broken one is noted."""
    tally = Tally()
    started = time.process_time()
    for seed in range(first, last):
        world = World(seed, **shape_of(seed))
        tally.worlds += 1
        try:
            world.run()
        except Violation as violation:
            tally.broken.append(f"seed {seed}: {violation}")
            continue
        tally.ends.update(str(state) for state in world.final_states().values())
        tally.happened.update(str(kind) for kind, _ in world.incidents.seen.elements())
        tally.happened["coordinator died"] += world.coordinator.crashes
        tally.happened["a process of an older epoch woke"] += world.truth.ghosts
        tally.happened["steps"] += world.steps
    tally.cpu_s = time.process_time() - started
    return tally


def live(first: int, seeds: int, jobs: int) -> int:
    """Many lives, on several processes."""
    started = time.perf_counter()
    chunks = [(at, min(at + CHUNK, first + seeds)) for at in range(first, first + seeds, CHUNK)]
    total = Tally()
    if jobs == 1:
        for tally in starmap(lives, chunks):
            _note(total, tally)
    else:
        with ProcessPoolExecutor(jobs) as pool:
            for tally in pool.map(lives, *zip(*chunks, strict=True)):
                _note(total, tally)
    took_s = time.perf_counter() - started
    gangs = total.ends.total()
    print(
        f"{total.worlds:,} worlds, {gangs:,} gang lives in {took_s:.1f} s: {gangs / took_s:,.0f} a second, "
        f"{gangs / total.cpu_s:,.0f} per CPU second"
    )
    print(f"ends: {dict(total.ends.most_common())}")
    print("happened: " + ", ".join(f"{what} {count:,}" for what, count in total.happened.most_common()))
    print(f"{total.worlds - len(total.broken):,} passed, {len(total.broken):,} failed")
    return 1 if total.broken else 0


def _note(total: Tally, tally: Tally) -> None:
    for told in tally.broken[: max(0, TOLD_MAX - len(total.broken))]:
        print(told, flush=True)
    total.add(tally)


if __name__ == "__main__":
    sys.exit(main())
