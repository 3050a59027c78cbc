"""Checkpoints with real processes and real disks: killed in the middle, damaged, full, slow (cases 27 and 49)."""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents import restore as restore_module
from agents.checkpoint import Checkpointer, CheckpointListener, StoredPart
from agents.restore import restore
from agents.state_look import look, writers
from coordinator.checkpoint_store import CheckpointStore, Written
from coordinator.core.checkpoints import CommitCheckpoint
from mesh import checkpoint
from mesh.blob_store import BlobStore, Writable
from mesh.checkpoint_format import Part, RestoreReference, blob_key, part_key
from mesh.errors import CheckpointError, CheckpointStoreError, MeshError, StorageError
from mesh.ids import Epoch, Rank, RunUid
from mesh.reasons import Reason

RUN = RunUid("0123456789abcdef")
LIMIT_S = 30.0


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.02)


class Rig:
    """One rank's checkpointer over a real directory."""

    def __init__(self, place: Path, store: BlobStore | None = None, *, state: Path | None = None) -> None:
        self.store = store or BlobStore(f"file://{place}/store")
        self.state = state or place / "0" / "state"
        self.state.mkdir(parents=True, exist_ok=True)
        self.parts: queue.Queue[StoredPart] = queue.Queue()
        self.answers: queue.Queue[tuple[int, str, bool]] = queue.Queue()
        self.said: list[str] = []
        self.taker = Checkpointer(
            state_dir=self.state,
            work_dir=self.state.with_name(f"checkpointing-{secrets.token_hex(2)}"),
            store_url=self.store.url,
            run=RUN,
            store=self.store,
            root=os.getpid(),
            listener=CheckpointListener(
                on_part=self.parts.put, on_answer=lambda *a: self.answers.put(a), on_trouble=self.said.append
            ),
            retry_first_s=0.05,
        )
        self.taker.start()

    def next_part(self) -> Part:
        stored = self.parts.get(timeout=LIMIT_S)
        return Part.decode(self.store.get_bytes(part_key(RUN, stored.digest), bytes_max=1 << 20))

    def next_part_with(self, path: str) -> Part:
        while True:
            part = self.next_part()
            if path in {file.path for file in part.files}:
                return part


@contextmanager
def rig(place: Path, store: BlobStore | None = None, *, state: Path | None = None) -> Iterator[Rig]:
    made = Rig(place, store, state=state)
    try:
        yield made
    finally:
        made.taker.stop()


async def commit(store: BlobStore, *parts: Part, number: int = 1) -> RestoreReference:
    digests = tuple(part.digest for part in parts)
    wish = CommitCheckpoint(number=number, epoch=Epoch(1), step=None, parts=digests, contents=digests)
    done = await CheckpointStore(store.url, blobs=store).commit(RUN, wish)
    assert isinstance(done, Written)
    return RestoreReference(number=number, id=wish.id, step=None, uri=done.uri)


def start(script: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=LIMIT_S)


HALF_A_SAVE = """
import io, os, sys, torch
state = {"weights": torch.arange(200_000)}
torch.save(state, sys.argv[1] + "/ckpt-1.pt")
print("first", flush=True)
sys.stdin.readline()

class Slow(io.FileIO):  # a disk that takes its time: half of it, and then nothing more
    written = 0
    def write(self, data):
        count = super().write(data)
        self.written += count
        if self.written > 800_000:
            print("half", flush=True)
            sys.stdin.readline()
        return count

torch.save(state, Slow(sys.argv[1] + "/ckpt-2.pt", "wb"))
"""


HOLDS_A_FILE_OPEN = """
import sys, time
file = open(sys.argv[1], "w")
room = bytearray(30 << 20)  # what the kernel has to let go, and takes its time for
print("open", flush=True)
time.sleep(60)
"""


def test_a_process_that_is_ending_has_not_closed_its_files_itself(tmp_path: Path) -> None:
    """The kernel closes them a moment before the process is gone; a look in between saw a file closed by the living."""
    for number in range(100):
        process = start(HOLDS_A_FILE_OPEN, tmp_path / "half.pt")
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            assert {pid for _, (pid, _) in look(tmp_path, root=os.getpid()).writers} == {process.pid}
            threading.Timer(number * 1e-4, process.kill).start()  # in the middle of any part of a look
            seen = look(tmp_path, root=os.getpid())
            while process.pid in {pid for pid, _ in seen.processes}:
                assert seen.writers, f"kill {number}: closed, and its writer is there as if it had closed it"
                seen = look(tmp_path, root=os.getpid())
        finally:
            end(process)


