"""The proof that the simulation sees something: each of these worlds has one fence broken, and is caught.

A mutant names the invariant that catches it (see `tests.sim.truth` and `coordinator.core.invariants`) and is given
1,000 seeds of the usual faults. Most need a few; `python -m tests.sim.test_mutants` prints how many.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from agents.core.lease import Lease
from agents.core.lease_events import Confirmed, KillTree, LeaseEffect, LeaseEvent, Tell
from coordinator.checkpoint_store import Lacking, Written
from coordinator.core import blame, recovery
from coordinator.core import effects as do
from coordinator.core.checkpoints import Checkpoints, CleanCheckpointStore, CommitCheckpoint
from coordinator.core.events import LeaseLapsed
from coordinator.core.gang import GangCore
from coordinator.core.gang_state import Gang, Outcome, OutcomeKind, RestartKind, Restarts, Settlement
from coordinator.core.store_trust import EpochKey, StoreTrust, Telling
from mesh.checkpoint_format import RestoreReference
from mesh.ids import Epoch, Incarnation, Rank, RunUid
from mesh.reasons import Reason
from mesh.states import FailurePolicy, RunState
from mesh.store import barrier, leases
from mesh.store import messages as ms
from mesh.store.books import Books, Output
from mesh.store.books import Lease as StoredLease
from mesh.store.state import StoreState
from tests.sim import member as sim_member
from tests.sim.checkpoint_store import SimCheckpointStore
from tests.sim.coordinator import SimCoordinator
from tests.sim.faults import Faults, Incident, mostly, shape_of
from tests.sim.store_line import StoreLine
from tests.sim.tasks import Step
from tests.sim.truth import Violation
from tests.sim.world import Parts, World

SEEDS_MAX = 1_000


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One broken fence."""

    name: str
    caught_by: str
    """A pattern of the violation."""
    parts: Parts = field(default_factory=Parts)
    faults: Faults = field(default_factory=Faults)
    policy: FailurePolicy | None = None
    """Of every run; None for what the seed says."""
    patches: tuple[tuple[Any, str, Any], ...] = ()
    """Functions of modules that are replaced: module, name, what takes its place."""
    is_about_checkpoints: bool = False
    """In all of its worlds they are saved."""

    def world(self, seed: int, parts: Parts) -> World:
        """One of its worlds."""
        shape = shape_of(seed)
        shape["saves"] |= self.is_about_checkpoints
        return World(seed, **shape, faults=self.faults, parts=parts, policy=self.policy)


# ---- the store ----------------------------------------------------------------------------------------


class NoGate(StoreState):
    """Takes a request of an older epoch for one of the current."""

    def handle(self, request: Any, connection: Any, now: float) -> list[Output]:
        gang = self.books.gangs.get(getattr(request, "gang", RunUid("")))
        if gang is not None and getattr(request, "epoch", gang.epoch) < gang.epoch:
            request = request._replace(epoch=gang.epoch)
        return super().handle(request, connection, now)


class ExpiresAtOnce(StoreState):
    """A lease that is to be renewed no more is over there and then, whatever its holder knows."""

    def handle(self, request: Any, connection: Any, now: float) -> list[Output]:
        outputs = super().handle(request, connection, now)
        if isinstance(request, ms.Expire):
            gang = self.books.gangs.get(request.gang)
            lease = None if gang is None else gang.leases.get(request.rank)
            if lease is not None and lease.token == request.token:
                outputs = [*outputs, *leases.lapse(self.books, lease, now)]
        return outputs


class SharedKeys(StoreState):
    """Keeps the keys of the epoch before."""

    def handle(self, request: Any, connection: Any, now: float) -> list[Output]:
        before = self.books.gangs.get(getattr(request, "gang", RunUid("")))
        outputs = super().handle(request, connection, now)
        if isinstance(request, ms.SetFloor) and before is not None:
            self.books.gangs[request.gang].keys.update(before.keys)
        return outputs


def _end_but_let_it_arrive(books: Books, gang: Any, lease: Any) -> list[Output]:
    books.end_lease(gang, lease)
    return []


# ---- leases -------------------------------------------------------------------------------------------


class CountsFromReceipt(Lease):
    """The right to run counted from when the answer came."""

    def handle(self, event: LeaseEvent, now: float) -> list[LeaseEffect]:
        effects = super().handle(event, now)
        if isinstance(event, Confirmed) and self.state.held_from is not None:
            self.state.held_from = now
        return effects


