"""One simulated member: the real core of `agents.core.member`, and a model of everything around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agents.core import effects as do
from agents.core import events as ev
from agents.core.checkpoint_events import Entry
from agents.core.events import Arrival
from agents.core.lease import LeasePhase
from agents.core.member_state import Phase
from agents.member_checkpoints import HAND_OVER_AFTER_KILL_S, HAND_OVER_LIMIT_S, PATIENCE_SHARE
from mesh.ids import Incarnation, Rank, RunUid
from mesh.messages import CauseEvidence, CheckpointOrder, JoinOrder, ProcessExit
from mesh.reasons import Reason
from mesh.store import messages as ms
from tests.sim.keeper import SimKeeper
from tests.sim.process import SIGKILL, SIGTERM, SimProcess
from tests.sim.saver import SimSaver, StateDirectory
from tests.sim.wire import Wire

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.world import World

RESTORE_AGAIN_S = 2.0
TOLD_AFTER_S = 0.01
"""How long a command runs before its launcher says so."""
KEEPERS_PATIENCE_S = 160.0
"""By the usual terms: a pipe's page of "alive", and `agents.keeper.PARENT_STILL_LEASES`."""
PASSING_REASONS = frozenset({Reason.UNREACHABLE, Reason.UNKNOWN_GANG, Reason.LEASE_LOST, Reason.TIMEOUT})
"""Of `agents.barrier`."""