@pytest.mark.torch
def test_a_state_directory_that_its_command_removes_ends_no_look(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "model.bin").write_text("x")
    seen = look(state)
    shutil.rmtree(state)
    assert writers(state, seen.entries) == ()
    assert "cannot be read" in look(state).trouble


async def test_a_process_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    import torch

    with rig(tmp_path) as one:
        process = start(HALF_A_SAVE, one.state)
        try:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "first\n"
            part = one.next_part_with("ckpt-1.pt")
            assert part.steps == (1,)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "half\n"
            time.sleep(4)  # the half-written file is still for longer than it takes to settle
            assert one.parts.empty(), "it is open for writing"
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=LIMIT_S)
        finally:
            end(process)
        one.taker.command_ended(ok=False)
        assert one.taker.wait_finished(LIMIT_S)
        assert one.parts.empty()
        reference = await commit(one.store, part)
        assert (one.state / "ckpt-2.pt").stat().st_size > 100_000
        done = restore(reference, run=RUN, epoch=Epoch(2), rank=Rank(0), state_dir=one.state, store=one.store)
    assert os.listdir(one.state) == ["ckpt-1.pt"]
    assert torch.load(one.state / "ckpt-1.pt")["weights"][-1] == 199_999
    assert done.aside is not None
    assert os.listdir(done.aside) == ["ckpt-2.pt"], "what was half-written is kept aside"


HELPER_LOOP = """
import sys, time
from mesh import checkpoint
for step in range(1, 10_000):
    checkpoint.save(b"x" * 50_000 + str(step).encode(), step=step, directory=sys.argv[1])
    with open(sys.argv[1] + "/scratch", "w") as file:
        file.write(str(step))
    print(step, flush=True)
    time.sleep(0.1)
"""


