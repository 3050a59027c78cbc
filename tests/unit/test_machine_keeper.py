"""A laptop's machines keep their number: real inventory, real provider and keeper, and raylets that a test commands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.deployment import Inventory, StateFolder
from coordinator.machine_keeper import MachineKeeper
from coordinator.providers.local import LocalProvider
from mesh.errors import DeploymentError, PlacementError, StorageError

LIMIT_S = 10.0


@dataclass
class Raylets:
    """In the place of `RayProcesses`: a node is up once `gate` is open, unless the next starts fail."""

    running: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    failing: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def node(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(name=name)

    async def start_node(self, node: Any) -> None:
        self.started.append(node.name)
        await self.gate.wait()
        if self.failing:
            self.failing -= 1
            raise DeploymentError("it ended while it was starting")
        self.running.add(node.name)

    async def stop_node(self, name: str) -> bool:
        self.stopped.append(name)
        self.running.discard(name)
        return True

    def pid_of(self, name: str) -> int | None:
        return 1 if name in self.running else None


@dataclass
class Laptop:
    """A provider with its keeper at work."""

    provider: LocalProvider
    raylets: Raylets
    coming: list[list[str]] = field(default_factory=list)

    async def lose(self, name: str) -> None:
        self.raylets.running.discard(name)
        await self.provider.node_lost(name, "killed")

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while sorted(self.provider.machines) != sorted(names):
                await asyncio.sleep(0.001)
        assert self.raylets.running == set(names)

    async def until_count(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.provider.machines) != count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def laptop(state: Path, *, machines: int) -> AsyncIterator[Laptop]:
    folder = StateFolder(state)
    folder.prepare()
    raylets = Raylets()
    raylets.gate.set()
    provider = LocalProvider(state=folder, ray=raylets, gpu=None)  # type: ignore[arg-type]
    await provider.begin(machines)
    one = Laptop(provider, raylets)

    async def tell_coming(names: Sequence[str]) -> None:
        one.coming.append(list(names))

    keeper = MachineKeeper(provider, tell_coming=tell_coming, again_first_s=0.001)
    task = asyncio.create_task(keeper.run())
    yield one
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_lost_machine_is_replaced_under_a_new_name_and_told_as_coming(tmp_path: Path) -> None:
    async with laptop(tmp_path, machines=2) as one:
        await one.lose("local-1")
        await one.until("local-2", "local-3")
        async with asyncio.timeout(LIMIT_S):
            while len(one.coming) < 2:
                await asyncio.sleep(0.001)
        assert one.coming == [["local-3"], []]
        assert StateFolder(tmp_path).read_inventory().indexes == (2, 3)


async def test_all_lost_at_once_are_all_replaced(tmp_path: Path) -> None:
    async with laptop(tmp_path, machines=3) as one:
        await asyncio.gather(*(one.lose(name) for name in ("local-1", "local-2", "local-3")))
        await one.until("local-4", "local-5", "local-6")
        assert StateFolder(tmp_path).read_inventory().indexes == (4, 5, 6)


async def test_a_start_that_fails_is_tried_again_under_another_name(tmp_path: Path) -> None:
    async with laptop(tmp_path, machines=1) as one:
        one.raylets.failing = 3
        await one.lose("local-1")
        await one.until("local-5")


async def test_growing_while_a_replacement_comes_leads_to_no_more_than_wanted(tmp_path: Path) -> None:
    async with laptop(tmp_path, machines=2) as one:
        one.raylets.gate.clear()
        await one.lose("local-2")
        async with asyncio.timeout(LIMIT_S):
            while "local-3" not in one.raylets.started:
                await asyncio.sleep(0.001)
        growing = asyncio.create_task(one.provider.grow(3))
        async with asyncio.timeout(LIMIT_S):
            while "local-4" not in one.raylets.started:
                await asyncio.sleep(0.001)
        one.raylets.gate.set()
        await growing
        await one.until("local-1", "local-3", "local-4")
        assert one.raylets.started.count("local-3") == 1


async def test_a_machine_that_was_only_frozen_is_ended(tmp_path: Path) -> None:
    async with laptop(tmp_path, machines=1) as one:
        await one.provider.node_lost("local-1", "it does not answer")
        await one.until("local-2")
        assert one.raylets.stopped == ["local-1"]


async def test_a_start_is_cut_off_when_the_deployment_stops(tmp_path: Path) -> None:
    async with laptop(tmp_path, machines=1) as one:
        one.raylets.gate.clear()
        await one.lose("local-1")
        async with asyncio.timeout(LIMIT_S):
            while "local-2" not in one.raylets.started:
                await asyncio.sleep(0.001)
    await one.provider.stop()
    one.raylets.gate.set()
    await asyncio.sleep(0)
    assert not one.raylets.running
    with pytest.raises(PlacementError):
        await one.provider.acquire("local-9")


async def test_a_loss_that_cannot_be_noted_is_made_up_for_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for a moment."""
    async with laptop(tmp_path, machines=2) as one:
        write = StateFolder.write_inventory
        tries = [StorageError("the disk is full")]

        def fail_once(self: StateFolder, inventory: Inventory) -> None:
            if tries:
                raise tries.pop()
            write(self, inventory)

        monkeypatch.setattr(StateFolder, "write_inventory", fail_once)
        with pytest.raises(StorageError):
            await one.lose("local-1")
        await one.until("local-2", "local-3")