class NeverFencesItself(Lease):
    """It knows that its lease is over, and lets the command run."""

    def handle(self, event: LeaseEvent, now: float) -> list[LeaseEffect]:
        effects = super().handle(event, now)
        return [
            e
            for e in effects
            if not isinstance(e, KillTree) and not (isinstance(e, Tell) and e.word == "lost")
        ]


# ---- the coordinator ----------------------------------------------------------------------------------


class DoesNotWait(GangCore):
    """Opens the next epoch as soon as this one has been told to stop."""

    def _conclude_if_settled(self) -> None:
        if self.gang.outcome is not None and self.gang.outcome.kind is OutcomeKind.JUDGE:
            for member in [m for m in self.gang.members.values() if m.settlement is None]:
                self._settle(member, Settlement.CONFIRMED)
        super()._conclude_if_settled()


class AvoidsNothing(GangCore):
    """Would take any machine for a replacement."""

    def _reserve_effect(self, want: Any) -> do.ReserveMachines:
        return replace(super()._reserve_effect(want), avoid=())


class AllIsClean(GangCore):
    """Gives every machine back as if nothing could run there."""

    def _vacate(self, rank: Any, *, is_clean: bool) -> Any:
        return super()._vacate(rank, is_clean=True)


class WaitsForEver(GangCore):
    """A member that does not answer its fence is waited for."""

    def _end_overdue_fences(self) -> None:
        self._due.fence.clear()


class ReadsLapsesAsNew(GangCore):
    """Takes the store's word for new, however long it lay unread."""

    def handle(self, event: Any, now: Any) -> list[do.GangEffect]:
        if isinstance(event, LeaseLapsed):
            event = replace(event, said_after=None)
        return super().handle(event, now)


class ForgetsWishes(GangCore):
    """A cancel that comes while the epoch is being fenced is answered, and lost."""

    def _wish(self, outcome: Outcome) -> None:
        if self.gang.outcome is None or self.gang.outcome.kind is not OutcomeKind.JUDGE:
            super()._wish(outcome)


class OrdersUnchecked(GangCore):
    """Orders members while the network is still being checked."""

    def _check_seats(self) -> None:
        super()._check_seats()
        self._mark_checked({(seat.rank, seat.machine) for seat in self.gang.seats.values()})


class PassesEveryMachine(GangCore):
    """Hears what a check says, and keeps the machine."""

    def _refuse_machine(self, rank: Any, reason: Any, message: str) -> None:
        if reason is Reason.NETWORK_CHECK_FAILED:
            self._mark_checked({(rank, self.gang.seats[rank].machine)})
        else:
            super()._refuse_machine(rank, reason, message)


class StartsAgainAtOnce(GangCore):
    """Makes a rank's next life before the one before has confirmed."""

    def _stop_alone(self, failure: Any, member: Any) -> None:
        super()._stop_alone(failure, member)
        if member.settlement is None:
            self._begin_again(member)


class ActsFirst(SimCoordinator):
    """Does what was decided before it is durable."""

    def _persist(self, uid: Any, shell: Any, effects: Any, dones: Any, tries: int) -> None:
        for effect in effects:
            self._perform(uid, effect)
        super()._persist(uid, shell, [], dones, tries)


