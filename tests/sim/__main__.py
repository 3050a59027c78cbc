"""`python -m tests.sim`: many more lives than a test run has time for, or one of them step by step.

python -m tests.sim [--seeds 1000000] [--first 0] [--jobs 2]
python -m tests.sim --seed 4711
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import starmap

from tests.sim.faults import shape_of
from tests.sim.truth import Violation
from tests.sim.world import World

CHUNK = 1_000
"""Seeds that a process lives at a time."""
TOLD_MAX = 20
"""Broken seeds that are printed; all are counted."""
PROGRESS_S = 60.0
"""How often it is said how far it is."""


@dataclass
class Tally:
    """What became of many lives."""

    worlds: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    broken: int = 0
    told: list[str] = field(default_factory=list)
    """The first of those that broke: at most `TOLD_MAX`."""
    cpu_s: float = 0.0

    def note_broken(self, seed: int, why: str) -> None:
        self.broken += 1
        if len(self.told) < TOLD_MAX:
            self.told.append(f'seed {seed}: {why}\n  repeat it: make sim S="--seed {seed}"')

    def add(self, other: Tally) -> None:
        self.worlds += other.worlds
        self.ends += other.ends
        self.happened += other.happened
        self.broken += other.broken
        self.told += other.told[: TOLD_MAX - len(self.told)]
        self.cpu_s += other.cpu_s


def main() -> int:
    """Returns 1 when a seed broke an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000_000, help="how many worlds (default 1,000,000)")
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
        tally.worlds += 1
        try:
            world = World(seed, **shape_of(seed)).run()
        except Violation as violation:
            tally.note_broken(seed, str(violation))
            continue
        except Exception as error:  # noqa: BLE001 - whatever a life dies of is what was looked for
            tally.note_broken(seed, f"{type(error).__name__}: {error}")
            continue
        tally.ends.update(str(state) for state in world.final_states().values())
        tally.happened.update(str(kind) for kind, _ in world.incidents.seen.elements())
        tally.happened["coordinator died"] += world.coordinator.crashes
        tally.happened["a process of an older epoch woke"] += world.truth.ghosts
        tally.happened["a rank started again alone"] += world.truth.again
        tally.happened["checkpoint committed"] += world.truth.checkpoints.commits
        tally.happened["rank began from a checkpoint"] += world.truth.checkpoints.restored
        tally.happened["checkpoint found damaged"] += world.truth.checkpoints.found_damaged
        tally.happened["steps"] += world.steps
    tally.cpu_s = time.process_time() - started
    return tally


def live(first: int, seeds: int, jobs: int) -> int:
    """Many lives, on several processes."""
    started = told_at = time.perf_counter()
    chunks = [(at, min(at + CHUNK, first + seeds)) for at in range(first, first + seeds, CHUNK)]
    total = Tally()
    for tally in _all_lives(chunks, jobs):
        for told in tally.told[: TOLD_MAX - len(total.told)]:
            print(told, flush=True)
        total.add(tally)
        now = time.perf_counter()
        if now - told_at >= PROGRESS_S:
            told_at = now
            left_s = (now - started) / total.worlds * (seeds - total.worlds)
            print(
                f"{total.worlds:,} of {seeds:,} worlds, {total.broken:,} failed, "
                f"{total.worlds / (now - started):,.0f} a second, about {left_s / 60:,.0f} minutes to go",
                flush=True,
            )
    _sum_up(total, time.perf_counter() - started)
    return 1 if total.broken else 0


def _all_lives(chunks: list[tuple[int, int]], jobs: int) -> Iterator[Tally]:
    """One tally per chunk, in their order."""
    if jobs == 1:
        yield from starmap(lives, chunks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(lives, *zip(*chunks, strict=True))


def _sum_up(total: Tally, took_s: float) -> None:
    gangs = total.ends.total()
    print(
        f"{total.worlds:,} worlds, {gangs:,} gang lives in {took_s:.1f} s: {gangs / took_s:,.0f} a second, "
        f"{gangs / total.cpu_s:,.0f} per CPU second"
    )
    print(f"ends: {dict(total.ends.most_common())}")
    print("happened: " + ", ".join(f"{what} {count:,}" for what, count in total.happened.most_common()))
    print(f"{total.worlds - total.broken:,} passed, {total.broken:,} failed")


if __name__ == "__main__":
    sys.exit(main())
