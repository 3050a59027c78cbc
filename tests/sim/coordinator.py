"""The simulated coordinator: the real gang cores, a journal, and what `coordinator.gang_driver` does around them.

A life ends at any journal write, before any effect, or at any moment; what it had sent is under way, what it had not
is lost, and the next life knows what is in the journal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from coordinator.checkpoint_store import Lacking
from coordinator.core import effects as do
from coordinator.core import events as ev
from coordinator.core.checkpoints import CleanCheckpointStore, CommitCheckpoint
from coordinator.core.gang import GangCore
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Gang
from mesh.ids import Epoch, IncarnationToken, RunUid
from mesh.messages import JoinOrder, MemberReport
from mesh.plan import Endpoint
from mesh.states import FailurePolicy, RunState
from tests.sim.tasks import DOWN, GONE, Begin, Down, Resume, Step, Task

if TYPE_CHECKING:
    from tests.sim.world import World

NOWHERE = Endpoint(host="127.0.0.1", port=1, secret="")
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 5.0
Done = Callable[[bool], None]
_RESTING = (RunState.PENDING, RunState.SUSPENDED)


@dataclass(slots=True, eq=False)
class _Shell:
    """What the driver of one gang holds besides its core, in one life."""

    core: GangCore
    inbox: list[tuple[ev.GangEvent, Done | None]] = field(default_factory=list)
    """What waits while the journal cannot be written."""
    is_blocked: bool = False
    alarm: float | None = None


class SimCoordinator:
    """One life after the other, over one journal."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.journal: dict[RunUid, Gang] = {}
        """What is durable."""
        self.life = 0
        self.is_up = True
        self.crashes = 0
        self.writes = 0
        self.effects = 0
        self.disk_full_until = 0.0
        self._shells: dict[RunUid, _Shell] = {}
        self._tasks: dict[tuple[Any, ...], Task] = {}
        self.line = self.world.parts.line(self)

    # ---- gangs ------------------------------------------------------------------------------------

    def submit(self, gang: Gang) -> None:
        """A run is in the journal; its core is told once the coordinator is up."""
        self.journal[gang.uid] = gang.snapshot()
        if self.is_up:
            self._adopt(gang)
            self.tell(gang.uid, ev.RunAccepted())

    def _adopt(self, gang: Gang) -> None:
        core = self.world.parts.gang_core(
            gang,
            new_token=self._token,
            checks_network=self.world.checks_network,
            validate=self.world.parts.validates_gangs,
        )
        self._shells[gang.uid] = _Shell(core)

    def _token(self) -> IncarnationToken:
        return IncarnationToken(f"{self.world.random.getrandbits(32):08x}")

    def gang(self, uid: RunUid) -> Gang | None:
        """As the core of this life sees it."""
        shell = self._shells.get(uid)
        return None if shell is None else shell.core.gang

    def live_gangs(self) -> list[Gang]:
        gangs = (shell.core.gang for shell in self._shells.values())
        return [g for g in gangs if not g.state.is_terminal and g.state not in _RESTING]

    def live_gang(self, uid: RunUid, epoch: Epoch) -> Gang | None:
        return next((g for g in self.live_gangs() if g.uid == uid and g.epoch == epoch), None)

    # ---- events -----------------------------------------------------------------------------------

    def report(self, report: MemberReport, reply: Done) -> None:
        """A member's report at the door; answered when what it changed is durable."""
        if not self.tell(report.incarnation.run_uid, report, reply):
            reply(False)

    def tell(self, uid: RunUid, event: ev.GangEvent, done: Done | None = None) -> bool:
        """Hands an event to a gang's driver. False when there is none."""
        shell = self._shells.get(uid)
        if shell is None or not self.is_up:
            return False
        shell.inbox.append((event, done))
        if not shell.is_blocked:
            self._handle(uid, shell)
        return True

    def _handle(self, uid: RunUid, shell: _Shell) -> None:
        """Everything that waits in the inbox, as one batch."""
        core, world = shell.core, self.world
        letters, shell.inbox = shell.inbox, []
        now = ev.Now(mono=world.now, wall=world.now)
        effects: list[do.GangEffect] = []
        is_dirty = False
        for event, _ in letters:
            answer = core.handle(event, now)
            if answer and isinstance(answer[0], do.Persist):
                is_dirty = True
                answer = answer[1:]
                if world.keeps_log:
                    world.note(
                        uid[-1:], type(event).__name__, _about(event), "->", core.gang.state, core.gang.epoch
                    )
            effects += answer
        dones = [done for _, done in letters if done is not None]
        if is_dirty:
            self._persist(uid, shell, effects, dones, 0)
        else:
            self._go_on(uid, shell, effects, dones)

    # ---- the journal ------------------------------------------------------------------------------

    def _persist(
        self, uid: RunUid, shell: _Shell, effects: list[do.GangEffect], dones: list[Done], tries: int
    ) -> None:
        world = self.world
        if self._shells.get(uid) is not shell:
            return  # of a life that is over
        if self.disk_full_until > world.now:
            shell.is_blocked = True
            pause_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2.0**tries)
            world.after(pause_s, self._persist, uid, shell, effects, dones, tries + 1)
            return
        self.writes += 1
        faults = world.faults
        is_crash, is_durable = self.writes in faults.crash_writes, faults.crash_writes.get(self.writes, True)
        if not is_crash and world.roll(faults.crash_at_write):
            is_crash, is_durable = True, world.random.random() < 0.5
        if is_durable:
            # A core that checks itself has a copy already, of its state after the last event that changed it.
            self.commit(uid, shell.core._checked or shell.core.gang.snapshot())
        if is_crash:
            self.crash()
            return
        shell.is_blocked = False
        self._go_on(uid, shell, effects, dones)
        if shell.inbox and self._shells.get(uid) is shell:
            self._handle(uid, shell)

    def commit(self, uid: RunUid, gang: Gang) -> None:
        """It is durable from here on."""
        before = self.journal[uid]
        self.journal[uid] = gang
        self.world.truth.committed(before, gang)
        if gang.state is not before.state:
            self.world.incidents.state_entered(gang)
        elif _has_rank_away(before, gang):
            self.world.incidents.rank_away(gang)

    def _go_on(self, uid: RunUid, shell: _Shell, effects: list[do.GangEffect], dones: list[Done]) -> None:
        for done in dones:
            done(True)
        world = self.world
        for effect in effects:
            self.effects += 1
            if self.effects in world.faults.crash_effects or world.roll(world.faults.crash_at_effect):
                self.crash()
                return
            self._perform(uid, effect)
        deadline = shell.core.next_deadline()
        if deadline != shell.alarm:
            shell.alarm = deadline
            if deadline is not None:
                world.at(max(world.now, deadline), self._alarm, uid, shell, deadline)

    def _alarm(self, uid: RunUid, shell: _Shell, deadline: float) -> None:
        if self._shells.get(uid) is shell and shell.alarm == deadline:
            shell.alarm = None
            self.tell(uid, ev.TimePassed())

    # ---- its lives --------------------------------------------------------------------------------

    def crash(self) -> None:
        """This life is over."""
        if not self.is_up:
            return
        world = self.world
        world.note("--- the coordinator crashes")
        self.crashes += 1
        self.is_up = False
        world.truth.coordinator_crashed()
        self._shells = {}
        for task in self._tasks.values():
            task.cancel()
        self._tasks = {}
        self.line.close()
        world.after(world.random.uniform(0.5, 4.0), self._recover)

    def _recover(self) -> None:
        self.world.note("--- the coordinator is back")
        self.life += 1
        self.is_up = True
        self.recover_journal()
        self.line = self.world.parts.line(self)
        for gang in list(self.journal.values()):
            copy = gang.snapshot()
            if self.crashes % 8 == 1:  # the text form, now and then: it costs more than all the rest
                copy = gang_of(json.loads(json.dumps(record_of(copy))))
            self._adopt(copy)
        for uid in list(self.journal):
            if not self.tell(uid, ev.CoordinatorRecovered()):
                return  # it died of the write already
        self.line.connect()

    def recover_journal(self) -> None:
        """Reads what is durable."""
        for gang in self.journal.values():
            self.world.truth.read_back(gang)

    # ---- effects ----------------------------------------------------------------------------------

    def spawn(self, key: tuple[Any, ...], gen: Step[None]) -> None:
        """The one maker of tasks: one per key."""
        if key in self._tasks or not self.is_up:
            gen.close()
            return
        task = self._tasks[key] = Task(gen, lambda ended: self._ended(key, ended))
        task.step()

    def _ended(self, key: tuple[Any, ...], task: Task) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    def stop(self, key: tuple[Any, ...]) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def _perform(self, uid: RunUid, effect: do.GangEffect) -> None:
        line, fleet = self.line, self.world.fleet
        match effect:
            case do.ReserveMachines():
                self.spawn((uid, "reserve", effect.reservation), self._reserve(uid, effect))
            case do.WithdrawReservation():
                self.stop((uid, "reserve", effect.reservation))
                self.spawn((uid, "withdraw", effect.reservation), self._withdraw(uid, effect))
            case do.ReleaseMachine():
                key = (uid, "release", effect.reservation, effect.machine)
                self.spawn(key, self._release(uid, effect))
            case do.OpenEpoch():
                self.world.truth.epoch_heard(uid, effect.epoch)
                opening = lambda: line.open_epoch(uid, effect.epoch, effect.size, effect.is_new)  # noqa: E731
                self.spawn((uid, "open", effect.epoch), self._insist_on(opening))
            case do.CheckNetwork():
                self.spawn((uid, "check", effect.number), self._check(uid, effect))
            case do.CloseBarrier():
                for key in [k for k in self._tasks if k[:2] == (uid, "check")]:
                    self.stop(key)
                self.spawn((uid, "close", effect.epoch), self._close_barrier(uid, effect))
            case do.OrderMember():
                self.spawn((uid, "order", effect.incarnation), self._order(uid, effect))
            case do.AdmitMember():
                self.spawn((uid, "admit", effect.incarnation), self._admit(uid, effect))
            case do.RevokeMember():
                self.stop((uid, "admit", effect.incarnation))
                self.stop((uid, "order", effect.incarnation))
                self.spawn((uid, "revoke", effect.incarnation), self._revoke(uid, effect))
            case do.FenceMember():
                self.spawn((uid, "fence", effect.incarnation), self._fence(uid, effect))
            case do.ExpireLease():
                self.spawn((uid, "expire", effect.incarnation), self._expire(uid, effect))
            case do.TellAboutPart() | CommitCheckpoint() | CleanCheckpointStore():
                self._perform_checkpoint(uid, effect)
            case do.DismissMember():
                for what in ("order", "fence", "expire", "question", "lost part"):
                    self.stop((uid, what, effect.incarnation))
                asking = self._ask(fleet.dismiss(effect.incarnation))
                self.spawn((uid, "dismiss", effect.incarnation), asking)
            case do.ForgetGang():
                for key in [
                    k
                    for k in self._tasks
                    if k[0] == uid and k[1] in ("open", "close", "revoke", "expire", "admit")
                ]:
                    self.stop(key)
                self.spawn(
                    (uid, "forget", effect.epoch), self._insist_on(lambda: line.forget(uid, effect.epoch))
                )
            case _:
                raise AssertionError(effect)

    def _perform_checkpoint(
        self, uid: RunUid, effect: do.TellAboutPart | CommitCheckpoint | CleanCheckpointStore
    ) -> None:
        store = self.world.checkpoint_store
        match effect:
            case do.TellAboutPart():
                if effect.question is not None:
                    self.stop((uid, "question", effect.incarnation))
                what = "lost part" if effect.question is None else "question"
                asking = self._ask(self.world.fleet.tell_about_part(effect))
                self.spawn((uid, what, effect.incarnation), asking)
            case CommitCheckpoint():
                for key in [k for k in self._tasks if k[:2] == (uid, "commit") and k[2] != effect.number]:
                    self.stop(key)
                self.spawn((uid, "commit", effect.number), self._commit_checkpoint(uid, effect))
            case CleanCheckpointStore():
                self.stop((uid, "clean"))
                self.spawn((uid, "clean"), self._ask(store.clean(uid, effect)))

    def _commit_checkpoint(self, uid: RunUid, wish: CommitCheckpoint) -> Step[None]:
        done = yield from self._ask(self.world.checkpoint_store.commit(uid, wish))
        event: ev.GangEvent
        if isinstance(done, Lacking):
            event = ev.CheckpointLacking(number=wish.number, parts=done.parts, message=done.message)
        else:
            event = ev.CheckpointWritten(
                number=wish.number, uri=done.uri, size_bytes=done.size_bytes, created_at=done.created_at
            )
        self.tell(uid, event)

    def _sleep(self, for_s: float) -> Begin:
        def begin(resume: Resume) -> None:
            self.world.after(for_s, resume, None)

        return begin

    def _ask(self, begin: Begin) -> Step[Any]:
        """Asks until there is an answer."""
        pause_s = RETRY_FIRST_S
        while (answer := (yield begin)) is DOWN:
            yield self._sleep(pause_s)
            pause_s = min(RETRY_MAX_S, pause_s * 2)
        return answer

    def _insist_on(self, begin_work: Callable[[], Step[Any]]) -> Step[Any]:
        """Does the work again until it is done."""
        pause_s = RETRY_FIRST_S
        while True:
            try:
                return (yield from begin_work())
            except Down:
                yield self._sleep(pause_s)
                pause_s = min(RETRY_MAX_S, pause_s * 2)

    def _reserve(self, uid: RunUid, effect: do.ReserveMachines) -> Step[None]:
        placements = yield self.world.fleet.reserve(uid, effect)
        self.tell(uid, ev.MachinesReserved(reservation=effect.reservation, placements=placements))

    def _withdraw(self, uid: RunUid, effect: do.WithdrawReservation) -> Step[None]:
        yield self.world.fleet.withdraw(uid, effect.reservation)
        self.tell(uid, ev.ReservationWithdrawn(reservation=effect.reservation))

    def _release(self, uid: RunUid, effect: do.ReleaseMachine) -> Step[None]:
        yield self._sleep(0.05)  # dismissals first
        yield self.world.fleet.release(uid, effect)
        self.tell(uid, ev.MachineReleased(reservation=effect.reservation, machine=effect.machine))

    def _check(self, uid: RunUid, effect: do.CheckNetwork) -> Step[None]:
        world = self.world
        yield self._sleep(world.random.uniform(0.3, 5.0))
        if world.roll(world.faults.network_silent):
            return
        verdict = ev.NetworkChecked(number=effect.number, message="Nothing is wrong.")
        if world.roll(world.faults.network_unchecked):
            verdict = replace(verdict, message="No actor could be made.", is_performed=False)
        elif world.roll(world.faults.network_refuses):
            rank = world.random.choice(effect.fresh)
            machine = dict(effect.machines)[rank]
            refusal = ev.NetworkRefusal(rank=rank, machine=machine, message="Nobody reaches it.")
            verdict = replace(verdict, message="Something is wrong.", refusals=(refusal,))
        world.truth.network_answered(uid, verdict)
        self.tell(uid, verdict)

    def _close_barrier(self, uid: RunUid, effect: do.CloseBarrier) -> Step[None]:
        was_open = yield from self._insist_on(lambda: self.line.close_barrier(uid, effect.epoch))
        self.tell(uid, ev.BarrierClosed(epoch=effect.epoch, was_open=was_open))

    def _revoke(self, uid: RunUid, effect: do.RevokeMember) -> Step[None]:
        has_passed = yield from self._insist_on(lambda: self.line.revoke(effect.incarnation))
        self.tell(uid, ev.MemberRevoked(incarnation=effect.incarnation, has_passed=has_passed))

    def _admit(self, uid: RunUid, effect: do.AdmitMember) -> Step[None]:
        admitting = lambda: self.line.admit(  # noqa: E731
            effect.incarnation, effect.instead_of, effect.alive_since
        )
        is_admitted = yield from self._insist_on(admitting)
        self.tell(uid, ev.MemberAdmitted(incarnation=effect.incarnation, is_admitted=is_admitted))

    def _order(self, uid: RunUid, effect: do.OrderMember) -> Step[None]:
        order = JoinOrder(
            incarnation=effect.incarnation,
            plan=self.journal[uid].plan,
            machine=effect.machine,
            store=NOWHERE,
            logs=NOWHERE,
            checkpoints="sim://" if self.world.saves else None,
            is_clean_start=effect.is_clean_start,
            restore=effect.restore,
            is_left_behind=effect.is_left_behind,
        )
        answer = yield from self._ask(self.world.fleet.order(order, effect.reservation))
        if answer is GONE:
            self.tell(uid, ev.MemberVanished(incarnation=effect.incarnation, message="no actor"))

    def _fence(self, uid: RunUid, effect: do.FenceMember) -> Step[None]:
        answer = yield from self._ask(self.world.fleet.fence(effect))
        if answer is GONE:
            self.tell(uid, ev.MemberVanished(incarnation=effect.incarnation, message="no actor"))
        else:
            self.tell(uid, ev.FenceTaken(incarnation=effect.incarnation, grace_s=effect.grace_s))

    def _expire(self, uid: RunUid, effect: do.ExpireLease) -> Step[None]:
        is_over = yield from self._insist_on(lambda: self.line.expire(effect.incarnation))
        self.tell(uid, ev.LeaseExpiring(incarnation=effect.incarnation, is_over=is_over))


def _has_rank_away(before: Gang, after: Gang) -> bool:
    """A rank has failed and is to start again alone, or its next life was made."""
    if after.state is not RunState.RUNNING or after.plan.on_process_failure is not FailurePolicy.RESTART_RANK:
        return False
    return len(after.failures) > len(before.failures) or len(after.attempts) > len(before.attempts)


def _about(event: ev.GangEvent) -> str:
    incarnation = getattr(event, "incarnation", None)
    if incarnation is not None:
        return f"{incarnation.rank}/{incarnation.epoch}"
    return str(getattr(event, "reservation", ""))
