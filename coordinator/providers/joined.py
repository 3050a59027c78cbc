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
from collections.abc import Mapping
from typing import Any

from agents.raylet_process import NODE_ID_BYTES
from coordinator.deployment import StateFolder
from coordinator.ray_processes import RayProcesses
from mesh import __version__
from mesh.errors import ConflictError, SpecError


class JoinedMachines:
    """See `coordinator.api.service.Admit`.

    Args:
        state: counts the names.
        ray: the cluster that they join.
    """

    def __init__(self, *, state: StateFolder, ray: RayProcesses) -> None:
        self._state = state
        self._ray = ray
        self._naming = asyncio.Lock()

    async def admit(self, request: dict[str, Any]) -> dict[str, Any]:
        """The terms for one machine. Raises SpecError, ConflictError, DeploymentError, StorageError."""
        _check_address(request)
        check_versions(request)
        terms = self._ray.terms
        async with self._naming:
            number = await asyncio.to_thread(self._state.count_joined)
        name, node_id = f"machine-{number}", secrets.token_hex(NODE_ID_BYTES)
        return {
            "name": name,
            "nodeId": node_id,
            "cluster": {"address": terms.address, "id": terms.cluster_id, "session": terms.session},
            "clusterToken": self._state.secret("ray-token"),
        }


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
