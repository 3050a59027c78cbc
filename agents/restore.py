"""Makes a rank's state directory exactly what a committed gang checkpoint says it was.

Rules of this file:
1. Blocking: call it in a thread, while nothing of the run is alive on this machine.
2. The directory is touched only when everything that it lacks has been fetched and verified. What fails before leaves
   it as it was. A crash in the middle leaves a mixture that no command ever sees: the next restore completes it.
3. Nothing of the user's is destroyed: what is not in the checkpoint moves to `uncommitted/<epoch>` beside the state
   directory. Only the last such folder is kept; but what a restore has moved that did not come to its end (a mark says
   so) stays until one has.
4. A file that is right already, by size and sha256, stays as it is.
5. A damaged checkpoint is a CheckpointError that names checkpoint, file and rank: the one before is to be tried. A
   store that is away is a CheckpointStoreError: this one is to be tried again.
6. Without a checkpoint the directory becomes empty, so that survivors and replacements agree.
7. What is in the directory's place and is none (a link that the command put there, a file) is moved aside itself. Where
   a link leads nothing is changed: that is no part of the run.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

from agents.core.checkpoint_names import shown
from agents.state_look import file_entry
from agents.state_part import RETRY_FIRST_S, RETRY_MAX_S, Hashes
from mesh.blob_store import BlobStore, split_manifest_uri
from mesh.checkpoint_format import (
    MANIFEST_BYTES_MAX,
    FileKind,
    FileRecord,
    Manifest,
    RestoreReference,
    blob_key,
)
from mesh.errors import CheckpointError, CheckpointStoreError, MeshError, MeshTimeoutError, StorageError
from mesh.ids import Epoch, Rank, RunUid
from mesh.reasons import Reason

FILES_AT_ONCE = 4
CHUNK_BYTES = 1 << 20
STORE_PATIENCE_S = 120.0
"""How long a store that does not work is tried before the preparation fails."""
LOCK_LOOK_S = 0.05
WHOLE_MODE = 0o700

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Restored:
    """What was done."""

    files_kept: int = 0
    files_fetched: int = 0
    bytes_fetched: int = 0
    moved_aside: int = 0
    aside: Path | None = None
    hashes: Hashes = field(default_factory=Hashes)
    """Of the files that are there now: the first part of the new epoch need not read them again."""

    @property
    def words(self) -> str:
        """For a log."""
        return (
            f"{self.files_kept} files were right, {self.files_fetched} fetched ({self.bytes_fetched} bytes), "
            f"{self.moved_aside} moved aside."
        )


def restore(
    reference: RestoreReference | None,
    *,
    run: RunUid,
    epoch: Epoch,
    rank: Rank,
    state_dir: Path,
    store: BlobStore | None = None,
    stop: threading.Event | None = None,
    patience_s: float = STORE_PATIENCE_S,
    tell: Callable[[str], None] = lambda message: None,
) -> Restored:
    """Restores; `reference` None empties the directory.

    Args:
        epoch: the one that begins; names the folder of what was uncommitted.
        store: where the checkpoint is; by default the one that the reference names.
        tell: told, once, that the store does not work and is waited for.

    Raises:
        CheckpointError, CheckpointStoreError, StorageError: rule 5, and a disk that is full or not ours to write.
    """
    restoring = _Restoring(
        reference=reference,
        run=run,
        epoch=epoch,
        rank=rank,
        state_dir=state_dir,
        store=store,
        stop=stop or threading.Event(),
        patience_s=patience_s,
        tell=tell,
    )
    try:
        with restoring.alone():
            return restoring.run_all()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        place = shown(os.fsdecode(error.filename)) if error.filename else str(state_dir)
        raise StorageError(
            f"The state directory of rank {rank} could not be restored: {error.strerror} ({place}).",
            hint="Free some space on this machine." if full else "",
            reason=Reason.STORAGE_FULL if full else Reason.STATE_NOT_WRITABLE,
            path=place,
        ) from error


@dataclass(slots=True, kw_only=True)
class _Restoring:
    reference: RestoreReference | None
    run: RunUid
    epoch: Epoch
    rank: Rank
    state_dir: Path
    store: BlobStore | None
    stop: threading.Event
    patience_s: float
    tell: Callable[[str], None]
    has_told: bool = False
    has_failed: bool = False
    """One of the files cannot be had: what is under way for the others is of no use."""
    right: set[str] = field(default_factory=set)
    """Files that are there already."""
    done: Restored = field(default_factory=Restored)

    @property
    def work_dir(self) -> Path:
        return self.state_dir.with_name("restoring")

    @property
    def all_aside_dir(self) -> Path:
        return self.state_dir.with_name("uncommitted")

    @property
    def unfinished_mark(self) -> Path:
        """Is there from the first move until everything is in its place."""
        return self.all_aside_dir / "unfinished"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for a restore of an earlier epoch that was called off and has not let go yet."""
        self.state_dir.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        deadline = time.monotonic() + self.patience_s
        with self.state_dir.with_name("restore.lock").open("wb") as lock:
            while not _is_locked(lock):
                self._check_stop()
                if time.monotonic() >= deadline:
                    raise MeshTimeoutError(
                        f"An earlier restore of rank {self.rank} has not let go of its state directory.",
                        timeout_s=self.patience_s,
                    )
                self.stop.wait(LOCK_LOOK_S)
            try:
                yield
            finally:
                shutil.rmtree(self.work_dir, ignore_errors=True)

    def run_all(self) -> Restored:
        wanted = {file.path: file for file in self._wanted()}
        shutil.rmtree(self.work_dir, ignore_errors=True)
        self.work_dir.mkdir(mode=0o700)
        files = [file for file in wanted.values() if file.kind is FileKind.FILE]
        if self._is_directory():
            self.right = {file.path for file in files if self._is_right(file)}
        places = self._fetch([file for file in files if file.path not in self.right])
        self._check_stop()
        self._make_directory()
        self._move_others_aside(wanted)
        self._put_in_place(wanted, places)
        self.unfinished_mark.unlink(missing_ok=True)
        return self.done

    # ---- what is wanted ----------------------------------------------------------------------------

    def _wanted(self) -> tuple[FileRecord, ...]:
        reference = self.reference
        if reference is None:
            return ()
        base, key = split_manifest_uri(reference.uri)
        if self.store is None:
            self.store = BlobStore(base)
        store = self.store
        try:
            data = self._insist(lambda: store.get_bytes(key, bytes_max=MANIFEST_BYTES_MAX))
            manifest = Manifest.decode(data)
        except FileNotFoundError as error:
            raise self._damaged("its manifest is missing", key) from error
        except CheckpointError as error:
            raise self._damaged(f"its manifest cannot be read: {error.message}", key) from error
        if manifest.run != self.run or manifest.number != reference.number:
            raise self._damaged("its manifest is another one's", key)
        if self.rank >= manifest.world_size:
            raise self._damaged(f"it is of {manifest.world_size} ranks", key)
        return manifest.parts[self.rank].files

    def _damaged(self, why: str, file: str) -> CheckpointError:
        assert self.reference is not None
        return CheckpointError(
            f"Checkpoint {self.reference.id} cannot be restored on rank {self.rank}: {why.rstrip('.')}.",
            checkpoint=self.reference.id,
            number=self.reference.number,
            file=shown(file),
            rank=self.rank,
        )

    def _is_right(self, file: FileRecord) -> bool:
        """The file is there, with these bytes, reached through directories only."""
        path = self.state_dir
        for part in file.path.split("/")[:-1]:
            path = path / part
            if path.is_symlink() or not path.is_dir():
                return False
        path = self.state_dir / file.path
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != file.size:
                return False
            return self._hash(path) == file.sha256
        except (FileNotFoundError, PermissionError):
            return False

    def _hash(self, path: Path) -> str:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                self._check_stop()
        return digest.hexdigest()

    # ---- fetching ----------------------------------------------------------------------------------

    def _fetch(self, files: list[FileRecord]) -> dict[str, Path]:
        """Each distinct content once; returns where each lies, by sha256."""
        sources: dict[str, FileRecord] = {}
        for file in files:
            sources.setdefault(file.sha256, file)
        with ThreadPoolExecutor(FILES_AT_ONCE, "restore") as pool:
            try:
                return dict(zip(sources, pool.map(self._fetch_one, sources.values()), strict=True))
            except BaseException:
                self.has_failed = True
                raise

    def _fetch_one(self, file: FileRecord) -> Path:
        place = self.work_dir / file.sha256
        store = self.store
        assert store is not None

        def fetch() -> str:
            with place.open("wb") as target:
                return store.get_file(blob_key(self.run, file.sha256), _Stoppable(target, self._check_stop))

        try:
            sha256 = self._insist(fetch)
        except FileNotFoundError as error:
            raise self._damaged(f"the content of '{shown(file.path)}' is missing", file.path) from error
        if sha256 != file.sha256 or place.stat().st_size != file.size:
            raise self._damaged(f"the content of '{shown(file.path)}' is damaged", file.path)
        self.done.files_fetched += 1
        self.done.bytes_fetched += file.size
        return place

    def _insist(self, call: Callable[[], T]) -> T:
        pause_s, left_s = RETRY_FIRST_S, self.patience_s
        while True:
            self._check_stop()
            try:
                return call()
            except CheckpointStoreError as error:
                if left_s <= 0:
                    raise
                if not self.has_told:
                    self.has_told = True
                    self.tell(f"{error} The restore waits for it.")
            self.stop.wait(min(pause_s, left_s))
            left_s -= pause_s
            pause_s = min(RETRY_MAX_S, pause_s * 2)

    def _check_stop(self) -> None:
        if self.stop.is_set() or self.has_failed:
            raise MeshError("The restore was called off.", reason=Reason.CANCELLED)

    # ---- the directory -----------------------------------------------------------------------------

    def _is_directory(self) -> bool:
        return self.state_dir.is_dir() and not self.state_dir.is_symlink()

    def _make_directory(self) -> None:
        """Rule 7."""
        if os.path.lexists(self.state_dir) and not self._is_directory():
            self.done.aside = self._fresh_aside_dir()
            _move(self.state_dir, self.done.aside)
            self.done.moved_aside += 1
        self.state_dir.mkdir(exist_ok=True, mode=0o700)

    def _move_others_aside(self, wanted: dict[str, FileRecord]) -> None:
        """Everything that is not, byte for byte, in the checkpoint."""
        others = [path for path in _everything(self.state_dir) if not self._stays(path, wanted)]
        if not others:
            return
        aside = self.done.aside = self._fresh_aside_dir()
        for path in sorted(others, reverse=True):  # what is in a folder before the folder
            source, target = self.state_dir / path, aside / path
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if source.is_dir() and not source.is_symlink():
                target.mkdir(exist_ok=True)
                with suppress(OSError):  # it holds something that stays: then the checkpoint has the folder
                    source.rmdir()
                continue
            _move(source, target)
            self.done.moved_aside += 1

    def _fresh_aside_dir(self) -> Path:
        if not self.unfinished_mark.exists():
            shutil.rmtree(self.all_aside_dir, ignore_errors=True)
        self.all_aside_dir.mkdir(exist_ok=True, mode=0o700)
        self.unfinished_mark.touch()
        name, again = str(self.epoch), 1
        while os.path.lexists(folder := self.all_aside_dir / name):  # of a try before in the same epoch
            again += 1
            name = f"{self.epoch}.{again}"
        return folder

    def _stays(self, path: str, wanted: dict[str, FileRecord]) -> bool:
        record, place = wanted.get(path), self.state_dir / path
        if record is None:
            return False
        if place.is_symlink():
            return record.kind is FileKind.LINK and os.readlink(place) == record.target  # noqa: PTH115
        if place.is_dir():
            return record.kind is FileKind.DIRECTORY
        return record.kind is FileKind.FILE and path in self.right

    def _put_in_place(self, wanted: dict[str, FileRecord], places: dict[str, Path]) -> None:
        last_use = {file.sha256: path for path, file in sorted(wanted.items())}
        for path, file in sorted(wanted.items()):
            target = self.state_dir / path
            if file.kind is FileKind.DIRECTORY:
                target.mkdir(exist_ok=True)
                target.chmod(file.mode | WHOLE_MODE)
            elif file.kind is FileKind.LINK:
                if not target.is_symlink():
                    target.symlink_to(file.target)
            else:
                self._put_file(file, target, places.get(file.sha256), is_last=last_use[file.sha256] == path)
        for path, file in sorted(wanted.items(), reverse=True):
            if file.kind is FileKind.DIRECTORY:
                (self.state_dir / path).chmod(file.mode)

    def _put_file(self, file: FileRecord, target: Path, source: Path | None, *, is_last: bool) -> None:
        if target.exists():
            self.done.files_kept += 1
        else:
            assert source is not None, "what is not there was fetched"
            if is_last:
                _move(source, target)
            else:
                shutil.copyfile(source, target)
        target.chmod(file.mode)
        self.done.hashes.note(file_entry(file.path, target.lstat()), file.sha256)


