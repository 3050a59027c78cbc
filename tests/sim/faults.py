"""What may go wrong in a simulated world, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypedDict

from mesh.states import RunState


class Incident(StrEnum):
    """Something that happens to a machine, a process, the store, or the coordinator at one moment."""

    MACHINE_LOST = "machine lost"
    MACHINE_FROZEN = "machine frozen"
    CUT_FROM_STORE = "cut from the store"
    CUT_FROM_HEAD = "cut from coordinator and fleet"
    CUT_OFF = "cut off from everything"
    AGENT_DIED = "agent died"
    KEEPER_DIED = "keeper died"
    MEMBER_HUNG = "agent stands still, its keeper does not"
    PROCESS_FAILED = "process failed"
    SLOW_NETWORK = "slow network"
    CLOCK_STEPPED = "wall clock stepped"
    STORE_RESTARTED = "store restarted"
    STORE_STALLED = "store stalled"
    STORE_LINE_CUT = "coordinator's line to the store cut"
    COORDINATOR_CRASHED = "coordinator crashed"
    DISK_FULL = "journal cannot be written"
    RECLAIM = "machine reclaimed"
    CAPACITY_GONE = "a free machine is gone"
    CAPACITY_CAME = "a machine joins"
    CANCEL = "cancel"
    SUSPEND = "suspend"
    RESUME = "resume"


USUAL = {
    Incident.MACHINE_LOST: 5, Incident.MACHINE_FROZEN: 5, Incident.CUT_FROM_STORE: 3, Incident.CUT_FROM_HEAD: 3,
    Incident.CUT_OFF: 4, Incident.AGENT_DIED: 3, Incident.KEEPER_DIED: 2, Incident.MEMBER_HUNG: 2,
    Incident.PROCESS_FAILED: 3,
    Incident.SLOW_NETWORK: 2, Incident.CLOCK_STEPPED: 1, Incident.STORE_RESTARTED: 3, Incident.STORE_STALLED: 2,
    Incident.STORE_LINE_CUT: 2, Incident.COORDINATOR_CRASHED: 3, Incident.DISK_FULL: 1, Incident.RECLAIM: 3,
    Incident.CAPACITY_GONE: 1, Incident.CAPACITY_CAME: 2, Incident.CANCEL: 4, Incident.SUSPEND: 3,
    Incident.RESUME: 3,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities per occasion, unless said otherwise. All of them are 0 once the world has healed."""

    exit_badly: float = 0.08
    start_failure: float = 0.01
    peer_dies_of_it: float = 0.8
    """A rank whose peer died ends too, complaining about the peer."""
    unrelated_dies_of_it: float = 0.05
    """The same under RestartRank: its ranks are said to share nothing, mostly with right."""
    never_arrives: float = 0.02
    slow_preparation: float = 0.03
    preparation_failure: float = 0.02
    ignores_term: float = 0.2
    stuck_in_the_kernel: float = 0.01
    """A process that a kill does not end for a while."""
    never_appears: float = 0.02
    """The actor of a member cannot be created, or nothing is heard of it."""
    network_refuses: float = 0.15
    """A check of the network finds that one of the machines it is about is cut off from the others."""
    network_unchecked: float = 0.05
    """It could not be done."""
    network_silent: float = 0.03
    """Nothing is heard of it."""
    long_run: float = 0.03
    """A command that runs for more than ten minutes."""
    message_lost: float = 0.01
    message_twice: float = 0.02
    crash_at_write: float = 0.01
    crash_at_effect: float = 0.003
    crash_writes: dict[int, bool] = field(default_factory=dict)
    """Exact crashes: number of the journal write -> whether the write itself still became durable."""
    crash_effects: frozenset[int] = frozenset()
    """Exact crashes: numbers of the effects before which the coordinator dies."""
    latency_s: float = 0.005
    """Mean of one message from or to a machine."""
    thaws_without_network: float = 0.25
    """A machine that stood still comes back cut off."""
    checkpoint_store_away: float = 0.3
    """A time at which the checkpoint store answers nothing: it is slow, full, or not there."""
    checkpoint_store_slow: float = 0.1
    """One answer of it takes seconds."""
    upload_late: float = 0.1
    """One part takes ten seconds, or until its epoch is over."""
    part_harmed: float = 0.05
    """A part that is stored is lost, truncated, or rots."""
    clock_drift: float = 1e-4
    """How far a monotonic clock may run fast or slow, as a share."""
    incidents: dict[Incident, int] = field(default_factory=lambda: dict(USUAL))
    """Weights."""
    incidents_max: int = 4
    incidents_in: tuple[RunState, ...] = ()
    """When a gang first enters one of these; empty: at any time, and in any state."""
    every_heartbeat: bool = False
    """Simulate the heartbeats of healthy times too (see `tests.sim.keeper`)."""


