"""Plays one case of blame against the real core, in an order that `choose` picks among those that can be.

What keeps its order: each rank's own, and moment after moment. A rank's confirmed fence is the last of its own.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.core import effects as do
from coordinator.core import events as ev
from coordinator.core.gang import GangCore
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Failure, Gang, RestartKind
from mesh import messages as msg
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.plan import RunPlan
from mesh.states import FailurePolicy, RunState
from tests.unit import blame_cases as cases

UID = RunUid("00000000000000aa")
NODES = 3
BEGIN_MONO, BEGIN_WALL = 1000.0, 5000.0

Choose = Callable[[int], int]
"""Picks one of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the core made of it."""

    kind: RestartKind
    cause: Failure
    victims: tuple[Rank, ...]
    lost: tuple[Rank, ...]
    story: str
    """The sentence with which it ended, or with which it goes on."""


class Player:
    """A gang of three that runs, and what is then heard of it.

    Args:
        choose: called with the number of events that could be heard next.
        crash: called before each event; True when the coordinator crashes now.
        repeat: called after each report; True when it is delivered once more.
    """

    def __init__(
        self,
        *,
        choose: Choose,
        crash: Callable[[], bool] = lambda: False,
        repeat: Callable[[], bool] = lambda: False,
    ) -> None:
        self._choose, self._crash, self._repeat = choose, crash, repeat
        self._now = ev.Now(mono=BEGIN_MONO, wall=BEGIN_WALL)
        self._fences: set[Rank] = set()
        self._lost: set[Rank] = set()
        self.story = ""
        self.core = _core(_running_gang().snapshot())
        self.incarnations = {r: m.incarnation for r, m in self.core.gang.members.items()}

    # ---- the case ---------------------------------------------------------------------------------

    def play(self, case: cases.Case) -> Found:
        """From the first moment to the verdict."""
        ahead = {r: sum(h.rank == r for _, heard in case.moments for h in heard) for r in self.incarnations}
        for at_s, heard in case.moments:
            self._wait_until(BEGIN_MONO + at_s)
            streams = {r: [h for h in heard if h.rank == r] for r in self.incarnations}
            while any(streams.values()):
                able = [r for r in streams if streams[r] or (r in self._fences and not ahead[r])]
                rank = able[self._choose(len(able))]
                if streams[rank]:
                    ahead[rank] -= 1
                    self._hear(streams[rank].pop(0))
                else:
                    self._confirm_fence(rank)
        while not self._is_over():
            able = [r for r in self.incarnations if r in self._fences]
            if able:
                self._confirm_fence(able[self._choose(len(able))])
            else:
                deadline = self.core.next_deadline()
                assert deadline is not None, "the epoch ends or waits for something"
                self._wait_until(deadline)
        return self._found()

    def _is_over(self) -> bool:
        gang = self.core.gang
        return gang.state.is_terminal or gang.epoch > 1 or gang.state is RunState.PENDING

    def _wait_until(self, mono: float) -> None:
        """Deadlines come when they are due, not when the next event does."""
        while (due := self.core.next_deadline()) is not None and due <= mono and not self._is_over():
            self._at(max(due, self._now.mono))
            self._tell(ev.TimePassed())
        self._at(max(mono, self._now.mono))

    def _at(self, mono: float) -> None:
        self._now = ev.Now(mono=mono, wall=BEGIN_WALL + mono - BEGIN_MONO)

    def _hear(self, heard: cases.Heard) -> None:
        if isinstance(heard, cases.FencedItself):
            self._fences.discard(Rank(heard.rank))
        is_lost = isinstance(heard, (cases.Lapsed, cases.Gone))
        if is_lost:
            self._fences.discard(Rank(heard.rank))
        self._deliver(self._event(heard))
        if is_lost:
            self._lost.add(Rank(heard.rank))

    def _confirm_fence(self, rank: Rank) -> None:
        self._fences.discard(rank)
        self._deliver(msg.MemberFenced(incarnation=self.incarnations[rank], at=self._now.wall))

    def _event(self, heard: cases.Heard) -> ev.GangEvent:
        me = self.incarnations[Rank(heard.rank)]
        at = self._now.wall if heard.at_s is None else BEGIN_WALL + heard.at_s
        match heard:
            case cases.Exited():
                return msg.MemberExited(
                    incarnation=me,
                    at=at,
                    exit=heard.exit,
                    evidence=heard.evidence,
                    last_lines=heard.last_lines,
                )
            case cases.StartFailed():
                return msg.MemberStartFailed(
                    incarnation=me, at=at, reason=heard.reason, message="no 'trian'."
                )
            case cases.FencedItself():
                return msg.MemberFenced(incarnation=me, at=at, reason=heard.reason)
            case cases.StoreSilent():
                return ev.StoreSilent(since=self._now.mono - heard.silent_s)
            case cases.StoreHeard():
                return ev.StoreHeard()
            case cases.Lapsed():
                said_after = self._now.mono - heard.read_late_s
                return ev.LeaseLapsed(incarnation=me, silent_s=heard.silent_s, said_after=said_after)
            case cases.Reclaimed():
                return ev.MachineReclaimed(
                    machine=MachineName(f"m{heard.rank}"), grace_s=30.0, message="Spot price."
                )
        return _store_event(heard, me)

    # ---- the core ---------------------------------------------------------------------------------

    def _deliver(self, event: ev.GangEvent) -> None:
        if self._crash():
            record = json.loads(json.dumps(record_of(self.core.gang)))
            self.core = _core(gang_of(record))
            self._tell(ev.CoordinatorRecovered())
            for rank in self._lost:  # what the store says to whoever comes back
                self._tell(ev.LeaseGone(incarnation=self.incarnations[rank]))
        self._tell(event)
        if isinstance(event, msg.MemberReport) and self._repeat():
            self._tell(event)

    def _tell(self, event: ev.GangEvent) -> None:
        is_over = self._is_over()
        for effect in self.core.handle(event, self._now):
            if isinstance(effect, do.FenceMember) and effect.incarnation.epoch == 1:
                self._fences |= {effect.incarnation.rank} - self._lost
            if isinstance(effect, do.Persist) and not is_over:
                ends = [a for a in effect.announcements if a.kind in ("Restarting", "Failed")]
                self.story = ends[0].message if ends else self.story

    def _found(self) -> Found:
        gang = self.core.gang
        chapter = next(c for c in gang.history if c.epoch == 1)
        assert chapter.cause is not None
        lost = () if gang.state.is_terminal else tuple(r for r in range(NODES) if self._has_moved(Rank(r)))
        return Found(
            kind=chapter.charged or RestartKind.FAILURE,
            cause=chapter.cause,
            victims=chapter.victims,
            lost=tuple(map(Rank, lost)),
            story=self.story,
        )

    def _has_moved(self, rank: Rank) -> bool:
        seat = self.core.gang.seats.get(rank)
        return seat is None or seat.reservation != 1


def _core(gang: Gang) -> GangCore:
    tokens = itertools.count(1)
    epoch = gang.epoch
    return GangCore(gang, new_token=lambda: IncarnationToken(f"t{epoch}x{next(tokens)}"), validate=True)


@functools.cache
def _running_gang() -> Gang:
    """Every rank runs, in epoch 1."""
    plan = RunPlan(
        name=RunName("demo"), command=("true",), nodes=NODES, on_process_failure=FailurePolicy.RESTART_GANG
    )
    core = _core(Gang(uid=UID, plan=plan, created_at=BEGIN_WALL))
    now = ev.Now(mono=BEGIN_MONO, wall=BEGIN_WALL)
    placements = tuple(
        ev.Placement(machine=MachineName(f"m{i}"), address=f"10.0.0.{i + 1}") for i in range(NODES)
    )
    core.handle(ev.RunAccepted(), now)
    core.handle(ev.MachinesReserved(reservation=1, placements=placements), now)
    core.handle(ev.BarrierOpened(epoch=Epoch(1)), now)
    for member in list(core.gang.members.values()):
        started = msg.MemberStarted(incarnation=member.incarnation, at=BEGIN_WALL, pid=100, master_port=29500)
        core.handle(started, now)
    assert core.gang.state is RunState.RUNNING
    return core.gang


def _store_event(heard: cases.Heard, me: Incarnation) -> ev.GangEvent:
    match heard:
        case cases.Gone():
            return ev.LeaseGone(incarnation=me)
        case cases.Suspected():
            return ev.MemberSuspected(incarnation=me)
    raise AssertionError(heard)
