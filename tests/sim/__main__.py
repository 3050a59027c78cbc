"""`python -m tests.sim`: many more lives than a test run has time for, or one of them step by step.

python -m tests.sim [--seeds 1000000] [--first 0] [--jobs 2] [--troubled]
python -m tests.sim --seed 4711 [--troubled]
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

from mesh.states import FailurePolicy
from tests.sim.faults import TROUBLED, shape_of
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

    def note_broken(self, seed: int, why: str, is_troubled: bool) -> None:
        self.broken += 1
        if len(self.told) < TOLD_MAX:
            options = f"--seed {seed}" + (" --troubled" if is_troubled else "")
            self.told.append(f'seed {seed}: {why}\n  repeat it: make sim S="{options}"')

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
    parser.add_argument("--troubled", action="store_true", help="lives in which much more goes wrong")
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cpus, help=f"processes (default {cpus}, one per CPU)")
    options = parser.parse_args()
    if options.seed is not None:
        return tell(options.seed, options.troubled)
    return live(options.first, options.seeds, max(1, options.jobs), options.troubled)


def world_of(seed: int, is_troubled: bool) -> World:
    """The world that a seed means."""
    shape = shape_of(seed)
    if not is_troubled:
        return World(seed, **shape)
    nodes = (2, 3, 4, 5)[seed // 7 % 4]
    return World(
        seed,
        gangs=shape["gangs"],
        nodes=nodes,
        machines=nodes + seed // 3 % 4,
        saves=shape["saves"],
        faults=TROUBLED[seed % len(TROUBLED)],
        policy=(None, *FailurePolicy)[seed // 5 % (1 + len(FailurePolicy))],
        max_restarts=(3, 8)[seed % 2],
    )


def tell(seed: int, is_troubled: bool) -> int:
    """One life with its story."""
    world = world_of(seed, is_troubled)
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


def lives(first: int, last: int, is_troubled: bool) -> Tally:
    """Some lives; every broken one is noted."""
    tally = Tally()
    started = time.process_time()
    for seed in range(first, last):
        tally.worlds += 1
        try:
            world = world_of(seed, is_troubled).run()
        except Violation as violation:
            tally.note_broken(seed, str(violation), is_troubled)
            continue
        except Exception as error:  # noqa: BLE001 - whatever a life dies of is what was looked for
            tally.note_broken(seed, f"{type(error).__name__}: {error}", is_troubled)
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


def live(first: int, seeds: int, jobs: int, is_troubled: bool) -> int:
    """Many lives, on several processes."""
    started = told_at = time.perf_counter()
    starts = range(first, first + seeds, CHUNK)
    chunks = [(at, min(at + CHUNK, first + seeds), is_troubled) for at in starts]
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


def _all_lives(chunks: list[tuple[int, int, bool]], jobs: int) -> Iterator[Tally]:
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
