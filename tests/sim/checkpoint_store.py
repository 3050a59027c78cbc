"""The simulated checkpoint store: parts and manifests of every run, what harms them, and times when it does not work.

It keeps the rules of `coordinator.checkpoint_store`. What was begun there is done, whoever has died meanwhile: a
manifest may be written for a coordinator that never hears of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from agents.core.checkpoint_events import Entry
from coordinator.checkpoint_store import PART_GRACE_S, Lacking, Written
from coordinator.core.checkpoints import CleanCheckpointStore, CommitCheckpoint
from mesh.checkpoint_format import RestoreReference, step_of_folder
from mesh.ids import Rank, RunUid
from tests.sim.tasks import DOWN, Begin, Resume

if TYPE_CHECKING:
    from tests.sim.world import World

TRY_LIMIT_S = 3.0
"""After so long a store that is away is taken for away."""


class Harm(StrEnum):
    """What became of a part in the store."""

    GONE = "gone"
    TRUNCATED = "truncated"
    ROTTEN = "rotten"
    """Only who reads all of it sees that."""


@dataclass(slots=True)
class StoredPart:
    """What one rank's state directory was."""

    entries: tuple[Entry, ...]
    stored_at: float
    harm: Harm | None = None


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A gang checkpoint."""

    wish: CommitCheckpoint
    was_whole: bool
    """The truth about its parts when it was written."""


class SimCheckpointStore:
    """One store for all runs, outside of every machine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.parts: dict[tuple[RunUid, str], StoredPart] = {}
        self.manifests: dict[tuple[RunUid, int], StoredManifest] = {}
        self.away_until = 0.0
        if world.saves and world.roll(world.faults.checkpoint_store_away):
            world.after(world.random.uniform(0.0, 60.0), self._go_away)

    def _go_away(self) -> None:
        """Slow, full, or not there: nothing is answered for a while."""
        world = self.world
        if not world.has_healed:
            world.note("*** the checkpoint store does not work")
            for_s = world.random.choice([2.0, 10.0, 40.0])
            self.away_until = min(world.now + for_s, world.heals_at)

    @property
    def is_away(self) -> bool:
        return self.away_until > self.world.now

    def _delay_s(self) -> float:
        world = self.world
        return world.random.expovariate(0.3 if world.roll(world.faults.checkpoint_store_slow) else 10.0)

    # ---- parts --------------------------------------------------------------------------------------

    def put(self, uid: RunUid, digest: str, entries: tuple[Entry, ...]) -> None:
        """All of a part is here. One that is here already is looked at, and sent again when it is harmed."""
        world = self.world
        known = self.parts.get((uid, digest))
        if known is None or known.harm in (Harm.GONE, Harm.TRUNCATED):
            self.parts[uid, digest] = StoredPart(entries, world.now)
        if world.roll(world.faults.part_harmed):
            harm = world.random.choice(list(Harm))
            world.after(world.random.expovariate(0.2), self._harm, uid, digest, harm)

    def _harm(self, uid: RunUid, digest: str, harm: Harm) -> None:
        part = self.parts.get((uid, digest))
        if part is not None and not self.world.has_healed:
            self.world.note(f"*** a part is {harm}: {digest}")
            part.harm = harm

    def _is_whole(self, uid: RunUid, digest: str) -> bool:
        """As far as looking at names and sizes tells."""
        part = self.parts.get((uid, digest))
        return part is not None and part.harm in (None, Harm.ROTTEN)

    def fetch(self, uid: RunUid, reference: RestoreReference, rank: Rank) -> tuple[Entry, ...] | None:
        """What a rank's directory was at the checkpoint's step; None when that is damaged."""
        manifest = self.manifests.get((uid, reference.number))
        if manifest is None or len(manifest.wish.parts) <= rank:
            self.world.truth.checkpoints.found_missing(uid, reference.number)
            return None
        part = self.parts.get((uid, manifest.wish.parts[rank]))
        if part is None:
            self.world.truth.checkpoints.found_missing(uid, reference.number)
        if part is None or part.harm is not None:
            self.world.truth.checkpoints.found_damaged += 1
            return None
        return tuple(e for e in part.entries if _is_of(e, manifest.wish.step))

    # ---- checkpoints --------------------------------------------------------------------------------

    def commit(self, uid: RunUid, wish: CommitCheckpoint) -> Begin:
        """`Written`, `Lacking`, or DOWN."""

        def begin(resume: Resume) -> None:
            self.world.after(self._delay_s(), self._commit, uid, wish, resume)

        return begin

    def _commit(self, uid: RunUid, wish: CommitCheckpoint, resume: Resume) -> None:
        world = self.world
        if self.is_away:
            world.after(TRY_LIMIT_S, resume, DOWN)
            return
        answer = self.publish(uid, wish)
        world.after(self._delay_s(), resume, answer)

    def publish(self, uid: RunUid, wish: CommitCheckpoint) -> Written | Lacking:
        """Creates the manifest, once, when every part is here."""
        lacking = [digest for digest in wish.parts if not self._is_whole(uid, digest)]
        if lacking:
            return Lacking(parts=(lacking[0],), message="A part is missing or damaged.")
        known = self.manifests.get((uid, wish.number))
        if known is not None and known.wish != wish:
            return Lacking(parts=(), message=f"Checkpoint {wish.number} exists with other content.")
        self.write(uid, wish)
        return Written(uri=f"sim://{wish.number}", size_bytes=1, created_at=self.world.now)

    def write(self, uid: RunUid, wish: CommitCheckpoint) -> None:
        was_whole = all(self._is_whole(uid, digest) for digest in wish.parts)
        self.manifests.setdefault((uid, wish.number), StoredManifest(wish, was_whole))

    # ---- cleaning -----------------------------------------------------------------------------------

    def clean(self, uid: RunUid, staying: CleanCheckpointStore) -> Begin:
        """Answers None, or DOWN."""

        def begin(resume: Resume) -> None:
            self.world.after(self._delay_s(), self._clean, uid, staying, resume)

        return begin

    def _clean(self, uid: RunUid, staying: CleanCheckpointStore, resume: Resume) -> None:
        world = self.world
        if self.is_away:
            world.after(TRY_LIMIT_S, resume, DOWN)
            return
        newest = max(staying.numbers, default=0)
        for key in [k for k in self.manifests if k[0] == uid]:
            if key[1] < newest and key[1] not in staying.numbers:
                del self.manifests[key]
        needed = set(staying.parts)
        for key, manifest in self.manifests.items():
            if key[0] == uid:
                needed.update(manifest.wish.parts)
        for part_key, part in list(self.parts.items()):
            is_old = world.now - part.stored_at > PART_GRACE_S
            if part_key[0] == uid and part_key[1] not in needed and is_old:
                del self.parts[part_key]
        world.truth.checkpoints.cleaned(uid)
        world.after(self._delay_s(), resume, None)


def _is_of(entry: Entry, step: int | None) -> bool:
    found = step_of_folder(entry.path.partition("/")[0])
    return step is None or found is None or found <= step
