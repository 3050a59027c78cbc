"""The real head process with a stand-in for coordinator and store (run with `python -m`, arguments as the real one).

The stand-in is a real Ray actor, detached, pinned to the head, that lists machines as Ray sees them and keeps the
configuration that it was given. No machine keeps a worker ready, since none of these deployments runs anything: a
worker process costs a second of CPU to start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from coordinator import __main__ as program
from coordinator import head_parts


class StandInCoordinator:
    """Answers what the API asks of an idle deployment."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    async def machines(self) -> list[dict[str, Any]]:
        import ray

        nodes = await asyncio.to_thread(ray.nodes)
        return [
            {
                "name": node["Labels"]["gangmesh.machine"],
                "address": node["Labels"]["gangmesh.address"],
                "labels": {
                    k: v for k, v in node["Labels"].items() if not k.startswith(("ray.io/", "gangmesh."))
                },
                "gpus": {
                    "type": node["Labels"].get("gangmesh.gpu-type"),
                    "count": int(node["Resources"].get("GPU", 0)),
                },
                "state": "Ready" if node["Alive"] else "Lost",
                "run": None,
                "waitsFor": None,
                "network": None,
            }
            for node in nodes
            if "gangmesh.machine" in node["Labels"]
        ]

    async def facts(self) -> dict[str, Any]:
        config = {k: v for k, v in self._config.items() if k != "logs"}
        return {"environment": dict(os.environ), "config": config, "path": sys.path, "nice": os.nice(0)}


class StandInService:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def list_machines(self) -> Any:
        return await self._handle.machines.remote()

    async def status(self) -> Any:
        facts = await self._handle.facts.remote()
        return {
            "state": "Ready",
            "version": "0",
            "local": True,
            "machines": {},
            "runs": {},
            "details": facts,
        }

    async def list_runs(self, labels: Any) -> Any:
        return []

    async def shutdown(self, wait_s: float) -> list[str]:
        return []


class StandInActors:
    def __init__(self, address: str, port: int | None = None) -> None:
        self._handle: Any = None

    def preload(self) -> None:
        pass

    async def start(self, config: Mapping[str, Any]) -> Any:
        import ray

        actor: Any = ray.remote(StandInCoordinator)
        self._handle = actor.options(
            name="coordinator",
            namespace="gangmesh",
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            resources={"gangmesh_head": 0.001},
        ).remote(dict(config))
        await self._handle.facts.remote()
        return StandInService(self._handle)

    async def stop(self) -> None:
        import ray

        if self._handle is not None:
            await asyncio.to_thread(ray.kill, self._handle)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    head_parts.RayActors = StandInActors  # type: ignore[misc,assignment]
    code = program.main()
    sys.stderr.flush()
    os._exit(code)
