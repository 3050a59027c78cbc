"""What is so about checkpoints, whoever believes what. Violations are of invariant 10:

Only whole checkpoints, of one epoch and of every rank, are committed; an epoch begins from the newest of them that is
whole, on every rank; none is lost while it is retained; steps do not go back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agents.core.checkpoint_events import Entry
from coordinator.core.checkpoints import KEEP, Committed
from coordinator.core.gang_state import Gang
from mesh.ids import Epoch, Incarnation, Rank, RunUid

if TYPE_CHECKING:
    from tests.sim.process import SimProcess
    from tests.sim.world import World

FOREVER = float("inf")
Span = list[float]
"""From when until when a directory was the same."""


class CheckpointTruth:
    """Watches the checkpoints of a world. Raises AssertionError."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.restored = 0
        """Commands that began from a checkpoint."""
        self.commits = 0
        self.found_damaged = 0
        """Restores that a damaged part stopped."""
        self._stored: set[tuple[RunUid, Epoch, Rank, str]] = set()
        """Parts that a member of that epoch has stored."""
        self._half: set[tuple[RunUid, str]] = set()
        """Parts with a file that was being written."""
        self._contents: dict[tuple[RunUid, str], tuple[Entry, ...]] = {}
        self._spans: dict[tuple[RunUid, Epoch, Rank, str], Span] = {}
        self._current: dict[tuple[RunUid, Epoch, Rank], str] = {}
        self._begins_from: dict[tuple[RunUid, Epoch], int | None] = {}
        self._has_run: dict[RunUid, Epoch] = {}
        """The first epoch of which a command ran."""
        self._progressed: set[RunUid] = set()

    # ---- on the machines ---------------------------------------------------------------------------

    def directory_is(self, me: Incarnation, digest: str) -> None:
        """From now on."""
        now = self.world.now
        key = (me.run_uid, me.epoch, me.rank)
        before = self._current.get(key)
        if before == digest:
            return
        if before is not None:
            self._spans[(*key, before)][1] = now
        self._current[key] = digest
        self._spans[(*key, digest)] = [now, FOREVER]

    def part_stored(
        self, me: Incarnation, digest: str, entries: tuple[Entry, ...], *, has_half: bool
    ) -> None:
        self._stored.add((me.run_uid, me.epoch, me.rank, digest))
        self._contents[me.run_uid, digest] = entries
        if has_half:
            self._half.add((me.run_uid, digest))

    def process_started(self, process: SimProcess, *, is_again: bool) -> None:
        """What its directory was made before. A rank that starts again alone finds its own."""
        if is_again:
            return
        me, order = process.incarnation, process.member.order
        begun_from = None if order.restore is None else order.restore.number
        if (me.run_uid, me.epoch) in self._begins_from:
            wanted = self._begins_from[me.run_uid, me.epoch]
            assert begun_from == wanted, (
                f"10: rank {me.rank} begins from checkpoint {begun_from}, its epoch from {wanted}"
            )
        first = min(
            me.epoch, self._has_run.get(me.run_uid, me.epoch)
        )  # an older one's ghost may come to life late
        assert order.is_clean_start or first == me.epoch, "10: a rank goes on with what is in no checkpoint"
        self._has_run[me.run_uid] = first
        if begun_from is not None:
            self.restored += 1

    # ---- the journal -------------------------------------------------------------------------------

    def committed(self, before: Gang, after: Gang) -> None:
        """A gang's new state is durable."""
        old, new = before.checkpoints.committed, after.checkpoints.committed
        if old != new:
            known = {one.number for one in old}
            for one in new:
                if one.number not in known:
                    self._check_new(before, after, one)
            self._check_retained(old, new)
        if after.epoch != before.epoch:
            self._check_begin(after)

    def _check_new(self, before: Gang, after: Gang, one: Committed) -> None:
        uid = after.uid
        self.commits += 1
        assert one.epoch == before.epoch, "10: a checkpoint of an older epoch is committed"
        assert len(one.parts) == after.plan.nodes, "10: a checkpoint lacks a rank"
        manifest = self.world.checkpoint_store.manifests.get((uid, one.number))
        assert manifest is not None, "10: a checkpoint is committed of which there is no manifest"
        assert (manifest.wish.epoch, manifest.wish.parts) == (one.epoch, one.parts), (
            "10: it says something else"
        )
        assert manifest.was_whole, "10: a checkpoint is committed that was not whole"
        for rank, digest in enumerate(one.parts):
            assert (uid, one.epoch, Rank(rank), digest) in self._stored, (
                f"10: a part of rank {rank} is not of epoch {one.epoch}"
            )
            assert (uid, digest) not in self._half, "10: a half-written file is in a checkpoint"
        self._check_fit(uid, one)
        whole = [c for c in before.checkpoints.committed if not c.damage]
        if not whole or one.step is None or whole[-1].step is None:
            self._progressed.add(uid)
            return
        assert one.step >= whole[-1].step, "10: a later checkpoint is of an earlier step"
        if one.step > whole[-1].step:
            self._progressed.add(uid)

    def _check_fit(self, uid: RunUid, one: Committed) -> None:
        """One step, or one moment at which all directories were at rest."""
        spans: list[Span] = []
        for rank, digest in enumerate(one.parts):
            entries = self._contents[uid, digest]
            if one.step is not None and entries:
                names = {entry.path for entry in entries}
                wanted = {f"iter_{one.step:08d}.pt", f"step-{one.step:08d}"}
                assert names & wanted, f"10: rank {rank} has nothing of step {one.step}"
            else:
                spans.append(self._spans[uid, one.epoch, Rank(rank), digest])
        assert not spans or max(s[0] for s in spans) < min(s[1] for s in spans), (
            "10: the parts of a checkpoint were never there at one moment"
        )

    def _check_retained(self, old: list[Committed], new: list[Committed]) -> None:
        whole = [one.number for one in new if not one.damage]
        for one in old:
            is_there = any(n.number == one.number for n in new)
            assert is_there or one.damage or sum(n > one.number for n in whole) >= KEEP, (
                "10: a committed checkpoint is forgotten"
            )

    def _check_begin(self, after: Gang) -> None:
        """An epoch begins from the newest whole checkpoint, committed at the latest by what is written with it."""
        whole = [one.number for one in after.checkpoints.committed if not one.damage]
        newest = max(whole, default=None)
        self._begins_from[after.uid, after.epoch] = newest
        assert after.checkpoints.restored == newest, (
            f"10: epoch {after.epoch} begins from {after.checkpoints.restored}, and {newest} is committed"
        )

    def has_progressed(self, uid: RunUid) -> bool:
        """Since this was asked last a checkpoint was committed that is further than those before it."""
        found = uid in self._progressed
        self._progressed.discard(uid)
        return found

    # ---- the store ---------------------------------------------------------------------------------

    def cleaned(self, uid: RunUid) -> None:
        """What is retained is still there."""
        store = self.world.checkpoint_store
        for one in self.world.coordinator.journal[uid].checkpoints.committed:
            is_there = (uid, one.number) in store.manifests
            assert is_there and all((uid, digest) in store.parts for digest in one.parts), (
                "10: a checkpoint that is retained was removed"
            )

    def found_missing(self, uid: RunUid, number: int) -> None:
        """A restore found that its checkpoint, or its part of it, had been removed."""
        raise AssertionError(f"10: checkpoint {number} is restored from, and was removed")
