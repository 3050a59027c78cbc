"""A fleet and a store of which a test decides what happens, for the coordinator's shell without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from agents.chaos import HarmOrder
from coordinator.core.events import Placement
from coordinator.fleet import HeldMachine, Looked, MachineFacts, Shape, Waiting, matches, why_waiting
from mesh.errors import NotFoundError, TransportError
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, RunUid
from mesh.messages import CheckpointOrder, FenceOrder, JoinOrder
from mesh.netcheck.measurements import Dialled, MemberFacts, Push, Reach, Seen

OPEN = Reach(rendezvous=Dialled.ANSWERED, ephemeral=Dialled.ANSWERED, round_trip_s=0.001, offset_s=0.0)
SILENT = Reach(rendezvous=Dialled.SILENT, ephemeral=Dialled.SILENT)


class FakeFleet:
    """Machines `m0`, `m1`, …; orders, fences and harms are only written down.

    Args:
        machines: how many there are.
    """

    def __init__(self, machines: int = 2) -> None:
        self.names = [MachineName(f"m{i}") for i in range(machines)]
        self.held: dict[tuple[RunUid, int], tuple[MachineName, ...]] = {}
        self.cordoned: set[MachineName] = set()
        self.lost: set[MachineName] = set()
        self.unclean: list[MachineName] = []
        """Released without the proof that nothing runs there."""
        self.orders: list[JoinOrder] = []
        self.fences: list[FenceOrder] = []
        self.about_parts: list[CheckpointOrder] = []
        self.harms: list[HarmOrder] = []
        self.left_of_harms: str | None = None
        self.dismissed: list[Incarnation] = []
        self.forgotten: list[RunUid] = []
        self.looks: list[tuple[dict[int, MachineName], tuple[int, ...]]] = []
        self.shut: set[tuple[str, str]] = set()
        """Ways from one machine to another that nothing comes along."""
        self.mute: set[str] = set()
        """Machines on which no end of a network check comes up."""
        self.providers: dict[str, str] = {}
        """Of machines that are not `fake`'s."""
        self.unreachable = 0
        """So many of the next calls fail as if Ray could not be reached."""
        self._changed = asyncio.Condition()

    async def machines(self) -> list[MachineFacts]:
        return [
            MachineFacts(
                name=name, address=f"10.0.0.{i}", gpu_type=None, gpu_count=0,
                labels={"provider": self.providers.get(name, "fake")},
                is_alive=name not in self.lost, is_cordoned=name in self.cordoned,
            )
            for i, name in enumerate(self.names)
        ]  # fmt: skip

    def free(self) -> list[MachineName]:
        """Machines that nobody holds."""
        held = {name for names in self.held.values() for name in names}
        return [name for name in self.names if name not in held]

    async def _fitting(self, shape: Shape) -> list[MachineName]:
        free = set(self.free())
        return [m.name for m in await self.machines() if m.name in free and matches(m, shape) is None]

    async def reserve(
        self, uid: RunUid, reservation: int, shape: Shape, *, on_waiting: Callable[[Waiting], None]
    ) -> tuple[Placement, ...]:
        async with self._changed:
            key = (uid, reservation)
            if key not in self.held:
                while len(found := await self._fitting(shape)) < shape.nodes:
                    on_waiting(why_waiting(shape, await self.machines(), {}))
                    await self._changed.wait()
                self.held[key] = tuple(found[: shape.nodes])
            return tuple(Placement(machine=m, address=f"{m}.test") for m in self.held[key])

    async def withdraw(self, uid: RunUid, reservation: int) -> None:
        self._may_fail()
        async with self._changed:
            self.held.pop((uid, reservation), None)
            self._changed.notify_all()

    async def release(self, uid: RunUid, reservation: int, machine: MachineName, *, is_clean: bool) -> None:
        self._may_fail()
        async with self._changed:
            if not is_clean:
                self.unclean.append(machine)
            left = tuple(m for m in self.held.pop((uid, reservation), ()) if m != machine)
            if left:
                self.held[(uid, reservation)] = left
            self._changed.notify_all()

    async def held_by(self, uid: RunUid) -> list[HeldMachine]:
        self._may_fail()
        return [
            HeldMachine(name=machine, reservation=reservation)
            for (holder, reservation), machines in self.held.items()
            for machine in machines
            if holder == uid
        ]

    async def holders(self) -> set[RunUid]:
        self._may_fail()
        return {uid for uid, _ in self.held}

    async def cordon(self, machine: MachineName) -> None:
        if machine not in self.names:
            raise NotFoundError(f"There is no machine {machine}.", hint="See them all: mesh get machines")
        self.cordoned.add(machine)

    async def why_no_harm(self, order: HarmOrder) -> str | None:
        return f"{order.machine} is lost." if order.machine in self.lost else None

    async def harm(self, order: HarmOrder) -> None:
        self.harms.append(order)

    async def left_of_harm(self, order: HarmOrder) -> str | None:
        return self.left_of_harms

    async def look(self, machines: Mapping[int, MachineName], *, fresh: Collection[int]) -> Looked:
        """Everything is well, but for the ways in `shut`; machines in `mute` cannot be looked at."""
        self._may_fail()
        self.looks.append((dict(machines), tuple(fresh)))
        absent = {rank: f"{name} does not answer." for rank, name in machines.items() if name in self.mute}
        absent |= {r: f"{n} is lost." for r, n in machines.items() if n not in self.names or n in self.lost}
        providers = {facts.name: facts.labels["provider"] for facts in await self.machines()}
        there = {rank: name for rank, name in machines.items() if rank not in absent}
        ways = {(a, b) for a in there for b in there if a != b and (a in fresh or b in fresh)}
        shut = {way for way in ways if (there[way[0]], there[way[1]]) in self.shut}
        return Looked(
            seen=Seen(
                members={
                    rank: MemberFacts(
                        rank=rank, machine=name, address=f"10.0.0.{name[1:]}", rendezvous_port=29500,
                        ephemeral_port=40000, place=providers[name],
                    )
                    for rank, name in there.items()
                },
                asked=ways,
                reach={way: SILENT if way in shut else OPEN for way in ways},
                push={way: Push(bytes_per_s=1e9) for way in ways - shut},
            ),
            absent=absent,
        )  # fmt: skip

    async def order(self, order: JoinOrder, reservation: int) -> None:
        self._may_fail()
        self.orders.append(order)

    async def tell_about_part(self, order: CheckpointOrder) -> None:
        self.about_parts.append(order)

    async def fence(self, order: FenceOrder) -> None:
        self._may_fail()
        self.fences.append(order)

    async def dismiss(self, incarnation: Incarnation) -> None:
        self.dismissed.append(incarnation)

    async def forget_run(self, uid: RunUid) -> None:
        self.forgotten.append(uid)

    def _may_fail(self) -> None:
        if self.unreachable:
            self.unreachable -= 1
            raise TransportError("the member cannot be reached")


