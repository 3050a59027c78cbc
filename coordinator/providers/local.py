"""Machines simulated on this host: each is a raylet with an address, labels and accelerators of its own.

Rules of this file:
1. A machine's name is `local-<index>`; index and address belong together for the life of the state folder.
2. A raylet that ends by itself is a lost machine. It is taken out of the inventory, and its name is never given again.
   The number of machines that are wanted stays (`vacancy`).
3. Accelerators are declared, not there: commands that are written for GPUs can be rehearsed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from agents.raylet import ADDRESS_LABEL, GPU_TYPE_LABEL, MACHINE_LABEL, MEMBER_WORKERS, SLOT_RESOURCE
from coordinator.deployment import MACHINES_MAX, GpuShape, Inventory, StateFolder, machine_name
from coordinator.providers.base import MachineGone
from coordinator.ray_processes import RayProcesses
from mesh.errors import PlacementError, SpecError
from mesh.reasons import Reason

STARTED_TOGETHER_MAX = 8
LOSSES_UNSEEN_MAX = 256


class LocalProvider:
    """See `Provider`.

    Args:
        state: keeps the inventory and the machines' folders.
        ray: the cluster that the machines join.
        gpu: what every machine declares.
    """

    def __init__(self, *, state: StateFolder, ray: RayProcesses, gpu: GpuShape | None) -> None:
        self._state = state
        self._ray = ray
        self._gpu = gpu
        self._inventory: Inventory = state.read_inventory()
        self._machines: set[str] = set()
        self._losses: asyncio.Queue[MachineGone] = asyncio.Queue(LOSSES_UNSEEN_MAX)
        self._resizing = asyncio.Lock()
        self._noting = asyncio.Lock()
        self._wanted = 0
        self._starting: dict[str, asyncio.Task[None]] = {}
        """Who asks for a machine that is being started gets that one."""
        self._starts = asyncio.Semaphore(STARTED_TOGETHER_MAX)

    @property
    def machines(self) -> frozenset[str]:
        """Those that have joined and are not known to be gone."""
        return frozenset(self._machines)

    async def begin(self, count: int) -> None:
        """Brings up the machines of before, the first `count` of them, and new ones where there were fewer."""
        self._wanted = count
        async with self._resizing:
            await self._resize(self._inventory.with_count(count))

    async def grow(self, count: int) -> None:
        """Brings the machines to at least `count`; those that were lost do not count.

        Raises:
            SpecError: more than a host may have. PlacementError: a machine did not come up.
        """
        if count > MACHINES_MAX:
            raise SpecError(
                f"A local deployment has at most {MACHINES_MAX} machines; {count} were asked for.",
                field="count",
                got=str(count),
            )
        async with self._resizing:
            self._wanted = max(self._wanted, count)
            await self._resize(self._inventory.with_count(max(count, len(self._inventory.indexes))))

    async def vacancy(self) -> str | None:
        async with self._resizing:
            if len(self._inventory.indexes) >= self._wanted:
                return None
            inventory = self._inventory.with_count(len(self._inventory.indexes) + 1)
            await self._note(inventory)
            return machine_name(inventory.indexes[-1])

    async def _resize(self, inventory: Inventory) -> None:
        await self._note(inventory)
        missing = [i for i in inventory.indexes if machine_name(i) not in self._machines]
        results = await asyncio.gather(
            *(self.acquire(machine_name(i)) for i in missing), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _note(self, inventory: Inventory) -> None:
        # Before anything else: a name that may have been seen by anybody is never given again, whatever happens now.
        added = set(inventory.indexes) - set(self._inventory.indexes)
        self._inventory = inventory
        try:
            async with self._noting:
                await asyncio.to_thread(self._state.write_inventory, self._inventory)
        except BaseException:
            for index in added:  # nobody starts these: they hold no machine's place
                self._inventory = self._inventory.without(index)
            raise

    async def acquire(self, name: str) -> None:
        if name in self._machines:
            return
        start = self._starting.get(name)
        if start is None:
            index = _index(name, self._inventory.indexes)
            start = asyncio.create_task(self._bring_up(index), name=f"start of {name}")
            self._starting[name] = start
            start.add_done_callback(lambda _: self._starting.pop(name, None))
        await asyncio.shield(start)

    async def _bring_up(self, index: int) -> None:
        name = machine_name(index)
        async with self._starts:
            try:
                await self._start(index)
                self._machines.add(name)
            except Exception as error:
                try:
                    await self._forget(index)
                finally:
                    await self._ray.stop_node(name)
                raise PlacementError(
                    f"The machine {name} did not come up: {getattr(error, 'message', error)}",
                    hint=getattr(error, "hint", ""),
                    reason=Reason.MACHINE_REFUSED,
                ) from error

    async def stop(self) -> None:
        """Starts no machine any more. Those that run are Ray's to stop."""
        starts = list(self._starting.values())
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self, index: int) -> None:
        name = machine_name(index)
        folder: Path = self._state.machines / name
        await asyncio.to_thread(folder.mkdir, mode=0o700, exist_ok=True)
        hidden = {MACHINE_LABEL: name, ADDRESS_LABEL: self._inventory.address(index)}
        resources: dict[str, float] = {SLOT_RESOURCE: 1, "CPU": max(os.cpu_count() or 1, MEMBER_WORKERS)}
        if self._gpu is not None:
            hidden[GPU_TYPE_LABEL] = self._gpu.type
            resources |= {"GPU": self._gpu.count, f"accelerator_type:{self._gpu.type}": 1}
        node = self._ray.node(
            name,
            socket_name=str(index),
            resources=resources,
            labels={**_labels(), **hidden},
        )
        await self._ray.start_node(node)

    async def retire(self, name: str) -> None:
        """Ends a machine that was wanted back and is free. None comes in its place."""
        async with self._resizing:
            if name not in self._machines:
                return
            self._wanted -= 1
            await self.release(name)

    # ---- losses -----------------------------------------------------------------------------------

    async def node_lost(self, name: str, message: str) -> None:
        """The raylet of this name ended by itself, or Ray holds it for dead. May be told again."""
        if name not in self._machines:
            return
        self._machines.remove(name)
        try:
            await self._forget(_index(name, self._inventory.indexes))
        finally:  # a note that cannot be written now holds up no replacement
            if self._losses.full():
                self._losses.get_nowait()
            self._losses.put_nowait(MachineGone(name=name, message=message))

    async def _forget(self, index: int) -> None:
        await self._note(self._inventory.without(index))

    async def watch(self) -> AsyncIterator[MachineGone]:
        while True:
            yield await self._losses.get()

    async def release(self, name: str) -> None:
        is_mine = name in self._machines
        self._machines.discard(name)
        try:
            if is_mine:
                await self._forget(_index(name, self._inventory.indexes))
        finally:
            await self._ray.stop_node(name)

    async def confirm(self, name: str) -> bool:
        return self._ray.pid_of(name) is None


def _labels() -> dict[str, str]:
    """What a user can select by. All machines of a host are one fast network, in one place."""
    return {"provider": "local", "region": "local", "fabric": "loopback", "rack": "local"}


def _index(name: str, known: Iterable[int]) -> int:
    for index in known:
        if machine_name(index) == name:
            return index
    raise PlacementError(f"There is no machine {name}.", reason=Reason.NO_CAPACITY)
