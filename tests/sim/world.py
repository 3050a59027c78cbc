"""The simulated world: the real cores of coordinator, members and store under one seeded event heap.

Nothing here waits and nothing is random but through the seed, so a life of many minutes takes about a
millisecond and every failure can be repeated by its seed. What the shells do is modelled as plainly as
can be: an effect takes a while, may be performed although its coordinator has died meanwhile, and its answer
is lost with the life of the coordinator that asked for it.

The invariants of the design that need the whole world are checked here, after every step.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coordinator.core import effects as do
from coordinator.core import events as ev
from coordinator.core.gang import GangCore
from coordinator.core.gang_state import Gang, Holding
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, RunName, RunUid
from mesh.messages import JoinOrder, MemberReport
from mesh.plan import Endpoint, RunPlan
from mesh.reasons import Reason
from mesh.states import RunState, Transport
from tests.sim.member import SimMember
from tests.sim.store import SimStore

NOWHERE = Endpoint(host="127.0.0.1", port=1, secret="")
STEPS_MAX = 20_000


@dataclass(kw_only=True)
class Faults:
    """What may go wrong, as probabilities per occasion unless said otherwise."""

    exit_badly: float = 0.15
    start_failure: float = 0.03
    peer_dies_of_it: float = 0.7
    """A rank whose peer died ends too, complaining about the peer."""
    never_arrives: float = 0.05
    slow_preparation: float = 0.1
    preparation_failure: float = 0.03
    ignores_term: float = 0.2
    machine_loss: float = 0.03
    cancel: float = 0.3
    crash_at_write: float = 0.05
    crash_writes: dict[int, bool] = field(default_factory=dict)
    """Exact crashes: number of the journal write -> whether the write itself still became durable."""


class Violation(AssertionError):
    """An invariant does not hold; the message says which and when."""


class World:
    """One deployment with some gangs, from their submission to the last machine's release.

    Args:
        seed: of everything that is random.
        gangs: how many runs are submitted; they compete for the machines.
        nodes: machines that each run wants.
        machines: machines that there are.
        faults: None for the default mix.
    """

    def __init__(
        self, seed: int, *, gangs: int = 1, nodes: int = 2, machines: int = 3, faults: Faults | None = None
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.now = 1000.0
        self.log: list[str] = []
        self.keeps_log = False
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        # the coordinator
        self.cores: dict[RunUid, GangCore] = {}
        self.life = 0
        self.is_up = True
        self.crashes = 0
        # its journal: what is durable
        self.journal: dict[RunUid, Gang] = {}
        self.writes = 0
        # the fleet
        self.free = [MachineName(f"m{i}") for i in range(machines)]
        self.machine_count = machines
        self.held: dict[tuple[RunUid, int], list[MachineName]] = {}
        self.granted: dict[tuple[RunUid, int], tuple[MachineName, ...]] = {}
        self.waiting: list[tuple[RunUid, do.ReserveMachines, int]] = []
        self.released: set[tuple[RunUid, int]] = set()
        # the rest
        self.store = SimStore(self)
        self.members: dict[Incarnation, SimMember] = {}
        self.running: dict[RunUid, dict[Incarnation, float]] = {}
        """Live user processes: the truth that the invariants are about."""
        self._alarms: dict[RunUid, float] = {}
        for index in range(gangs):
            self._submit(index, nodes)

    def _submit(self, index: int, nodes: int) -> None:
        plan = RunPlan(
            name=RunName(f"run{index}"),
            command=("true",),
            nodes=nodes,
            startup_timeout_s=300.0,
            max_assembly_retries=self.random.randrange(3),
            grace_period_s=10.0,
        )
        uid = RunUid(f"{index:016x}")
        gang = Gang(uid=uid, plan=plan, created_at=self.now)
        self.journal[uid] = gang.snapshot()
        self.running[uid] = {}
        self.after(self.random.uniform(0, 1), self._accept, uid)
        if self.random.random() < self.faults.cancel:
            when = self.random.choice([0.05, 0.5, 5.0, 60.0, 400.0])
            self.after(self.random.uniform(0, when), self._cancel, uid)

    def _accept(self, uid: RunUid) -> None:
        if not self.is_up:
            return  # the recovery reads it from the journal
        if uid not in self.cores:
            self.cores[uid] = self._core(self.journal[uid].snapshot())
        self.tell(uid, ev.RunAccepted())

    def _core(self, gang: Gang) -> GangCore:
        return GangCore(gang, new_token=self._token, validate=True)

    def _token(self) -> IncarnationToken:
        return IncarnationToken(f"{self.random.getrandbits(32):08x}")

    def _cancel(self, uid: RunUid) -> None:
        if not self.is_up or uid not in self.cores:
            self.after(1.0, self._cancel, uid)
            return
        self.tell(uid, ev.CancelRequested(reason=Reason.CANCELLED, message="Cancelled."))

    # ---- time -------------------------------------------------------------------------------------

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Schedules an act."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._sequence, act, arguments))

    def soon(self, act: Callable[..., None], *arguments: Any) -> None:
        """Schedules an act after what a message takes: reordering comes of it."""
        self.after(self.random.expovariate(1 / 0.01), act, *arguments)

    def note(self, *words: object) -> None:
        """A line for whoever repeats a failing seed."""
        if self.keeps_log:
            self.log.append(f"{self.now - 1000:9.3f} " + " ".join(map(str, words)))

    def run(self) -> World:
        """Lives until nothing is left to happen. Raises Violation."""
        steps = 0
        try:
            while self._heap:
                steps += 1
                if steps > STEPS_MAX:
                    raise Violation("9: liveness: the world does not come to rest")
                self.now, _, act, arguments = heapq.heappop(self._heap)
                act(*arguments)
            self._check_the_end()
        except AssertionError as error:
            raise Violation(f"{error} (seed {self.seed}, t={self.now - 1000:.3f})") from error
        return self

    # ---- the coordinator --------------------------------------------------------------------------

    def tell(self, uid: RunUid, event: ev.GangEvent, *, life: int | None = None) -> bool:
        """Hands an event to the coordinator's core. False when it was not taken (or not durably)."""
        if not self.is_up or (life is not None and life != self.life) or uid not in self.cores:
            return False
        core = self.cores[uid]
        effects = core.handle(event, ev.Now(mono=self.now, wall=self.now))
        if effects and isinstance(effects[0], do.Persist):
            self.note(uid[-2:], type(event).__name__, "->", core.gang.state, core.gang.epoch)
            if not self._write(uid, core):
                return False
            effects = effects[1:]
        for effect in effects:
            self.soon(self._perform, uid, effect, self.life)
        self._set_alarm(uid, core)
        return True

    def _write(self, uid: RunUid, core: GangCore) -> bool:
        """One journal write; False when the coordinator died of or right after it."""
        self.writes += 1
        faults = self.faults
        crash = self.writes in faults.crash_writes
        becomes_durable = faults.crash_writes.get(self.writes, True)
        if not crash and self.random.random() < faults.crash_at_write:
            crash, becomes_durable = True, self.random.random() < 0.5
        if becomes_durable:
            before = self.journal[uid]
            if before.state.is_terminal and core.gang.state is not before.state:
                raise Violation("4: a terminal state changed in the journal")
            self.journal[uid] = core.gang.snapshot()
        if crash:
            self._crash()
        return not crash

    def _crash(self) -> None:
        self.note("--- the coordinator crashes")
        self.crashes += 1
        self.is_up = False
        self.cores = {}
        self._alarms = {}
        self.after(self.random.uniform(0.5, 5.0), self._recover)

    def _recover(self) -> None:
        self.note("--- the coordinator is back")
        self.life += 1
        self.is_up = True
        for uid, gang in self.journal.items():
            if self.crashes % 16 == 1:  # the text form, now and then: it costs more than all the rest
                gang = Gang.from_record(json.loads(json.dumps(gang.to_record())))
            self.cores[uid] = self._core(gang.snapshot())
        self.store.resync()
        for uid in list(self.journal):
            self.tell(uid, ev.CoordinatorRecovered())

    def _set_alarm(self, uid: RunUid, core: GangCore) -> None:
        deadline = core.next_deadline()
        if deadline is not None and self._alarms.get(uid) != deadline:
            self._alarms[uid] = deadline
            self.after(max(0.0, deadline - self.now), self._alarm, uid, self.life)

    def _alarm(self, uid: RunUid, life: int) -> None:
        self._alarms.pop(uid, None)
        self.tell(uid, ev.TimePassed(), life=life)

    # ---- effects ----------------------------------------------------------------------------------

    def _perform(self, uid: RunUid, effect: do.GangEffect, life: int) -> None:
        if life != self.life and self.random.random() < 0.5:
            return  # it had not been sent when the coordinator died
        match effect:
            case do.ReserveMachines():
                if (uid, effect.reservation) not in self.released:
                    self.waiting.append((uid, effect, life))
                    self._grant()
            case do.WithdrawReservation():
                self._withdraw(uid, effect.reservation, life)
            case do.ReleaseMachine():
                self._release(uid, effect, life)
            case do.RevokeMember():
                has_passed = self.store.revoke(effect.incarnation)
                if has_passed is not None:
                    revoked = ev.MemberRevoked(incarnation=effect.incarnation, has_passed=has_passed)
                    self.soon(self._answer, uid, revoked, life)
                elif not self.journal[uid].state.is_terminal:
                    self.after(0.1, self._perform, uid, effect, life)
            case do.OpenEpoch():
                self._check_epoch_is_durable(uid, effect.epoch)
                self.store.open_epoch(uid, effect.epoch, effect.size, effect.is_new)
            case do.CloseBarrier():
                was_open = self.store.close_barrier(uid, effect.epoch)
                if was_open is not None:
                    closed = ev.BarrierClosed(epoch=effect.epoch, was_open=was_open)
                    self.soon(self._answer, uid, closed, life)
                elif not self.journal[uid].state.is_terminal:
                    self.after(0.1, self._perform, uid, effect, life)
            case do.OrderMember():
                self._order(uid, effect, life)
            case do.FenceMember():
                member = self.members.get(effect.incarnation)
                if member is not None and not member.is_gone:
                    member.fence(effect.grace_s)
                else:
                    gone = ev.MemberVanished(incarnation=effect.incarnation, message="no actor")
                    self.soon(self._answer, uid, gone, life)
            case do.DismissMember():
                member = self.members.get(effect.incarnation)
                if member is not None:
                    member.leave()
            case do.ForgetGang():
                self.store.forget(uid, effect.epoch)
            case _:
                raise AssertionError(effect)

    def _answer(self, uid: RunUid, event: ev.GangEvent, life: int) -> None:
        self.tell(uid, event, life=life)

    def _order(self, uid: RunUid, effect: do.OrderMember, life: int) -> None:
        incarnation = effect.incarnation
        if effect.machine not in self.held.get((uid, effect.reservation), ()):
            gone = ev.MemberVanished(incarnation=incarnation, message="its place is gone")
            self.soon(self._answer, uid, gone, life)
            return
        if incarnation not in self.members:
            self.members[incarnation] = SimMember(self, incarnation)
        plan = self.journal[uid].plan
        self.members[incarnation].join(
            JoinOrder(
                incarnation=incarnation,
                plan=plan,
                machine=effect.machine,
                store=NOWHERE,
                logs=NOWHERE,
                transport=Transport.PRIVATE,
            )
        )

    # ---- machines ---------------------------------------------------------------------------------

    def _grant(self) -> None:
        """All or nothing, first come first served among those that fit."""
        for request in list(self.waiting):
            uid, effect, life = request
            key = (uid, effect.reservation)
            if key in self.released:
                self.waiting.remove(request)
                continue
            if key not in self.held:
                fitting = [m for m in self.free if m not in effect.avoid]
                if len(fitting) < effect.nodes:
                    waiting = ev.ReservationWaiting(
                        reservation=effect.reservation,
                        why="Busy.",
                        is_possible=self.machine_count - len(effect.avoid) >= effect.nodes,
                    )
                    self.soon(self._answer, uid, waiting, life)
                    continue
                self.random.shuffle(fitting)
                self.held[key] = list(fitting[: effect.nodes])
                self.granted[key] = tuple(self.held[key])
                for machine in self.held[key]:
                    self.free.remove(machine)
            self.waiting.remove(request)
            reserved = ev.MachinesReserved(
                reservation=effect.reservation,
                placements=tuple(ev.Placement(machine=m, address=f"{m}.test") for m in self.granted[key]),
            )
            self.soon(self._answer, uid, reserved, life)

    def _withdraw(self, uid: RunUid, reservation: int, life: int) -> None:
        key = (uid, reservation)
        self.released.add(key)
        for machine in list(self.held.get(key, ())):
            self._give_back(key, machine)
        self.soon(self._answer, uid, ev.ReservationWithdrawn(reservation=reservation), life)
        self._grant()

    def _release(self, uid: RunUid, effect: do.ReleaseMachine, life: int) -> None:
        self._give_back((uid, effect.reservation), effect.machine)
        released = ev.MachineReleased(reservation=effect.reservation, machine=effect.machine)
        self.soon(self._answer, uid, released, life)
        self._grant()

    def _give_back(self, key: tuple[RunUid, int], machine: MachineName) -> None:
        held = self.held.get(key, [])
        if machine not in held:
            return
        held.remove(machine)
        for incarnation, member in self.members.items():
            if incarnation.run_uid == key[0] and member.machine == machine:
                member.die()
        self.free.append(machine)

    # ---- what members do --------------------------------------------------------------------------

    def process_started(self, incarnation: Incarnation) -> None:
        """A user's process lives from now on. Invariants 1 and 2 are about this moment."""
        live = self.running[incarnation.run_uid]
        if any(other.epoch != incarnation.epoch for other in live):
            raise Violation("1: two epochs of a gang have live processes")
        if not self.store.has_opened(incarnation.run_uid, incarnation.epoch):
            raise Violation("2: a process started before its barrier opened")
        if incarnation in live:
            raise Violation("2: a command was started twice")
        live[incarnation] = self.now
        self.note(incarnation.run_uid[-2:], f"rank {incarnation.rank}/{incarnation.epoch} lives")

    def process_ended(self, incarnation: Incarnation) -> None:
        """The user's process is dead."""
        self.running[incarnation.run_uid].pop(incarnation, None)

    def report(self, report: MemberReport) -> bool:
        """A member's report at the coordinator's door; True when it was taken durably."""
        uid = report.incarnation.run_uid
        if self.is_up and uid in self.cores:
            return self.tell(uid, report)
        return False

    # ---- invariants -------------------------------------------------------------------------------

    def _check_epoch_is_durable(self, uid: RunUid, epoch: Epoch) -> None:
        if epoch > self.journal[uid].epoch:
            raise Violation("3: somebody hears of an epoch that is not durable")

    def _check_the_end(self) -> None:
        if not self.is_up:
            raise Violation("9: the coordinator never came back")
        for uid, gang in self.journal.items():
            if not gang.state.is_terminal:
                raise Violation(f"9: liveness: {uid} rests in {gang.state}: {gang.message}")
            if not gang.is_released:
                raise Violation("6: machines were never released")
            if any(h.until is None for h in gang.holdings):
                raise Violation("6: the ledger has an open line")
            if self.running[uid]:
                raise Violation("1: processes outlive their run")
            self._check_ledger(gang.holdings)
        if any(self.held.values()) or len(self.free) != self.machine_count:
            raise Violation("6: the fleet still holds machines for nobody")

    @staticmethod
    def _check_ledger(holdings: list[Holding]) -> None:
        for line in holdings:
            if line.until is None or line.until < line.since:
                raise Violation("6: a ledger line ends before it begins")
        keys = [(line.machine, line.reservation) for line in holdings]
        if len(keys) != len(set(keys)):
            raise Violation("6: a machine is in the ledger twice for one reservation")

    def final_states(self) -> dict[RunUid, RunState]:
        """How every run ended."""
        return {uid: gang.state for uid, gang in self.journal.items()}
