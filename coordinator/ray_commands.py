"""The command line of Ray's directory server, and the names that the coordinator's side needs of a node. Pure.

See `agents.raylet` for the rules: flags that are Ray's own affair, and a cluster of our own.
"""

from __future__ import annotations

import base64

from agents.raylet import (
    ADDRESS_LABEL,
    GPU_TYPE_LABEL,
    HEAD_RESOURCE,
    LOOPBACK,
    MACHINE_LABEL,
    NO_PORT,
    SLOT_RESOURCE,
    RayInstall,
    RayNode,
)

__all__ = [
    "ADDRESS_LABEL",
    "GPU_TYPE_LABEL",
    "HEAD_RESOURCE",
    "LOOPBACK",
    "MACHINE_LABEL",
    "SLOT_RESOURCE",
    "gcs_command",
]


def gcs_command(install: RayInstall, node: RayNode) -> list[str]:
    """The cluster's directory server, on a port of its own choice (it writes it into the session's folder)."""
    return [
        install.gcs_server,
        f"--log_dir={node.logs}",
        f"--config_list={base64.b64encode(b'{}').decode()}",
        "--gcs_server_port=0",
        f"--metrics-agent-port={NO_PORT}",
        f"--node-ip-address={node.address}",
        f"--session-name={node.session}",
        f"--ray-commit={install.commit}",
        f"--session-dir={node.folder}",
        f"--node-id={node.node_id}",
        f"--stdout_filepath={node.logs / 'gcs_server.out'}",
        f"--stderr_filepath={node.logs / 'gcs_server.err'}",
    ]
