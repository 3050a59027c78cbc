"""Whole lives of gangs under every fault that the simulation knows, all invariants after every step.

A failing seed is printed; `python -m tests.sim --seed N` repeats it step by step. Seeds that once failed
stay in `seeds.txt`.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

from mesh.states import RunState
from tests.sim.world import Faults, Violation, World

SEEDS = 2_000
NO_FAULTS = dict.fromkeys(
    [
        "exit_badly", "start_failure", "never_arrives", "slow_preparation", "preparation_failure",
        "ignores_term", "machine_loss", "cancel", "crash_at_write",
    ],
    0.0,
)  # fmt: skip


def kept_seeds() -> list[int]:
    """Seeds of faults that were mended."""
    lines = (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def shape_of(seed: int) -> dict[str, int]:
    """How big a world a seed means: mostly one gang of two, some crowded ones."""
    gangs = (1, 1, 1, 2, 3)[seed % 5]
    nodes = (2, 2, 3, 4)[seed % 4]
    return {"gangs": gangs, "nodes": nodes, "machines": nodes + seed % 2}


def test_every_seed_keeps_every_invariant() -> None:
    ends: Counter[RunState] = Counter()
    crashes = 0
    for seed in [*kept_seeds(), *range(SEEDS)]:
        world = World(seed, **shape_of(seed)).run()
        ends.update(world.final_states().values())
        crashes += world.crashes
    assert set(ends) == {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}
    assert crashes > SEEDS / 10, "the faults that were to be survived did not happen"


def test_without_faults_every_run_succeeds() -> None:
    for seed in range(200):
        world = World(seed, gangs=2, machines=2, faults=Faults(**NO_FAULTS)).run()
        assert set(world.final_states().values()) == {RunState.SUCCEEDED}


@pytest.mark.parametrize("becomes_durable", [True, False], ids=["after the write", "before the write"])
def test_a_crash_at_each_journal_write_changes_no_end(becomes_durable: bool) -> None:
    writes = World(1, faults=Faults(**NO_FAULTS)).run().writes
    assert writes > 8
    for number in range(1, writes + 1):
        faults = Faults(**NO_FAULTS, crash_writes={number: becomes_durable})
        world = World(1, faults=faults).run()
        assert world.crashes == 1
        assert set(world.final_states().values()) == {RunState.SUCCEEDED}, f"a crash at write {number}"


@pytest.mark.parametrize("step", range(60))
def test_a_cancel_at_any_moment_ends_in_cancelled_or_in_what_had_happened_before(step: int) -> None:
    world = World(7, faults=Faults(**NO_FAULTS))
    (uid,) = world.journal
    world.after(step * 0.05 if step < 40 else step, world._cancel, uid)
    assert world.run().final_states()[uid] in (RunState.CANCELLED, RunState.SUCCEEDED)


def test_a_seed_repeats_itself_bit_for_bit() -> None:
    def story(seed: int) -> list[str]:
        world = World(seed, gangs=2, machines=3)
        world.keeps_log = True
        return world.run().log

    assert story(11) == story(11) != story(12)


class _Broken(World):
    """The proof that the simulation sees something: a world with one rule taken out."""


def _finds_a_violation(world_class: type[World], pattern: str) -> None:
    for seed in range(1_000):
        try:
            world_class(seed, **shape_of(seed)).run()
        except Violation as violation:
            if re.search(pattern, str(violation)):
                return
            raise
    raise AssertionError(f"1,000 seeds and nobody noticed: {pattern}")


def test_a_store_that_opens_barriers_early_is_caught() -> None:
    class Early(_Broken):
        def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            super().__init__(*args, **kwargs)
            self.store.arrive = lambda member, arrival: member.barrier_opened(
                (arrival,) * self.journal[member.incarnation.run_uid].plan.nodes
            )

    _finds_a_violation(Early, "2: a process started before its barrier opened")


def test_an_epoch_told_before_it_is_durable_is_caught() -> None:
    class Hasty(_Broken):
        def _write(self, uid, core):  # type: ignore[no-untyped-def]
            before = self.journal[uid]
            ok = super()._write(uid, core)
            if core.gang.epoch != before.epoch:
                self.journal[uid] = before
            return ok

    _finds_a_violation(Hasty, "3: somebody hears of an epoch that is not durable")


def test_machines_that_are_never_given_back_are_caught() -> None:
    class Greedy(_Broken):
        def _release(self, uid, effect, life):  # type: ignore[no-untyped-def]
            released = ev.MachineReleased(reservation=effect.reservation, machine=effect.machine)
            self.soon(self._answer, uid, released, life)

    from coordinator.core import events as ev

    # With a second gang they starve it before they are counted.
    _finds_a_violation(Greedy, "6: the fleet still holds machines|9: liveness: .* rests in Pending")
