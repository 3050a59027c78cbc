"""Keeps worker processes warm on free machines, so that a member's start does not pay for a Python start.

Theory of operation. A member takes two worker processes of its machine (itself and its launcher), and they end with it.
Ray starts a worker when a task wants one and keeps it idle afterwards, for actors too. So a few empty tasks, pinned to
the machine and begun together, leave that many workers ready, with the modules imported that a member needs. A machine
is warmed when it joined and whenever it has become free again.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mesh.errors import MeshError
from mesh.resources import Machine

LOOK_S = 1.0
TOGETHER_S = 0.05
"""Each task stays this long, so that no worker does two of them."""
WARM_LIMIT_S = 30.0
MODULES = ("agents.node", "agents.launcher.actor")

_log = logging.getLogger(__name__)

ListMachines = Callable[[], Awaitable[Sequence[Machine]]]


class WorkerWarmth:
    """Warms machines until it is cancelled.

    Args:
        list_machines: the machines and whether they are in use.
        node_id: of a machine's Ray node; None when it is gone.
        workers: how many each free machine shall have ready.
    """

    def __init__(
        self, *, list_machines: ListMachines, node_id: Callable[[str], str | None], workers: int
    ) -> None:
        self._list_machines = list_machines
        self._node_id = node_id
        self._workers = workers
        self._warm: set[str] = set()

    async def keep(self) -> None:
        while True:
            try:
                await self.look()
            except MeshError as error:  # the coordinator is being restarted
                _log.debug("machines are not warmed now: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Warms what is free and cold, once."""
        machines = await self._list_machines()
        free = {machine["name"] for machine in machines if machine["state"] == "Ready"}
        self._warm &= free
        cold = sorted(free - self._warm)
        self._warm |= set(cold)
        ids = [node_id for name in cold if (node_id := self._node_id(name)) is not None]
        if ids:
            await asyncio.to_thread(_warm, ids, self._workers)


def _warm(node_ids: list[str], workers: int) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(num_cpus=0, max_retries=0)(_import_modules)
    pending = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()
        for node_id in node_ids
        for _ in range(workers)
    ]
    try:
        ray.get(pending, timeout=WARM_LIMIT_S)
    except (
        RayError,
        GetTimeoutError,
    ) as error:  # a machine that was lost or is busy: it is cold, nothing else
        _log.info("machines are not warm: %s", error)


def _import_modules() -> None:
    for module in MODULES:
        importlib.import_module(module)
    time.sleep(TOGETHER_S)
