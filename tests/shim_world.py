"""Two gateways on one host, without rights or rules: programs reach each other's overlay address by the shim."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mesh.ids import Epoch, MachineName, Rank, RunUid
from mesh.net.authority import Authority, new_authority
from mesh.net.gateway import Gateway
from mesh.net.roster import MachinePlace, MemberPlace, Roster
from mesh.net.shim.library import TABLE_NAME, ShimPlace, missing, shim_environment
from mesh.net.shim.table import ShimTable
from tests.net_world import DEPLOYMENT, RUN, credentials, machine, member

NAMES = ("a", "b")
DEVICE = "gm0test"
LIMIT_S = 30.0


def addresses_of(rank: int) -> tuple[str, str]:
    return f"198.18.0.{rank + 1}", f"fd67:6d00::{rank + 1}"


@dataclass
class ShimWorld:
    """Rank 0 on a, rank 1 on b; each program is started `on` one of them."""

    folder: Path
    authority: Authority
    gateways: dict[str, Gateway] = field(default_factory=dict)
    tables: dict[str, ShimTable] = field(default_factory=dict)
    programs: list[asyncio.subprocess.Process] = field(default_factory=list)

    def start_gateway(self, name: str) -> None:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        self.tables[name] = ShimTable(folder / TABLE_NAME)
        gateway = self.gateways[name] = Gateway(
            deployment=DEPLOYMENT, machine=MachineName(name), shim=self.tables[name]
        )
        gateway.set_identity(credentials(self.authority, machine(name)))
        gateway.start(listen_on=(("127.0.0.1", 0),), capture_port=0)

    def brief(self, epoch: int = 1) -> None:
        """Everybody knows everybody."""
        places = {
            MachineName(name): MachinePlace(gateway=tuple(gateway.addresses))
            for name, gateway in self.gateways.items()
        }
        members = tuple(
            MemberPlace(rank=Rank(rank), machine=MachineName(name), overlay=addresses_of(rank))
            for rank, name in enumerate(NAMES)
        )
        for rank, (name, gateway) in enumerate(self.gateways.items()):
            gateway.set_machines(places)
            gateway.set_roster(Roster(run=RunUid(RUN), epoch=Epoch(epoch), members=members))
            who = credentials(self.authority, member(rank, name, epoch=epoch))
            gateway.host(who, deliver_to=addresses_of(rank))

    async def stop_gateway(self, name: str) -> None:
        await self.gateways[name].stop()
        self.tables[name].close()

    async def start(
        self,
        on: str,
        *argv: str,
        env: Mapping[str, str] | None = None,
        addresses: tuple[str, ...] | None = None,
    ) -> asyncio.subprocess.Process:
        """A program, with the member's addresses unless others are given; what it writes goes into pipes."""
        own = {**os.environ, **(env or {})}
        place = ShimPlace(
            gateway_folder=self.folder / on,
            device=DEVICE,
            addresses=addresses or addresses_of(NAMES.index(on)),
        )
        process = await asyncio.create_subprocess_exec(
            *argv, env=own | shim_environment(own, place), stdout=-1, stderr=-1, stdin=-1
        )
        self.programs.append(process)
        return process

    async def python(self, on: str, text: str, *arguments: str) -> asyncio.subprocess.Process:
        return await self.start(on, sys.executable, "-c", text, *arguments)

    async def run(self, on: str, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """What a program prints that must end well."""
        return await ended(await self.start(on, *argv, env=env))


async def ended(process: asyncio.subprocess.Process, *, limit_s: float = LIMIT_S) -> str:
    """What a program says that has to end well."""
    async with asyncio.timeout(limit_s):
        out, err = await process.communicate()
    assert process.returncode == 0, (process.returncode, out.decode(), err.decode())
    return out.decode()


@contextlib.asynccontextmanager
async def shim_world(folder: Path) -> AsyncIterator[ShimWorld]:
    lacking = missing()
    assert lacking is None, lacking
    made = ShimWorld(folder=folder, authority=new_authority(DEPLOYMENT, now=time.time()))
    try:
        for name in NAMES:
            made.start_gateway(name)
        made.brief()
        yield made
    finally:
        for process in made.programs:
            if process.returncode is None:
                process.kill()
            await process.communicate()
        for name in list(made.gateways):
            await made.stop_gateway(name)