class FakeStore:
    """Writes down what it was told; barriers count as opened when a test says so."""

    def __init__(self) -> None:
        self.opened: set[tuple[RunUid, Epoch]] = set()
        self.epochs: list[tuple[RunUid, Epoch, int]] = []
        self.forgotten: list[tuple[RunUid, Epoch]] = []
        self.expired: list[Incarnation] = []
        self.admitted: list[tuple[Incarnation, IncarnationToken]] = []

    async def open_epoch(self, uid: RunUid, epoch: Epoch, size: int, *, is_new: bool) -> None:
        self.epochs.append((uid, epoch, size))

    async def close_barrier(self, uid: RunUid, epoch: Epoch) -> bool:
        return (uid, epoch) in self.opened

    async def admit(
        self, uid: RunUid, incarnation: Incarnation, *, instead_of: IncarnationToken, alive_within_s: float
    ) -> bool:
        self.admitted.append((incarnation, instead_of))
        return True

    async def revoke(self, uid: RunUid, incarnation: Incarnation) -> bool:
        return (uid, incarnation.epoch) in self.opened

    async def expire(self, uid: RunUid, incarnation: Incarnation) -> bool:
        self.expired.append(incarnation)
        return False

    async def forget(self, uid: RunUid, epoch: Epoch) -> None:
        self.forgotten.append((uid, epoch))
