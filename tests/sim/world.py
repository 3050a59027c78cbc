"""The simulated world: the real cores of coordinator, members, leases and store under one seeded event heap.

Nothing here waits and nothing is random but through the seed, so a life of many minutes takes a few milliseconds and
every failure can be repeated by its seed. What the shells do is modelled as plainly as can be, in the rooms beside
this one: `coordinator` (journal and drivers), `store_line`, `store`, `fleet`, `machine`, `member`, `keeper`,
`process`, `network`, and for checkpoints `saver` and `checkpoint_store`. `incidents` is what goes wrong, `truth` and
`checkpoint_truth` what must hold whatever does.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agents.core.lease import Lease
from agents.core.member import Member
from coordinator.core import events as ev
from coordinator.core.gang import GangCore
from coordinator.core.gang_state import Gang
from coordinator.core.store_trust import StoreTrust
from mesh.ids import RunName, RunUid
from mesh.plan import RunPlan
from mesh.states import FailurePolicy, RunState
from mesh.store.state import StoreState
from tests.sim.checkpoint_store import SimCheckpointStore
from tests.sim.coordinator import SimCoordinator
from tests.sim.faults import Faults, Incident
from tests.sim.fleet import SimFleet
from tests.sim.incidents import AFTERMATH_S, Incidents, cancel_event
from tests.sim.machine import Machine
from tests.sim.network import Network
from tests.sim.saver import Saving, Style
from tests.sim.store import SimStore
from tests.sim.store_line import StoreLine
from tests.sim.truth import Truth, Violation

STEPS_MAX = 60_000
LIVENESS_S = 900.0
"""So long after the world has healed every gang runs or has ended: one assembly that was stuck (300 s), one pause (at
most 300 s here), and the assembly after it."""
STARTUP_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the world is made of; mutants put something broken in."""

    gang_core: type[GangCore] = GangCore
    lease: type[Lease] = Lease
    checkpoint_store: type[SimCheckpointStore] = SimCheckpointStore
    member: type[Member] = Member
    trust: type[StoreTrust] = StoreTrust
    store_state: type[StoreState] = StoreState
    coordinator: type[SimCoordinator] = SimCoordinator
    fleet: type[SimFleet] = SimFleet
    store: type[SimStore] = SimStore
    line: type[StoreLine] = StoreLine
    leases_by_wall_clock: bool = False
    validates_gangs: bool = True
    sweeps_always: bool = False


