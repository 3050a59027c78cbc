"""What every checkpoint store must do, over file://, memory:// and s3:// (a server on this host)."""

from __future__ import annotations

import errno
import hashlib
import io
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh import blob_store
from mesh.blob_store import BlobStore, from_caller
from mesh.errors import CheckpointError, CheckpointStoreError
from tests.s3_fixture import s3_store


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    if request.param == "file":
        yield BlobStore(f"file://{tmp_path}/sto re")
        return
    if request.param == "s3":
        yield s3_store(request.getfixturevalue("s3_server"))
        return
    made = BlobStore(f"memory://{secrets.token_hex(8)}/store")
    yield made
    made.remove_below("")


def test_what_was_put_is_there(store: BlobStore) -> None:
    store.put_bytes("a/b", b"one")
    store.put_bytes("a/b", b"other")
    store.put_stream("a/c", iter([b"x" * 1000, b"y"]))
    assert store.get_bytes("a/b", bytes_max=5) == b"other"
    assert store.size("a/c") == 1001
    target = io.BytesIO()
    assert store.get_file("a/c", target) == hashlib.sha256(target.getvalue()).hexdigest()
    assert len(target.getvalue()) == 1001


def test_what_is_not_there_is_said_so(store: BlobStore) -> None:
    assert store.size("a/none") is None
    assert store.list_below("a") == []
    with pytest.raises(FileNotFoundError):
        store.get_bytes("a/none", bytes_max=1)
    with pytest.raises(FileNotFoundError):
        store.get_file("a/none", io.BytesIO())
    store.remove(["a/none"])
    store.remove_below("a")


def test_an_object_is_created_once(store: BlobStore) -> None:
    store.create_bytes("c/1", b"first")
    with pytest.raises(FileExistsError):
        store.create_bytes("c/1", b"second")
    assert store.get_bytes("c/1", bytes_max=9) == b"first"
    assert [fact.key for fact in store.list_below("c")] == ["c/1"]


def test_of_many_that_create_the_same_object_one_wins(store: BlobStore) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        try:
            store.create_bytes("c/1", str(number).encode())
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "memory" in store.url:  # a check and a write, no more: for tests only
        assert won
        return
    assert [str(n).encode() for n in won] == [store.get_bytes("c/1", bytes_max=9)]


def test_a_source_that_fails_leaves_nothing_and_is_told_as_it_is(store: BlobStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError("torn")

    with pytest.raises(ZeroDivisionError, match="torn"):
        store.put_stream("a/b", from_caller(chunks()))
    assert store.list_below("a") == []


def test_a_target_that_is_full_is_not_the_stores_fault(store: BlobStore) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    store.put_bytes("a/b", b"x")
    with pytest.raises(OSError, match="No space left"):
        store.get_file("a/b", Full())


def test_a_list_has_keys_and_sizes(store: BlobStore) -> None:
    store.put_bytes("runs/1/blobs/aa/aa11", b"12")
    store.put_bytes("runs/1/blobs/bb/bb11", b"123")
    store.put_bytes("runs/2/blobs/bb/bb11", b"1")
    found = store.list_below("runs/1/blobs")
    assert [(fact.key, fact.size) for fact in found] == [
        ("runs/1/blobs/aa/aa11", 2),
        ("runs/1/blobs/bb/bb11", 3),
    ]
    store.remove([found[0].key])
    assert [fact.size for fact in store.list_below("runs/1/blobs")] == [3]
    store.remove_below("runs/1")
    assert store.list_below("runs/1") == []
    assert len(store.list_below("runs")) == 1


def test_what_is_too_large_is_not_read(store: BlobStore) -> None:
    store.put_bytes("a", b"12345")
    with pytest.raises(CheckpointError, match="larger than 4"):
        store.get_bytes("a", bytes_max=4)


def test_a_call_that_stalls_is_given_up_and_many_of_them_make_the_store_away(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path), stall_s=0.05)
    release = threading.Event()

    def never() -> Iterator[bytes]:
        yield b"begun"
        release.wait(60)

    for _ in range(blob_store.LEFT_BEHIND_MAX):
        with pytest.raises(CheckpointStoreError, match="nothing has moved"):
            store.put_stream("a", never())
    with pytest.raises(CheckpointStoreError, match="still hang"):
        store.size("a")
    release.set()
    deadline = threading.Event()
    while store._left_behind and not deadline.wait(0.01):
        pass
    assert store.size("a") is not None


def test_a_slow_source_that_moves_is_not_given_up(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path), stall_s=0.5)
    pause = threading.Event()

    def slow() -> Iterator[bytes]:
        for _ in range(8):
            pause.wait(0.1)
            yield b"x"

    store.put_stream("a", slow())
    assert store.size("a") == 8


def test_what_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = BlobStore(str(tmp_path / "file"))
    with pytest.raises(CheckpointStoreError, match=r"file://.*could not write a/b"):
        store.put_bytes("a/b", b"x")


@pytest.mark.parametrize("url", ["", "nonsense://x", "  "])
def test_a_url_that_is_none_is_refused_with_what_to_do(url: str) -> None:
    with pytest.raises(CheckpointStoreError, match="URL"):
        BlobStore(url)


def test_a_manifests_uri_is_taken_apart() -> None:
    assert blob_store.split_manifest_uri("s3://b/x/runs/u/checkpoints/000001.json") == (
        "s3://b/x",
        "runs/u/checkpoints/000001.json",
    )
    with pytest.raises(CheckpointError):
        blob_store.split_manifest_uri("s3://b/x")
    assert blob_store.normal_url("/a/b/") == "file:///a/b"


def test_passwords_are_refused_and_in_no_message() -> None:
    with pytest.raises(CheckpointStoreError, match="password") as caught:
        BlobStore("nonsense://user:geheim@host/x?sig=geheim")
    assert "geheim" not in str(caught.value) + repr(caught.value.details)


def test_a_removal_that_was_given_up_removes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then what it was to remove may be needed again."""
    store = BlobStore(f"file://{tmp_path}/s")
    for key in ("a", "b"):
        store.put_bytes(key, b"x")
    may_go_on = threading.Event()
    remove = store._fs.rm_file

    def slow(path: str) -> None:
        may_go_on.wait(10.0)
        remove(path)

    monkeypatch.setattr(store._fs, "rm_file", slow)
    monkeypatch.setattr(store, "_stall_s", 0.05)
    with pytest.raises(CheckpointStoreError, match="nothing has moved"):
        store.remove(["a", "b"])
    may_go_on.set()
    monkeypatch.undo()
    tries = iter(range(1000))
    while store._left_behind:
        next(tries)
        threading.Event().wait(0.01)
    assert store.size("b") == 1
