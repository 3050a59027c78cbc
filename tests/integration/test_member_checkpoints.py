"""A member and its checkpoints, with real processes: restored before the barrier, taken meanwhile, handed over."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents.preparation import Folders
from coordinator.checkpoint_store import CheckpointStore, Written
from coordinator.core.checkpoints import CommitCheckpoint
from mesh import checkpoint
from mesh.blob_store import BlobStore
from mesh.checkpoint_format import Part, RestoreReference, blob_key, part_key
from mesh.ids import Epoch, Rank, RunName
from mesh.messages import (
    CheckpointOrder,
    CheckpointPartAnswered,
    CheckpointPartStored,
    CheckpointTroubled,
    JoinOrder,
    MemberFenced,
    MemberPreparationFailed,
    MemberReport,
)
from mesh.plan import RunPlan
from mesh.reasons import Reason
from tests.integration.test_member_real import Gang, Head, until

SAVES_WHEN_ASKED = """
import signal, sys, pathlib
sys.path.insert(0, sys.argv[1])
import checkpoint

def save(*_):
    checkpoint.save(b"of the grace period", step=7)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
pathlib.Path("model.bin").write_text("at rest")
print("ready", flush=True)
while True:
    signal.pause()
"""
SHOWS = "import os; print(sorted(os.listdir('.')), os.environ.get('NODUS_RESTORE_URI'), flush=True)"


class SavingGang(Gang):
    """One rank whose orders name a checkpoint store."""

    def __init__(self, head: Head, folder: Path, *command: str) -> None:
        super().__init__(head, folder, RunPlan(name=RunName("save"), command=command, nodes=1))
        self.store = BlobStore(f"file://{folder}/store")
        self.restore: RestoreReference | None = None
        self.is_clean_start = False

    def order(self, rank: int) -> JoinOrder:
        return replace(
            super().order(rank),
            checkpoints=self.store.url,
            restore=self.restore,
            is_clean_start=self.is_clean_start,
        )

    @property
    def state(self) -> Path:
        return Folders.of(self.incarnation(0), machine_dir=self.folder / "machine-0").state

    def parts(self) -> list[CheckpointPartStored]:
        return [report for report in self.reports if isinstance(report, CheckpointPartStored)]

    def part(self, stored: CheckpointPartStored) -> Part:
        return Part.decode(self.store.get_bytes(part_key(self.uid, stored.digest), bytes_max=1 << 20))

    async def commit(self, stored: CheckpointPartStored) -> RestoreReference:
        wish = CommitCheckpoint(number=1, epoch=Epoch(1), step=None, parts=(stored.digest,), contents=("",))
        done = await CheckpointStore(self.store.url, blobs=self.store).commit(self.uid, wish)
        assert isinstance(done, Written)
        return RestoreReference(number=1, id=wish.id, step=None, uri=done.uri)


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    made = Head(tmp_path)
    await made.start()
    yield made
    await made.stop()


def stored_before(gang: SavingGang, content: str) -> Part:
    """A part of an earlier epoch, in the store."""
    import hashlib

    from mesh.checkpoint_format import FileKind, FileRecord

    data = content.encode()
    sha256 = hashlib.sha256(data).hexdigest()
    gang.store.put_bytes(blob_key(gang.uid, sha256), data)
    part = Part(
        files=(FileRecord(path="model.bin", kind=FileKind.FILE, mode=0o644, size=len(data), sha256=sha256),)
    )
    gang.store.put_bytes(part_key(gang.uid, part.digest), part.encode())
    return part


async def test_what_a_rank_saves_in_its_grace_period_is_stored_and_told_before_it_is_fenced(
    head: Head, tmp_path: Path
) -> None:
    helper = str(Path(checkpoint.__file__).parent)
    gang = SavingGang(head, tmp_path, sys.executable, "-c", SAVES_WHEN_ASKED, helper)
    try:
        await gang.join()
        await until(lambda: any(part.files == 1 for part in gang.parts()))
        (first,) = (part for part in gang.parts() if part.files == 1)
        assert [file.path for file in gang.part(first).files] == ["model.bin"]
        order = CheckpointOrder(incarnation=gang.incarnation(0), digest=first.digest, question=5)
        await gang.members[0].about_part(order)
        await until(lambda: CheckpointPartAnswered in gang.kinds(0))
        answer = await gang.last(0, CheckpointPartAnswered)
        assert isinstance(answer, CheckpointPartAnswered)
        assert (answer.question, answer.digest, answer.holds) == (5, first.digest, True)
        gang.refused_reports = 2  # the coordinator is away for a moment
        await gang.fence(0)
        await gang.fenced(0)
        last = gang.parts()[-1]
        assert last.steps == (7,)
        assert {file.path for file in gang.part(last).files} >= {"model.bin", "step-00000007/state.bin"}
        kinds = gang.kinds(0)
        assert kinds.index(MemberFenced) > max(i for i, k in enumerate(kinds) if k is CheckpointPartStored)
    finally:
        await gang.close()
    assert not Folders.of(gang.incarnation(0), machine_dir=gang.folder / "machine-0").checkpointing.exists()


async def test_a_rank_begins_with_what_was_committed_and_is_told_where_it_is(
    head: Head, tmp_path: Path
) -> None:
    gang = SavingGang(head, tmp_path, sys.executable, "-c", SHOWS)
    try:
        part = stored_before(gang, "committed")
        gang.restore = await gang.commit(
            CheckpointPartStored(
                incarnation=gang.incarnation(0), at=0.0, number=1, digest=part.digest, content="", steps=(), files=1,
                size_bytes=9,
            )
        )  # fmt: skip
        gang.is_clean_start = True
        gang.state.mkdir(parents=True)
        (gang.state / "uncommitted.bin").write_text("half")
        await gang.join()
        assert (await gang.exit(0)).exit.ok
        await until(lambda: "model.bin" in gang.output(0))
        assert f"['model.bin'] {gang.restore.uri}" in gang.output(0)
        assert (gang.state / "model.bin").read_text() == "committed"
        assert os.listdir(gang.state.parent / "uncommitted" / "1") == ["uncommitted.bin"]
    finally:
        await gang.close()


async def test_a_restore_that_waits_for_its_store_says_so_and_goes_on_when_it_is_back(
    head: Head, tmp_path: Path
) -> None:
    """Else a gang would stand at the barrier for minutes, and nobody knew what for."""
    gang = SavingGang(head, tmp_path, sys.executable, "-c", SHOWS)
    folder, away = tmp_path / "store", tmp_path / "away"
    try:
        part = stored_before(gang, "committed")
        report = CheckpointPartStored(
            incarnation=gang.incarnation(0), at=0.0, number=1, digest=part.digest, content="", steps=(), files=1,
            size_bytes=9,
        )  # fmt: skip
        gang.restore = await gang.commit(report)
        gang.is_clean_start = True
        folder.rename(away)
        folder.write_text("no store")
        await gang.join()
        told = await gang.last(0, CheckpointTroubled)
        assert isinstance(told, CheckpointTroubled)
        assert "The checkpoint store" in told.message and "The restore waits for it." in told.message
        folder.unlink()
        away.rename(folder)
        assert (await gang.exit(0)).exit.ok
        await until(lambda: f"['model.bin'] {gang.restore.uri}" in gang.output(0))
        assert gang.kinds(0).count(CheckpointTroubled) == 1
    finally:
        await gang.close()


async def test_a_first_start_leaves_the_directory_as_it_is_and_names_no_checkpoint(
    head: Head, tmp_path: Path
) -> None:
    gang = SavingGang(head, tmp_path, sys.executable, "-c", SHOWS)
    try:
        gang.state.mkdir(parents=True)
        (gang.state / "mine").write_text("!")
        await gang.join()
        assert (await gang.exit(0)).exit.ok
        await until(lambda: "['mine'] None" in gang.output(0))
    finally:
        await gang.close()


async def test_a_damaged_checkpoint_is_told_by_its_number_and_nothing_starts(
    head: Head, tmp_path: Path
) -> None:
    gang = SavingGang(head, tmp_path, sys.executable, "-c", SHOWS)
    try:
        part = stored_before(gang, "committed")
        report = CheckpointPartStored(
            incarnation=gang.incarnation(0), at=0.0, number=1, digest=part.digest, content="", steps=(), files=1,
            size_bytes=9,
        )  # fmt: skip
        gang.restore = await gang.commit(report)
        gang.is_clean_start = True
        gang.store.remove([blob_key(gang.uid, part.files[0].sha256)])
        await gang.join()
        failed: MemberReport = await gang.last(0, MemberPreparationFailed)
        assert isinstance(failed, MemberPreparationFailed)
        assert (failed.reason, failed.damaged_checkpoint) == (Reason.CHECKPOINT_CORRUPT, 1)
        assert "e1-c000001 cannot be restored on rank 0" in failed.message
        assert failed.incarnation.rank == Rank(0)
        assert gang.tree(0) == {}
        await gang.fence(0)
        await gang.fenced(0)
    finally:
        await gang.close()
