"""Ray's processes as children of the head: started, watched, stopped.

Rules of this file:
1. Nothing here looks for a Ray that runs already, and nothing of the user's Ray environment is passed on: the cluster
   has its own ports, folders and token.
2. A process that ends without having been stopped is told to `on_lost` once, with its exit code and the end of its log.
3. A node is started when Ray's directory says that it is alive, and not before.
4. Ray's interface that is not public is used here, in `agents.raylet` and `agents.raylet_process`,
   and nowhere else.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.child import Child, spawn
from agents.mesh_ports import MeshPorts
from agents.raylet import HEAD_RESOURCE, LOOPBACK, NO_PORT, RayInstall, RayNode, raylet_command
from agents.raylet_process import (
    NODE_ID_BYTES,
    RAYLET_GRACE_S,
    START_LIMIT_S,
    find_install,
    log_tail,
    or_end,
    prepare,
    start_limit,
    until_alive,
)
from mesh.errors import DeploymentError
from mesh.reasons import Reason

GCS_GRACE_S = 2.0
HEAD_NAME = "head"
DIRECTORY_NAME = "Ray's directory"
HEAD_WORKERS_READY = 3
"""The coordinator, the store, and one in which Ray restarts the first of them that dies: to start a process takes some
seconds on a busy machine, a lease lasts three, and healthy ranks would fence themselves for the want of a store."""

OnLost = Callable[[str, int, str], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTerms:
    """Where a cluster is, and which one."""

    address: str
    cluster_id: str
    session: str


@dataclass(slots=True, kw_only=True)
class _Cluster:
    address: str
    cluster_id: str
    client: Any
    """`ray._raylet.GcsClient`; its calls block."""
    raylets: dict[str, Child] = field(default_factory=dict)
    node_ids: dict[str, str] = field(default_factory=dict)


class RayProcesses:
    """One embedded Ray cluster.

    Args:
        folder: where Ray keeps its files.
        sockets: a short folder for Unix sockets.
        environment: of every process.
        on_lost: called with name, exit code and the end of its log when a process ends by itself.
        address: of the head's own processes: loopback, or one that machines elsewhere can reach.
        ports: of the head's own processes; None lets Ray choose.
    """

    def __init__(
        self,
        *,
        folder: Path,
        sockets: Path,
        environment: Mapping[str, str],
        on_lost: OnLost,
        address: str = LOOPBACK,
        ports: MeshPorts | None = None,
    ) -> None:
        self._folder = folder
        self._sockets = sockets
        self._environment = dict(environment)
        self._on_lost = on_lost
        self._address = address
        self._ports = ports
        self._session = f"session_{secrets.token_hex(4)}"
        self._install = find_install()
        self._gcs: Child | None = None
        self._cluster: _Cluster | None = None
        self._stopping: set[str] = set()
        """Names of processes whose end is wanted."""

    # ---- start ------------------------------------------------------------------------------------

    async def start_head(self) -> str:
        """Starts the directory server and the head's raylet; returns the cluster's address.

        Raises:
            DeploymentError: one of them ended. MeshTimeoutError: one of them is not up in time.
        """
        node = self.node(HEAD_NAME, socket_name="h", resources={HEAD_RESOURCE: 1}, is_head=True)
        await asyncio.to_thread(prepare, node)
        gcs = spawn(
            DIRECTORY_NAME,
            _gcs_command(self._install, node),
            environment=self._environment,
            log=node.logs / "gcs_server.start",
        )
        self._gcs = gcs
        self._watch(gcs, node.logs / "gcs_server.err")
        async with start_limit("Ray's directory to start"):
            port = await or_end(gcs, _told_port(node))
            address = f"{self._address}:{port}"
            client = await or_end(gcs, asyncio.to_thread(_register_cluster, address, node))
        self._cluster = _Cluster(address=address, cluster_id=client.cluster_id.hex(), client=client)
        await self.start_node(replace(node, workers_ready=HEAD_WORKERS_READY))
        return address

    def node(
        self,
        name: str,
        *,
        socket_name: str,
        resources: Mapping[str, float],
        labels: Mapping[str, str] | None = None,
        is_head: bool = False,
    ) -> RayNode:
        """A node of this cluster, not started yet."""
        return RayNode(
            name=name,
            address=self._address,
            node_id=secrets.token_hex(NODE_ID_BYTES),
            session=self._session,
            temp=self._folder / name,
            sockets=self._sockets,
            socket_name=socket_name,
            resources=resources,
            labels=labels or {},
            is_head=is_head,
            ports=self._ports if is_head else None,
        )

    async def start_node(self, node: RayNode) -> None:
        """Starts a node and returns when it is part of the cluster. Raises as `start_head`."""
        cluster = self._running()
        await asyncio.to_thread(prepare, node)
        command = raylet_command(
            self._install, node, gcs_address=cluster.address, cluster_id=cluster.cluster_id
        )
        child = spawn(
            node.name,
            command,
            environment=self._environment,
            log=node.logs / "raylet.start",
        )
        cluster.raylets[node.name] = child
        cluster.node_ids[node.name] = node.node_id
        self._watch(child, node.logs / "raylet.err")
        async with start_limit(f"{node.name} to join Ray"):
            await or_end(child, until_alive(cluster.client, node.node_id, where=cluster.address))

    def _running(self) -> _Cluster:
        if self._cluster is None:
            raise DeploymentError("Ray does not run.", reason=Reason.INTERNAL)
        return self._cluster

    @property
    def terms(self) -> ClusterTerms:
        """What a machine elsewhere has to know to become a node of this cluster. Raises DeploymentError."""
        cluster = self._running()
        return ClusterTerms(address=cluster.address, cluster_id=cluster.cluster_id, session=self._session)

    # ---- watch and stop ---------------------------------------------------------------------------

    def _watch(self, child: Child, errors: Path) -> None:
        def on_end(ended: asyncio.Future[int]) -> None:
            if child.name in self._stopping or ended.cancelled():
                return
            tail = log_tail(errors)
            _log.error(
                "%s (pid %d) ended by itself, code %d. %s", child.name, child.pid, ended.result(), tail
            )
            self._on_lost(child.name, ended.result(), tail)

        child.ended.add_done_callback(on_end)

    def pid_of(self, name: str) -> int | None:
        """The pid of a node's raylet, while it runs."""
        child = self._cluster.raylets.get(name) if self._cluster else None
        return child.pid if child is not None and child.is_running else None

    async def stop_node(self, name: str) -> bool:
        """Stops a node's raylet and with it its workers. False when it cannot be killed."""
        child = self._cluster.raylets.get(name) if self._cluster else None
        if child is None:
            return True
        self._stopping.add(name)
        return await child.stop(grace_s=RAYLET_GRACE_S)

    async def stop(self) -> None:
        """Stops what still runs, the machines first."""
        names = list(self._cluster.raylets) if self._cluster else []
        await asyncio.gather(*(self.stop_node(name) for name in names if name != HEAD_NAME))
        await self.stop_node(HEAD_NAME)
        if self._gcs is not None:
            self._stopping.add(self._gcs.name)
            await self._gcs.stop(grace_s=GCS_GRACE_S)


