"""From a Job to the `RunPlan` that everything behind the front door works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mesh.ids import RunName
from mesh.plan import RunPlan
from mesh.spec.model import Job
from mesh.topology import GPUS_PER_NODE_CHOICES


class MachineFacts(Protocol):
    """What the shape depends on when it is ours to pick."""

    @property
    def machine_sizes(self) -> Sequence[int]: ...


def resolve(job: Job, *, facts: MachineFacts | None = None) -> RunPlan:
    """The plan of this job. The shape is decided here, once; the plan is what has to be kept.

    Args:
        facts: the deployment's; without them every machine shape counts as available.
    """
    spec = job.spec
    sizes = tuple(facts.machine_sizes) if facts is not None else GPUS_PER_NODE_CHOICES
    shape = spec.topology(machine_sizes=sizes)
    gpu = spec.resources.gpu
    return RunPlan(
        name=RunName(job.metadata.name),
        command=spec.command,
        env=tuple(spec.env.items()),
        working_dir=spec.working_dir,
        labels=tuple(job.metadata.labels.items()),
        launcher=spec.distributed.launcher,
        nodes=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
        gpu_types=gpu.type if gpu is not None else (),
        network=spec.distributed.network,
        transport_policy=spec.distributed.transport,
        startup_timeout_s=spec.distributed.startup_timeout,
        max_assembly_retries=spec.distributed.max_assembly_retries,
        max_restarts=spec.recovery.max_attempts,
        on_process_failure=spec.recovery.on_process_failure,
        grace_period_s=spec.grace_period,
    )
