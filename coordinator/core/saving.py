"""The checkpoints of a gang: its members' parts become gang checkpoints, and an epoch begins from one.

`checkpoints` decides which parts fit together; this room says when, and tells the run's story.

Rules of this file:
1. A part counts when it is of the current epoch and its member is not settled: what has been fenced commits nothing.
   What was wished for before may still be written, until the next epoch begins.
2. The next epoch waits a little (`COMMIT_PATIENCE_S`) for a checkpoint that is being written, to begin from it: before
   the one before is over, and after a suspension, which itself does not wait, before it begins.
3. A damaged checkpoint is not the assembly's fault: another one begins, on the same machines, from the one before.
"""

from __future__ import annotations

from coordinator.core import recovery
from coordinator.core.checkpoints import (
    AskAboutPart,
    CheckpointEffect,
    Committed,
    PartFact,
    RetakePart,
)
from coordinator.core.effects import TellAboutPart
from coordinator.core.events import CheckpointLacking, CheckpointWritten
from coordinator.core.gang_base import GangBase
from coordinator.core.gang_state import CommittedCheckpoint, MemberRecord
from mesh.messages import CheckpointPartAnswered, CheckpointPartStored, CheckpointTroubled
from mesh.reasons import Reason

COMMIT_PATIENCE_S = 5.0
TELL_EVERY_S = 30.0
"""Of checkpoints that follow each other fast, not each one is told."""
TROUBLES_MAX = 8
"""Told per rank and epoch."""


class Saving(GangBase):
    """Parts and checkpoints."""

    def _begin_checkpoints(self) -> None:
        """For the epoch that begins now; what it is restored from is `gang.checkpoint`."""
        self.gang.checkpoints.begin_epoch(self.gang.epoch)
        self._due.commit = None
        self._told_at = None
        self._troubles = {}

    def _on_checkpoint_part_stored(self, event: CheckpointPartStored) -> None:
        if self._current(event.incarnation) is None:
            return
        part = PartFact(
            number=event.number,
            digest=event.digest,
            content=event.content,
            steps=event.steps,
            files=event.files,
            size_bytes=event.size_bytes,
        )
        incarnation = event.incarnation
        self._dirty = True
        self._save(
            self.gang.checkpoints.part_stored(epoch=incarnation.epoch, rank=incarnation.rank, part=part)
        )

    def _on_checkpoint_part_answered(self, event: CheckpointPartAnswered) -> None:
        if self._current(event.incarnation) is None:
            return
        self._dirty = True
        self._save(
            self.gang.checkpoints.answered(
                epoch=event.incarnation.epoch,
                rank=event.incarnation.rank,
                question=event.question,
                digest=event.digest,
                holds=event.holds,
            )
        )

    def _on_checkpoint_troubled(self, event: CheckpointTroubled) -> None:
        member = self._current(event.incarnation)
        if member is None or self._troubles.get(member.rank, 0) >= TROUBLES_MAX:
            return
        self._troubles[member.rank] = self._troubles.get(member.rank, 0) + 1
        self._announce("CheckpointTrouble", f"Rank {member.rank}: {event.message}", rank=member.rank)

    def _on_checkpoint_written(self, event: CheckpointWritten) -> None:
        checkpoints = self.gang.checkpoints
        if checkpoints.wish is None or checkpoints.wish.number != event.number:
            return
        effects = checkpoints.committed_as(
            number=event.number, uri=event.uri, size_bytes=event.size_bytes, created_at=event.created_at
        )
        self._dirty = True
        newest = checkpoints.committed[-1]
        self._note_newest()
        if checkpoints.is_progress(newest) and not self.gang.state.is_terminal:
            self.gang.restarts = recovery.with_progress(self.gang.restarts)
        self._tell_committed(newest)
        self._save(effects)

    def _on_checkpoint_lacking(self, event: CheckpointLacking) -> None:
        checkpoints = self.gang.checkpoints
        if checkpoints.wish is None or checkpoints.wish.number != event.number:
            return
        self._announce(
            "CheckpointDropped",
            f"Checkpoint {checkpoints.wish.id} is not committed: {event.message}",
            reason=Reason.CHECKPOINT_CORRUPT,
        )
        self._save(checkpoints.not_committed(number=event.number, lacking=event.parts))

    def _note_newest(self) -> None:
        newest = self.gang.checkpoints.newest
        self.gang.checkpoint = (
            None
            if newest is None
            else CommittedCheckpoint(
                id=newest.id,
                uri=newest.uri,
                epoch=newest.epoch,
                step=newest.step,
                bytes=newest.size_bytes,
                at=newest.created_at,
            )
        )

    def _tell_committed(self, one: Committed) -> None:
        if self._told_at is not None and self._now.mono - self._told_at < TELL_EVERY_S:
            return
        self._told_at = self._now.mono
        step = "" if one.step is None else f" of step {one.step}"
        self._announce(
            "CheckpointCommitted",
            f"Checkpoint {one.id}{step} is committed: {one.size_bytes / 2**20:.1f} MiB.",
        )

    def _note_damage(self, member: MemberRecord, number: int, message: str) -> bool:
        """A rank could not restore this checkpoint. False when that is not news."""
        damaged = self.gang.checkpoints.found_damaged(number=number, why=message)
        if damaged is None:
            return False
        self._note_newest()
        then = self.gang.checkpoint
        instead = "There is no other one: the state directories are emptied."
        if then is not None:
            instead = f"The one before, {then.id}, is restored instead."
        self._announce(
            "CheckpointDamaged",
            f"{message} {instead}",
            reason=Reason.CHECKPOINT_CORRUPT,
            rank=member.rank,
        )
        return True

    def _awaits_commit(self) -> bool:
        """Whether the next epoch should wait a little (rule 2)."""
        if self.gang.checkpoints.wish is not None:
            if self._due.commit is None:
                self._due.commit = self._now.mono + COMMIT_PATIENCE_S
            if self._now.mono < self._due.commit:
                return True
            self.gang.checkpoints.wish = None
            self._dirty = True
        self._due.commit = None
        return False

    def _save(self, effects: list[CheckpointEffect]) -> None:
        members = self.gang.members
        for effect in effects:
            if not isinstance(effect, AskAboutPart | RetakePart):
                self._effects.append(effect)
            elif effect.rank in members:
                question = effect.question if isinstance(effect, AskAboutPart) else None
                self._effects.append(
                    TellAboutPart(
                        incarnation=members[effect.rank].incarnation, digest=effect.digest, question=question
                    )
                )