class _Stoppable:
    """A file that takes no more once `check` raises: an hour of download must not hold up the next epoch."""

    def __init__(self, file: BinaryIO, check: Callable[[], None]) -> None:
        self._file = file
        self._check = check

    def write(self, chunk: bytes) -> int:
        self._check()
        return self._file.write(chunk)


def _is_locked(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _everything(folder: Path) -> list[str]:
    """Every entry below, as relative paths. Folders that may not be read are made readable: they are the user's."""
    found: list[str] = []
    waiting = [""]
    while waiting:
        parent = waiting.pop()
        place = folder / parent
        mode = stat.S_IMODE(place.lstat().st_mode)
        if mode & WHOLE_MODE != WHOLE_MODE:
            place.chmod(mode | WHOLE_MODE)
        for item in os.scandir(place):
            path = f"{parent}/{item.name}" if parent else item.name
            found.append(path)
            if item.is_dir(follow_symlinks=False):
                waiting.append(path)
    return found


def _move(source: Path, target: Path) -> None:
    """By rename; across file systems by a copy."""
    try:
        os.replace(source, target)  # noqa: PTH105
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        if stat.S_ISSOCK(source.lstat().st_mode):
            source.unlink()  # nothing to keep: its process is gone
            return
        shutil.move(source, target)