class LosesWrites(SimCoordinator):
    """A disk that acknowledges a write and loses it when the machine goes down."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._synced: dict[RunUid, Gang] = {}

    def commit(self, uid: RunUid, gang: Gang) -> None:
        self._synced[uid] = self.journal[uid]
        super().commit(uid, gang)

    def recover_journal(self) -> None:
        self.journal.update(self._synced)
        super().recover_journal()


class SkipsRevoke(StoreLine):
    """Says that a member was given up, and does not tell the store."""

    def revoke(self, incarnation: Incarnation) -> Step[bool | None]:
        yield self.ask(ms.Ping)
        return False


class TrustsEveryStore(StoreTrust):
    """Believes a store that was restarted that what it does not know has not been."""

    def is_believed(self, key: EpochKey, instance: str) -> bool:
        return True


class ForgetsLapses(StoreTrust):
    """A store that was restarted is not told whose lease is over."""

    def telling(self, key: EpochKey, gang: Gang | None, *, is_first: bool) -> Telling:
        telling = super().telling(key, gang, is_first=is_first)
        members = [] if gang is None else gang.members.values()
        present = {(member.rank, member.incarnation.token) for member in members}
        return replace(telling, revoked=tuple(one for one in telling.revoked if one not in present))


def _heard_now(lease: StoredLease, request_id: int, now: float) -> None:
    """A renewal that lay unread, or travelled for long, is taken for a sign of life when it is received."""
    lease.alive_at = now
    lease.renew(now)


# ---- checkpoints --------------------------------------------------------------------------------------


class CommitsUnseen(SimCheckpointStore):
    """Writes the manifest without a look at the parts."""

    def publish(self, uid: RunUid, wish: CommitCheckpoint) -> Written | Lacking:
        self.write(uid, wish)
        return Written(uri="sim://", size_bytes=1, created_at=self.world.now)


def _all_but_the_last_rank(checkpoints: Checkpoints) -> list[Rank]:
    return [Rank(number) for number in range(max(1, checkpoints.world_size - 1))]


def _keep_older_parts(checkpoints: Checkpoints, epoch: Epoch) -> RestoreReference | None:
    """The next epoch begins, and the parts of the one before still count."""
    parts = checkpoints._parts
    reference = _begin_epoch(checkpoints, epoch)
    checkpoints._parts = parts
    return reference


def _clean_all_but_the_newest(checkpoints: Checkpoints) -> CleanCheckpointStore:
    return CleanCheckpointStore(numbers=(checkpoints.committed[-1].number,), parts=())


def _oldest(checkpoints: Checkpoints) -> RestoreReference | None:
    newest = checkpoints.newest
    if newest is None:
        return None
    first = checkpoints.committed[0]
    return RestoreReference(number=first.number, id=first.id, step=first.step, uri=first.uri)


_begin_epoch = Checkpoints.begin_epoch


# ---- budgets and blame --------------------------------------------------------------------------------


def _charge_nothing(restarts: Restarts, kind: Any) -> Restarts:
    return replace(restarts, total=restarts.total + 1)


def _first_heard(gang: Gang) -> blame.Verdict:
    """The first failure that was heard is the cause, whoever falls silent afterwards."""
    verdict = _judge(gang)
    return replace(verdict, cause=gang.failures[0], kind=RestartKind.FAILURE) if gang.failures else verdict


_judge = blame.judge
_FROZEN = mostly({Incident.MACHINE_FROZEN: 1}, at_most=3)
_CUTS = {Incident.CUT_FROM_STORE: 2, Incident.CUT_OFF: 1}

MUTANTS = (
    Mutant(
        name="epoch check skipped",
        caught_by="^8: the store served",
        parts=Parts(store_state=NoGate),
        faults=_FROZEN,
    ),
    Mutant(
        name="keys shared between epochs",
        caught_by="^8: a rank read what another epoch had written",
        parts=Parts(store_state=SharedKeys),
    ),
    Mutant(
        name="barrier opened without leases",
        caught_by="^2: a barrier opened for a rank without a valid lease",
        patches=(
            (barrier, "_all_leases_are_valid", lambda *_: True),
            (leases, "end", _end_but_let_it_arrive),
        ),
        faults=mostly(
            {Incident.CUT_FROM_STORE: 1, Incident.MACHINE_FROZEN: 1}, incidents_in=(RunState.ASSEMBLING,)
        ),
    ),
    Mutant(
        name="stall of the store not forgiven",
        caught_by="^9: a healthy member was declared lost",
        patches=((Books, "absolve_stall", lambda *_: False),),
        faults=mostly({Incident.STORE_STALLED: 1}),
    ),
    Mutant(
        name="wall clock used for leases",
        caught_by="^1: ",
        parts=Parts(leases_by_wall_clock=True),
        faults=mostly({Incident.CLOCK_STEPPED: 2, **_CUTS}),
    ),
    Mutant(
        name="lease counted from receipt",
        caught_by="^1: ",
        parts=Parts(lease=CountsFromReceipt),
        faults=mostly({Incident.MACHINE_FROZEN: 1}, latency_s=0.2, thaws_without_network=1.0),
    ),
    Mutant(name="self-fence missing", caught_by="^1: ", parts=Parts(lease=NeverFencesItself)),
    Mutant(
        name="overdue fence waited for",
        caught_by="^9: liveness",
        parts=Parts(gang_core=WaitsForEver),
        patches=((sim_member, "KEEPERS_PATIENCE_S", 1e6),),  # else it ends the wait
        faults=mostly({Incident.MEMBER_HUNG: 1}, incidents_in=(RunState.FENCING,), exit_badly=0.4),
    ),
    Mutant(
        name="lease ended at once",
        caught_by="^1: |^9: a healthy member was declared lost",
        parts=Parts(store_state=ExpiresAtOnce),
        faults=mostly(
            {Incident.MEMBER_HUNG: 1, Incident.CANCEL: 1},
            at_most=8,
            incidents_in=(RunState.RUNNING, RunState.FENCING),
        ),
    ),
    Mutant(name="clocks drift beyond the guard", caught_by="^1: ", faults=Faults(clock_drift=0.3)),
    Mutant(name="next epoch before all are settled", caught_by="^1: ", parts=Parts(gang_core=DoesNotWait)),
    Mutant(
        name="replacement on the same machine",
        caught_by="^5: a replacement is on the machine that it replaces",
        parts=Parts(gang_core=AvoidsNothing),
    ),
    Mutant(
        name="unclean machine given away",
        caught_by="^6: a machine is given away on which something still runs",
        parts=Parts(gang_core=AllIsClean),
        faults=replace(_FROZEN, stuck_in_the_kernel=0.9),
    ),
    Mutant(
        name="cancel turned into a restart",
        caught_by="^4: a run that was cancelled begins an epoch",
        parts=Parts(gang_core=ForgetsWishes),
        faults=mostly({Incident.CANCEL: 1, Incident.AGENT_DIED: 1}, exit_badly=0.4),
    ),
    Mutant(
        name="acted on before it is durable",
        caught_by="^3: ",
        parts=Parts(coordinator=ActsFirst),
    ),
    Mutant(
        name="lost fsync",
        caught_by="^3: an epoch that was heard of|^9: liveness",  # an epoch used twice; a report that nobody repeats
        parts=Parts(coordinator=LosesWrites),
    ),
    Mutant(
        name="revoke skipped",
        caught_by="^[12]: ",
        parts=Parts(line=SkipsRevoke),
        faults=mostly(
            {Incident.RECLAIM: 1, Incident.CUT_FROM_HEAD: 1}, at_most=6, incidents_in=(RunState.ASSEMBLING,)
        ),
    ),
    Mutant(
        name="every store trusted",
        caught_by="^1: |^9: liveness",  # who is believed dead too early, or is never accounted for
        parts=Parts(trust=TrustsEveryStore),
        faults=mostly(
            {
                Incident.STORE_RESTARTED: 3,
                Incident.RECLAIM: 2,
                Incident.STORE_LINE_CUT: 2,
                Incident.CUT_FROM_HEAD: 3,
            },
            at_most=10,
            incidents_in=(RunState.ASSEMBLING,),
        ),
    ),
    Mutant(
        name="lapse forgotten with the store",
        caught_by="^1: |^2: ",  # its tree goes on, or it passes a barrier that was closed for it
        parts=Parts(trust=ForgetsLapses),
        faults=mostly({Incident.MACHINE_FROZEN: 3, Incident.STORE_RESTARTED: 3}, at_most=10),
    ),
    Mutant(
        name="restart budget never charged",
        caught_by="^7: more restarts in a row than any budget allows",
        patches=((recovery, "_charge", _charge_nothing),),
        faults=mostly({Incident.AGENT_DIED: 1}, at_most=8, exit_badly=0.7),
    ),
    Mutant(
        name="unread renewal taken for a new one",
        caught_by="^blame: ",
        patches=((StoredLease, "heard", _heard_now),),
        faults=mostly(
            {Incident.STORE_STALLED: 1, Incident.MACHINE_LOST: 1},
            at_most=14,
            incidents_in=(RunState.RUNNING,),
            exit_badly=0.0,
            start_failure=0.0,
            latency_s=0.05,
        ),
    ),
    Mutant(
        name="lapse that is read late taken for a new one",
        caught_by="^blame: ",
        parts=Parts(gang_core=ReadsLapsesAsNew),
        faults=mostly(
            {Incident.STORE_LINE_CUT: 2, Incident.DISK_FULL: 1, Incident.MACHINE_LOST: 2},
            at_most=14,
            incidents_in=(RunState.RUNNING,),
            exit_badly=0.0,
            start_failure=0.0,
        ),
    ),
    Mutant(
        name="checkpoint without a rank's part",
        caught_by="^10: a checkpoint lacks a rank",
        patches=((Checkpoints, "_ranks", _all_but_the_last_rank),),
        is_about_checkpoints=True,
    ),
    Mutant(
        name="checkpoint committed unseen",
        caught_by="^10: a checkpoint is committed that was not whole",
        parts=Parts(checkpoint_store=CommitsUnseen),
        is_about_checkpoints=True,
    ),
    Mutant(
        name="checkpoint of an older epoch's parts",
        caught_by="^10: a part of rank . is not of epoch",
        patches=((Checkpoints, "begin_epoch", _keep_older_parts),),
        faults=mostly({Incident.AGENT_DIED: 1}),
        is_about_checkpoints=True,
    ),
    Mutant(
        name="retained checkpoint cleaned away",
        caught_by="^10: a checkpoint that is retained was removed",
        patches=((Checkpoints, "_cleaning", _clean_all_but_the_newest),),
        is_about_checkpoints=True,
    ),
    Mutant(
        name="epoch from an old checkpoint",
        caught_by="^10: (epoch|rank) . begins from",
        patches=((Checkpoints, "reference", _oldest),),
        faults=mostly({Incident.AGENT_DIED: 1}),
        is_about_checkpoints=True,
    ),
    Mutant(name="blame without waiting", caught_by="^blame: ", patches=((blame, "judge", _first_heard),)),
    Mutant(
        name="members ordered before the network is checked",
        caught_by="^(2: a process started on a machine that the others|9: who has a machine)",
        parts=Parts(gang_core=OrdersUnchecked),
    ),
    Mutant(
        name="refused by the check and kept",
        caught_by="^2: a process started on a machine that the others do not reach",
        parts=Parts(gang_core=PassesEveryMachine),
    ),
    Mutant(
        name="rank admitted without proof",
        caught_by="^1: nothing begins beside what may still act",
        parts=Parts(gang_core=StartsAgainAtOnce),
        policy=FailurePolicy.RESTART_RANK,
    ),
    Mutant(
        name="rank restarted without proof of the others' lives",
        caught_by="^blame: rank . starts again alone",
        patches=((recovery, "LONE_WINDOW_S", 0.0), (leases, "_others_live", lambda *_: True)),
        faults=mostly({Incident.MACHINE_LOST: 1}, incidents_in=(RunState.RUNNING,), exit_badly=0.7),
        policy=FailurePolicy.RESTART_RANK,
    ),
)


def seeds_needed(mutant: Mutant, patch: Callable[[Any, str, Any], None]) -> int:
    """How many seeds it takes to catch it. Raises AssertionError when 1,000 do not, or another invariant did."""
    for target, name, broken in mutant.patches:
        patch(target, name, broken)
    for seed in range(SEEDS_MAX):
        try:
            mutant.world(seed, mutant.parts).run()
        except Violation as violation:
            assert re.search(mutant.caught_by, str(violation)), (
                f"caught, but by another invariant: {violation}"
            )
            return seed + 1
    raise AssertionError(f"{SEEDS_MAX} seeds, and nobody noticed: {mutant.name}")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_a_broken_fence_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeds_needed(mutant, monkeypatch.setattr) <= SEEDS_MAX


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.faults != Faults()], ids=lambda m: m.name)
def test_the_same_faults_break_nothing_that_is_whole(mutant: Mutant) -> None:
    for seed in range(30):
        if mutant.name != "clocks drift beyond the guard":
            mutant.world(seed, Parts()).run()


def main() -> None:
    """A table: which mutant was caught after how many seeds. Arguments: words of the names of some."""
    wanted = sys.argv[1:]
    for mutant in [m for m in MUTANTS if not wanted or any(word in m.name for word in wanted)]:
        monkeypatch = pytest.MonkeyPatch()
        try:
            needed = f"{seeds_needed(mutant, monkeypatch.setattr):4} seeds"
        except AssertionError as error:
            needed = f"FAILED: {error}"
        monkeypatch.undo()
        print(f"{mutant.name:36} {needed}", flush=True)


if __name__ == "__main__":
    main()
