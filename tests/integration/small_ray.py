"""A Ray of a test's own, started as a deployment starts its own: the directory server and raylets, nothing else.

`ray.init(address="local")` starts four Python processes beside them, which costs ten seconds of CPU, and on a busy
machine it gives up on itself. Ray's settings are Ray's own here, not a deployment's, and there is no token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coordinator import ray_processes
from mesh.messages import RAY_NAMESPACE


def ray_environment() -> dict[str, str]:
    """Of a program that starts one: Ray reads it when it is imported."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    # Misnamed: without it Ray looks for an address that others can reach, in place of 127.0.0.1.
    return {**mine, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONPATH": str(Path(__file__).parents[2])}


@asynccontextmanager
async def small_ray(folder: Path, *, cpus: int) -> AsyncIterator[str]:
    """Yields its address. The folder's path must be short: Ray's sockets lie in it."""
    ray_processes.HEAD_WORKERS_READY = 0
    servers = ray_processes.RayProcesses(
        folder=folder / "ray", sockets=folder, environment=os.environ, on_lost=_on_lost
    )
    try:
        address = await servers.start_head()
        if cpus:
            await servers.start_node(servers.node("m0", socket_name="m0", resources={"CPU": cpus}))
        yield address
    finally:
        await servers.stop()


def _on_lost(name: str, code: int, tail: str) -> None:
    print(f"{name} ended by itself with {code}: {tail}", file=sys.stderr)


def connect(address: str) -> None:
    """This process becomes a driver of it."""
    import ray

    ray.init(
        address=address,
        _node_ip_address="127.0.0.1",
        namespace=RAY_NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
    )
