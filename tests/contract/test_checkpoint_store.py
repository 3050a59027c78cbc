"""The store of gang checkpoints, over file://, memory:// and s3://: whole or not committed, and cleaned with care."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from coordinator import checkpoint_store
from coordinator.checkpoint_store import CheckpointStore, Cleaned, Lacking, Written
from coordinator.core.checkpoints import CleanCheckpointStore, CommitCheckpoint
from mesh.blob_store import BlobStore, split_manifest_uri
from mesh.checkpoint_format import FileKind, FileRecord, Manifest, Part, blob_key, part_key
from mesh.errors import CheckpointError, CheckpointStoreError
from mesh.ids import Epoch, RunUid
from tests.s3_fixture import s3_store

RUN = RunUid("0123456789abcdef")


@pytest.fixture(params=["file", "memory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    if request.param == "s3":
        store = s3_store(request.getfixturevalue("s3_server"))
    else:
        url = f"file://{tmp_path}/s" if request.param == "file" else f"memory://{secrets.token_hex(8)}"
        store = BlobStore(url)
    yield store
    store.remove_below("")


@pytest.fixture
def store(blobs: BlobStore) -> CheckpointStore:
    return CheckpointStore(blobs.url, blobs=blobs)


def stored(blobs: BlobStore, **files: str) -> str:
    """A part of these files, in the store; returns its digest."""
    records = []
    for name, content in sorted(files.items()):
        data = content.encode()
        sha256 = hashlib.sha256(data).hexdigest()
        blobs.put_bytes(blob_key(RUN, sha256), data)
        records.append(FileRecord(path=name, kind=FileKind.FILE, mode=0o644, size=len(data), sha256=sha256))
    part = Part(files=tuple(records))
    blobs.put_bytes(part_key(RUN, part.digest), part.encode())
    return part.digest


def wish(number: int, *parts: str, step: int | None = None) -> CommitCheckpoint:
    return CommitCheckpoint(number=number, epoch=Epoch(1), step=step, parts=parts, contents=parts)


async def test_what_is_whole_is_published_under_its_number(store: CheckpointStore, blobs: BlobStore) -> None:
    one, two = stored(blobs, a="x", b="yy"), stored(blobs, c="zzz")
    done = await store.commit(RUN, wish(7, one, two, step=100))
    assert isinstance(done, Written)
    assert done.size_bytes == 6
    base, key = split_manifest_uri(done.uri)
    assert (base, key) == (store.url, f"runs/{RUN}/checkpoints/000007.json")
    manifest = await store.manifest(RUN, 7)
    assert (manifest.id, manifest.step, manifest.world_size) == ("e1-c000007", 100, 2)
    assert [file.path for file in manifest.parts[0].files] == ["a", "b"]


async def test_the_same_wish_after_a_crash_is_written_once(store: CheckpointStore, blobs: BlobStore) -> None:
    one = stored(blobs, a="x")
    first = await store.commit(RUN, wish(1, one))
    assert await store.commit(RUN, wish(1, one)) == first


async def test_a_number_that_somebody_else_has_used_is_not_taken(
    store: CheckpointStore, blobs: BlobStore
) -> None:
    one, two = stored(blobs, a="x"), stored(blobs, a="y")
    await store.commit(RUN, wish(1, one))
    done = await store.commit(RUN, wish(1, two))
    assert isinstance(done, Lacking)
    assert done.parts == ()
    assert "other content" in done.message
    assert (await store.manifest(RUN, 1)).parts[0].digest == one


@pytest.mark.parametrize("damage", ["no part", "another part", "no blob", "truncated blob"])
async def test_what_is_not_whole_is_not_committed(
    store: CheckpointStore, blobs: BlobStore, damage: str
) -> None:
    good, bad = stored(blobs, a="x"), stored(blobs, weights="w" * 100)
    blob = blob_key(RUN, hashlib.sha256(b"w" * 100).hexdigest())
    if damage == "no part":
        blobs.remove([part_key(RUN, bad)])
    elif damage == "another part":
        blobs.put_bytes(part_key(RUN, bad), Part().encode())
    elif damage == "no blob":
        blobs.remove([blob])
    else:
        blobs.put_bytes(blob, b"w" * 99)
    done = await store.commit(RUN, wish(1, good, bad))
    assert isinstance(done, Lacking)
    assert done.parts == (bad,)
    with pytest.raises(CheckpointError, match="missing"):
        await store.manifest(RUN, 1)


async def test_many_files_are_verified_by_one_list(
    store: CheckpointStore, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "LIST_FROM", 3)
    names = {f"f{number}": f"content {number}" for number in range(5)}
    part = stored(blobs, **names)
    assert isinstance(await store.commit(RUN, wish(1, part)), Written)
    blobs.remove([blob_key(RUN, hashlib.sha256(b"content 3").hexdigest())])
    assert isinstance(await store.commit(RUN, wish(2, part)), Lacking)


async def test_a_later_step_of_a_part_is_not_in_the_manifest(
    store: CheckpointStore, blobs: BlobStore
) -> None:
    names = ["step-00000100", "step-00000200"]
    part = Part(
        steps=(100, 200),
        files=tuple(FileRecord(path=n, kind=FileKind.DIRECTORY, mode=0o755) for n in names),
    )
    blobs.put_bytes(part_key(RUN, part.digest), part.encode())
    await store.commit(RUN, wish(1, part.digest, step=100))
    manifest: Manifest = await store.manifest(RUN, 1)
    assert [file.path for file in manifest.parts[0].files] == names[:1]


async def test_cleaning_removes_what_nothing_refers_to_and_nothing_else(
    store: CheckpointStore, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "PART_GRACE_S", -1.0)
    shared = {"shared": "of all"}
    parts = [stored(blobs, **shared, own=f"{number}") for number in range(1, 5)]
    for number, part in enumerate(parts, start=1):
        await store.commit(RUN, wish(number, part))
    waiting = stored(blobs, new="of a part that waits")
    orphan = blob_key(RUN, hashlib.sha256(b"under way").hexdigest())
    blobs.put_bytes(orphan, b"under way")
    staying = CleanCheckpointStore(numbers=(2, 3), parts=(waiting, parts[1]))
    assert await store.clean(RUN, staying) == Cleaned(manifests=1, parts=3, blobs=1)
    left = {fact.key for fact in blobs.list_below(f"runs/{RUN}/blobs")}
    content = ["2", "3", "4", "of all", "of a part that waits", "under way"]
    assert left == {blob_key(RUN, hashlib.sha256(text.encode()).hexdigest()) for text in content}
    with pytest.raises(CheckpointError):
        await store.manifest(RUN, 1)
    assert (await store.manifest(RUN, 4)).number == 4, "a newer one than those that stay may just be written"
    assert await store.clean(RUN, staying) == Cleaned()
    monkeypatch.setattr(checkpoint_store, "UPLOAD_LIMIT_S", -1.0)
    assert await store.clean(RUN, staying) == Cleaned(blobs=1)
    assert blobs.size(orphan) is None


async def test_a_young_part_keeps_its_files(store: CheckpointStore, blobs: BlobStore) -> None:
    one = stored(blobs, a="x")
    await store.commit(RUN, wish(1, one))
    young = stored(blobs, b="y")
    assert await store.clean(RUN, CleanCheckpointStore(numbers=(1,), parts=())) == Cleaned()
    assert isinstance(await store.commit(RUN, wish(2, young)), Written)


async def test_what_is_no_manifest_does_not_stop_the_cleaning(
    store: CheckpointStore, blobs: BlobStore
) -> None:
    blobs.put_bytes(f"runs/{RUN}/checkpoints/000001.json", b"not json")
    blobs.put_bytes(f"runs/{RUN}/checkpoints/notes.txt", b"somebody's")
    await store.commit(RUN, wish(2, stored(blobs, a="x")))
    assert await store.clean(RUN, CleanCheckpointStore(numbers=(2,), parts=())) == Cleaned(manifests=1)
    with pytest.raises(CheckpointError):
        await store.manifest(RUN, 1)


async def test_a_run_is_removed_whole_and_alone(store: CheckpointStore, blobs: BlobStore) -> None:
    await store.commit(RUN, wish(1, stored(blobs, a="x")))
    blobs.put_bytes("runs/fedcba9876543210/blobs/aa/aa", b"x")
    await store.delete_run(RUN)
    await store.delete_run(RUN)
    assert [fact.key for fact in blobs.list_below("runs")] == ["runs/fedcba9876543210/blobs/aa/aa"]


async def test_a_store_is_tried_before_it_is_used(
    store: CheckpointStore, blobs: BlobStore, tmp_path: Path
) -> None:
    await store.check()
    assert blobs.list_below("") == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointStoreError, match="could not create"):
        await CheckpointStore(str(tmp_path / "file")).check()


async def test_a_store_that_creates_an_object_twice_is_refused(
    store: CheckpointStore, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An S3 server that passes over the condition of a write: in it a ghost could publish."""
    monkeypatch.setattr(blobs, "create_bytes", blobs.put_bytes)
    with pytest.raises(CheckpointStoreError, match="overwrites"):
        await store.check()
    assert blobs.list_below("") == []


