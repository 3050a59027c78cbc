"""The Job resource: what a user asks for (`spec`) and what became of it (`status`), in the first document's format.

Rules of this file:
1. Keys are camelCase, as in the document (`totalGPUs`, `gpusPerNode`, `maxAssemblyRetries`); unknown ones are refused.
2. Everything in the document is accepted here. Whether this deployment can do it is asked in `mesh.spec.admission`.
3. `to_json` fills every default in and is stable: the same job always gives the same JSON, and reading it back gives an
   equal job.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mesh.spec.environment import total_problem
from mesh.spec.fields import (
    AssemblyRetries,
    Attempts,
    Command,
    Env,
    GpuCount,
    GpusPerNode,
    GpuTypes,
    GracePeriod,
    Image,
    Labels,
    Launcher,
    MaxCost,
    Network,
    Nodes,
    OnProcessFailure,
    RunNameText,
    StartupTimeout,
    TotalGpus,
    TransportChoice,
    WorkingDir,
    gpu_mapping,
)
from mesh.spec.problems import refuse
from mesh.states import FailurePolicy, LauncherKind, NetworkScope, TransportPolicy
from mesh.topology import GPUS_PER_NODE_CHOICES, ShapeError, Topology, resolve_topology

API_VERSION = "nodus.dev/v1"
KIND = "Job"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False, validate_default=False)


class Metadata(_Part):
    """Who the run is. `uid` and `createdAt` are the deployment's to give."""

    name: RunNameText
    labels: Labels = Field(default_factory=dict)
    uid: str | None = None
    created_at: float | None = Field(default=None, alias="createdAt")


class Gpu(_Part):
    """Accelerators of each machine. `type` is one or a list, best first; empty means any."""

    type: GpuTypes = ()
    count: GpuCount = None


class Resources(_Part):
    """What each machine must have."""

    gpu: Gpu | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_gpu(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("gpu"), str):
            return {**value, "gpu": gpu_mapping(value["gpu"])}
        return value


class Distributed(_Part):
    """The gang: how big, how started, where, over which paths, and how long its assembly may take."""

    nodes: Nodes = None
    total_gpus: TotalGpus = Field(default=None, alias="totalGPUs")
    gpus_per_node: GpusPerNode = Field(default=None, alias="gpusPerNode")
    launcher: Launcher = LauncherKind.PLAIN
    network: Network = NetworkScope.COLOCATED
    transport: TransportChoice = TransportPolicy.DIRECT
    startup_timeout: StartupTimeout = Field(default=900.0, alias="startupTimeout")
    max_assembly_retries: AssemblyRetries = Field(default=2, alias="maxAssemblyRetries")


class Recovery(_Part):
    """What happens when something fails. `maxAttempts` counts restarts."""

    max_attempts: Attempts = Field(default=3, alias="maxAttempts")
    on_process_failure: OnProcessFailure = Field(default=FailurePolicy.FAIL, alias="onProcessFailure")


class JobSpec(_Part):
    """What every rank runs, on what, and how it ends. Times are in seconds here and durations (`15m`) in JSON."""

    command: Command
    env: Env = Field(default_factory=dict)
    working_dir: WorkingDir = Field(default=None, alias="workingDir")
    image: Image = None
    resources: Resources = Field(default_factory=Resources)
    distributed: Distributed = Field(default_factory=Distributed)
    recovery: Recovery = Field(default_factory=Recovery)
    grace_period: GracePeriod = Field(default=30.0, alias="gracePeriod")
    max_cost: MaxCost = Field(default=None, alias="maxCost")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if problem := total_problem(self.command, self.env):
            refuse(f"{problem}.")
        try:
            self.topology()
        except ShapeError as error:
            place = ("resources", "gpu") if error.field == "count" else ("distributed",)
            refuse(error.text, path=(*place, error.field), got=str(error.got))
        return self

    def topology(self, *, machine_sizes: tuple[int, ...] = GPUS_PER_NODE_CHOICES) -> Topology:
        """The shape that this comes to, on a deployment whose machines can hold these GPU counts."""
        gpu = self.resources.gpu
        return resolve_topology(
            nodes=self.distributed.nodes,
            total_gpus=self.distributed.total_gpus,
            gpus_per_node=self.distributed.gpus_per_node,
            gpu_count=gpu.count if gpu else None,
            gpu_wanted=gpu is not None,
            machine_sizes=machine_sizes,
        )


class Job(_Part):
    """A Job resource. Make one with `mesh.spec.parse_job`, `job_from_data` or `job_from_flags`."""

    api_version: Literal["nodus.dev/v1"] = Field(default="nodus.dev/v1", alias="apiVersion")
    kind: Literal["Job"] = "Job"
    metadata: Metadata
    spec: JobSpec
    status: dict[str, Any] | None = None
    """What became of it, as `mesh.resources.RunStatus`; never taken from a user."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-able data: camelCase, defaults filled in, what was not said left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
