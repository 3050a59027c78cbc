"""Whole lives of gangs under every fault that the simulation knows, all invariants after every step.

A failing seed is printed; `python -m tests.sim --seed N` repeats it step by step. Seeds that once failed
stay in `seeds.txt`. That the simulation sees anything is shown by `test_mutants`.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.core.gang_state import RestartKind
from mesh.messages import CauseEvidence, ProcessExit
from mesh.states import FailurePolicy, RunState
from tests.sim.faults import NO_FAULTS, Faults, Incident, only, shape_of
from tests.sim.incidents import STATES
from tests.sim.saver import Saving, Style
from tests.sim.world import World

PIECES, PIECE = 10, 1_000
"""So many lives, in pieces that workers can share."""


def kept_seeds() -> list[int]:
    """Seeds of faults that were mended."""
    lines = (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def test_seeds_that_once_failed_pass() -> None:
    for seed in kept_seeds():
        World(seed, **shape_of(seed)).run()


@pytest.mark.parametrize("piece", range(PIECES))
def test_every_seed_keeps_every_invariant(piece: int) -> None:
    ends: Counter[RunState] = Counter()
    seen: Counter[tuple[Incident, RunState]] = Counter()
    crashes = restored = 0
    for seed in range(piece * PIECE, (piece + 1) * PIECE):
        world = World(seed, **shape_of(seed)).run()
        ends.update(world.final_states().values())
        seen.update(world.incidents.seen)
        crashes += world.coordinator.crashes
        restored += world.truth.checkpoints.restored
    assert set(ends) == {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}
    assert crashes > PIECE / 20, "the faults that were to be survived did not happen"
    assert restored, "no rank ever began from a checkpoint"
    assert {kind for kind, _ in seen} == set(Incident), "something never went wrong"
    assert {state for _, state in seen} >= set(STATES), "in some state nothing ever went wrong"


@pytest.mark.parametrize("piece", range(2))
def test_ranks_that_start_again_alone_keep_every_invariant(piece: int) -> None:
    """Most commands fail; what goes wrong besides does so while a rank is away."""
    again = crashes = 0
    faults = replace(Faults(), exit_badly=0.5)
    for seed in range(piece * PIECE, (piece + 1) * PIECE):
        policy = FailurePolicy.RESTART_RANK
        world = World(seed, **shape_of(seed), faults=faults, policy=policy, max_restarts=3).run()
        again += world.truth.again
        crashes += world.coordinator.crashes
    assert again > PIECE / 4 and crashes > PIECE / 20


def test_lives_with_every_heartbeat_keep_every_invariant_too() -> None:
    for seed in range(15):
        World(seed, **shape_of(seed), faults=Faults(every_heartbeat=True)).run()


def test_without_faults_every_run_succeeds() -> None:
    for seed in range(100):
        world = World(seed, gangs=2, machines=2, faults=NO_FAULTS).run()
        assert set(world.final_states().values()) == {RunState.SUCCEEDED}


def test_a_seed_repeats_itself_bit_for_bit() -> None:
    def story(seed: int) -> list[str]:
        world = World(seed, gangs=2, machines=3)
        world.keeps_log = True
        return world.run().log

    assert story(11) == story(11) != story(12)


# ---- a crash at every step of a life ------------------------------------------------------------------

LIVES: dict[str, tuple[tuple[float, Incident], ...]] = {
    "nothing happens": (),
    "a machine is lost": ((6.0, Incident.MACHINE_LOST),),
    "two machines are lost during one recovery": (
        (6.0, Incident.MACHINE_LOST),
        (10.5, Incident.MACHINE_LOST),
    ),
    "a machine is wanted back": ((6.0, Incident.RECLAIM),),
    "suspended and resumed": ((6.0, Incident.SUSPEND), (12.0, Incident.RESUME)),
    "the store is restarted, and an agent dies": (
        (6.0, Incident.STORE_RESTARTED),
        (16.0, Incident.AGENT_DIED),
    ),
    "a rank starts again alone": (),
    "the network is checked, and a machine is lost": ((14.0, Incident.MACHINE_LOST),),
}


def fail_rank_1(world: World) -> None:
    for processes in list(world.truth.alive.values()):
        for process in [process for me, process in processes.items() if me.rank == 1]:
            process.end(ProcessExit(code=42), CauseEvidence())


def live(life: str, faults: Faults, *more: tuple[float, Incident]) -> World:
    """One of `LIVES`, and more to happen: the same up to the first fault that is added."""
    is_for_rank = life == "a rank starts again alone"
    policy = FailurePolicy.RESTART_RANK if is_for_rank else None
    faults = replace(faults, long_run=1.0)
    world = World(
        8,
        nodes=2,
        machines=5,
        faults=faults,
        checks_network=life.startswith("the network"),
        max_restarts=3,
        policy=policy,
    )
    if is_for_rank:
        world.after(6.0, fail_rank_1, world)
    for at_s, incident in (*LIVES[life], *more):
        world.after(at_s, world.incidents.happen, incident)
    return world.run()


def test_a_rank_that_fails_starts_again_alone() -> None:
    world = live("a rank starts again alone", NO_FAULTS)
    assert world.truth.again == 1
    assert [gang.epoch for gang in world.coordinator.journal.values()] == [1]


def test_machines_that_the_others_do_not_reach_are_replaced_and_the_gang_runs() -> None:
    faults = replace(NO_FAULTS, network_refuses=0.4, network_unchecked=0.1, network_silent=0.1)
    refusals = 0
    for seed in range(100):
        world = World(seed, nodes=3, machines=6, faults=faults, checks_network=True).run()
        assert set(world.final_states().values()) <= {RunState.SUCCEEDED, RunState.FAILED}
        refusals += world.truth.refusals
    assert refusals > 50


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("becomes_durable", [True, False], ids=["after the write", "before the write"])
def test_a_crash_at_each_journal_write_changes_no_end(life: str, becomes_durable: bool) -> None:
    writes = live(life, NO_FAULTS).coordinator.writes
    assert writes > 8
    for number in range(1, writes + 1):
        world = live(life, replace(NO_FAULTS, crash_writes={number: becomes_durable}))
        assert world.coordinator.crashes == 1
        assert set(world.final_states().values()) == {RunState.SUCCEEDED}, f"a crash at write {number}"


@pytest.mark.parametrize("becomes_durable", [True, False], ids=["after the write", "before the write"])
def test_a_crash_at_each_journal_write_loses_no_committed_checkpoint(becomes_durable: bool) -> None:
    """Between a manifest and its line in the journal too."""

    def saving(faults: Faults) -> World:
        world = World(8, nodes=2, machines=5, saves=True, faults=faults, max_restarts=3)
        world.savings = dict.fromkeys(world.savings, Saving(Style.HELPER, 4.0))
        world.after(18.0, world.incidents.happen, Incident.MACHINE_LOST)
        return world.run()

    undisturbed = saving(NO_FAULTS)
    assert undisturbed.truth.checkpoints.commits > 1
    assert undisturbed.truth.checkpoints.restored == 2
    for number in range(1, undisturbed.coordinator.writes + 1):
        world = saving(replace(NO_FAULTS, crash_writes={number: becomes_durable}))
        assert set(world.final_states().values()) == {RunState.SUCCEEDED}, f"a crash at write {number}"


@pytest.mark.parametrize("life", LIVES)
def test_a_crash_before_each_effect_changes_no_end(life: str) -> None:
    effects = live(life, NO_FAULTS).coordinator.effects
    assert effects > 5
    for number in range(1, effects + 1):
        world = live(life, replace(NO_FAULTS, crash_effects=frozenset({number})))
        assert world.coordinator.crashes == 1
        assert set(world.final_states().values()) == {RunState.SUCCEEDED}, f"a crash before effect {number}"


@pytest.mark.parametrize("life", ["nothing happens", "a machine is lost", "suspended and resumed"])
def test_a_cancel_at_any_moment_ends_in_cancelled_or_in_what_had_happened_before(life: str) -> None:
    for step in range(60):
        world = World(8, nodes=2, machines=5, faults=NO_FAULTS, max_restarts=3)
        for at_s, incident in (*LIVES[life], (step * 0.2, Incident.CANCEL)):
            world.after(at_s, world.incidents.happen, incident)
        assert set(world.run().final_states().values()) <= {RunState.CANCELLED, RunState.SUCCEEDED}


@pytest.mark.parametrize(
    ("incident", "end"),
    [
        (Incident.CANCEL, RunState.CANCELLED),
        (Incident.MACHINE_LOST, RunState.SUCCEEDED),
        (Incident.RECLAIM, RunState.SUCCEEDED),
        (Incident.AGENT_DIED, RunState.SUCCEEDED),
        (Incident.STORE_RESTARTED, RunState.SUCCEEDED),
        (Incident.COORDINATOR_CRASHED, RunState.SUCCEEDED),
    ],
)
def test_whatever_happens_while_a_rank_is_away_has_its_end(incident: Incident, end: RunState) -> None:
    for step in range(50):
        world = live("a rank starts again alone", NO_FAULTS, (5.9 + step * 0.15, incident))
        assert set(world.final_states().values()) == {end}, f"{incident} at step {step}"


# ---- stories that the design names --------------------------------------------------------------------


@pytest.mark.parametrize("incident", [Incident.MACHINE_FROZEN, Incident.CUT_OFF])
def test_a_lost_machine_that_comes_back_finds_every_door_closed(incident: Incident) -> None:
    """In the middle of the next epoch, with its old processes alive: `Truth` looks at every door that they ask."""
    ghosts = 0
    for seed in range(200):
        world = World(seed, nodes=2, machines=4, faults=only(incident, at_most=2)).run()
        ghosts += world.truth.ghosts
        assert RunState.CANCELLED not in world.final_states().values()
    assert ghosts or incident is Incident.CUT_OFF, (
        "a frozen process wakes; one that was cut off has been ended"
    )


@pytest.mark.parametrize("incident", [Incident.STORE_STALLED, Incident.STORE_RESTARTED])
def test_no_machine_pays_for_the_stores_own_troubles(incident: Incident) -> None:
    charged: Counter[RestartKind | None] = Counter()
    for seed in range(150):
        world = World(seed, **shape_of(seed), faults=only(incident)).run()
        charged.update(c.charged for gang in world.coordinator.journal.values() for c in gang.history)
    assert charged[RestartKind.OURS] > 5, "nobody ever ran out of his lease"
    assert set(charged) == {None, RestartKind.OURS}


@pytest.mark.parametrize(
    "incident", [Incident.COORDINATOR_CRASHED, Incident.DISK_FULL, Incident.STORE_LINE_CUT]
)
def test_healthy_ranks_are_not_restarted_by_troubles_of_the_head(incident: Incident) -> None:
    for seed in range(150):
        world = World(seed, nodes=3, machines=3, faults=only(incident, at_most=4)).run()
        for gang in world.coordinator.journal.values():
            assert gang.state is RunState.SUCCEEDED
            assert gang.epoch == 1, f"seed {seed}: restarted although every rank was well"
