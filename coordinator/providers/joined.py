"""Machines that join from elsewhere by themselves: each is given a name and told where the cluster is.

Rules of this file:
1. A name is given once. A machine that comes back (its raylet ended, or the deployment began again) is another one.
2. What does not run the same versions is refused: Ray's parts talk to each other in pickles.
3. Whoever may submit runs may let machines join: the API's token is the only key, the cluster's is handed out for it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import platform
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from agents.raylet_process import NODE_ID_BYTES
from coordinator.deployment import StateFolder
from coordinator.ray_processes import RayProcesses
from coordinator.warm_workers import warm
from mesh import __version__
from mesh.errors import ConflictError, SpecError

JOIN_LIMIT_S = 90.0
LOOK_S = 0.25

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class JoinedMachines:
    """See `coordinator.api.service.Admit`.

    Args:
        state: counts the names.
        ray: the cluster that they join.
        spawn: runs something beside everything else, by this name, until the head stops.
    """

    def __init__(self, *, state: StateFolder, ray: RayProcesses, spawn: Spawn) -> None:
        self._state = state
        self._ray = ray
        self._spawn = spawn
        self._naming = asyncio.Lock()

    async def admit(self, request: dict[str, Any]) -> dict[str, Any]:
        """The terms for one machine. Raises SpecError, ConflictError, DeploymentError, StorageError."""
        _check_address(request)
        check_versions(request)
        terms = self._ray.terms
        async with self._naming:
            number = await asyncio.to_thread(self._state.count_joined)
        name, node_id = f"machine-{number}", secrets.token_hex(NODE_ID_BYTES)
        self._spawn(warm_once_alive(node_id), f"warming {name}")
        return {
            "name": name,
            "nodeId": node_id,
            "cluster": {"address": terms.address, "id": terms.cluster_id, "session": terms.session},
            "clusterToken": self._state.secret("ray-token"),
        }


async def warm_once_alive(node_id: str) -> None:
    """A raylet starts workers ahead only for drivers that come after it; here the driver was first."""
    try:
        async with asyncio.timeout(JOIN_LIMIT_S):
            while not await asyncio.to_thread(_is_alive, node_id):  # noqa: ASYNC110 - Ray cannot wait
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return  # its agent has said why, or asks again under another name
    await asyncio.to_thread(warm, [node_id])


def _is_alive(node_id: str) -> bool:
    import ray

    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def _check_address(request: Any) -> None:
    given = request.get("address") if isinstance(request, dict) else None
    try:
        address = ipaddress.IPv4Address(given if isinstance(given, str) else "")
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_loopback or address.is_multicast:
        raise SpecError(
            f"A machine joins with the IPv4 address at which others reach it; got {str(given)[:80]!r}.",
            field="address",
            got=str(given)[:80],
        )


def check_versions(request: Mapping[str, Any]) -> None:
    """Raises ConflictError when the machine runs others than this head."""
    import ray

    ours = {"version": __version__, "python": platform.python_version(), "ray": ray.__version__}
    for name, wanted in ours.items():
        if request.get(name) != wanted:
            what = {"version": "gangmesh", "python": "Python", "ray": "Ray"}[name]
            raise ConflictError(
                f"The machine runs {what} {str(request.get(name))[:40]}, this deployment {wanted}.",
                hint="Install the same versions on both.",
            )
