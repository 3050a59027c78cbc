"""One simulated member: the real core of `agents.core.member`, and a model of everything around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agents.core import effects as do
from agents.core import events as ev
from agents.core.events import Arrival
from agents.core.member import Member
from mesh.ids import Incarnation
from mesh.messages import CauseEvidence, JoinOrder, ProcessExit
from mesh.reasons import Reason
from mesh.store.books import ConnectionId

if TYPE_CHECKING:
    from tests.sim.world import World

SIGTERM, SIGKILL = 15, 9


class SimMember:
    """A MemberNode actor with its keeper, launcher and command."""

    def __init__(self, world: World, incarnation: Incarnation) -> None:
        self.world = world
        self.incarnation = incarnation
        self.core = Member(address=f"rank{incarnation.rank}.test", validate=True)
        self.machine = ""
        self.connection: ConnectionId | None = None
        """To the store; None before the first request and after death."""
        self.is_gone = False
        self._alarm_at: float | None = None
        self._runs = False
        roll = world.random.random
        self.never_arrives = roll() < world.faults.never_arrives
        self.fails_to_prepare = roll() < world.faults.preparation_failure
        self.is_slow = roll() < world.faults.slow_preparation
        self.ignores_term = roll() < world.faults.ignores_term

    # ---- what it is told --------------------------------------------------------------------------

    def join(self, order: JoinOrder) -> None:
        if not self.machine and self.world.random.random() < self.world.faults.machine_loss:
            self.world.after(self.world.random.expovariate(1 / 5), self.die)
        self.machine = order.machine
        self._handle(ev.JoinOrdered(incarnation=self.incarnation, order=order))

    def fence(self, grace_s: float) -> None:
        self._handle(ev.FenceOrdered(incarnation=self.incarnation, grace_s=grace_s))

    def leave(self) -> None:
        self._handle(ev.LeaveOrdered(incarnation=self.incarnation))

    def die(self) -> None:
        """The actor's place was taken away: its keeper sees the pipe close and kills everything."""
        if self.is_gone:
            return
        self.is_gone = True
        self._end_process()
        self.world.store.connection_lost(self)

    def _handle(self, event: ev.MemberEvent) -> None:
        if self.is_gone:
            return
        for effect in self.core.handle(event, self.world.now):
            self._perform(effect)
        self._set_alarm()

    def _set_alarm(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is not None and deadline != self._alarm_at:
            self._alarm_at = deadline
            self.world.after(max(0.0, deadline - self.world.now), self._alarm)

    def _alarm(self) -> None:
        self._alarm_at = None
        self._handle(ev.DeadlinePassed(incarnation=self.incarnation))

    def _soon(self, event: ev.MemberEvent) -> None:
        self.world.soon(self._handle, event)

    # ---- what it does -----------------------------------------------------------------------------

    def _perform(self, effect: do.MemberEffect) -> None:
        incarnation = self.incarnation
        world = self.world
        match effect:
            case do.TakeLease():
                world.soon(self._take_lease)
            case do.ReleaseLease():
                world.store.release_lease(self)
            case do.Prepare():
                self._prepare()
            case do.ArriveAtBarrier():
                if not self.never_arrives:
                    world.soon(world.store.arrive, self, effect.arrival)
            case do.LaunchCommand():
                world.soon(self._launch)
            case do.StopCommand():
                ends_after = effect.grace_s if self.ignores_term else world.random.uniform(0, 0.5)
                signal = SIGKILL if self.ignores_term else SIGTERM
                world.after(ends_after, self._command_ends, ProcessExit(signal=signal), CauseEvidence())
            case do.KillEverything():
                world.soon(self._command_ends, ProcessExit(signal=SIGKILL), CauseEvidence())
            case do.HandOverLogs():
                self._soon(ev.LogsHandedOver(incarnation=incarnation))
            case do.SendReport():
                world.soon(self._send, effect)
            case do.Finish():
                self.die()
            case do.WarmLauncher() | do.AbandonPreparation() | do.FreeResources():
                pass
            case _:
                raise AssertionError(effect)

    def _take_lease(self) -> None:
        refusal = self.world.store.grant_lease(self)
        if refusal is None:
            self._handle(ev.LeaseGranted(incarnation=self.incarnation))
        elif refusal is Reason.UNKNOWN_GANG and not self.is_gone:
            self.world.after(0.1, self._take_lease)
        else:
            self._handle(ev.LeaseRefused(incarnation=self.incarnation, reason=refusal, message="no lease"))

    def _prepare(self) -> None:
        world = self.world
        delay_s = world.random.uniform(0, 500 if self.is_slow else 2)
        if self.fails_to_prepare:
            event: ev.MemberEvent = ev.PreparationFailed(
                incarnation=self.incarnation, reason=Reason.PREPARATION_FAILED, message="no disk"
            )
        else:
            arrival = Arrival(
                address=self.core.address, master_port=29500 if self.incarnation.rank == 0 else 0
            )
            event = ev.Prepared(incarnation=self.incarnation, arrival=arrival)
        world.after(delay_s, self._handle, event)

    def barrier_opened(self, arrivals: tuple[Arrival, ...]) -> None:
        self._soon(ev.BarrierOpened(incarnation=self.incarnation, arrivals=arrivals))

    def barrier_refused(self, reason: Reason) -> None:
        self._soon(ev.BarrierRefused(incarnation=self.incarnation, reason=reason, message="closed"))

    def lease_lost(self, reason: Reason) -> None:
        self._soon(ev.LeaseLost(incarnation=self.incarnation, reason=reason, message="stale"))

    def _launch(self) -> None:
        if self.is_gone or self.core.state.tree_empty:
            return
        world = self.world
        if world.random.random() < world.faults.start_failure:
            self._handle(
                ev.CommandStartFailed(
                    incarnation=self.incarnation, reason=Reason.COMMAND_NOT_FOUND, message="no such command"
                )
            )
            return
        self._runs = True
        world.process_started(self.incarnation)
        self._handle(ev.CommandStarted(incarnation=self.incarnation, pid=1000 + self.incarnation.rank))
        code = 42 if world.random.random() < world.faults.exit_badly else 0
        world.after(
            world.random.expovariate(1 / 20), self._command_ends, ProcessExit(code=code), CauseEvidence()
        )

    def _command_ends(self, exit_: ProcessExit, evidence: CauseEvidence) -> None:
        if self.is_gone:
            return
        if not self._runs:
            if self.core.state.launched and not self.core.state.tree_empty:
                # It was killed before it had come to life: the launcher says so.
                self._handle(
                    ev.CommandStartFailed(
                        incarnation=self.incarnation, reason=Reason.COMMAND_KILLED, message="killed early"
                    )
                )
            return
        self._end_process()
        self._handle(ev.CommandExited(incarnation=self.incarnation, exit=exit_))
        self._handle(ev.TreeEmpty(incarnation=self.incarnation, evidence=evidence))
        if not exit_.ok:
            self._peers_notice()

    def _peers_notice(self) -> None:
        """A dead rank breaks its peers' collectives within milliseconds."""
        world = self.world
        for other in list(world.members.values()):
            same_epoch = other.incarnation.run_uid == self.incarnation.run_uid and (
                other.incarnation.epoch == self.incarnation.epoch
            )
            suffers = same_epoch and other is not self and other._runs
            if suffers and world.random.random() < world.faults.peer_dies_of_it:
                blames = CauseEvidence(blames_peer=True)
                world.after(world.random.uniform(0, 0.3), other._command_ends, ProcessExit(code=1), blames)

    def _end_process(self) -> None:
        if self._runs:
            self._runs = False
            self.world.process_ended(self.incarnation)

    def _send(self, effect: do.SendReport) -> None:
        if self.is_gone:
            return
        answer: Any = ev.ReportAcknowledged if self.world.report(effect.report) else ev.ReportUndelivered
        self._soon(answer(incarnation=self.incarnation, report_id=effect.report_id))
