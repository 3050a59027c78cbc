"""Machines whose members play a script instead of running a command: a whole coordinator without Ray or processes.

The command is `exit:CODE` (each rank ends with it) or `hang` (until it is fenced).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agents.chaos import HarmOrder
from coordinator.coordinator import Coordinator
from coordinator.core.effects import OrderMember
from coordinator.core.events import BarrierOpened, LeaseLapsed
from coordinator.journal import SqlJournal
from mesh.ids import Epoch, Incarnation, RunUid
from mesh.messages import (
    CauseEvidence,
    FenceOrder,
    JoinOrder,
    MemberArrived,
    MemberExited,
    MemberFenced,
    MemberRegistered,
    MemberStarted,
    ProcessExit,
)
from mesh.plan import Endpoint, RunPlan
from mesh.states import HarmKind
from tests.fakes.fleet import FakeFleet, FakeStore

_NOWHERE = Endpoint(host="127.0.0.1", port=1, secret="s")


class ScriptedFleet(FakeFleet):
    """A `Fleet` whose members report by themselves. Give it its coordinator before the first order."""

    def __init__(self, store: FakeStore, machines: int = 2) -> None:
        super().__init__(machines)
        self.coordinator: Coordinator | None = None
        self._store = store
        self._present: dict[tuple[RunUid, Epoch], dict[int, JoinOrder]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def order(self, order: JoinOrder, reservation: int) -> None:
        await super().order(order, reservation)
        incarnation = order.incarnation
        key = (incarnation.run_uid, incarnation.epoch)
        present = self._present.setdefault(key, {})
        present[incarnation.rank] = order
        await self._report(
            MemberRegistered(
                incarnation=incarnation, at=time.time(), machine=order.machine, address="10.0.0.1"
            )
        )
        await self._report(MemberArrived(incarnation=incarnation, at=time.time()))
        if len(present) == order.plan.nodes:
            self._store.opened.add(key)
            assert self.coordinator is not None
            self.coordinator.post(incarnation.run_uid, BarrierOpened(epoch=incarnation.epoch))
            for member in present.values():
                self._spawn(self._live(member))

    async def harm(self, order: HarmOrder) -> None:
        """What comes of it, at once."""
        await super().harm(order)
        assert self.coordinator is not None
        if order.kind is HarmKind.KILL_RANK:
            self._spawn(self._report(_killed(order.incarnation)))
        else:
            self.lost.add(order.machine)
            self.coordinator.post(order.incarnation.run_uid, LeaseLapsed(incarnation=order.incarnation))

    async def fence(self, order: FenceOrder) -> None:
        await super().fence(order)
        place = next(o.machine for o in self.orders if o.incarnation == order.incarnation)
        if place in self.lost:
            return  # nobody is there to confirm it
        self._spawn(self._report(_fenced(order.incarnation)))

    async def _live(self, order: JoinOrder) -> None:
        incarnation = order.incarnation
        await self._report(MemberStarted(incarnation=incarnation, at=time.time(), pid=1, master_port=29500))
        verb, _, code = order.plan.command[-1].partition(":")
        if verb == "exit":
            await self._report(
                MemberExited(
                    incarnation=incarnation,
                    at=time.time(),
                    exit=ProcessExit(code=int(code)),
                    evidence=CauseEvidence(),
                )
            )

    async def _report(self, report: Any) -> None:
        assert self.coordinator is not None
        await self.coordinator.report(report)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Waits for what members are still saying."""
        await asyncio.gather(*self._tasks)


def _killed(incarnation: Incarnation) -> MemberExited:
    return MemberExited(
        incarnation=incarnation, at=time.time(), exit=ProcessExit(signal=9), evidence=CauseEvidence()
    )


def _fenced(incarnation: Incarnation) -> MemberFenced:
    return MemberFenced(incarnation=incarnation, at=time.time(), exit=ProcessExit(signal=15))


def scripted_coordinator(db: str, *, machines: int = 2) -> tuple[Coordinator, ScriptedFleet]:
    """A real coordinator over these machines; `db` is its journal's URL."""
    store = FakeStore()
    fleet = ScriptedFleet(store, machines)

    def join_order(plan: RunPlan, effect: OrderMember) -> JoinOrder:
        return JoinOrder(
            incarnation=effect.incarnation,
            plan=plan,
            machine=effect.machine,
            store=_NOWHERE,
            logs=_NOWHERE,
        )

    coordinator = Coordinator(
        journal=SqlJournal(db),
        fleet=fleet,
        store=store,
        join_order=join_order,
        deployment={"version": "0", "local": True, "chaos": True},
    )
    fleet.coordinator = coordinator
    return coordinator, fleet
