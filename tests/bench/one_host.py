"""A gang without Ray: the coordinator, its journal on disk, the store, keepers, supervisors and commands are real.

Only placement is played: `OneHost` has as many machines as it is asked for, each an address of its own on this host and
a folder of its own, and members live in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agents.chaos import HarmOrder
from agents.launcher.launcher import Launcher
from agents.member import Member, MemberConfig
from coordinator.coordinator import Coordinator
from coordinator.core.effects import OrderMember
from coordinator.core.events import Now, Placement
from coordinator.core.gang_state import Gang
from coordinator.fleet import MachineFacts, MemberGoneError, Shape, Waiting
from coordinator.journal import SqlJournal
from coordinator.logs.sink import LogSink
from coordinator.logs.store import LogStore
from coordinator.store_link import StoreLink
from mesh.ids import Incarnation, MachineName, RunUid
from mesh.messages import CheckpointOrder, FenceOrder, JoinOrder, MemberReport
from mesh.plan import Endpoint, RunPlan

STORE_PROCESS = Path(__file__).parents[1] / "integration" / "store_process.py"
STORE_STOP_S = 5.0


class OneHost:
    """A `Fleet` of members in this process."""

    def __init__(self, folder: Path, *, report: Callable[[MemberReport], object]) -> None:
        self._folder = folder
        self._report = report
        self._members: dict[Incarnation, Member] = {}

    async def machines(self) -> list[MachineFacts]:
        return []

    async def reserve(
        self, uid: RunUid, reservation: int, shape: Shape, *, on_waiting: Callable[[Waiting], None]
    ) -> tuple[Placement, ...]:
        return tuple(
            Placement(machine=MachineName(f"m{number}"), address=f"127.0.0.{10 + number}")
            for number in range(shape.nodes)
        )

    async def withdraw(self, uid: RunUid, reservation: int) -> None:
        """Nothing is held."""

    async def release(self, uid: RunUid, reservation: int, machine: MachineName, *, is_clean: bool) -> None:
        """Nothing is held."""

    async def cordon(self, machine: MachineName) -> None:
        raise NotImplementedError

    async def why_no_harm(self, order: HarmOrder) -> str | None:
        raise NotImplementedError

    async def harm(self, order: HarmOrder) -> None:
        raise NotImplementedError

    async def order(self, order: JoinOrder, reservation: int) -> None:
        me = order.incarnation
        if me not in self._members:
            self._members[me] = Member(
                MemberConfig(
                    address=f"127.0.0.{10 + me.rank}",
                    machine_dir=self._folder / order.machine,
                    base_environment=dict(os.environ),
                ),
                send_report=self._take,
                launcher=Launcher(),
            )
            self._members[me].start()
        await self._members[me].join(order)

    async def _take(self, report: MemberReport) -> bool:
        return bool(await self._report(report))  # type: ignore[misc]

    async def tell_about_part(self, order: CheckpointOrder) -> None:
        await self._member(order.incarnation).about_part(order)

    async def fence(self, order: FenceOrder) -> None:
        await self._member(order.incarnation).fence(order)

    async def dismiss(self, incarnation: Incarnation) -> None:
        if (member := self._members.pop(incarnation, None)) is not None:
            await member.leave()
            await member.close()

    async def forget_run(self, uid: RunUid) -> None:
        """The folder goes as a whole."""

    async def close(self) -> None:
        for incarnation in list(self._members):
            await self.dismiss(incarnation)

    def _member(self, incarnation: Incarnation) -> Member:
        try:
            return self._members[incarnation]
        except KeyError:
            raise MemberGoneError(f"There is no member for rank {incarnation.rank}.") from None


@dataclass(slots=True)
class Clock:
    """The coordinator's, which can be put on: leases are the store's and the keepers', on clocks of their own."""

    ahead_s: float = 0.0

    def now(self) -> Now:
        return Now(mono=time.monotonic() + self.ahead_s, wall=time.time() + self.ahead_s)


@dataclass(frozen=True, slots=True)
class Deployment:
    coordinator: Coordinator
    clock: Clock

    def gang(self) -> Gang | None:
        """The only one, once its first epoch has begun."""
        return next(iter(self.coordinator.live_gangs()), None)


@asynccontextmanager
async def deployment(folder: Path) -> AsyncIterator[Deployment]:
    """Everything of it is ended afterwards."""
    logs = LogStore(folder / "logs")
    sink = LogSink(logs, secret="logs", host="127.0.0.1")
    log_endpoint = await sink.start()
    store = subprocess.Popen(
        [sys.executable, str(STORE_PROCESS), "0", "admin", "member"], stdout=subprocess.PIPE, text=True
    )
    assert store.stdout is not None
    port = int(store.stdout.readline())
    clock = Clock()
    fleet = OneHost(folder, report=lambda report: coordinator.report(report))
    link = StoreLink(Endpoint(host="127.0.0.1", port=port, secret="admin"))

    def join_order(plan: RunPlan, effect: OrderMember) -> JoinOrder:
        return JoinOrder(
            incarnation=effect.incarnation,
            plan=plan,
            machine=effect.machine,
            store=Endpoint(host="127.0.0.1", port=port, secret="member"),
            logs=log_endpoint,
        )

    coordinator = Coordinator(
        journal=SqlJournal(f"sqlite+aiosqlite:///{folder}/journal.db"),
        fleet=fleet,
        store=link,
        join_order=join_order,
        deployment={},
        now=clock.now,
    )
    await coordinator.start()
    link.start(coordinator)
    try:
        yield Deployment(coordinator, clock)
    finally:
        await fleet.close()
        await link.stop()
        await coordinator.stop()
        await sink.stop()
        logs.close()
        store.terminate()
        store.wait(STORE_STOP_S)
