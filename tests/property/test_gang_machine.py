"""The gang's core under any order of what can be heard: it never raises, its ends are final, and it comes to rest.

The world around it is the least that is true of the real one: a barrier opens only for members that hold their leases,
what is asked for is answered once, a fenced member says nothing new. All else may come in any order, twice, or late.
"""

from __future__ import annotations

import itertools
import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.core import effects as do
from coordinator.core import events as ev
from coordinator.core.checkpoints import CommitCheckpoint
from coordinator.core.gang import GangCore
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Gang
from mesh import messages as msg
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, RunName, RunUid
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import FailurePolicy

UID = RunUid("00000000000000aa")
NODES = 2
REST_STEPS_MAX = 500
PLACES = st.integers(0, 5)
EXITS = st.sampled_from(
    [
        (msg.ProcessExit(code=0), msg.CauseEvidence()),
        (msg.ProcessExit(code=1), msg.CauseEvidence(blames_peer=True, peer_address="10.0.0.1")),
        (msg.ProcessExit(code=1), msg.CauseEvidence(exit=msg.ProcessExit(signal=11), global_rank=1)),
        (msg.ProcessExit(signal=9), msg.CauseEvidence(oom_killed=True)),
        (msg.ProcessExit(signal=9), msg.CauseEvidence(by_infrastructure=True)),
        (msg.ProcessExit(code=143), msg.CauseEvidence()),
    ]
)


