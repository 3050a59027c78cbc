"""The command line of a node's raylet, and what every node of an embedded Ray cluster agrees on. Pure.

Rules of this file:
1. We start `gcs_server` and `raylet` ourselves instead of `ray start`. Measured on 2 idle cores: a head and two
   machines are up in 0.1 to 1.1 s this way, in 11 s through `ray._private.node.Node`, later through `ray start`; and
   nine Python processes of 80 to 100 MB that do nothing for us are not there (the `ray start` processes, dashboard
   and runtime-env agents). What it costs: the flags are Ray's own affair, so Ray is pinned to one minor version,
   and `tests/integration/test_head.py` fails when they change.
2. Every Ray process of a deployment on one host listens on 127.0.0.1 only. A machine's own address, at which its
   members find each other, is a label. Where machines join from elsewhere the node's address is the machine's,
   and Ray then binds all interfaces. With an overlay address its ports are in a block that only the mesh leads to
   (`mesh_ports.py`); with any other it is only for a network in which everybody may be trusted.
3. The two agents that a raylet insists on are stand-ins that wait for the raylet's end. So an actor of an embedded
   deployment cannot have a `runtime_env`; ours have none.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents.mesh_ports import MeshPorts

LOOPBACK = "127.0.0.1"
"""Of every Ray process, unless machines join from elsewhere; see rule 2."""
OBJECT_STORE_BYTES = 80_000_000
"""Ray's smallest is 75 MiB. Nothing large goes through it: logs, checkpoints and data have ways of their own."""
MEMORY_BYTES = 1 << 30
"""What a raylet offers to tasks that ask for memory; ours ask for none."""
LOG_BYTES_MAX = 5_000_000
LOG_BACKUPS = 1
NO_PORT = -1
STAND_IN_PORT = 1024
"""Nothing listens there; Ray's workers only check that it could be a port."""

MACHINE_LABEL = "gangmesh.machine"
ADDRESS_LABEL = "gangmesh.address"
"""Where a machine's member is for its peers; on the mesh the member's overlay address."""
GPU_TYPE_LABEL = "gangmesh.gpu-type"
MEMBER_WORKERS = 2
"""Worker processes that a member takes: its own, and its launcher's."""
CHECK_WORKERS = 1
"""And before it, where machines are on hosts of their own: the network check's end."""
SLOT_RESOURCE = "gangmesh_slot"
HEAD_RESOURCE = "gangmesh_head"

RAY_SETTINGS: Mapping[str, str] = {
    # Token authentication is on, with a token of our own (RAY_AUTH_TOKEN_PATH is added where the path is known).
    "RAY_AUTH_MODE": "token",
    # Misnamed: it says whether Ray looks for an address that others can reach, in place of 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A call after the connection has ended would start another cluster on its own.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # A user's command inherits the worker's priority; Ray's default makes it 15.
    "RAY_worker_niceness": "0",
    # A supervisor ends its command's tree when its launcher dies; killed by Ray with it, it could not.
    "RAY_kill_child_processes_on_worker_exit": "false",
    # Idle workers are kept: the next member finds one that is warm.
    "RAY_kill_idle_workers_interval_ms": "0",
    # What a member and its launcher import, ahead (`coordinator.ray_workers`).
    "RAY_preload_python_modules": "agents.node,agents.launcher.actor",
    # A killed worker would look like a lost machine, and it is the user's command that eats the memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # There is nobody to export to, and nobody who reads the dumps.
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_debug_dump_period_milliseconds": "0",
    "RAY_metrics_report_interval_ms": "0",
    "RAY_task_events_report_interval_ms": "0",
    # A raylet that died is noticed in 2.5 s instead of 15; one that is only slow has 10 s for each answer, as ever.
    "RAY_health_check_period_ms": "500",
    "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES_MAX),
    "RAY_ROTATION_BACKUP_COUNT": str(LOG_BACKUPS),
}

MESH_RAY_SETTINGS: Mapping[str, str] = {
    # A gateway that is started again takes a second or more, in which every question of Ray's fails at once: a machine
    # is held for dead after 6 s of that, and 18 to 24 s after it has fallen silent. Leases notice it far sooner.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "6",
}
"""Where Ray's connections go through gateways, in addition."""

# One word after `sh -c CODE` is `$0`; whatever Ray appends after it is ignored.
_STAND_IN_AGENT = ["/bin/sh", "-c", "exec cat > /dev/null", "gangmesh-stand-in"]
"""Ends when the raylet does: its stdin is a pipe that the raylet holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayInstall:
    """Where Ray and Python are."""

    ray: Path
    python: str
    commit: str

    @property
    def gcs_server(self) -> str:
        return str(self.ray / "core/src/ray/gcs/gcs_server")

    @property
    def raylet(self) -> str:
        return str(self.ray / "core/src/ray/raylet/raylet")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One node: the head, or a machine."""

    name: str
    node_id: str
    session: str
    temp: Path
    """The node's own folder; its session lies in it under the session's name."""
    sockets: Path
    socket_name: str
    """Short: see `deployment.SOCKET_NAME_LONGEST`."""
    resources: Mapping[str, float]
    address: str = LOOPBACK
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: MeshPorts | None = None
    """On the mesh; None lets Ray choose."""
    workers_ready: int = 0
    """Worker processes that the raylet starts by itself when a driver connects; beside `coordinator.warm_workers`."""
    is_head: bool = False

    @property
    def folder(self) -> Path:
        return self.temp / self.session

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def folders(self) -> tuple[Path, ...]:
        """What must be there before the node starts."""
        return (self.logs / "old", self.folder / "runtime_resources")

    @property
    def raylet_socket(self) -> str:
        return str(self.sockets / f"{self.socket_name}.raylet")

    @property
    def plasma_socket(self) -> str:
        return str(self.sockets / f"{self.socket_name}.plasma")