async def test_a_fault_nobody_thought_of_ends_no_watch_over_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with laptop(tmp_path, machines=2) as one:
        release = one.provider.release
        tries = [RuntimeError("a bug")]

        async def fail_once(name: str) -> None:
            if tries:
                raise tries.pop()
            await release(name)

        monkeypatch.setattr(one.provider, "release", fail_once)
        await one.lose("local-1")
        await one.until("local-2", "local-3")


@pytest.mark.parametrize("works_first", [0, 1], ids=["the loss", "the new name"])
async def test_a_full_disk_costs_no_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works_first: int
) -> None:
    """Whichever note cannot be written: a name that was drawn and never started holds no machine's place."""
    async with laptop(tmp_path, machines=2) as one:
        write = StateFolder.write_inventory
        writes = 0

        def fail_for_a_while(self: StateFolder, inventory: Inventory) -> None:
            nonlocal writes
            writes += 1
            if works_first < writes < 4:
                raise StorageError("the disk is full")
            write(self, inventory)

        monkeypatch.setattr(StateFolder, "write_inventory", fail_for_a_while)
        with contextlib.suppress(StorageError):
            await one.lose("local-1")
        await one.until_count(2)


async def test_a_raylet_that_cannot_be_spawned_is_tried_again_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an error of ours but of the system: no more processes, no more open files."""
    async with laptop(tmp_path, machines=2) as one:
        start = one.raylets.start_node
        tries = [BlockingIOError(11, "Resource temporarily unavailable")]

        async def fail_once(node: Any) -> None:
            if tries:
                raise tries.pop()
            await start(node)

        monkeypatch.setattr(one.raylets, "start_node", fail_once)
        await one.lose("local-1")
        await one.until("local-2", "local-4")


async def test_a_machine_that_was_wanted_back_is_ended_and_none_comes_in_its_place(tmp_path: Path) -> None:
    async with laptop(tmp_path, machines=2) as one:
        await one.provider.retire("local-1")
        await one.until("local-2")
        await one.provider.retire("local-1")
        assert StateFolder(tmp_path).read_inventory().indexes == (2,)
        await one.lose("local-2")
        await one.until("local-3")


async def test_a_machine_that_leaves_is_ended_though_it_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would come back to it: it is in no list any more."""

    def fail(self: StateFolder, inventory: Inventory) -> None:
        raise StorageError("the disk is full")

    async with laptop(tmp_path, machines=2) as one:
        monkeypatch.setattr(StateFolder, "write_inventory", fail)
        with pytest.raises(StorageError):
            await one.provider.retire("local-1")
        assert one.raylets.running == {"local-2"}
