"""The half of a Job that the deployment writes: what became of the run.

The keys and meanings are those of `mesh.resources` (which types the API's answers); a test keeps the two in step. Here
they are read leniently, since a newer server may say more, and never validated as user input.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from mesh.states import RunState


class _Reported(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


class ProcessEnd(_Reported):
    """How a process ended: exactly one of the two is a number."""

    code: int | None = None
    signal: int | None = None


class RankStatus(_Reported):
    """One rank in the current epoch."""

    rank: int
    machine: str | None = None
    address: str | None = None
    state: str
    stage: str | None = None
    exit: ProcessEnd | None = None
    last_output_at: float | None = None
    finished_at: float | None = None


class BarrierStatus(_Reported):
    """How far the assembly is."""

    arrived: int
    of: int


class TopologyStatus(_Reported):
    """The shape, resolved once."""

    nodes: int
    gpus_per_node: int
    processes_per_node: int
    world_size: int


class Condition(_Reported):
    """Something worth knowing that is no failure, such as `WANBound`."""

    type: str
    message: str


class EpochStatus(_Reported):
    """One collective life of the gang."""

    epoch: int
    began_at: float
    opened_at: float | None = None
    running_at: float | None = None
    stopped_at: float | None = None
    ended_at: float | None = None
    kept: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()
    restored: str | None = None
    restored_step: int | None = None
    reason: str | None = None
    cause: dict[str, Any] | None = None
    victims: tuple[int, ...] = ()
    charged_to: str | None = None
    led_somewhere: bool = False
    lost_seconds: float | None = None


class CheckpointStatus(_Reported):
    """A gang checkpoint that is committed."""

    id: str
    uri: str
    epoch: int
    step: int | None = None
    bytes: int
    at: float


class JobStatus(_Reported):
    """What became of the run. Times are seconds since 1970."""

    state: RunState
    reason: str | None = None
    message: str | None = None
    epoch: int = 0
    exit_code: int | None = None
    topology: TopologyStatus
    barrier: BarrierStatus
    started_at: float | None = None
    ended_at: float | None = None
    ranks: tuple[RankStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()
    cause: dict[str, Any] | None = None
    restarts: dict[str, int] | None = None
    epochs: tuple[EpochStatus, ...] = ()
    checkpoint: CheckpointStatus | None = None
    productive: dict[str, float] | None = None
