"""What a validated Job comes to: the frozen data that cores and members work with.

`mesh.spec` turns what a user wrote into a `RunPlan`, once, at the front door; nothing behind it sees
pydantic models. A plan never changes for the life of a run, so the world size never changes either.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mesh.ids import RunName
from mesh.states import FailurePolicy, LauncherKind, NetworkScope, TransportPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run, resolved. Times are in seconds."""

    name: RunName
    command: tuple[str, ...]
    """argv of one rank; never empty."""
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """The user's own variables, in the order given, each name once. Often secrets: in no log, no traceback."""
    working_dir: str | None = None
    """Absolute directory on the member's machine; None is the rank's state directory."""
    labels: tuple[tuple[str, str], ...] = ()
    launcher: LauncherKind = LauncherKind.PLAIN
    nodes: int = 1
    """Machines, 1 to 8."""
    gpus_per_node: int = 0
    """Accelerators that each member holds; 0 is a CPU run."""
    gpu_types: tuple[str, ...] = ()
    """Accepted accelerator types, best first; empty means any."""
    network: NetworkScope = NetworkScope.COLOCATED
    transport_policy: TransportPolicy = TransportPolicy.DIRECT
    startup_timeout_s: float = 900.0
    """Bound on one whole assembly: 300 to 3600, default 900 (first document, "The assembly bound")."""
    max_assembly_retries: int = 2
    max_restarts: int = 3
    """`recovery.maxAttempts`."""
    on_process_failure: FailurePolicy = FailurePolicy.FAIL
    grace_period_s: float = 30.0
    """Between SIGTERM and SIGKILL."""

    @property
    def processes_per_node(self) -> int:
        """torchrun's processes on each machine: one per GPU, one on a CPU machine."""
        return max(1, self.gpus_per_node)

    def to_record(self) -> dict[str, Any]:
        """Plain JSON-able data; `from_record` is the inverse."""
        record = asdict(self)
        record["command"] = list(self.command)
        record["gpu_types"] = list(self.gpu_types)
        record["env"] = [list(pair) for pair in self.env]
        record["labels"] = [list(pair) for pair in self.labels]
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> RunPlan:
        return cls(
            name=RunName(record["name"]),
            command=tuple(record["command"]),
            env=tuple((k, v) for k, v in record["env"]),
            working_dir=record["working_dir"],
            labels=tuple((k, v) for k, v in record["labels"]),
            launcher=LauncherKind(record["launcher"]),
            nodes=record["nodes"],
            gpus_per_node=record["gpus_per_node"],
            gpu_types=tuple(record["gpu_types"]),
            network=NetworkScope(record["network"]),
            transport_policy=TransportPolicy(record["transport_policy"]),
            startup_timeout_s=record["startup_timeout_s"],
            max_assembly_retries=record["max_assembly_retries"],
            max_restarts=record["max_restarts"],
            on_process_failure=FailurePolicy(record["on_process_failure"]),
            grace_period_s=record["grace_period_s"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a msgpack/TCP service listens, and the secret that its first frame must carry."""

    host: str
    port: int
    secret: str = field(repr=False)
    source: str | None = None
    """The address to connect from; None leaves it to the kernel. A machine that is simulated on a host with others
    has one of its own: what is cut off is told by it."""