class SimMember:
    """A MemberNode actor with its keeper, launcher and command."""

    def __init__(self, world: World, incarnation: Incarnation, machine: Machine) -> None:
        self.world = world
        self.incarnation = incarnation
        self.machine = machine
        self.core = world.parts.member(address=f"rank{incarnation.rank}.test", validate=True)
        self.keeper: SimKeeper | None = None
        self.process: SimProcess | None = None
        self.saver: SimSaver | None = None
        self.is_gone = False
        self.is_hung = False
        """Its process stands still; its keeper, its launcher and its command do not."""
        self._hangs = 0
        self._unheard: list[ev.MemberEvent] = []
        """What it is told while it stands still."""
        self._is_stopped = False
        """The launcher has been told to stop: what it has not started yet it does not start."""
        self._alarm_at: float | None = None
        self._alarm_number = 0
        self._arrival: Arrival | None = None
        self._barrier: Wire | None = None
        roll, faults = world.roll, world.faults
        self.never_arrives = roll(faults.never_arrives)
        self.fails_to_prepare = roll(faults.preparation_failure)
        self.is_slow = roll(faults.slow_preparation)
        self.ignores_term = roll(faults.ignores_term)
        machine.members.append(self)

    @property
    def order(self) -> JoinOrder:
        order = self.core.state.order
        assert order is not None, "a command is started by an order"
        return order

    # ---- what it is told --------------------------------------------------------------------------

    def join(self, order: JoinOrder) -> None:
        self.handle(ev.JoinOrdered(incarnation=self.incarnation, order=order))

    def about_part(self, order: CheckpointOrder) -> None:
        if self.saver is not None:
            self.saver.about_part(order)

    def fence(self, grace_s: float) -> None:
        self.handle(ev.FenceOrdered(incarnation=self.incarnation, grace_s=grace_s))

    def leave(self) -> None:
        self.handle(ev.LeaveOrdered(incarnation=self.incarnation))

    def die(self) -> None:
        """The actor ends, however: its keeper sees the pipe close and kills everything."""
        if self.is_gone:
            return
        self.is_gone = True
        if self.saver is not None:
            self.saver.close()
        self._leave_barrier()
        if self.keeper is not None:
            self.machine.after(self.world.random.uniform(0.0, 0.01), self.keeper.hear_parent_died)

    def hang(self) -> None:
        """It stands still. Its keeper finds that out, in a while."""
        self.is_hung = True
        self._hangs += 1
        self.machine.after(KEEPERS_PATIENCE_S, self._found_still, self._hangs)

    def _found_still(self, number: int) -> None:
        if self.is_hung and not self.is_gone and number == self._hangs and self.keeper is not None:
            self.keeper.hear_parent_died()
            lost = ev.LeaseLost(
                incarnation=self.incarnation, reason=Reason.LEASE_LOST, message="its keeper ended"
            )
            self.handle(lost)

    def stir(self) -> None:
        """It goes on."""
        self.is_hung = False
        unheard, self._unheard = self._unheard, []
        for event in unheard:
            self.handle(event)

    def vanish(self) -> None:
        """Its machine is gone, with keeper and command."""
        self.is_gone = True
        if self.saver is not None:
            self.saver.close()
        if self.keeper is not None:
            self.keeper.vanish()

    def handle(self, event: ev.MemberEvent) -> None:
        if self.is_gone:
            return
        if self.is_hung:
            self._unheard.append(event)
            return
        for effect in self.core.handle(event, self.machine.clock()):
            self._perform(effect)
        self._set_alarm()

    def _set_alarm(self) -> None:
        deadline = self.core.next_deadline()
        if deadline == self._alarm_at:
            return
        self._alarm_at = deadline
        self._alarm_number += 1
        if deadline is not None:
            delay_s = max(0.0, deadline - self.machine.clock()) + 1e-6
            self.machine.after(delay_s, self._alarm, self._alarm_number)

    def _alarm(self, number: int) -> None:
        if number == self._alarm_number:
            self._alarm_at = None
            self.handle(ev.DeadlinePassed(incarnation=self.incarnation))

    def _soon(self, event: ev.MemberEvent) -> None:
        self.machine.after(0.002, self.handle, event)

    # ---- what it does -----------------------------------------------------------------------------

    def _perform(self, effect: do.MemberEffect) -> None:
        machine = self.machine
        random = self.world.random
        match effect:
            case do.SendReport():
                self._send(effect)
            case do.TakeLease():
                machine.after(random.uniform(0.02, 0.15), self._take_lease)
            case do.ReleaseLease():
                if self.keeper is not None:
                    self.keeper.release()
            case do.Prepare():
                self._prepare()
            case do.ArriveAtBarrier():
                if not self.never_arrives:
                    self._arrival = effect.arrival
                    self._arrive()
            case do.AbandonPreparation():
                self._arrival = None
                self._leave_barrier()
            case do.LaunchCommand():
                machine.after(random.uniform(0.01, 0.2), self._launch)
            case do.StopCommand():
                self._stop(effect.grace_s)
            case do.KillEverything():
                self._is_stopped = True
                machine.after(random.uniform(0.0, 0.02), self.kill_tree)
            case do.HandOverLogs():
                limit_s = HAND_OVER_AFTER_KILL_S if self.core.state.kills else HAND_OVER_LIMIT_S
                self._hand_over(machine.clock() + limit_s)
            case do.Finish():
                self.die()
            case do.WarmLauncher() | do.FreeResources():
                pass
            case _:
                raise AssertionError(effect)

    def _hand_over(self, until: float) -> None:
        """The last part of a checkpoint is worth a little time."""
        is_done = self.saver is None or self.saver.is_done
        if is_done or self.machine.clock() >= until:
            self._soon(ev.LogsHandedOver(incarnation=self.incarnation))
        else:
            self.machine.after(0.25, self._hand_over, until)

    def _take_lease(self) -> None:
        if not self.is_gone:
            self.keeper = SimKeeper(self)

    def _prepare(self) -> None:
        delay_s = self.world.random.uniform(0, 350 if self.is_slow else 2)
        if self.fails_to_prepare:
            event: ev.MemberEvent = ev.PreparationFailed(
                incarnation=self.incarnation, reason=Reason.PREPARATION_FAILED, message="no disk"
            )
        else:
            port = 29500 if self.incarnation.rank == 0 else 0
            arrival = Arrival(address=self.core.address, master_port=port)
            event = ev.Prepared(incarnation=self.incarnation, arrival=arrival)
            if self.order.is_clean_start and self.world.saves:
                patience_s = PATIENCE_SHARE * self.order.plan.startup_timeout_s
                self.machine.after(delay_s, self._restore, self.machine.clock() + patience_s, event)
                return
        self.machine.after(delay_s, self.handle, event)

    def _restore(self, until: float, prepared: ev.Prepared) -> None:
        """Makes the state directory what the order says, and tries for a while where the store is away."""
        reference = self.order.restore
        store = self.world.checkpoint_store
        if self.is_gone or self.core.state.phase is not Phase.PREPARING:
            return
        if reference is not None and store.is_away:
            if self.machine.clock() < until:
                self.machine.after(RESTORE_AGAIN_S, self._restore, until, prepared)
            else:
                self._cannot_restore(Reason.CHECKPOINT_STORE_FAILED, None)
            return
        entries: tuple[Entry, ...] = ()
        if reference is not None:
            found = store.fetch(self.incarnation.run_uid, reference, self.incarnation.rank)
            if found is None:
                self._cannot_restore(Reason.CHECKPOINT_CORRUPT, reference.number)
                return
            entries = found
        self.machine.state_dirs[self._place] = StateDirectory(entries)
        self.handle(prepared)

    @property
    def _place(self) -> tuple[RunUid, Rank]:
        return self.incarnation.run_uid, self.incarnation.rank

    def _cannot_restore(self, reason: Reason, number: int | None) -> None:
        self.handle(
            ev.PreparationFailed(
                incarnation=self.incarnation, reason=reason, message="not restored", damaged_checkpoint=number
            )
        )

    # ---- the barrier ------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """Over a new connection; again and again until there is an answer that counts."""
        self._leave_barrier()
        if self._arrival is None or self.is_gone:
            return
        self._barrier = Wire(self.world.store, self.machine, self)
        me = self.incarnation
        payload = f"{self._arrival.address} {self._arrival.master_port}".encode()
        key = (2, me.run_uid, me.epoch, me.rank, me.token)
        self._barrier.send(ms.Arrive, (*key, ms.START_BARRIER, payload))

    def _leave_barrier(self) -> None:
        if self._barrier is not None:
            self._barrier.close()
            self._barrier = None

    def hear(self, message: ms.Message) -> None:
        """From the store, over the barrier's connection."""
        if self._arrival is None:
            return
        me = self.incarnation
        match message:
            case ms.Opened():
                self._arrival = None
                self._leave_barrier()
                arrivals = tuple(_arrival(payload) for payload in message.payloads)
                self._soon(ev.BarrierOpened(incarnation=me, arrivals=arrivals))
            case ms.Refused() if message.reason in PASSING_REASONS:
                self.machine.after(self.world.random.uniform(0.05, 1.0), self._arrive)
            case ms.Refused():
                self._arrival = None
                self._soon(ev.BarrierRefused(incarnation=me, reason=message.reason, message="refused"))

    def hear_lost(self) -> None:
        if self._arrival is not None:
            self._barrier = None
            self.machine.after(self.world.random.uniform(0.05, 1.0), self._arrive)

    # ---- the command ------------------------------------------------------------------------------

    def _launch(self) -> None:
        if self.is_gone or self.core.state.tree_empty:
            return
        keeper = self.keeper
        if self._is_stopped or (keeper is not None and keeper.lease.state.phase is LeasePhase.OVER):
            self._start_failed(Reason.COMMAND_KILLED)  # it was killed before it had come to life
        elif self.world.roll(self.world.faults.start_failure):
            self.world.truth.failed_by_itself(self.incarnation)
            self._start_failed(Reason.COMMAND_NOT_FOUND)
        else:
            is_asking = keeper is not None and keeper.lease.state.phase is LeasePhase.ASKING
            self.process = SimProcess(self, starts_frozen=is_asking)
            if self.world.saves:
                saving = self.world.savings[self.incarnation.run_uid]
                directory = self.machine.state_dirs.setdefault(self._place, StateDirectory())
                self.saver = SimSaver(self, directory, saving)
                self.saver.start(self.process)
            pid = 1000 + self.incarnation.rank
            self.machine.after(
                TOLD_AFTER_S, self.handle, ev.CommandStarted(incarnation=self.incarnation, pid=pid)
            )

    def _start_failed(self, reason: Reason) -> None:
        self.handle(
            ev.CommandStartFailed(incarnation=self.incarnation, reason=reason, message="no such command")
        )

    def _stop(self, grace_s: float) -> None:
        self._is_stopped = True
        process = self.process
        if process is None:
            return  # the launcher starts nothing any more, and says so
        self.machine.after(grace_s, self.kill_tree)
        if not self.ignores_term:
            term = (ProcessExit(signal=SIGTERM), CauseEvidence())
            self.machine.after(self.world.random.uniform(0.0, min(0.5, grace_s)), process.end, *term)

    def kill_tree(self) -> None:
        process = self.process
        if process is not None and process.is_alive:
            world = self.world
            if not process.stuck_until and world.roll(world.faults.stuck_in_the_kernel):
                process.stuck_until = world.now + world.random.uniform(1.0, 60.0)
            process.end(ProcessExit(signal=SIGKILL), CauseEvidence())
            if process.is_alive:
                failed = ev.KillFailed(
                    incarnation=self.incarnation, pids=(7,), message="process 7 does not die"
                )
                self.machine.after(4.0, self._kill_failed, failed)

    def _kill_failed(self, event: ev.KillFailed) -> None:
        if self.process is not None and self.process.is_alive:
            self.handle(event)

    def process_ended(self, exit_: ProcessExit, evidence: CauseEvidence) -> None:
        """The launcher sees it, a little later, and after it has told the start."""
        delay_s = TOLD_AFTER_S + self.world.random.uniform(0.001, 0.1)
        self.machine.after(delay_s, self._tell_end, exit_, evidence)

    def _tell_end(self, exit_: ProcessExit, evidence: CauseEvidence) -> None:
        self.handle(ev.CommandExited(incarnation=self.incarnation, exit=exit_))
        if self.saver is not None:
            self.saver.command_ended(ok=exit_.ok)
        self.handle(ev.TreeEmpty(incarnation=self.incarnation, evidence=evidence))

    # ---- reports ----------------------------------------------------------------------------------

    def _send(self, effect: do.SendReport) -> None:
        report, report_id = effect.report, effect.report_id

        def answered(is_taken: bool) -> None:
            answer: Any = ev.ReportAcknowledged if is_taken else ev.ReportUndelivered
            self.handle(answer(incarnation=self.incarnation, report_id=report_id))

        self.world.network.report(self.machine, report, answered)


def _arrival(payload: bytes) -> Arrival:
    address, master_port = payload.decode().split()
    return Arrival(address=address, master_port=int(master_port))
