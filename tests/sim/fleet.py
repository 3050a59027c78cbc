"""The simulated fleet: which machine belongs to which reservation, the members' actors on them, giving back.

It keeps the rules of `coordinator.fleet`, and outlives every coordinator. It reaches a machine over the same network
as the coordinator does, so a machine that is frozen or cut off can be neither used nor swept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.core import effects as do
from coordinator.core import events as ev
from mesh.ids import Incarnation, MachineName, RunUid
from mesh.messages import CheckpointOrder, JoinOrder
from tests.sim.machine import Machine
from tests.sim.member import SimMember
from tests.sim.tasks import DOWN, GONE, Begin, Resume

if TYPE_CHECKING:
    from tests.sim.world import World

Key = tuple[RunUid, int]
LOOK_AGAIN_S = 2.0
TELL_AGAIN_S = 10.0


class SimFleet:
    """Every machine that there is."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machines: dict[MachineName, Machine] = {}
        self.owner: dict[MachineName, Key] = {}
        """Machines that are held, or not yet confirmed as given back."""
        self.granted: dict[Key, tuple[ev.Placement, ...]] = {}
        self.members: dict[Incarnation, SimMember] = {}
        self._withdrawn: set[Key] = set()
        self._waiting: dict[Key, tuple[do.ReserveMachines, Resume]] = {}
        self._count = 0

    # ---- machines come and go ---------------------------------------------------------------------

    def add_machine(self) -> Machine:
        world = self.world
        drift = world.faults.clock_drift
        machine = Machine(
            world, MachineName(f"m{self._count}"), rate=1.0 + world.random.uniform(-drift, drift)
        )
        self._count += 1
        self.machines[machine.name] = machine
        world.after(0.0, self.look)
        return machine

    def machine_lost(self, machine: Machine) -> None:
        """It is gone for ever; who holds it hears so when it asks."""
        if machine.name not in self.owner:
            del self.machines[machine.name]

    def free_machines(self) -> list[Machine]:
        return [m for m in self.machines.values() if m.name not in self.owner and _is_usable(m)]

    # ---- reservations -----------------------------------------------------------------------------

    def reserve(self, uid: RunUid, effect: do.ReserveMachines) -> Begin:
        """Answers with the placements, when there are any."""

        def begin(resume: Resume) -> None:
            key = (uid, effect.reservation)
            if key not in self._withdrawn:
                self._waiting[key] = (effect, resume)
                self.look()
                self._tell_waiting(uid, effect)

        return begin

    def _tell_waiting(self, uid: RunUid, effect: do.ReserveMachines) -> None:
        """Now and again until it has them."""
        if self._waiting.get((uid, effect.reservation), (None, None))[0] is not effect:
            return
        self.world.after(TELL_AGAIN_S, self._tell_waiting, uid, effect)
        possible = [m for m in self.machines.values() if not m.is_cordoned and m.name not in effect.avoid]
        waiting = ev.ReservationWaiting(
            reservation=effect.reservation,
            why="Waiting for machines.",
            is_possible=sum(not m.is_lost for m in possible) >= effect.nodes,
        )
        if not waiting.is_possible:
            self.world.truth.no_other_machine(uid)
        self.world.soon(self.world.coordinator.tell, uid, waiting)

    def look(self) -> None:
        """All or nothing, first come first served among those that fit."""
        for key, (effect, resume) in list(self._waiting.items()):
            if key not in self.granted:
                chosen = self._choose(effect)
                if chosen is None:
                    continue
                for machine in chosen:
                    self.owner[machine.name] = key
                    self.world.truth.machine_granted(machine, key[0])
                self.granted[key] = tuple(
                    ev.Placement(machine=m.name, address=f"{m.name}.test") for m in chosen
                )
            del self._waiting[key]
            self.world.after(self.world.random.uniform(0.01, 2.0), resume, self.granted[key])

    def _choose(self, effect: do.ReserveMachines) -> list[Machine] | None:
        fitting = [m for m in self.free_machines() if m.name not in effect.avoid]
        if len(fitting) < effect.nodes:
            return None
        self.world.random.shuffle(fitting)
        return fitting[: effect.nodes]

    def withdraw(self, uid: RunUid, reservation: int) -> Begin:
        """Nobody was ordered to any machine of it."""

        def begin(resume: Resume) -> None:
            key = (uid, reservation)
            self._withdrawn.add(key)
            self._waiting.pop(key, None)
            for name in [name for name, owner in self.owner.items() if owner == key]:
                self._free(name)
            self.world.soon(resume, None)

        return begin

    def release(self, uid: RunUid, effect: do.ReleaseMachine) -> Begin:
        """Answers when others may have the machine, or when it is gone."""

        def begin(resume: Resume) -> None:
            if self.owner.get(effect.machine) != (uid, effect.reservation):
                self.world.soon(resume, None)
                return
            machine = self.machines[effect.machine]
            if machine.is_lost:
                self.world.after(self.world.random.uniform(0.5, 15.0), self._given_back, machine, resume)
            elif effect.is_clean and not self.world.parts.sweeps_always:
                self._end_members(machine, uid)
                self._given_back(machine, resume)
            else:
                self._sweep(machine, uid, resume)

        return begin

    def _sweep(self, machine: Machine, uid: RunUid, resume: Resume) -> None:
        """Kills everything of the run there, and looks; waits while the machine cannot be reached."""
        if self.owner.get(machine.name, (None, 0))[0] != uid:
            self.world.soon(resume, None)
            return
        if machine.is_lost:
            self._given_back(machine, resume)
            return
        if _is_reachable(machine):
            self._end_members(machine, uid)
            for process in [p for p in machine.processes if p.incarnation.run_uid == uid]:
                process.member.kill_tree()
            if not any(p.incarnation.run_uid == uid for p in machine.processes):
                self._given_back(machine, resume)
                return
        self.world.after(LOOK_AGAIN_S, self._sweep, machine, uid, resume)

    def _given_back(self, machine: Machine, resume: Resume) -> None:
        self._free(machine.name)
        self.world.soon(resume, None)

    def _free(self, name: MachineName) -> None:
        self.owner.pop(name, None)
        if (machine := self.machines.get(name)) is not None and machine.is_lost:
            del self.machines[name]
        self.look()

    def _end_members(self, machine: Machine, uid: RunUid) -> None:
        for member in machine.members:
            if member.incarnation.run_uid == uid:
                machine.run(member.die, ())

    # ---- members ----------------------------------------------------------------------------------

    def order(self, order: JoinOrder, reservation: int) -> Begin:
        def begin(resume: Resume) -> None:
            world = self.world
            key = (order.incarnation.run_uid, reservation)
            machine = self.machines.get(order.machine)
            if machine is None or self.owner.get(order.machine) != key or machine.is_dead_to_ray:
                world.soon(resume, GONE)
            elif machine.is_lost:
                world.after(world.random.uniform(0.5, 6.0), resume, GONE)
            elif order.incarnation not in self.members and world.roll(world.faults.never_appears):
                world.after(1.0, resume, GONE if world.random.random() < 0.5 else None)
            else:
                world.network.call(machine, self._join, order, machine, key)(resume)

        return begin

    def _join(self, order: JoinOrder, machine: Machine, key: Key) -> object:
        if self.owner.get(machine.name) != key:
            return GONE
        member = self.members.get(order.incarnation)
        if member is None:
            self.world.truth.epoch_heard(order.incarnation.run_uid, order.incarnation.epoch)
            member = self.members[order.incarnation] = SimMember(self.world, order.incarnation, machine)
        if member.is_gone:
            return GONE
        if member.is_hung:
            return DOWN
        member.join(order)
        return None

    def fence(self, effect: do.FenceMember) -> Begin:
        return self._to_member(effect.incarnation, "fence", effect.grace_s)

    def dismiss(self, incarnation: Incarnation) -> Begin:
        return self._to_member(incarnation, "leave")

    def tell_about_part(self, effect: do.TellAboutPart) -> Begin:
        order = CheckpointOrder(
            incarnation=effect.incarnation, digest=effect.digest, question=effect.question
        )
        return self._to_member(effect.incarnation, "about_part", order)

    def _to_member(self, incarnation: Incarnation, what: str, *arguments: Any) -> Begin:
        def act(member: SimMember) -> object:
            if member.is_gone:
                return GONE
            if member.is_hung:
                if what == "leave":  # who does not leave by itself is killed
                    member.die()
                return DOWN
            getattr(member, what)(*arguments)
            return None

        def begin(resume: Resume) -> None:
            member = self.members.get(incarnation)
            if member is None or member.machine.is_dead_to_ray:
                self.world.soon(resume, GONE)
            elif member.machine.is_lost:
                self.world.after(self.world.random.uniform(0.5, 6.0), resume, GONE)
            else:
                self.world.network.call(member.machine, act, member)(resume)

        return begin


def _is_reachable(machine: Machine) -> bool:
    return (
        not machine.is_lost
        and not machine.is_frozen
        and machine.is_open("head in")
        and machine.is_open("head out")
    )


def _is_usable(machine: Machine) -> bool:
    return _is_reachable(machine) and not machine.is_cordoned and not machine.is_dead_to_ray