PORTS_TOLD: Mapping[str, int] = {
    "dashboard_agent_listen_port": NO_PORT,
    "metrics_agent_port": NO_PORT,
    "metrics_export_port": NO_PORT,
    "runtime_env_agent_port": STAND_IN_PORT,
}
"""A raylet waits until its agents have told these, each in a file; we tell them before it starts."""


def raylet_command(install: RayInstall, node: RayNode, *, gcs_address: str, cluster_id: str) -> list[str]:
    """One node's raylet: its scheduler, worker pool and object store."""
    agent = subprocess.list2cmdline(_STAND_IN_AGENT)
    return [
        install.raylet,
        f"--raylet_socket_name={node.raylet_socket}",
        f"--store_socket_name={node.plasma_socket}",
        f"--object_manager_port={node.ports.object_manager if node.ports else 0}",
        f"--min_worker_port={node.ports.first_worker if node.ports else 0}",
        f"--max_worker_port={node.ports.last if node.ports else 0}",
        f"--node_manager_port={node.ports.node_manager if node.ports else 0}",
        f"--node_id={node.node_id}",
        f"--node_ip_address={node.address}",
        f"--node-name={node.name}",
        f"--maximum_startup_concurrency={max(MEMBER_WORKERS + CHECK_WORKERS, node.workers_ready)}",
        f"--num_prestart_python_workers={node.workers_ready}",
        f"--static_resource_list={_resource_list(node)}",
        f"--labels={json.dumps(dict(node.labels))}",
        f"--python_worker_command={_worker_command(install, node, gcs_address, cluster_id)}",
        "--java_worker_command=",
        "--cpp_worker_command=",
        f"--native_library_path={install.ray / 'cpp/lib'}",
        f"--temp_dir={node.temp}",
        f"--session_dir={node.folder}",
        f"--log_dir={node.logs}",
        f"--resource_dir={node.folder / 'runtime_resources'}",
        f"--metrics-agent-port={NO_PORT}",
        f"--metrics_export_port={NO_PORT}",
        f"--runtime_env_agent_port={STAND_IN_PORT}",
        f"--object_store_memory={OBJECT_STORE_BYTES}",
        "--plasma_directory=/dev/shm",
        f"--fallback_directory={node.folder}",
        "--ray-debugger-external=0",
        f"--gcs-address={gcs_address}",
        f"--session-name={node.session}",
        f"--cluster-id={cluster_id}",
        f"--stdout_filepath={node.logs / 'raylet.out'}",
        f"--stderr_filepath={node.logs / 'raylet.err'}",
        f"--dashboard_agent_command={agent}",
        f"--runtime_env_agent_command={agent}",
        *(["--head"] if node.is_head else []),
    ]


def _resource_list(node: RayNode) -> str:
    resources = {
        **node.resources,
        f"node:{node.address}": 1.0,
        **({"node:__internal_head__": 1.0} if node.is_head else {}),
        "memory": MEMORY_BYTES,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    return ",".join(f"{name},{amount}" for name, amount in resources.items())


def _worker_command(install: RayInstall, node: RayNode, gcs_address: str, cluster_id: str) -> str:
    """One string, quoted as Ray itself quotes it; the raylet takes it apart and fills in the words in capitals."""
    workers = install.ray / "_private/workers"
    return subprocess.list2cmdline(
        [
            install.python,
            str(workers / "setup_worker.py"),
            str(workers / "default_worker.py"),
            f"--node-ip-address={node.address}",
            "--node-manager-port=RAY_NODE_MANAGER_PORT_PLACEHOLDER",
            f"--object-store-name={node.plasma_socket}",
            f"--raylet-name={node.raylet_socket}",
            "--redis-address=None",
            f"--metrics-agent-port={NO_PORT}",
            f"--logging-rotate-bytes={LOG_BYTES_MAX}",
            f"--logging-rotate-backup-count={LOG_BACKUPS}",
            f"--runtime-env-agent-port={STAND_IN_PORT}",
            f"--gcs-address={gcs_address}",
            f"--session-name={node.session}",
            f"--temp-dir={node.temp}",
            "--webui=",
            f"--cluster-id={cluster_id}",
            "RAY_WORKER_DYNAMIC_OPTION_PLACEHOLDER",
        ]
    )
