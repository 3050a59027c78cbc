"""A rank's command: what the invariants are about. It meets its peers through the store's keys, runs, and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.messages import CauseEvidence, ProcessExit
from mesh.states import FailurePolicy
from mesh.store import messages as ms

if TYPE_CHECKING:
    from tests.sim.member import SimMember

SIGTERM, SIGKILL = 15, 9
SECRETLY_BY_A_PEER = 3
"""The exit code of a command that a peer's end made fail, and that does not say so."""


class SimProcess:
    """The tree of one incarnation, from its start until nothing of it is left.

    Args:
        starts_frozen: its keeper holds the tree frozen, and looks for newcomers every few milliseconds
            (`agents.keeper.FREEZE_AGAIN_S`).
    """

    def __init__(self, member: SimMember, *, starts_frozen: bool = False) -> None:
        self.member = member
        self.world = member.world
        self.machine = member.machine
        self.incarnation = member.incarnation
        self.is_alive = True
        self.is_tree_frozen = starts_frozen
        self.stuck_until = 0.0
        """It stands in the kernel until then: it does nothing, and a kill ends it only afterwards."""
        self._is_killed = False
        self._waiting_end: tuple[ProcessExit, CauseEvidence] | None = None
        self.machine.processes.append(self)
        self.world.truth.process_started(self)
        self._meet()
        roll = self.world.roll
        faults = self.world.faults
        if roll(faults.long_run):
            length_s = 700.0 + self.world.random.expovariate(1 / 60)
        else:
            length_s = self.world.random.expovariate(1 / 20) + (20.0 if self.world.saves else 0.0)
        code = 42 if roll(faults.exit_badly) else 0
        self.machine.after(length_s, self.end, ProcessExit(code=code), CauseEvidence())

    @property
    def is_acting(self) -> bool:
        """It can do something now. One that its thawed machine's keeper has not seen yet is only a ghost that stirs."""
        machine = self.machine
        now = self.world.now
        return (
            self.is_alive
            and not self.is_tree_frozen
            and not machine.is_frozen
            and now >= machine.stirs_until
            and now >= self.stuck_until
        )

    # ---- what it does -----------------------------------------------------------------------------

    def _meet(self) -> None:
        """Says where it is, and looks for the others."""
        me = self.incarnation
        key = (me.run_uid, me.epoch)
        self._ask(ms.Set, (f"{me.epoch}".encode(), *key, f"rank/{me.rank}"))
        for rank in range(self.member.order.plan.nodes):
            self.machine.after(0.02, self._ask, ms.Get, (*key, f"rank/{rank}"))

    def _ask(self, kind: type, fields: tuple[object, ...]) -> None:
        if self.is_alive and self.machine.is_open("store out"):
            self.world.after(
                self.machine.latency(), self.world.store.run, self.world.store.serve_key, self, kind, fields
            )

    def stir(self) -> None:
        """Its machine goes on after it stood still: it asks every door, before anybody has looked after it."""
        if not self.is_alive or self.is_tree_frozen:
            return
        me = self.incarnation
        self.world.truth.stirred(me)
        key = (me.run_uid, me.epoch)
        self._ask(ms.Set, (f"{me.epoch}".encode(), *key, f"rank/{me.rank}"))
        self._ask(ms.Add, (*key, "step", 1))
        self._ask(ms.CompareAndSet, (*key, "checkpoint", None, b"mine"))
        self._ask(ms.Arrive, (me.rank, me.token, *key))

    # ---- how it ends ------------------------------------------------------------------------------

    def end(self, exit_: ProcessExit, evidence: CauseEvidence) -> None:
        """By itself, by its peers, or by a signal."""
        if not self.is_alive:
            return
        is_kill = exit_.signal == SIGKILL
        self._is_killed |= is_kill
        if self.stuck_until > self.world.now:
            self.machine.after(
                (self.stuck_until - self.world.now) * self.machine.rate, self.end, exit_, evidence
            )
            return
        if self.is_tree_frozen and not is_kill:
            self._waiting_end = self._waiting_end or (exit_, evidence)
            return
        self._note_death(exit_, evidence)
        self._leave()
        self.member.process_ended(exit_, evidence)
        if not exit_.ok:
            self._peers_notice()

    def _note_death(self, exit_: ProcessExit, evidence: CauseEvidence) -> None:
        truth, me = self.world.truth, self.incarnation
        if exit_.code == 42:
            truth.failed_by_itself(me)
        if not exit_.ok and self.member.core.state.stop_by is None:  # nobody has ordered it to stop
            is_victim = evidence.blames_peer or exit_.code == SECRETLY_BY_A_PEER
            truth.died(me, "by a peer" if is_victim else "it was killed")

    def vanish(self) -> None:
        """Its machine is gone: nobody is left to say how it ended."""
        self.world.truth.died(self.incarnation, "its machine was lost")
        self._leave()
        if self.world.random.random() < 0.6:
            self._peers_notice()

    def freeze(self) -> None:
        self.is_tree_frozen = True

    def thaw(self) -> None:
        self.is_tree_frozen = False
        self.world.truth.check_acting()
        if self._waiting_end is not None:
            waiting, self._waiting_end = self._waiting_end, None
            self.end(*waiting)

    def _leave(self) -> None:
        self.is_alive = False
        self.machine.processes.remove(self)
        self.world.truth.process_ended(self)

    def _peers_notice(self) -> None:
        """A dead rank breaks its peers' collectives within milliseconds; one that vanished without a word, later."""
        world, me = self.world, self.incarnation
        latest_s = 0.3 if not self.machine.is_lost else 4.0
        is_for_ranks = self.member.order.plan.on_process_failure is FailurePolicy.RESTART_RANK
        share = world.faults.unrelated_dies_of_it if is_for_ranks else world.faults.peer_dies_of_it
        for other in list(world.truth.alive[me.run_uid].values()):
            if other.incarnation.epoch == me.epoch and world.random.random() < share:
                complains = (
                    world.seed + other.incarnation.rank + me.epoch
                ) % 4 > 0  # not drawn: seeds stay the same
                exit_ = ProcessExit(code=1 if complains else SECRETLY_BY_A_PEER)
                evidence = CauseEvidence(blames_peer=complains)
                other.machine.after(world.random.uniform(0.0, latest_s), other.end, exit_, evidence)