async def test_a_commit_during_the_cleaning_publishes_nothing_that_is_being_removed(
    store: CheckpointStore, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part comes after the cleaning has looked, and has a content in common with what is removed."""
    monkeypatch.setattr(checkpoint_store, "PART_GRACE_S", -1.0)
    old = stored(blobs, status="same")
    await store.commit(RUN, wish(1, old))
    kept = stored(blobs, status="other")
    await store.commit(RUN, wish(2, kept))
    has_committed = threading.Event()
    loop, remove = asyncio.get_running_loop(), blobs.remove
    commits: list[Future[Written | Lacking]] = []

    async def commit(part: str) -> Written | Lacking:
        done = await store.commit(RUN, wish(3, part))
        has_committed.set()
        return done

    def remove_late(keys: list[str]) -> None:
        if not commits:
            part = stored(blobs, status="same", more="new")
            commits.append(asyncio.run_coroutine_threadsafe(commit(part), loop))
            has_committed.wait(0.5)  # as long as nothing keeps it back
        remove(keys)

    monkeypatch.setattr(blobs, "remove", remove_late)
    await store.clean(RUN, CleanCheckpointStore(numbers=(2,), parts=()))
    done = await asyncio.wrap_future(commits[0])
    assert isinstance(done, Lacking), "it was published, and a file of it is gone"