class World:
    """One deployment with some gangs, from their submission to the last machine's release.

    Args:
        seed: of everything that is random.
        gangs: how many runs are submitted; they compete for the machines.
        nodes: machines that each run wants.
        machines: machines that there are at first.
        saves: the commands save checkpoints, and there is a store for them.
        faults: None for the default mix.
        parts: what the world is made of; broken ones for mutants.
        checks_network: machines are checked before members are ordered there; None for what the seed says.
        max_restarts: of every run's plan; None for what the seed says.
        policy: of every run's plan; None for what the seed says.
    """

    def __init__(
        self,
        seed: int,
        *,
        gangs: int = 1,
        nodes: int = 2,
        machines: int = 3,
        saves: bool = False,
        faults: Faults | None = None,
        parts: Parts | None = None,
        checks_network: bool | None = None,
        max_restarts: int | None = None,
        policy: FailurePolicy | None = None,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.parts = parts or Parts()
        self._max_restarts = max_restarts
        self._policy = policy
        # Not drawn: lives of other seeds stay as they were.
        self.checks_network = seed % 6 in (1, 4) if checks_network is None else checks_network
        self.now = 1000.0
        self.log: list[str] = []
        self.keeps_log = False
        self.has_healed = False
        self.heals_at = self.now + self.random.choice([20.0, 60.0, 150.0])
        self.troubled = self.faults.every_heartbeat
        """Something is wrong, or was a moment ago: heartbeats and ticks are simulated one by one."""
        self.line_cut_until = 0.0
        self._trouble_until = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = 0
        self.steps = 0
        self.truth = Truth(self)
        self.incidents = Incidents(self)
        self.network = Network(self)
        self.saves = saves
        self.savings: dict[RunUid, Saving] = {}
        self._stamps = 0
        self.checkpoint_store = self.parts.checkpoint_store(self)
        self.fleet = self.parts.fleet(self)
        drift = self.faults.clock_drift
        self.store = self.parts.store(self, rate=1.0 + self.random.uniform(-drift, drift))
        self.coordinator = self.parts.coordinator(self)
        self._needed = gangs * nodes
        for _ in range(machines):
            self.fleet.add_machine()
        if self.random.random() < 0.4:
            self._share_the_head(machines)
        for index in range(gangs):
            self._submit(index, nodes)
        self.coordinator.line.connect()
        self.incidents.plan()
        self.at(self.heals_at, self._heal)

    def _share_the_head(self, machines: int) -> None:
        """As on a laptop, or where the head takes members too."""
        for machine in list(self.fleet.machines.values())[: self.random.randint(1, machines)]:
            machine.is_the_stores = True
            machine.rate = self.store.rate

    def _submit(self, index: int, nodes: int) -> None:
        plan = RunPlan(
            name=RunName(f"run{index}"),
            command=("true",),
            nodes=nodes,
            startup_timeout_s=STARTUP_TIMEOUT_S,
            max_assembly_retries=self.random.randrange(1, 3),
            max_restarts=self.random.choice([0, 1, 3, 3])
            if self._max_restarts is None
            else self._max_restarts,
            on_process_failure=self._policy_of_run(),
            grace_period_s=10.0,
        )
        gang = Gang(uid=RunUid(f"{index:016x}"), plan=plan, created_at=self.now)
        if self.saves:
            saving = Saving(self.random.choice(list(Style)), self.random.choice([4.0, 8.0, 15.0]))
            self.savings[gang.uid] = saving
        self.coordinator.journal[gang.uid] = gang.snapshot()
        self.after(self.random.uniform(0, 1), self._accept, gang)

    def _policy_of_run(self) -> FailurePolicy:
        drawn = self.random.choice([FailurePolicy.FAIL, FailurePolicy.RESTART_GANG])
        if self.seed % 7 in (2, 4):  # not drawn: lives of other seeds stay as they were
            drawn = FailurePolicy.RESTART_RANK
        return self._policy or drawn

    def _accept(self, gang: Gang) -> None:
        has_read_of_it = self.coordinator.gang(gang.uid) is not None  # it came back meanwhile
        if self.coordinator.is_up and not has_read_of_it:
            self.coordinator.submit(gang)

    # ---- time -------------------------------------------------------------------------------------

    def at(self, time: float, act: Callable[..., object], *arguments: Any) -> None:
        """Schedules an act."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, act, arguments))

    def after(self, delay_s: float, act: Callable[..., object], *arguments: Any) -> None:
        """Schedules an act."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._sequence, act, arguments))

    def soon(self, act: Callable[..., object], *arguments: Any) -> None:
        """Schedules an act after what a message takes: reordering comes of it."""
        self.after(self.random.expovariate(100.0), act, *arguments)

    def stamp(self) -> int:
        """Another one each time."""
        self._stamps += 1
        return self._stamps

    def roll(self, probability: float) -> bool:
        """Whether something goes wrong now; nothing does once the world has healed."""
        return probability > 0.0 and not self.has_healed and self.random.random() < probability

    def note(self, *words: object) -> None:
        """A line for whoever repeats a failing seed."""
        if self.keeps_log:
            self.log.append(f"{self.now - 1000:9.3f} " + " ".join(map(str, words)))

    def run(self) -> World:
        """Lives until nothing is left to happen. Raises Violation."""
        heap, pop = self._heap, heapq.heappop
        try:
            while heap:
                self.steps += 1
                if self.steps > STEPS_MAX:
                    raise Violation("9: liveness: the world does not come to rest")
                self.now, _, act, arguments = pop(heap)
                act(*arguments)
            self.truth.check_end()
        except AssertionError as error:
            raise Violation(f"{error} (seed {self.seed}, t={self.now - 1000:.3f})") from error
        return self

    # ---- trouble and healing ----------------------------------------------------------------------

    def trouble_machine(self, machine: Machine, for_s: float) -> None:
        """Something goes wrong there now, for so long: from here on every heartbeat from it counts."""
        machine.is_roused_until = max(machine.is_roused_until, self.now + for_s + AFTERMATH_S)
        machine.troubled_until = max(machine.troubled_until, self.now + for_s + AFTERMATH_S)
        for member in machine.members:
            if member.keeper is not None:
                member.keeper.rouse()
        self.store.rouse()

    def trouble(self, for_s: float) -> None:
        """Something goes wrong with the store now, for so long: from here on every heartbeat counts."""
        until = self.now + for_s + AFTERMATH_S
        if until > self._trouble_until:
            self._trouble_until = until
            self.at(until, self._calm_down)
        if not self.troubled:
            self.store.rouse_before()
            self.troubled = True
            for keeper in list(self.store.keepers.values()):
                keeper.rouse()
            self.store.rouse()

    def _calm_down(self) -> None:
        if self.now >= self._trouble_until:
            self.troubled = self.faults.every_heartbeat

    def _heal(self) -> None:
        """From here on nothing goes wrong any more, and there are machines enough."""
        self.note("--- the world has healed")
        self.has_healed = True
        for _ in range(self._needed):  # not those that a replacement has to avoid
            self.fleet.add_machine()
        for uid in self.coordinator.journal:
            self.after(self.random.uniform(0.0, 5.0), self.wish, Incident.RESUME, uid)
        self.after(LIVENESS_S, self.truth.check_liveness)

    # ---- what users want --------------------------------------------------------------------------

    def wish(self, kind: Incident, uid: RunUid) -> None:
        """Asked again while the coordinator is away."""
        event: ev.GangEvent
        match kind:
            case Incident.CANCEL:
                event = cancel_event()
            case Incident.SUSPEND:
                event = ev.SuspendRequested(message="Suspended.")
            case _:
                event = ev.ResumeRequested(message="Resumed.")

        def done(is_taken: bool) -> None:
            if kind is Incident.CANCEL and is_taken:
                self.truth.cancel_taken(uid)
            elif kind is Incident.RESUME and self.has_healed and not self._is_settled(uid):
                self.after(5.0, self.wish, kind, uid)

        if not self.coordinator.tell(uid, event, done):
            self.after(1.0, self.wish, kind, uid)

    def _is_settled(self, uid: RunUid) -> bool:
        """No suspension is under way any more."""
        gang = self.coordinator.journal[uid]
        if gang.state.is_terminal:
            return True
        wishes = [o for o in (gang.outcome, gang.wish) if o is not None]
        return gang.state is not RunState.SUSPENDED and not any(o.kind == "Suspend" for o in wishes)

    def final_states(self) -> dict[RunUid, RunState]:
        """How every run ended."""
        return {uid: gang.state for uid, gang in self.coordinator.journal.items()}