def _gcs_command(install: RayInstall, node: RayNode) -> list[str]:
    """The cluster's directory server, on a port of its own choice (it writes it into the session's folder)."""
    return [
        install.gcs_server,
        f"--log_dir={node.logs}",
        f"--config_list={base64.b64encode(b'{}').decode()}",
        f"--gcs_server_port={node.ports.directory if node.ports else 0}",
        f"--metrics-agent-port={NO_PORT}",
        f"--node-ip-address={node.address}",
        f"--session-name={node.session}",
        f"--ray-commit={install.commit}",
        f"--session-dir={node.folder}",
        f"--node-id={node.node_id}",
        f"--stdout_filepath={node.logs / 'gcs_server.out'}",
        f"--stderr_filepath={node.logs / 'gcs_server.err'}",
    ]


async def _told_port(node: RayNode) -> int:
    from ray._raylet import GCS_SERVER_PORT_NAME, wait_for_persisted_port  # type: ignore[attr-defined]

    port: int = await asyncio.to_thread(
        wait_for_persisted_port,
        str(node.folder),
        node.node_id,
        GCS_SERVER_PORT_NAME,
        timeout_ms=int(START_LIMIT_S * 1000),
    )
    return port


def _register_cluster(address: str, node: RayNode) -> Any:
    """Writes into a fresh cluster's directory what `ray start --head` does: drivers and workers look for it."""
    from ray._common.usage import usage_lib
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=address)
    usage_lib.put_cluster_metadata(client, ray_init_cluster=False)
    client.internal_kv_put(b"session_name", node.session.encode(), False, b"session")
    return client