class GangMachine(RuleBasedStateMachine):
    """One gang, and a world that answers what it asks for."""

    @initialize(
        restarts=st.integers(0, 3),
        retries=st.integers(0, 2),
        policy=st.sampled_from(list(FailurePolicy)),
        stage=st.integers(0, 5),
        checks_network=st.booleans(),
    )
    def start(
        self, restarts: int, retries: int, policy: FailurePolicy, stage: int, checks_network: bool
    ) -> None:
        self.checks_network = checks_network
        plan = RunPlan(
            name=RunName("demo"),
            command=("true",),
            nodes=NODES,
            max_restarts=restarts if stage < 4 else 3,
            max_assembly_retries=retries,
            on_process_failure=policy if stage < 4 else FailurePolicy.RESTART_RANK,
        )
        self.now = ev.Now(mono=100.0, wall=5000.0)
        self.tokens = itertools.count(1)
        self.machines = itertools.count(1)
        self.parts = itertools.count(1)
        self.answers: list[ev.GangEvent] = []
        self.asked: dict[int, do.ReserveMachines] = {}
        self.opened: dict[Epoch, tuple[IncarnationToken, ...]] = {}
        self.closed: set[Epoch] = set()
        self.admitted: set[Incarnation] = set()
        self.silent: set[Incarnation] = set()
        """Fenced, lapsed or revoked: no lease, nothing new to say."""
        self.fencing: dict[Incarnation, float] = {}
        self.heard: list[ev.GangEvent] = []
        self.end: tuple[object, ...] | None = None
        self.core = self.new_core(Gang(uid=UID, plan=plan, created_at=5000.0))
        self.tell(ev.RunAccepted())
        self.bring_up(stage)

    def bring_up(self, stage: int) -> None:
        """Most of what can go wrong needs a gang that has come so far."""
        if stage >= 1:
            self.grant(0)
            if self.checks_network:
                self.answer(0)
        if stage >= 2:
            self.open_barrier(tells_tokens=True)
        if stage >= 3:
            for place in range(NODES):
                self.begin(place)
        if stage >= 4:  # rank 1 is to start again alone
            self.exit(1, (msg.ProcessExit(code=42), msg.CauseEvidence()))
        if stage >= 5:
            self.fence(1, None, fails=False)
            self.pass_time(30.0)
            self.answer(len(self.answers) - 1)

    def new_core(self, gang: Gang) -> GangCore:
        return GangCore(
            gang,
            new_token=lambda: IncarnationToken(f"t{next(self.tokens)}"),
            checks_network=self.checks_network,
            validate=True,
        )

    def tell(self, event: ev.GangEvent) -> None:
        self.heard = [*self.heard[-20:], event]
        for effect in self.core.handle(event, self.now):
            self.perform(effect)

    def perform(self, effect: do.GangEffect) -> None:
        match effect:
            case do.ReserveMachines():
                self.asked[effect.reservation] = effect
            case do.WithdrawReservation():
                self.asked.pop(effect.reservation, None)
                self.answers.append(ev.ReservationWithdrawn(reservation=effect.reservation))
            case do.ReleaseMachine():
                released = ev.MachineReleased(reservation=effect.reservation, machine=effect.machine)
                self.answers.append(released)
            case do.CheckNetwork():
                self.answers.append(self.verdict(effect))
            case do.CloseBarrier():
                self.closed.add(effect.epoch)
                was_open = effect.epoch in self.opened
                self.answers.append(ev.BarrierClosed(epoch=effect.epoch, was_open=was_open))
            case do.RevokeMember():
                me = effect.incarnation
                has_passed = me.token in self.opened.get(me.epoch, ())
                if not has_passed:
                    self.silent.add(me)
                self.answers.append(ev.MemberRevoked(incarnation=me, has_passed=has_passed))
            case do.AdmitMember():
                self.answers.append(self.store_s_admission(effect))
            case do.FenceMember():
                self.fencing[effect.incarnation] = effect.grace_s
            case CommitCheckpoint():
                self.answers.append(self.store_s_answer(effect))
            case do.TellAboutPart():
                if effect.question is not None:
                    self.answers.append(self.member_s_answer(effect, effect.question))

    def verdict(self, effect: do.CheckNetwork) -> ev.NetworkChecked:
        """Most machines are well; the others may have a member already."""
        assert set(effect.fresh) <= dict(effect.machines).keys()
        number, bad = effect.number, effect.machines[effect.number % len(effect.machines)]
        if number % 4 == 0:
            return ev.NetworkChecked(number=number, message="No actor.", is_performed=False)
        refusal = ev.NetworkRefusal(rank=bad[0], machine=bad[1], message="Bad.", peers=effect.fresh)
        return ev.NetworkChecked(number=number, message="Done.", refusals=() if number % 2 else (refusal,))

    def store_s_answer(self, wish: CommitCheckpoint) -> ev.GangEvent:
        """Every fourth one lacks something."""
        assert wish.epoch == self.core.gang.epoch, "a wish is of the current epoch"
        if wish.number % 4 == 0:
            return ev.CheckpointLacking(number=wish.number, parts=wish.parts[:1], message="Gone.")
        return ev.CheckpointWritten(
            number=wish.number, uri=f"u{wish.number}", size_bytes=1, created_at=self.now.wall
        )

    def store_s_admission(self, effect: do.AdmitMember) -> ev.GangEvent:
        """One in four is of a store that was restarted."""
        me = effect.incarnation
        (before,) = [m for m in self.core.gang.attempts if m.incarnation.token == effect.instead_of]
        assert before.incarnation in self.silent, "admitted beside a life that goes on"
        is_admitted = int(me.token[1:]) % 4 != 0
        if is_admitted:
            self.admitted.add(me)
        return ev.MemberAdmitted(incarnation=me, is_admitted=is_admitted)

    def member_s_answer(self, effect: do.TellAboutPart, question: int) -> ev.GangEvent:
        return msg.CheckpointPartAnswered(
            incarnation=effect.incarnation, at=self.now.wall, question=question, digest=effect.digest,
            holds=question % 3 != 0,
        )  # fmt: skip

    # ---- what the world does ----------------------------------------------------------------------

    @rule(place=PLACES)
    def answer(self, place: int) -> None:
        if self.answers:
            self.tell(self.answers.pop(place % len(self.answers)))

    @rule(place=PLACES)
    def grant(self, place: int) -> None:
        if self.asked:
            reservation = sorted(self.asked)[place % len(self.asked)]
            wanted = self.asked.pop(reservation)
            names = [MachineName(f"m{next(self.machines)}") for _ in range(wanted.nodes)]
            placements = tuple(ev.Placement(machine=n, address=f"10.0.0.{n[1:]}") for n in names)
            self.tell(ev.MachinesReserved(reservation=reservation, placements=placements))

    @rule(place=PLACES, is_possible=st.booleans())
    def keep_waiting(self, place: int, is_possible: bool) -> None:
        if self.asked:
            reservation = sorted(self.asked)[place % len(self.asked)]
            waiting = ev.ReservationWaiting(reservation=reservation, why="Busy.", is_possible=is_possible)
            self.tell(waiting)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.3, 30.0, 700.0]))
    def pass_time(self, seconds: float) -> None:
        self.now = ev.Now(mono=self.now.mono + seconds, wall=self.now.wall + seconds)
        self.tell(ev.TimePassed())

    @rule()
    def crash(self) -> None:
        record = json.loads(json.dumps(record_of(self.core.gang)))
        self.core = self.new_core(gang_of(record))
        self.tell(ev.CoordinatorRecovered())

    @rule(place=st.integers(0, 20))
    def say_again(self, place: int) -> None:
        reports = [
            e for e in self.heard if isinstance(e, (msg.MemberReport, ev.BarrierOpened, ev.LeaseLapsed))
        ]
        if reports:
            self.tell(reports[place % len(reports)])

    # ---- the barrier and the members --------------------------------------------------------------

    def living(self) -> list[Incarnation]:
        members = self.core.gang.members
        return [m.incarnation for r, m in sorted(members.items()) if m.incarnation not in self.silent]

    @precondition(lambda self: self.may_open())
    @rule(tells_tokens=st.booleans())
    def open_barrier(self, tells_tokens: bool) -> None:
        epoch = self.core.gang.epoch
        self.opened[epoch] = tuple(me.token for me in self.living())
        self.tell(ev.BarrierOpened(epoch=epoch, tokens=self.opened[epoch] if tells_tokens else ()))

    @rule(place=PLACES)
    def pass_open_barrier(self, place: int) -> None:
        able = [me for me in self.living() if me in self.admitted and me.epoch not in self.closed]
        if able:
            me = able[place % len(able)]
            self.opened[me.epoch] = (*self.opened[me.epoch], me.token)
            self.begin(self.living().index(me))

    def may_open(self) -> bool:
        gang = self.core.gang
        is_whole = len(self.living()) == NODES
        return gang.epoch > 0 and gang.epoch not in self.opened and gang.epoch not in self.closed and is_whole

    def pick(self, place: int, *, has_passed: bool = False) -> Incarnation | None:
        able = [me for me in self.living() if not has_passed or me.token in self.opened.get(me.epoch, ())]
        return able[place % len(able)] if able else None

    @rule(place=PLACES, step=st.sampled_from([None, 1, 2, 3]))
    def save(self, place: int, step: int | None) -> None:
        if (me := self.pick(place, has_passed=True)) is not None:
            number = next(self.parts)
            self.tell(
                msg.CheckpointPartStored(
                    incarnation=me, at=self.now.wall, number=number, digest=f"d{number}", content=f"c{number}",
                    steps=() if step is None else (step,), files=1, size_bytes=1,
                )
            )  # fmt: skip

    @rule(place=PLACES)
    def find_damage(self, place: int) -> None:
        me, newest = self.pick(place), self.core.gang.checkpoints.newest
        if me is not None and newest is not None and me.token not in self.opened.get(me.epoch, ()):
            self.tell(
                msg.MemberPreparationFailed(
                    incarnation=me, at=self.now.wall, reason=Reason.CHECKPOINT_CORRUPT, message="Damaged.",
                    damaged_checkpoint=newest.number,
                )
            )  # fmt: skip

    @rule(place=PLACES, kind=st.sampled_from(["registered", "arrived", "unprepared"]))
    def prepare(self, place: int, kind: str) -> None:
        me = self.pick(place)
        if me is None:
            return
        at = self.now.wall
        if kind == "registered":
            machine = self.core.gang.members[me.rank].machine
            self.tell(msg.MemberRegistered(incarnation=me, at=at, machine=machine, address="10.0.0.9"))
        elif kind == "arrived":
            self.tell(msg.MemberArrived(incarnation=me, at=at))
        elif me.token not in self.opened.get(me.epoch, ()):
            failed = msg.MemberPreparationFailed(
                incarnation=me, at=at, reason=Reason.PREPARATION_FAILED, message="disk full."
            )
            self.tell(failed)

    @rule(place=PLACES)
    def begin(self, place: int) -> None:
        if (me := self.pick(place, has_passed=True)) is not None:
            started = msg.MemberStarted(incarnation=me, at=self.now.wall, pid=7, master_port=29500)
            self.tell(started)

    @rule(place=PLACES)
    def fail_to_start(self, place: int) -> None:
        if (me := self.pick(place, has_passed=True)) is not None:
            failed = msg.MemberStartFailed(
                incarnation=me, at=self.now.wall, reason=Reason.COMMAND_NOT_FOUND, message="no 'trian'."
            )
            self.tell(failed)

    @rule(place=PLACES, end=EXITS)
    def exit(self, place: int, end: tuple[msg.ProcessExit, msg.CauseEvidence]) -> None:
        if (me := self.pick(place, has_passed=True)) is not None:
            self.tell(msg.MemberExited(incarnation=me, at=self.now.wall, exit=end[0], evidence=end[1]))

    @rule(place=PLACES, kind=st.sampled_from(["lapsed", "gone", "suspected", "vanished"]))
    def lose(self, place: int, kind: str) -> None:
        me = self.pick(place)
        if me is None:
            return
        if kind == "suspected":
            self.tell(ev.MemberSuspected(incarnation=me))
        elif kind == "vanished":
            self.tell(ev.MemberVanished(incarnation=me, message="its agent died."))
        else:
            self.silent.add(me)
            lost = ev.LeaseLapsed if kind == "lapsed" else ev.LeaseGone
            self.tell(lost(incarnation=me))

    @rule(
        place=PLACES,
        reason=st.sampled_from([None, Reason.LEASE_LOST, Reason.STALE_EPOCH]),
        fails=st.booleans(),
    )
    def fence(self, place: int, reason: Reason | None, fails: bool) -> None:
        me = self.pick(place, has_passed=fails)
        if me is None or (reason is None and me not in self.fencing):
            return
        if fails:
            self.tell(
                msg.MemberFenceFailed(incarnation=me, at=self.now.wall, message="7 does not die.", pids=(7,))
            )
        else:
            self.silent.add(me)
            self.tell(msg.MemberFenced(incarnation=me, at=self.now.wall, reason=reason))

    @rule(place=PLACES)
    def reclaim(self, place: int) -> None:
        seats = sorted(seat.machine for seat in self.core.gang.seats.values())
        if seats:
            machine = seats[place % len(seats)]
            self.tell(ev.MachineReclaimed(machine=machine, grace_s=20.0, message="Spot price."))

    # ---- what users want --------------------------------------------------------------------------

    @rule(wish=st.sampled_from(["cancel", "suspend", "resume", "resume", "resume"]))
    def want(self, wish: str) -> None:
        match wish:
            case "cancel":
                self.tell(ev.CancelRequested(reason=Reason.CANCELLED, message="Cancelled."))
            case "suspend":
                self.tell(ev.SuspendRequested(message="Suspended."))
            case _:
                self.tell(ev.ResumeRequested(message="Resumed."))

    # ---- what must hold ---------------------------------------------------------------------------

    @invariant()
    def ends_are_final(self) -> None:
        gang = self.core.gang
        if not gang.state.is_terminal:
            assert self.end is None
            return
        end = (gang.state, gang.reason, gang.message, gang.epoch, gang.cause)
        assert self.end in (None, end)
        self.end = end

    def teardown(self) -> None:
        """Once everything is answered and somebody cancels, all is over and nothing is held."""
        if not hasattr(self, "core"):
            return
        self.tell(ev.CancelRequested(reason=Reason.CANCELLED, message="Cancelled."))
        for _ in range(REST_STEPS_MAX):
            gang = self.core.gang
            if gang.state.is_terminal and gang.is_released:
                return
            unsettled = [m.incarnation for m in gang.members.values() if m.settlement is None]
            if self.answers:
                self.tell(self.answers.pop(0))
            elif unsettled and unsettled[0] in self.fencing and unsettled[0] not in self.silent:
                self.silent.add(unsettled[0])
                self.tell(msg.MemberFenced(incarnation=unsettled[0], at=self.now.wall))
            elif unsettled:
                self.tell(ev.LeaseGone(incarnation=unsettled[0]))
                self.pass_time(6.0)
            else:
                self.pass_time(30.0)
        raise AssertionError(f"it never comes to rest: {gang.state}, {gang.message}")


GangMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGangMachine = GangMachine.TestCase
