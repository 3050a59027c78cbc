"""The two fleets that the contract is tested on, each on a stage where a test can do harm to it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from coordinator.core.events import Placement
from coordinator.fleet import HeldMachine, Looked, MachineFacts, Shape, Waiting
from mesh.ids import MachineName, RunUid
from tests.contract.ray_fleet_host import LINE_BYTES_MAX, decode, encode
from tests.fakes.fleet import FakeFleet

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 90.0
STOP_LIMIT_S = 40.0


class Stage(Protocol):
    """Three machines at least, a fleet, and what can happen to it."""

    fleet: Any
    is_real: bool

    async def names(self) -> list[MachineName]:
        """Of the machines that live and may be given, in their order."""
        ...

    async def crash_coordinator(self) -> None: ...

    async def lose(self, machine: MachineName) -> None: ...


class FakeStage:
    """The fake keeps its books in itself, so that a crash changes nothing."""

    is_real = False

    def __init__(self) -> None:
        self.fleet = FakeFleet(3)

    async def names(self) -> list[MachineName]:
        return [f.name for f in await self.fleet.machines() if f.is_alive and not f.is_cordoned]

    async def crash_coordinator(self) -> None:
        pass

    async def lose(self, machine: MachineName) -> None:
        self.fleet.lost.add(machine)


class RayStage:
    """A deployment in a process of its own (`tests.contract.ray_fleet_host`), for a whole module."""

    is_real = True

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._waiting: dict[int, Callable[[Waiting], None]] = {}
        self._reader = asyncio.create_task(self._read())
        self.fleet = RemoteFleet(self)

    @classmethod
    async def start(cls, folder: Path, *, machines: int) -> RayStage:
        log = folder / "host.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "tests.contract.ray_fleet_host", str(folder / "s"), str(machines),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                env={**environment, "PYTHONPATH": str(ROOT)}, limit=LINE_BYTES_MAX,
            )  # fmt: skip
        stage = cls(process, log)
        ready = asyncio.get_running_loop().create_future()
        stage._answers[0] = ready
        async with asyncio.timeout(START_LIMIT_S):
            await ready
        return stage

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(STOP_LIMIT_S):
            await self._process.wait()
            await self._reader
        assert self._process.returncode == 0, self._log.read_text()[-3000:]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            number, kind, value = decode(line)
            if kind == "waiting":
                self._waiting[number](value)
                continue
            answer = self._answers.pop(number)
            if answer.done():
                continue
            if kind == "failed":
                answer.set_exception(value)
            else:
                answer.set_result(value)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(AssertionError(f"the host has ended: {self._log.read_text()[-3000:]}"))

    async def call(
        self,
        target: str,
        method: str,
        *args: Any,
        on_waiting: Callable[[Waiting], None] | None = None,
        **kw: Any,
    ) -> Any:
        assert self._process.stdin is not None
        self._number += 1
        number = self._number
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        if on_waiting is not None:
            self._waiting[number] = on_waiting
        self._process.stdin.write(encode((number, target, method, args, kw)))
        try:
            return await answer
        except asyncio.CancelledError:
            self._process.stdin.write(encode((0, "host", "cancel", (number,), {})))
            raise

    async def host(self, method: str, *args: Any) -> Any:
        """What is done to the deployment: see `ray_fleet_host.Host`."""
        return await self.call("host", method, *args)

    async def names(self) -> list[MachineName]:
        machines = await self.fleet.machines()
        alive = [f.name for f in machines if f.is_alive and not f.is_cordoned]
        return sorted(alive, key=lambda name: int(name.rpartition("-")[2]))

    async def crash_coordinator(self) -> None:
        await self.host("crash_coordinator")

    async def lose(self, machine: MachineName) -> None:
        await self.host("kill_machine", machine)


class RemoteFleet:
    """The part of `Fleet` that is about machines, in the host's process."""

    def __init__(self, stage: RayStage) -> None:
        self._stage = stage

    async def machines(self) -> list[MachineFacts]:
        return list(await self._stage.call("fleet", "machines"))

    async def reserve(
        self, uid: RunUid, reservation: int, shape: Shape, *, on_waiting: Callable[[Waiting], None]
    ) -> tuple[Placement, ...]:
        found: tuple[Placement, ...] = await self._stage.call(
            "fleet", "reserve", uid, reservation, shape, on_waiting=on_waiting
        )
        return found

    async def withdraw(self, uid: RunUid, reservation: int) -> None:
        await self._stage.call("fleet", "withdraw", uid, reservation)

    async def release(self, uid: RunUid, reservation: int, machine: MachineName, *, is_clean: bool) -> None:
        await self._stage.call("fleet", "release", uid, reservation, machine, is_clean=is_clean)

    async def held_by(self, uid: RunUid) -> list[HeldMachine]:
        return list(await self._stage.call("fleet", "held_by", uid))

    async def holders(self) -> set[RunUid]:
        return set(await self._stage.call("fleet", "holders"))

    async def look(self, machines: Mapping[int, MachineName], *, fresh: Collection[int]) -> Looked:
        looked: Looked = await self._stage.call("fleet", "look", machines, fresh=fresh)
        return looked

    async def cordon(self, machine: MachineName) -> None:
        await self._stage.call("fleet", "cordon", machine)