async def test_a_helper_that_saves_all_the_time_beside_a_restless_file_is_taken_whole(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        process = start(HELPER_LOOP, one.state)
        try:
            while not (part := one.next_part()).steps:
                pass
        finally:
            end(process)
        reference = await commit(one.store, part)
        one.taker.command_ended(ok=False)
        assert one.taker.wait_finished(LIMIT_S)
        last = checkpoint.step(one.state)
        while not one.parts.empty():
            part = one.next_part()
        assert part.steps[-1] == last, "the newest whole one is taken after the end too"
        restore(reference, run=RUN, epoch=Epoch(2), rank=Rank(0), state_dir=one.state, store=one.store)
    found = checkpoint.latest(one.state, verify=True)
    assert found is not None
    step = checkpoint.step(one.state)
    assert checkpoint.load(found) == b"x" * 50_000 + str(step).encode()


@pytest.mark.parametrize("damage", ["removed", "truncated", "other bytes"])
async def test_a_damaged_content_names_checkpoint_file_and_rank_and_the_directory_stays(
    tmp_path: Path, damage: str
) -> None:
    with rig(tmp_path) as one:
        (one.state / "model.pt").write_bytes(b"w" * 1000)
        part = one.next_part_with("model.pt")
        reference = await commit(one.store, part)
    key = blob_key(RUN, part.files[0].sha256)
    if damage == "removed":
        one.store.remove([key])
    else:
        one.store.put_bytes(key, b"w" * 999 if damage == "truncated" else b"v" * 1000)
    other = tmp_path / "replacement" / "state"
    other.mkdir(parents=True)
    (other / "mine").write_bytes(b"!")
    with pytest.raises(CheckpointError, match=r"Checkpoint e1-c000001 .* on rank 0: .*'model\.pt'") as caught:
        restore(reference, run=RUN, epoch=Epoch(2), rank=Rank(0), state_dir=other)
    assert caught.value.details["number"] == 1
    assert caught.value.reason is Reason.CHECKPOINT_CORRUPT
    assert os.listdir(other) == ["mine"]
    done = restore(reference, run=RUN, epoch=Epoch(2), rank=Rank(0), state_dir=one.state, store=one.store)
    assert done.files_kept == 1, "who has the file already does not need the store"


async def test_a_manifest_that_is_missing_or_of_another_run_is_damaged(tmp_path: Path) -> None:
    store = BlobStore(f"file://{tmp_path}/store")
    reference = RestoreReference(
        number=1, id="e1-c000001", step=None, uri=store.uri(f"runs/{RUN}/checkpoints/000001.json")
    )
    state = tmp_path / "0" / "state"
    for content in (None, b"{", b'{"format": 2}'):
        if content is not None:
            store.put_bytes(f"runs/{RUN}/checkpoints/000001.json", content)
        with pytest.raises(CheckpointError, match="manifest"):
            restore(reference, run=RUN, epoch=Epoch(2), rank=Rank(0), state_dir=state)


@pytest.mark.parametrize("why", ["called off", "another is damaged"])
async def test_a_large_download_ends_soon_when_it_is_of_no_use_any_more(tmp_path: Path, why: str) -> None:
    """The next epoch's restore waits for it."""

    class SlowStore(BlobStore):
        """Gives the large file chunk by chunk, for ever; the small one is damaged once the large one is under way."""

        chunks = 0

        def get_file(self, key: str, target: Writable) -> str:
            if key != large:
                assert under_way.wait(20.0)
                return "0" * 64
            while self.chunks < 5000:
                self.chunks += 1
                target.write(b"x")
                under_way.set()
                if why == "called off":
                    stop.set()
                time.sleep(0.002)
            return "0" * 64

    with rig(tmp_path) as one:
        (one.state / "a").write_bytes(b"w" * 1000)
        (one.state / "b").write_bytes(b"v" * 1000)
        part = one.next_part()
        while {file.path for file in part.files} != {"a", "b"}:
            part = one.next_part()
        reference = await commit(one.store, part)
    files = {file.path: file for file in part.files}
    large = blob_key(RUN, files["b"].sha256)
    store, stop, under_way = SlowStore(one.store.url), threading.Event(), threading.Event()
    state = tmp_path / "replacement" / "state"
    with pytest.raises(MeshError):
        restore(reference, run=RUN, epoch=Epoch(2), rank=Rank(0), state_dir=state, store=store, stop=stop)
    assert store.chunks < 5000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """32 MiB, as in case 49."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


TOO_LARGE = """
import sys, torch
torch.save({"weights": torch.zeros(6 << 20, dtype=torch.uint8)}, sys.argv[1] + "/ckpt-1.pt")
print("first", flush=True)
sys.stdin.readline()
torch.save({"weights": torch.zeros(40 << 20, dtype=torch.uint8)}, sys.argv[1] + "/ckpt-2.pt")
"""


@pytest.mark.root
@pytest.mark.torch
async def test_a_checkpoint_that_does_not_fit_the_disk_is_not_the_restore_point(
    tmp_path: Path, small_disk: Path
) -> None:
    """Case 49: the state directory itself is the small disk, so links to it cannot be made either."""
    with rig(tmp_path, state=small_disk) as one:
        process = start(TOO_LARGE, small_disk)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "first\n"
            part = one.next_part_with("ckpt-1.pt")
            process.communicate("\n", timeout=LIMIT_S)
        finally:
            end(process)
        assert process.returncode == 1, "torch says that the disk is full"
        assert (small_disk / "ckpt-2.pt").exists()
        one.taker.command_ended(ok=False)
        assert one.taker.wait_finished(LIMIT_S)
        assert one.parts.empty()
        reference = await commit(one.store, part)
        restore(reference, run=RUN, epoch=Epoch(2), rank=Rank(0), state_dir=small_disk, store=one.store)
    assert os.listdir(small_disk) == ["ckpt-1.pt"]


@pytest.mark.root
def test_the_helper_names_a_full_disk_and_keeps_the_one_before(small_disk: Path) -> None:
    before = checkpoint.save(b"x" * (10 << 20), step=1, directory=small_disk)
    with pytest.raises(checkpoint.CheckpointSpaceError, match="step-00000001 is whole"):
        checkpoint.save(b"x" * (40 << 20), step=2, directory=small_disk)
    assert checkpoint.latest(small_disk, verify=True) == before
    assert os.listdir(small_disk) == ["step-00000001"]


@pytest.mark.root
@pytest.mark.torch
def test_the_helper_names_a_full_disk_behind_torch(small_disk: Path) -> None:
    import torch

    with pytest.raises(checkpoint.CheckpointSpaceError, match="no earlier one"):
        checkpoint.save({"w": torch.zeros(40 << 20, dtype=torch.uint8)}, step=2, directory=small_disk)
    assert os.listdir(small_disk) == []


@pytest.mark.root
async def test_a_full_store_is_told_and_used_again_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    (small_disk / "ballast").write_bytes(b"x" * (31 << 20))
    with rig(tmp_path, BlobStore(f"file://{small_disk}/store")) as one:
        (one.state / "model.pt").write_bytes(b"w" * (4 << 20))
        until(lambda: any("it is full" in text for text in one.said), "the full store is told")
        (small_disk / "ballast").unlink()
        one.next_part_with("model.pt")
    assert not list((small_disk / "store").rglob("*.tmp-*"))


class RefusingOnce(BlobStore):
    """Each content is refused the first time."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.refused: set[str] = set()

    def put_stream(self, key: str, chunks: Iterator[bytes]) -> None:
        if key not in self.refused:
            self.refused.add(key)
            raise CheckpointStoreError(f"'{key}' cannot be written: it is full.")
        super().put_stream(key, chunks)


def test_a_store_that_refuses_many_contents_is_told_once(tmp_path: Path) -> None:
    store = RefusingOnce(f"file://{tmp_path}/store")
    with rig(tmp_path, store) as one:
        for number in range(12):
            (one.state / f"shard-{number}.pt").write_bytes(secrets.token_bytes(100))
        one.next_part_with("shard-11.pt")
        assert len(store.refused) == 12
        assert len(one.said) == 1, one.said


@pytest.mark.root
async def test_a_machine_without_room_says_so_and_its_directory_stays(
    tmp_path: Path, small_disk: Path
) -> None:
    with rig(tmp_path) as one:
        (one.state / "model.pt").write_bytes(secrets.token_bytes(20 << 20))
        (one.state / "more.pt").write_bytes(secrets.token_bytes(20 << 20))
        reference = await commit(one.store, one.next_part_with("more.pt"))
    state = small_disk / "0" / "state"
    state.mkdir(parents=True)
    (state / "mine").write_bytes(b"!")
    with pytest.raises(StorageError, match="Free some space") as caught:
        restore(reference, run=RUN, epoch=Epoch(2), rank=Rank(0), state_dir=state, store=one.store)
    assert caught.value.reason is Reason.STORAGE_FULL
    assert os.listdir(state) == ["mine"]
    assert not (small_disk / "0" / "restoring").exists()


class SlowStore(BlobStore):
    """Nothing is written before `gate` is set; then `broken` calls fail first."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate = threading.Event()
        self.broken = 0

    def put_stream(self, key: str, chunks: Iterator[bytes]) -> None:
        self.gate.wait(LIMIT_S)
        if self.broken > 0:
            self.broken -= 1
            raise CheckpointStoreError("The store is away.")
        super().put_stream(key, chunks)


async def test_a_slow_store_keeps_nobody_waiting_and_its_lag_is_a_fact(tmp_path: Path) -> None:
    store = SlowStore(f"file://{tmp_path}/store")
    with rig(tmp_path, store) as one:
        (one.state / "ckpt-1.pt").write_bytes(b"1" * 1000)
        until(lambda: (one.taker.lag_s or 0) > 0.5, "a lag")
        os.replace(one.state / "ckpt-1.pt", one.state / "ckpt-2.pt")
        (one.state / "ckpt-1.pt").write_bytes(b"another")
        store.broken = 2
        store.gate.set()
        part = one.next_part_with("ckpt-1.pt")
        assert store.size(blob_key(RUN, part.files[0].sha256)) == 1000, "as it was when it was taken"
        assert one.said == ["The store is away. It is tried again; the run goes on."]
        assert {file.path for file in one.next_part().files} == {"ckpt-1.pt", "ckpt-2.pt"}


def test_a_store_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    store = SlowStore(f"file://{tmp_path}/store")
    made = Rig(tmp_path, store)
    (made.state / "a").write_bytes(b"1")
    until(lambda: made.taker.lag_s is not None, "a part under way")
    made.taker.command_ended(ok=True)
    assert not made.taker.wait_finished(0.2)
    threading.Timer(0.5, store.gate.set).start()
    made.taker.stop()
    assert made.parts.empty() or made.parts.qsize() <= 1


async def test_a_file_that_is_rewritten_in_place_during_a_slow_upload_is_taken_from_a_copy(
    tmp_path: Path,
) -> None:
    store = SlowStore(f"file://{tmp_path}/store")
    with rig(tmp_path, store) as one:
        (one.state / "model.pt").write_bytes(b"1" * 1000)
        until(lambda: one.taker.lag_s is not None, "a part under way")
        until(lambda: list(one.state.parent.glob("checkpointing-*/*")), "the file is held")
        (one.state / "model.pt").write_bytes(b"2" * 1000)  # the same inode
        store.gate.set()
        part = one.next_part_with("model.pt")
        assert store.get_bytes(blob_key(RUN, part.files[0].sha256), bytes_max=2000) == b"2" * 1000


async def test_two_ranks_one_of_which_writes_nothing(tmp_path: Path) -> None:
    with (
        rig(tmp_path / "a", BlobStore(f"file://{tmp_path}/store")) as zero,
        rig(tmp_path / "b", zero.store) as one,
    ):
        nothing = one.next_part()
        assert nothing.files == ()
        (zero.state / "ckpt-5.pt").write_bytes(b"5")
        five = zero.next_part_with("ckpt-5.pt")
        one.taker.question(3, nothing.digest)
        assert one.answers.get(timeout=LIMIT_S) == (3, nothing.digest, True)
        reference = await commit(zero.store, five, nothing)
        (one.state / "late").write_bytes(b"!")
        one.taker.question(4, nothing.digest)
        assert one.answers.get(timeout=LIMIT_S)[2] is False
    for rank, rank_rig in ((0, zero), (1, one)):
        restore(
            reference, run=RUN, epoch=Epoch(2), rank=Rank(rank), state_dir=rank_rig.state, store=zero.store
        )
    assert os.listdir(zero.state) == ["ckpt-5.pt"]
    assert os.listdir(one.state) == []
    assert os.listdir(one.state.parent / "uncommitted" / "2") == ["late"]


class CrashedError(BaseException):
    """Nothing is tidied up after it that a killed process would not have."""


def test_what_restores_that_crashed_had_moved_aside_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "0" / "state"
    state.mkdir(parents=True)
    files = ["a", "b", "c", "d"]
    for name in files:
        (state / name).write_bytes(name.encode())
    move = restore_module._move

    def move_and_crash(source: Path, target: Path) -> None:
        move(source, target)
        raise CrashedError

    monkeypatch.setattr(restore_module, "_move", move_and_crash)
    for epoch in (2, 2, 3):  # another life of the rank in the same epoch, and the next
        with pytest.raises(CrashedError):
            restore(None, run=RUN, epoch=Epoch(epoch), rank=Rank(0), state_dir=state)
    monkeypatch.setattr(restore_module, "_move", move)
    restore(None, run=RUN, epoch=Epoch(4), rank=Rank(0), state_dir=state)
    aside = tmp_path / "0" / "uncommitted"
    assert sorted(path.name for path in aside.glob("*/*")) == files
    assert not (aside / "unfinished").exists() and os.listdir(state) == []
    (state / "late").write_bytes(b"!")
    restore(None, run=RUN, epoch=Epoch(5), rank=Rank(0), state_dir=state)
    assert os.listdir(aside) == ["5"]


def test_without_a_checkpoint_the_directory_becomes_empty_and_only_the_last_remains_are_kept(
    tmp_path: Path,
) -> None:
    state = tmp_path / "0" / "state"
    state.mkdir(parents=True)
    for epoch in (2, 3):
        (state / f"of-{epoch}").write_bytes(b"x")
        done = restore(None, run=RUN, epoch=Epoch(epoch), rank=Rank(0), state_dir=state)
        assert (os.listdir(state), done.moved_aside) == ([], 1)
    assert os.listdir(tmp_path / "0" / "uncommitted") == ["3"]
    assert os.listdir(tmp_path / "0" / "uncommitted" / "3") == ["of-3"]


@pytest.mark.parametrize("instead", ["a link to a folder", "a link to nothing", "a file"])
async def test_what_a_command_put_in_the_place_of_its_state_directory_is_moved_aside_itself(
    tmp_path: Path, instead: str
) -> None:
    """A link leads to what is no part of the run: a restore that followed it would empty somebody's folder."""
    with rig(tmp_path) as one:
        (one.state / "ckpt-5.pt").write_bytes(b"five")
        reference = await commit(one.store, one.next_part_with("ckpt-5.pt"))
    shutil.rmtree(one.state)
    elsewhere = tmp_path / "elsewhere"
    if instead == "a file":
        one.state.write_bytes(b"no directory")
    else:
        one.state.symlink_to(elsewhere)
    if instead == "a link to a folder":
        elsewhere.mkdir()
        (elsewhere / "precious").write_bytes(b"not of this run")
        (elsewhere / "ckpt-5.pt").write_bytes(b"five")
    for epoch, wanted in ((2, reference), (3, None)):
        done = restore(
            wanted, run=RUN, epoch=Epoch(epoch), rank=Rank(0), state_dir=one.state, store=one.store
        )
        assert not one.state.is_symlink() and one.state.is_dir()
        assert os.listdir(one.state) == (["ckpt-5.pt"] if wanted else [])
        if epoch == 2:
            aside = tmp_path / "0" / "uncommitted" / "2"
            assert (done.moved_aside, done.aside) == (1, aside)
            assert aside.is_file() if instead == "a file" else os.readlink(aside) == str(elsewhere)
    if instead == "a link to a folder":
        assert sorted(os.listdir(elsewhere)) == ["ckpt-5.pt", "precious"]
