"""What goes wrong at some moment of a simulated life: chosen by the seed, at a time or when a gang enters a state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.core import events as ev
from coordinator.core.gang_state import Gang
from mesh.ids import RunUid
from mesh.messages import CauseEvidence, ProcessExit
from mesh.reasons import Reason
from mesh.states import RunState
from tests.sim.faults import Incident

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.world import World

STATES = (
    RunState.PENDING, RunState.ASSEMBLING, RunState.STARTING, RunState.RUNNING, RunState.FENCING,
    RunState.SUSPENDED,
)  # fmt: skip
AFTERMATH_S = 6.0
"""How long after a trouble leases may lapse of it: ttl, guard, and what a message takes."""
_CUTS = {
    Incident.CUT_FROM_STORE: ("store out", "store in"),
    Incident.CUT_FROM_HEAD: ("head out", "head in"),
    Incident.CUT_OFF: ("store out", "store in", "head out", "head in"),
}


@dataclass(slots=True, eq=False)
class _Planned:
    kind: Incident
    state: RunState
    visits: int
    """How many times a gang has to enter the state before."""


class Incidents:
    """The faults of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: Counter[tuple[Incident, RunState]] = Counter()
        """What happened while a gang was in which state."""
        self.has_delayed_news = False
        """A renewal may have reached the store long after it was sent."""
        self._planned: list[_Planned] = []

    def plan(self) -> None:
        """Draws them. Half come at a time, half when a gang enters a state."""
        world = self.world
        random, faults = world.random, world.faults
        if not faults.incidents:
            return
        kinds, weights = list(faults.incidents), list(faults.incidents.values())
        for kind in random.choices(kinds, weights, k=random.randint(0, faults.incidents_max)):
            if faults.incidents_in:
                self._planned.append(_Planned(kind, random.choice(faults.incidents_in), 0))
            elif random.random() < 0.4:
                latest_s = random.choice([3.0, 15.0, 60.0])
                world.after(random.uniform(0.0, latest_s), self.happen, kind)
            else:
                state = random.choice(STATES)
                self._planned.append(_Planned(kind, state, random.randint(0, 2)))

    def state_entered(self, gang: Gang) -> None:
        """A gang's new state is durable."""
        if not self._planned:
            return
        for planned in list(self._planned):
            if planned.state is gang.state:
                if planned.visits:
                    planned.visits -= 1
                    continue
                self._planned.remove(planned)
                delay_s = self.world.random.choice([0.0, self.world.random.expovariate(0.7)])
                self.world.after(delay_s, self.happen, planned.kind, gang.uid)

    def rank_away(self, gang: Gang) -> None:
        """A rank has failed, or begins again alone: what was to happen may happen about now."""
        random = self.world.random
        for planned in [planned for planned in self._planned if random.random() < 0.5]:
            self._planned.remove(planned)
            self.world.after(random.uniform(0.0, 6.0), self.happen, planned.kind, gang.uid)

    # ---- one of them ------------------------------------------------------------------------------

    def happen(self, kind: Incident, uid: RunUid | None = None) -> None:
        """Now, unless the world has healed."""
        world = self.world
        if world.has_healed:
            return
        uid = uid or world.random.choice(list(world.coordinator.journal))
        world.note(f"*** {kind}")
        self.seen[kind, world.coordinator.journal[uid].state] += 1
        match kind:
            case Incident.STORE_RESTARTED | Incident.STORE_STALLED | Incident.STORE_LINE_CUT:
                self._trouble_store(kind)
            case Incident.COORDINATOR_CRASHED:
                world.coordinator.crash()
            case Incident.DISK_FULL:
                world.coordinator.disk_full_until = self._until(world.random.uniform(0.5, 15.0))
            case Incident.CAPACITY_CAME:
                world.fleet.add_machine()
            case Incident.CAPACITY_GONE:
                if free := world.fleet.free_machines():
                    world.random.choice(free).lose()
            case Incident.CANCEL | Incident.SUSPEND | Incident.RESUME:
                world.wish(kind, uid)
            case _:
                if (machine := self._some_machine(uid)) is not None:
                    self._trouble_machine(kind, machine)

    def _until(self, for_s: float) -> float:
        return min(self.world.now + for_s, max(self.world.heals_at, self.world.now))

    def _some_machine(self, uid: RunUid) -> Machine | None:
        """Of the gang, or any."""
        fleet = self.world.fleet
        names = [name for name, owner in fleet.owner.items() if owner[0] == uid]
        names = names or list(fleet.machines)
        return fleet.machines[self.world.random.choice(names)] if names else None

    def _trouble_store(self, kind: Incident) -> None:
        world = self.world
        world.coordinator.line.listen()
        match kind:
            case Incident.STORE_RESTARTED:
                down_s = world.random.choice([0.3, 1.5, 6.0])
                world.trouble(down_s)
                world.store.restart(down_s)
            case Incident.STORE_STALLED:
                for_s = world.random.choice([0.5, 2.0, 3.5, 8.0])
                world.trouble(for_s)
                world.store.stall(for_s)
            case _:
                world.line_cut_until = self._until(world.random.uniform(0.5, 12.0))
                if world.random.random() < 0.5:
                    world.coordinator.line.hear_lost()

    def _trouble_machine(self, kind: Incident, machine: Machine) -> None:
        world, random = self.world, self.world.random
        for_s = random.choice([random.uniform(0.1, 2.5), random.uniform(2.0, 6.0), random.uniform(5.0, 40.0)])
        until = self._until(for_s)
        for_s = until - world.now
        if machine.is_the_stores and kind in (
            Incident.MACHINE_LOST,
            Incident.MACHINE_FROZEN,
            Incident.RECLAIM,
        ):
            return  # the head and its store are on it
        world.trouble_machine(machine, for_s)
        match kind:
            case Incident.MACHINE_LOST:
                machine.lose()
            case Incident.MACHINE_FROZEN:
                if not machine.is_frozen:
                    machine.freeze()
                    world.at(until, machine.thaw)
                    if (
                        random.random() < self.world.faults.thaws_without_network
                    ):  # it comes back without its network
                        cut_s = self._until(for_s + random.uniform(1.0, 10.0)) - until
                        world.at(until, self._cut, random.choice(list(_CUTS)), machine, cut_s)
                        world.trouble_machine(machine, for_s + cut_s)
                    self._may_be_given_up(machine, for_s)
            case Incident.CUT_FROM_STORE | Incident.CUT_FROM_HEAD | Incident.CUT_OFF:
                self._cut(kind, machine, for_s)
            case Incident.SLOW_NETWORK:
                machine.slow_until = until
                self.has_delayed_news = (
                    True  # a renewal that is received late was sent before its holder died
                )
            case Incident.CLOCK_STEPPED:
                machine.wall_offset += random.choice([-20.0, -4.0, 4.0])
            case Incident.RECLAIM:
                self._reclaim(machine)
            case Incident.MEMBER_HUNG:
                self._hang_somebody(machine, until)
            case _:
                self._end_something(kind, machine)

    def _hang_somebody(self, machine: Machine, until: float) -> None:
        """For a while or for ever."""
        members = [m for m in machine.members if not m.is_gone]
        if not members or members[-1].is_hung:
            return
        member = members[-1]
        member.hang()
        if self.world.random.random() < 0.5:
            self.world.at(until, machine.run, member.stir, ())

    def _cut(self, kind: Incident, machine: Machine, for_s: float) -> None:
        random = self.world.random
        directions = _CUTS[kind]
        if random.random() < 0.4:
            way = random.choice(["out", "in"])
            directions = tuple(d for d in directions if d.endswith(way))
        machine.cut(directions, self.world.now + for_s)
        if "head in" in directions:
            self._may_be_given_up(machine, for_s)
        if kind is Incident.CUT_OFF and random.random() < 0.4:
            self._peers_lose_each_other(machine)

    def _may_be_given_up(self, machine: Machine, for_s: float) -> None:
        """Who is silent for long is dead to Ray; when it comes back its actors are ended, and it is as new."""
        patience_s = self.world.random.uniform(5.0, 40.0)
        if for_s > patience_s:
            self.world.after(patience_s, machine.be_given_up)
            self.world.after(for_s + self.world.random.uniform(0.0, 3.0), machine.be_taken_back)
        else:
            self.world.after(for_s + 0.01, self.world.fleet.look)

    def _peers_lose_each_other(self, machine: Machine) -> None:
        """A collective across the cut fails on its sides."""
        for process in machine.processes:
            me = process.incarnation
            for other in self.world.truth.alive[me.run_uid].values():
                if other.incarnation.epoch == me.epoch:
                    delay_s = self.world.random.uniform(0.5, 6.0)
                    blames = (ProcessExit(code=1), CauseEvidence(blames_peer=True))
                    other.machine.after(delay_s, other.end, *blames)

    def _reclaim(self, machine: Machine) -> None:
        """The notice; and then the machine goes, whether it was left or not."""
        world = self.world
        if machine.is_cordoned or machine.is_lost:
            return
        machine.is_cordoned = True
        grace_s = world.random.choice([2.0, 30.0])
        notice = ev.MachineReclaimed(machine=machine.name, grace_s=grace_s, message="The provider wants it.")
        for uid in world.coordinator.journal:
            world.soon(world.coordinator.tell, uid, notice)
        machine.troubled_until = world.now + grace_s + world.random.uniform(0.0, 20.0) + AFTERMATH_S
        world.at(machine.troubled_until - AFTERMATH_S, self._take_away, machine)

    def _take_away(self, machine: Machine) -> None:
        self.world.trouble_machine(machine, 1.0)
        machine.lose()

    def _end_something(self, kind: Incident, machine: Machine) -> None:
        members = [m for m in machine.members if not m.is_gone]
        if not members:
            return
        member = members[-1]
        if kind is Incident.AGENT_DIED:
            machine.run(member.die, ())
        elif kind is Incident.KEEPER_DIED:
            if (
                member.keeper is not None and not member.is_hung
            ):  # both at once: nobody is left who could kill
                machine.run(member.keeper.die, ())
        elif member.process is not None:
            machine.run(member.process.end, (ProcessExit(code=42), CauseEvidence()))


def cancel_event() -> ev.CancelRequested:
    return ev.CancelRequested(reason=Reason.CANCELLED, message="Cancelled.")
