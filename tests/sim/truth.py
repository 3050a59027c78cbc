"""What is so in the simulated world, whoever believes what; and the design's invariants about it, after every step.

Each violation names its invariant by the design's number, or by the word that `tests.sim.test_mutants` looks for. The
invariants of one gang's own state are `coordinator.core.invariants`, checked inside the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.core import events as ev
from coordinator.core.gang_state import Gang, Holding, OutcomeKind, Settlement
from coordinator.core.recovery import FRUITLESS_MAX, HEALTHY_S
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunUid
from mesh.states import RunState
from mesh.store import messages as ms
from tests.sim.checkpoint_truth import CheckpointTruth
from tests.sim.process import SECRETLY_BY_A_PEER

if TYPE_CHECKING:
    from tests.sim.keeper import SimKeeper
    from tests.sim.machine import Machine
    from tests.sim.process import SimProcess
    from tests.sim.world import World


class Violation(AssertionError):
    """An invariant does not hold; the message says which and when."""


class Truth:
    """Watches everything. Raises Violation."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive: dict[RunUid, dict[Incarnation, SimProcess]] = {}
        """User processes that are not dead, acting or not."""
        self.settled: dict[Incarnation, Settlement] = {}
        """Members of which the journal says why nothing of them can act any more."""
        self.ghosts = 0
        """How often a process of an older epoch went on after its machine had stood still."""
        self.again = 0
        """How often a rank started again alone."""
        self.checkpoints = CheckpointTruth(world)
        self._started: set[Incarnation] = set()
        self._heard: dict[RunUid, Epoch] = {}
        self._cancelled: set[RunUid] = set()
        self._deaths: dict[tuple[RunUid, Epoch], list[tuple[float, Rank, str]]] = {}
        """Commands that did not end well: when, of which rank, and how: by itself, by a peer, or taken along."""
        self._by_itself: set[Incarnation] = set()
        self._said_lost: set[Incarnation] = set()
        """Members that the store has declared lost."""
        self._lost_seats: dict[tuple[RunUid, Rank], MachineName] = {}
        self._has_no_other: set[RunUid] = set()
        self._said_of_network: dict[tuple[RunUid, int], ev.NetworkChecked] = {}
        """What was answered to a check, whether it was heard or not."""
        self._apart: set[tuple[RunUid, MachineName]] = set()
        """Machines that a check has refused, and the journal knows it."""
        self.refusals = 0
        """How often a check cost a rank its machine."""
        self._fruitless: dict[RunUid, int] = {}
        self._running_since: dict[RunUid, float] = {}

    # ---- processes --------------------------------------------------------------------------------

    def process_started(self, process: SimProcess) -> None:
        """Invariants 1 and 2 are about this moment."""
        me = process.incarnation
        place = (me.run_uid, me.epoch, me.rank)
        tokens = self.world.store.opened.get((me.run_uid, me.epoch))
        if tokens is None:
            raise Violation("2: a process started before its barrier opened")
        admitted = self.world.store.admitted.get(place, ())
        if me.token != tokens[me.rank] and me.token not in admitted:
            raise Violation("2: a process started for which no barrier opened")
        if me in self._started:
            raise Violation("2: a command was started twice")
        if me.token != (admitted[-1] if admitted else tokens[me.rank]):
            raise Violation("1: a process started of a rank that is another life's by now")
        self._started.add(me)
        if (me.run_uid, process.machine.name) in self._apart:
            raise Violation("2: a process started on a machine that the others do not reach")
        if any(_place(other) == place for other in self.alive.get(me.run_uid, ())):
            raise Violation("1: a rank starts again beside a process of its life before")
        if admitted:
            self.again += 1
            deaths = self._deaths.get((me.run_uid, me.epoch), [])
            deaths[:] = [
                death for death in deaths if death[1] != me.rank
            ]  # it is answered, and causes nothing more
        self.alive.setdefault(me.run_uid, {})[me] = process
        self.checkpoints.process_started(process, is_again=bool(admitted))
        self.check_acting()
        if self.world.keeps_log:
            self.world.note(me.run_uid[-1:], f"rank {me.rank}/{me.epoch} lives on {process.machine.name}")

    def process_ended(self, process: SimProcess) -> None:
        me = process.incarnation
        del self.alive[me.run_uid][me]
        if self.world.keeps_log:
            self.world.note(me.run_uid[-1:], f"rank {me.rank}/{me.epoch} is dead")

    def failed_by_itself(self, incarnation: Incarnation) -> None:
        self._by_itself.add(incarnation)

    def died(self, incarnation: Incarnation, how: str) -> None:
        """A command ended badly while nothing had been decided about its epoch."""
        key = (incarnation.run_uid, incarnation.epoch)
        if incarnation in self._by_itself:
            how = "by itself"
        self._deaths.setdefault(key, []).append((self.world.now, incarnation.rank, how))

    def stirred(self, incarnation: Incarnation) -> None:
        """A process that stood still with its machine goes on."""
        if incarnation.epoch < self.world.coordinator.journal[incarnation.run_uid].epoch:
            self.ghosts += 1

    def check_acting(self) -> None:
        """Whenever somebody begins to act, or goes on."""
        for uid, processes in self.alive.items():
            epochs = set()
            for incarnation, process in processes.items():
                if not process.is_acting:
                    continue
                epochs.add(incarnation.epoch)
                proof = self.settled.get(incarnation, Settlement.FENCE_FAILED)
                if proof is not Settlement.FENCE_FAILED:
                    raise Violation(f"1: a process acts of which it was proven that it cannot ({proof})")
            if len(epochs) > 1:
                raise Violation(f"1: two epochs of {uid} act at once")

    # ---- the journal ------------------------------------------------------------------------------

    def committed(self, before: Gang, after: Gang) -> None:
        uid = after.uid
        if before.state.is_terminal and after.state is not before.state:
            raise Violation("4: a terminal state changed in the journal")
        self.checkpoints.committed(before, after)
        self._note_settled(before, after)
        self._note_seats(before, after)
        self._note_network(before, after)
        if after.epoch != before.epoch:
            self._check_new_epoch(before, after)
        if _is_restart(before, after):
            self._fruitless[uid] = self._fruitless.get(uid, 0) + 1
            if self.checkpoints.has_progressed(uid):
                self._fruitless[uid] = 1
            if self._fruitless[uid] > FRUITLESS_MAX:
                raise Violation("7: more restarts in a row than any budget allows")
        if after.state is not before.state:
            if before.state is RunState.RUNNING:
                began = self._running_since.pop(uid, self.world.now)
                if self.world.now - began >= HEALTHY_S:
                    self._fruitless[uid] = 0
            if after.state is RunState.RUNNING:
                self._running_since[uid] = self.world.now
            if after.state is RunState.FAILED:
                self._check_blame(after)

    def _note_settled(self, before: Gang, after: Gang) -> None:
        known = self.settled
        retired = after.attempts[len(before.attempts) :]
        news = False
        for member in (*after.members.values(), *retired):
            if member.settlement is not None and member.incarnation not in known:
                known[member.incarnation] = member.settlement
                news = True
        if news:
            self.check_acting()

    def _note_seats(self, before: Gang, after: Gang) -> None:
        is_retry = after.state is RunState.PENDING and after.assemblies > 0
        is_fresh = after.state is RunState.SUSPENDED or is_retry
        if before.holdings == after.holdings and not is_fresh:
            return
        old, new = before.seats, after.seats
        for rank, seat in old.items():
            if rank not in new or new[rank].machine != seat.machine:
                self._lost_seats[after.uid, rank] = seat.machine
        if is_fresh:  # all is given back, and begins anew
            for key in [key for key in self._lost_seats if key[0] == after.uid]:
                del self._lost_seats[key]
        for rank, seat in new.items():
            is_taken = rank not in old or old[rank].machine != seat.machine
            is_same = is_taken and self._lost_seats.pop((after.uid, rank), None) == seat.machine
            if is_same and after.uid not in self._has_no_other:
                raise Violation("5: a replacement is on the machine that it replaces")

    def _check_new_epoch(self, before: Gang, after: Gang) -> None:
        uid = after.uid
        if uid in self._cancelled:
            raise Violation("4: a run that was cancelled begins an epoch")
        for incarnation, process in self.alive.get(uid, {}).items():
            if process.is_acting:
                raise Violation(
                    f"1: epoch {after.epoch} begins while rank {incarnation.rank} of another acts"
                )

    def _check_blame(self, gang: Gang) -> None:
        cause = gang.cause
        first = min(self._deaths.get((gang.uid, gang.epoch), []), default=None)
        if cause is None or first is None or first[1] == cause.rank or first[2] == "by a peer":
            return
        is_secret = cause.exit is not None and cause.exit.code == SECRETLY_BY_A_PEER
        if not cause.evidence.blames_peer and not (is_secret and first[2] == _MACHINE_LOST):
            return  # nothing could tell it from one that failed by itself
        raise Violation(f"blame: rank {cause.rank} is named, a victim of rank {first[1]} ({first[2]})")

    def epoch_heard(self, uid: RunUid, epoch: Epoch) -> None:
        """Somebody outside the coordinator is told of the epoch."""
        if epoch > self.world.coordinator.journal[uid].epoch:
            raise Violation("3: somebody hears of an epoch that is not durable")
        self._heard[uid] = max(epoch, self._heard.get(uid, epoch))

    def read_back(self, gang: Gang) -> None:
        """What a coordinator finds in the journal when it comes back."""
        if gang.epoch < self._heard.get(gang.uid, 0):
            raise Violation("3: an epoch that was heard of is not in the journal any more")

    def cancel_taken(self, uid: RunUid) -> None:
        """The user was told that the run is being cancelled."""
        self._cancelled.add(uid)

    # ---- the store --------------------------------------------------------------------------------

    def barrier_opened(self, message: ms.BarrierOpened, valid: set[IncarnationToken]) -> None:
        if any(token not in valid for token in message.tokens):
            raise Violation("2: a barrier opened for a rank without a valid lease")

    def lease_lapsed(self, keeper: SimKeeper | None) -> None:
        """Declared lost: was there any reason to?"""
        if keeper is not None:
            self._said_lost.add(keeper.incarnation)
        if keeper is None or keeper.is_over or keeper.machine.troubled_until >= self.world.now:
            return
        raise Violation("9: a healthy member was declared lost")

    def key_answered(self, process: SimProcess, request: Any, reply: ms.Message) -> None:
        """A process asked the store something under its epoch."""
        if isinstance(reply, ms.Refused):
            return
        gang = self.world.store.state.books.gangs[request.gang]
        if request.epoch != gang.epoch:
            raise Violation("8: the store served a process of an older epoch")
        if isinstance(reply, ms.Value) and reply.value != f"{request.epoch}".encode():
            raise Violation("8: a rank read what another epoch had written")

    def rank_admitted(self, message: ms.Admit) -> None:
        """A rank is let in alone, as if nothing but its own command had failed."""
        deaths = self._deaths.get((message.gang, message.epoch), [])
        failed_at = max((at for at, rank, _ in deaths if rank == message.rank), default=0.0)
        told = {me.rank for me in self._said_lost if (me.run_uid, me.epoch) == (message.gang, message.epoch)}
        for at, rank, how in deaths:  # the coordinator hears of a lapse before it hears of the admission
            if rank != message.rank and how == _MACHINE_LOST and at < failed_at and rank not in told:
                raise Violation(f"blame: rank {message.rank} starts again alone, rank {rank} was lost before")

    # ---- machines ---------------------------------------------------------------------------------

    def network_answered(self, uid: RunUid, verdict: ev.NetworkChecked) -> None:
        """On its way to the coordinator."""
        self._said_of_network[uid, verdict.number] = verdict

    def coordinator_crashed(self) -> None:
        """What was answered and is not durable was not heard."""
        self._said_of_network.clear()

    def _note_network(self, before: Gang, after: Gang) -> None:
        """A verdict counts from when it is durable; nobody waits for one of an epoch that was stopped."""
        if before.check is None or before.check == after.check or after.outcome is not None:
            return
        verdict = self._said_of_network.get((after.uid, before.check.number))
        for refusal in () if verdict is None else verdict.refusals:
            self.refusals += 1
            self._apart.add((after.uid, refusal.machine))

    def machine_granted(self, machine: Machine, uid: RunUid) -> None:
        self._apart.discard((uid, machine.name))
        if machine.processes:
            raise Violation("6: a machine is given away on which something still runs")

    def no_other_machine(self, uid: RunUid) -> None:
        """What the gang wants could never be had without the machines that it avoids."""
        self._has_no_other.add(uid)

    # ---- the end ----------------------------------------------------------------------------------

    def check_liveness(self) -> None:
        """Some time after the world has healed."""
        for uid, gang in self.world.coordinator.journal.items():
            if gang.state.is_terminal:
                continue
            acting = sum(p.is_acting for p in self.alive.get(uid, {}).values())
            succeeded = sum(m.succeeded for m in gang.members.values())
            is_well = gang.state is RunState.RUNNING and acting + succeeded == gang.plan.nodes
            if not is_well and gang.state is not RunState.RUNNING:
                raise Violation(f"9: liveness: {uid} is {gang.state}: {gang.message}")

    def check_end(self) -> None:
        """When nothing is left to happen."""
        world = self.world
        if not world.coordinator.is_up:
            raise Violation("9: the coordinator never came back")
        for uid, gang in world.coordinator.journal.items():
            if not gang.state.is_terminal:
                raise Violation(f"9: liveness: {uid} rests in {gang.state}: {gang.message}")
            if not gang.is_released:
                raise Violation("6: machines were never released")
            if self.alive.get(uid):
                raise Violation("1: processes outlive their run")
            self._check_ledger(gang.holdings)
        if world.fleet.owner:
            raise Violation("6: the fleet still holds machines for nobody")

    @staticmethod
    def _check_ledger(holdings: list[Holding]) -> None:
        for line in holdings:
            if line.until is None or line.until < line.since:
                raise Violation("6: a ledger line is open or ends before it begins")
        keys = [(line.machine, line.reservation) for line in holdings]
        if len(keys) != len(set(keys)):
            raise Violation("6: a machine is in the ledger twice for one reservation")


def _place(incarnation: Incarnation) -> tuple[RunUid, Epoch, Rank]:
    return (incarnation.run_uid, incarnation.epoch, incarnation.rank)


_MACHINE_LOST = "its machine was lost"
_IN_AN_EPOCH = (RunState.ASSEMBLING, RunState.STARTING, RunState.RUNNING, RunState.FENCING)


def _is_restart(before: Gang, after: Gang) -> bool:
    """An epoch ended, and the run goes on; an assembly that is tried again, from an earlier checkpoint too, is none."""
    is_retry = before.outcome is not None and before.outcome.kind is OutcomeKind.RETRY_ASSEMBLY
    if before.state not in _IN_AN_EPOCH or is_retry:
        return False
    if after.state is RunState.PENDING:
        return after.assemblies == 0
    return after.epoch > before.epoch