_PHYSICS = ("peer_dies_of_it", "latency_s", "thaws_without_network")
_NONE: dict[str, Any] = {f.name: 0.0 for f in fields(Faults) if f.type == "float" and f.name not in _PHYSICS}
NO_FAULTS = replace(Faults(), **_NONE, incidents={}, incidents_max=0)


def mostly(incidents: dict[Incident, int], *, at_most: int = 5, **other: Any) -> Faults:
    """The usual small faults, and of the incidents these."""
    return replace(Faults(), incidents=incidents, incidents_max=at_most, **other)


def only(*incidents: Incident, at_most: int = 3) -> Faults:
    """Nothing goes wrong but these."""
    return replace(NO_FAULTS, incidents=dict.fromkeys(incidents, 1), incidents_max=at_most)


_I = Incident
TROUBLED = (
    mostly(
        {
            _I.STORE_RESTARTED: 3, _I.MACHINE_FROZEN: 3, _I.COORDINATOR_CRASHED: 2, _I.STORE_LINE_CUT: 2,
            _I.DISK_FULL: 1, _I.CUT_OFF: 1,
        },
        at_most=14,
    ),
    mostly(
        {
            _I.MEMBER_HUNG: 3, _I.AGENT_DIED: 3, _I.KEEPER_DIED: 2, _I.STORE_STALLED: 2, _I.MACHINE_LOST: 2,
            _I.COORDINATOR_CRASHED: 1,
        },
        at_most=14,
        exit_badly=0.3,
    ),
    mostly(
        {
            _I.RECLAIM: 4, _I.MACHINE_LOST: 3, _I.MACHINE_FROZEN: 2, _I.STORE_RESTARTED: 2, _I.CAPACITY_GONE: 1,
            _I.CAPACITY_CAME: 2, _I.SUSPEND: 2, _I.RESUME: 2, _I.CANCEL: 1,
        },
        at_most=14,
    ),
    mostly(
        {
            _I.MACHINE_FROZEN: 2, _I.MACHINE_LOST: 2, _I.CUT_FROM_HEAD: 2, _I.CUT_FROM_STORE: 2, _I.STORE_RESTARTED: 2,
            _I.STORE_STALLED: 2, _I.DISK_FULL: 1,
        },
        at_most=14,
        never_arrives=0.1,
        slow_preparation=0.1,
        preparation_failure=0.1,
        never_appears=0.1,
    ),
    mostly(
        {
            _I.SLOW_NETWORK: 4, _I.MACHINE_LOST: 3, _I.STORE_STALLED: 1, _I.STORE_RESTARTED: 1, _I.PROCESS_FAILED: 2,
        },
        at_most=12,
        latency_s=0.05,
    ),
)  # fmt: skip
"""Much more going wrong than usual, of kinds that meddle with each other: store and standing still, agents that say
nothing, machines that come and go, assemblies, slow networks."""


class Shape(TypedDict):
    """How big a world is."""

    gangs: int
    nodes: int
    machines: int
    saves: bool


def shape_of(seed: int) -> Shape:
    """How big a world a seed means: mostly one gang of two, some crowded ones."""
    gangs = (1, 1, 1, 1, 2)[seed % 5]
    nodes = (2, 2, 3, 4)[seed % 4]
    saves = seed % 7 in (0, 2) and seed % 11 < 3  # some, since they take three times as long
    return {"gangs": gangs, "nodes": nodes, "machines": nodes + seed % 3, "saves": saves}
