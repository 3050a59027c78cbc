"""A member's life, decided: one rank of one epoch, from the order to join until nothing of it is left.

Rules of this file:
1. `handle(event, now)` is the only door, and never raises for what the world can do. Time is an argument.
2. One gate at the top: an event of another incarnation changes nothing. So does an event that the
   phase does not expect, and an order that is repeated.
3. A phase is written by `_enter` only, along `TRANSITIONS`.
4. The command is launched at most once, only while the lease is held, only after the barrier opened, and
   never once a fence has been ordered or the lease is lost.
5. Fenced means: nothing of this incarnation runs. It is entered only when no command was ever
   launched, or when its tree is known to be empty.
6. A lost lease waits for nobody: everything is killed at once, whatever grace was promised.
7. Reports are kept in order and repeated until acknowledged; the oldest one goes first, one at a time.

Theory of operation. The phases run Idle → Leasing → Preparing → Arrived → Launching → Running → Exited.
Exited means that the member's part is over (the command ended, or never could start), and that it
keeps its lease and its machine until the coordinator decides what comes next. From every phase, an order
to fence or a lost lease leads through Fencing (stop, then kill, then hand the logs over) to Fenced.
Gone is the end of the object. What is done about each effect is `agents.member`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from agents.core import effects as do
from agents.core import events as ev
from agents.core.member_state import (
    KILL_MARGIN_S,
    KILL_REPEAT_S,
    LOGS_LIMIT_S,
    REPORT_ANSWER_S,
    REPORT_REPEAT_FIRST_S,
    REPORT_REPEAT_MAX_S,
    REPORTS_MAX,
    TRANSITIONS,
    MemberState,
    Phase,
)
from mesh.ids import Incarnation
from mesh.messages import (
    JoinOrder,
    MemberArrived,
    MemberExited,
    MemberFenced,
    MemberFenceFailed,
    MemberPreparationFailed,
    MemberRegistered,
    MemberReport,
    MemberStarted,
    MemberStartFailed,
)
from mesh.reasons import Reason


@dataclass(slots=True)
class Member:
    """The pure core. `handle` returns what the shell must do, in order.

    Args:
        address: where peers reach this member.
        wall_offset_s: wall clock minus the clock of `now`, for the `at` of reports (for people only).
        validate: check every invariant after every event (tests and simulation).
    """

    address: str
    wall_offset_s: float = 0.0
    validate: bool = False
    state: MemberState = field(default_factory=MemberState)
    _out: list[do.MemberEffect] = field(default_factory=list)

    def handle(self, event: ev.MemberEvent, now: float) -> list[do.MemberEffect]:
        """Takes one event and returns the effects that it leads to."""
        if self._passes_gate(event):
            _HANDLERS[type(event)](self, event, now)
            self._send_due_report(now)
        effects, self._out = self._out, []
        if self.validate:
            self.check()
        return effects

    def next_deadline(self) -> float | None:
        """When `DeadlinePassed` is wanted; None when nothing is due."""
        state = self.state
        times = [t for t in (state.report_due, state.kill_at, state.logs_until) if t is not None]
        return min(times, default=None)

    def snapshot(self) -> MemberState:
        """A copy of the state: equal before and after an event that changed nothing."""
        return replace(self.state)

    def check(self) -> None:
        """Asserts the invariants of this file."""
        state = self.state
        phase = state.phase
        assert (state.incarnation is None) <= (phase in (Phase.IDLE, Phase.GONE))
        assert state.launched or state.tree_empty
        assert state.launched <= (phase not in _BEFORE_LAUNCH)
        assert state.launched <= bool(state.arrivals)
        assert state.tree_empty or phase in (Phase.LAUNCHING, Phase.RUNNING, Phase.EXITED, Phase.FENCING)
        assert state.tree_empty or state.lease_held or phase is Phase.FENCING
        assert (state.exit is None) or state.launched
        assert len(state.reports) <= REPORTS_MAX
        assert (state.report_due is None) == (not state.reports)
        assert (state.kill_at is None) or (phase is Phase.FENCING and not state.tree_empty)
        assert phase is not Phase.FENCING or state.kill_at is not None or state.logs_until is not None
        assert phase not in (Phase.FENCED, Phase.GONE) or not state.lease_held

    def _passes_gate(self, event: ev.MemberEvent) -> bool:
        if self.state.phase is Phase.GONE:
            return False
        if self.state.incarnation is None:
            return isinstance(event, (ev.JoinOrdered, ev.FenceOrdered, ev.LeaveOrdered))
        return event.incarnation == self.state.incarnation

    def _on_join_ordered(self, event: ev.JoinOrdered, now: float) -> None:
        if self.state.phase is not Phase.IDLE:
            return
        self.state.incarnation = event.incarnation
        self.state.order = event.order
        self._enter(Phase.LEASING)
        self._do(do.TakeLease(incarnation=event.incarnation, order=event.order))
        self._do(do.WarmLauncher(incarnation=event.incarnation))

    def _on_fence_ordered(self, event: ev.FenceOrdered, now: float) -> None:
        if self.state.phase is Phase.FENCED:
            # The coordinator asks again because it does not know the answer (it may have crashed).
            if not any(isinstance(report, MemberFenced) for _, report in self.state.reports):
                self._report_fenced(now)
            return
        if self.state.phase is Phase.IDLE:
            self.state.incarnation = event.incarnation
        self._fence(now, grace_s=max(0.0, event.grace_s))

    def _on_leave_ordered(self, event: ev.LeaveOrdered, now: float) -> None:
        if self.state.phase is Phase.IDLE:
            self._enter(Phase.GONE)
            self._do(do.Finish(incarnation=event.incarnation))
            return
        if self.state.leaving:
            return
        self.state.leaving = True
        if self.state.phase is Phase.FENCED:
            self._leave()
        else:
            self._fence(now, grace_s=0.0)

    def _on_lease_granted(self, event: ev.LeaseGranted, now: float) -> None:
        if self.state.phase is not Phase.LEASING:
            return
        order = self._order()
        self.state.lease_held = True
        self._enter(Phase.PREPARING)
        self._report(
            MemberRegistered(
                incarnation=event.incarnation,
                at=self._wall(now),
                machine=order.machine,
                address=self.address,
            ),
            now,
        )
        self._do(do.Prepare(incarnation=event.incarnation, order=order))

    def _on_lease_refused(self, event: ev.LeaseRefused, now: float) -> None:
        if self.state.phase is Phase.LEASING:
            self._refuse(event.reason, event.message, now)

    def _on_lease_lost(self, event: ev.LeaseLost, now: float) -> None:
        if not self.state.lease_held:
            return
        self.state.lease_held = False
        if self.state.fence_reason is None and self.state.phase is not Phase.FENCING:
            self.state.fence_reason = event.reason
            self.state.fence_message = event.message
        self._fence(now, grace_s=0.0, kill=f"The lease is lost: {event.message}")

    def _on_prepared(self, event: ev.Prepared, now: float) -> None:
        if self.state.phase is not Phase.PREPARING:
            return
        self._enter(Phase.ARRIVED)
        self._do(
            do.ArriveAtBarrier(incarnation=event.incarnation, order=self._order(), arrival=event.arrival)
        )
        self._report(MemberArrived(incarnation=event.incarnation, at=self._wall(now)), now)

    def _on_preparation_failed(self, event: ev.PreparationFailed, now: float) -> None:
        if self.state.phase is Phase.PREPARING:
            self._refuse(event.reason, event.message, now, damaged_checkpoint=event.damaged_checkpoint)

    def _on_barrier_refused(self, event: ev.BarrierRefused, now: float) -> None:
        if self.state.phase is Phase.ARRIVED:
            self._refuse(event.reason, event.message, now)

    def _refuse(
        self, reason: Reason, message: str, now: float, *, damaged_checkpoint: int | None = None
    ) -> None:
        """The member cannot take part: it fences itself when its epoch is over, else says why and waits."""
        incarnation = self._incarnation()
        if reason is Reason.STALE_EPOCH:
            self.state.fence_reason = reason
            self.state.fence_message = message
            self._fence(now, grace_s=0.0)
            return
        self._enter(Phase.EXITED)
        self._do(do.AbandonPreparation(incarnation=incarnation))
        self._report(
            MemberPreparationFailed(
                incarnation=incarnation,
                at=self._wall(now),
                reason=reason,
                message=message,
                damaged_checkpoint=damaged_checkpoint,
            ),
            now,
        )

    def _on_barrier_opened(self, event: ev.BarrierOpened, now: float) -> None:
        if self.state.phase is not Phase.ARRIVED:
            return
        order = self._order()
        if len(event.arrivals) != order.plan.nodes:
            self._refuse(
                Reason.PROTOCOL,
                f"The barrier opened with {len(event.arrivals)} ranks; the run has {order.plan.nodes}.",
                now,
            )
            return
        self.state.arrivals = event.arrivals
        self.state.launched = True
        self.state.tree_empty = False
        self._enter(Phase.LAUNCHING)
        self._do(do.LaunchCommand(incarnation=event.incarnation, order=order, arrivals=event.arrivals))

    def _on_command_started(self, event: ev.CommandStarted, now: float) -> None:
        if self.state.phase is not Phase.LAUNCHING:
            return
        self._enter(Phase.RUNNING)
        self._report(
            MemberStarted(
                incarnation=event.incarnation,
                at=self._wall(now),
                pid=event.pid,
                master_port=self.state.arrivals[0].master_port,
                path=event.path,
            ),
            now,
        )

    def _on_command_start_failed(self, event: ev.CommandStartFailed, now: float) -> None:
        if self.state.phase not in (Phase.LAUNCHING, Phase.FENCING) or self.state.tree_empty:
            return
        if self.state.phase is Phase.LAUNCHING:
            self._enter(Phase.EXITED)
        is_its_own = self.state.kills == 0 and event.reason is not Reason.EPOCH_ENDED
        if self.state.fence_reason is None and is_its_own:
            self._report(
                MemberStartFailed(
                    incarnation=event.incarnation,
                    at=self._wall(now),
                    reason=event.reason,
                    message=event.message,
                ),
                now,
            )
        self._tree_is_empty(now)

    def _on_command_exited(self, event: ev.CommandExited, now: float) -> None:
        if self.state.tree_empty or self.state.exit is not None:
            return
        if self.state.phase is Phase.RUNNING:
            self.state.exit_to_report = True
            self._enter(Phase.EXITED)
        elif self.state.phase is not Phase.FENCING:
            return
        self.state.exit = event.exit

    def _on_tree_empty(self, event: ev.TreeEmpty, now: float) -> None:
        if self.state.tree_empty or self.state.phase not in (Phase.EXITED, Phase.FENCING):
            return
        if self.state.exit_to_report:
            assert self.state.exit is not None
            self._report(
                MemberExited(
                    incarnation=event.incarnation,
                    at=self._wall(now),
                    exit=self.state.exit,
                    evidence=event.evidence,
                    last_lines=event.last_lines,
                ),
                now,
            )
            self.state.exit_to_report = False
        self._tree_is_empty(now)

    def _tree_is_empty(self, now: float) -> None:
        self.state.tree_empty = True
        self.state.kill_at = None
        if self.state.phase is Phase.FENCING:
            self._hand_over_logs(now)

    def _on_kill_failed(self, event: ev.KillFailed, now: float) -> None:
        if self.state.phase in (Phase.EXITED, Phase.FENCING) and not self.state.tree_empty:
            self._tell_fence_failure(event.message, event.pids, now)

    def _fence(self, now: float, *, grace_s: float, kill: str = "") -> None:
        """Every way into the fence, and every tightening of it."""
        state = self.state
        if state.phase is not Phase.FENCING:
            if not state.launched:
                self._enter_fenced(now)
                return
            self._enter(Phase.FENCING)
            if state.tree_empty:
                self._hand_over_logs(now)
                return
        if state.tree_empty:
            return
        if kill:
            self._kill(kill, now)
            return
        stop_by = now + grace_s
        if state.kills == 0 and (state.stop_by is None or stop_by < state.stop_by):
            state.stop_by = stop_by
            state.kill_at = stop_by + KILL_MARGIN_S
            self._do(do.StopCommand(incarnation=self._incarnation(), grace_s=grace_s))

    def _kill(self, why: str, now: float) -> None:
        self.state.kills += 1
        self.state.kill_at = now + KILL_REPEAT_S
        self._do(do.KillEverything(incarnation=self._incarnation(), why=why))

    def _hand_over_logs(self, now: float) -> None:
        self.state.logs_until = now + LOGS_LIMIT_S
        self._do(do.HandOverLogs(incarnation=self._incarnation()))

    def _on_logs_handed_over(self, event: ev.LogsHandedOver, now: float) -> None:
        if self.state.logs_until is not None:
            self._enter_fenced(now)

    def _tell_fence_failure(self, message: str, pids: tuple[int, ...], now: float) -> None:
        if self.state.fence_failure_told:
            return
        self.state.fence_failure_told = True
        self._report(
            MemberFenceFailed(
                incarnation=self._incarnation(), at=self._wall(now), message=message, pids=pids
            ),
            now,
        )

    def _enter_fenced(self, now: float) -> None:
        incarnation = self._incarnation()
        was_idle = self.state.order is None
        self._enter(Phase.FENCED)
        self.state.logs_until = None
        self.state.lease_held = False
        if not was_idle:
            self._do(do.AbandonPreparation(incarnation=incarnation))
            self._do(do.FreeResources(incarnation=incarnation))
        self._report_fenced(now)
        if not was_idle:
            self._do(do.ReleaseLease(incarnation=incarnation))
        if self.state.leaving:
            self._leave()

    def _report_fenced(self, now: float) -> None:
        self._report(
            MemberFenced(
                incarnation=self._incarnation(),
                at=self._wall(now),
                exit=self.state.exit,
                reason=self.state.fence_reason,
                message=self.state.fence_message,
            ),
            now,
        )

    def _leave(self) -> None:
        incarnation = self._incarnation()
        self._enter(Phase.GONE)
        self._forget_reports()
        self._do(do.Finish(incarnation=incarnation))

    def _report(self, report: MemberReport, now: float) -> None:
        state = self.state
        if not state.reports:
            state.report_due = now
            state.report_tries = 0
        state.reports = (*state.reports, (state.next_report_id, report))
        state.next_report_id += 1

    def _send_due_report(self, now: float) -> None:
        state = self.state
        if state.report_due is None or now < state.report_due:
            return
        report_id, report = state.reports[0]
        state.report_due = now + REPORT_ANSWER_S
        self._do(do.SendReport(incarnation=report.incarnation, report_id=report_id, report=report))

    def _on_report_acknowledged(self, event: ev.ReportAcknowledged, now: float) -> None:
        if not self._is_oldest_report(event.report_id):
            return
        self.state.reports = self.state.reports[1:]
        self.state.report_tries = 0
        self.state.report_due = now if self.state.reports else None

    def _on_report_undelivered(self, event: ev.ReportUndelivered, now: float) -> None:
        if not self._is_oldest_report(event.report_id):
            return
        pause_s = min(REPORT_REPEAT_MAX_S, REPORT_REPEAT_FIRST_S * 2.0**self.state.report_tries)
        self.state.report_tries = min(self.state.report_tries + 1, 16)
        self.state.report_due = now + pause_s

    def _is_oldest_report(self, report_id: int) -> bool:
        return bool(self.state.reports) and self.state.reports[0][0] == report_id

    def _forget_reports(self) -> None:
        self.state.reports = ()
        self.state.report_due = None
        self._out = [effect for effect in self._out if not isinstance(effect, do.SendReport)]

    def _on_deadline_passed(self, event: ev.DeadlinePassed, now: float) -> None:
        state = self.state
        if state.kill_at is not None and now >= state.kill_at:
            if state.kills:
                self._tell_fence_failure(
                    f"Something of {self._incarnation()} was killed {state.kills} times and is still there.",
                    (),
                    now,
                )
            self._kill("The grace period is over and the command's processes are still there.", now)
        if state.logs_until is not None and now >= state.logs_until:
            self._enter_fenced(now)

    def _enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.state.phase], f"{self.state.phase} -> {phase}"
        self.state.phase = phase

    def _do(self, effect: do.MemberEffect) -> None:
        self._out.append(effect)

    def _incarnation(self) -> Incarnation:
        assert self.state.incarnation is not None
        return self.state.incarnation

    def _order(self) -> JoinOrder:
        assert self.state.order is not None
        return self.state.order

    def _wall(self, now: float) -> float:
        return now + self.wall_offset_s


_BEFORE_LAUNCH = (Phase.IDLE, Phase.LEASING, Phase.PREPARING, Phase.ARRIVED)

_HANDLERS: Mapping[type[ev.MemberEvent], Callable[..., None]] = {
    ev.JoinOrdered: Member._on_join_ordered,
    ev.FenceOrdered: Member._on_fence_ordered,
    ev.LeaveOrdered: Member._on_leave_ordered,
    ev.LeaseGranted: Member._on_lease_granted,
    ev.LeaseRefused: Member._on_lease_refused,
    ev.LeaseLost: Member._on_lease_lost,
    ev.Prepared: Member._on_prepared,
    ev.PreparationFailed: Member._on_preparation_failed,
    ev.BarrierOpened: Member._on_barrier_opened,
    ev.BarrierRefused: Member._on_barrier_refused,
    ev.CommandStarted: Member._on_command_started,
    ev.CommandStartFailed: Member._on_command_start_failed,
    ev.CommandExited: Member._on_command_exited,
    ev.TreeEmpty: Member._on_tree_empty,
    ev.KillFailed: Member._on_kill_failed,
    ev.LogsHandedOver: Member._on_logs_handed_over,
    ev.ReportAcknowledged: Member._on_report_acknowledged,
    ev.ReportUndelivered: Member._on_report_undelivered,
    ev.DeadlinePassed: Member._on_deadline_passed,
}
