"""Takes one part of a gang checkpoint: holds the files still, hashes them, and stores what the store lacks.

Rules of this file:
1. Blocking: call it in a thread of its own. The run never waits for it.
2. What is stored is what was seen: every file has the size, time and inode of the look before it is read and after,
   and the whole directory is looked at again when all files are held still. Anything else is `TornError`.
3. Files are held still by a hard link, which survives a removal and a rename; by a copy when links do not hold (a file
   that is written in place) or cannot be made; and when there is no room for a copy, they are read where they are.
4. The store is tried until it works or `stop` is set. What it has already is not sent again, and is looked for a last
   time before the part is named.
5. It yields: low priority, a few files at a time, in chunks.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agents.core.checkpoint_events import Entry, EntryKind, TakePart
from agents.core.checkpoint_names import is_log_name, shown
from agents.core.checkpointing import first_difference
from agents.state_look import file_entry, look
from mesh.blob_store import BlobStore, from_caller, lower_priority
from mesh.checkpoint_format import FileKind, FileRecord, Part, blob_key, part_key
from mesh.errors import CheckpointStoreError
from mesh.ids import RunUid

FILES_AT_ONCE = 4
CHUNK_BYTES = 1 << 20
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0
HASHES_MAX = 100_000
_FICLONE = 0x40049409
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)

T = TypeVar("T")
Tell = Callable[[str], None]


class TornError(Exception):
    """A file changed while it was read."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class UnreadableError(Exception):
    """A file of the state directory cannot be read; the message says which and why."""


class AbandonedError(Exception):
    """`stop` was set."""


class Hashes:
    """sha256 by path, inode, size and time, so that a file that did not change is read once. Thread-safe enough: a race
    costs a second hash."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], str] = {}

    def of(self, entry: Entry) -> str | None:
        return self._known.get(_key(entry))

    def note(self, entry: Entry, sha256: str) -> None:
        if len(self._known) >= HASHES_MAX:
            self._known.clear()
        self._known[_key(entry)] = sha256


def _key(entry: Entry) -> tuple[str, int, int, int]:
    return entry.path, entry.inode, entry.size, entry.mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One file, held still."""

    entry: Entry
    place: Path
    """Where to read it."""
    is_own: bool
    """A copy of ours, that nobody else writes to."""


def insist(
    call: Callable[[], T], *, stop: threading.Event, tell: Tell, retry_first_s: float = RETRY_FIRST_S
) -> T:
    """Repeats a call to the store until it works. Raises AbandonedError when `stop` is set."""
    pause_s = retry_first_s
    while True:
        if stop.is_set():
            raise AbandonedError
        try:
            return call()
        except CheckpointStoreError as error:
            tell(f"{error} It is tried again; the run goes on.")
        stop.wait(pause_s)
        pause_s = min(RETRY_MAX_S, pause_s * 2)


def content_of(part: Part) -> tuple[str, int]:
    """What a part is about, logs and folders left out: one hash of it, and how many files and links that is."""
    files = tuple(
        file
        for file in part.files
        if file.kind is FileKind.LINK or (file.kind is FileKind.FILE and not is_log_name(file.path))
    )
    return Part(files=files).digest, len(files)


class PartTaker:
    """Takes parts of one rank, one at a time.

    Args:
        state_dir: what parts are of.
        work_dir: for links and copies; best on the same file system. Its content is this class's own.
        stop: ends what is under way.
        tell: told when the store does not work.
    """

    def __init__(
        self,
        *,
        state_dir: Path,
        work_dir: Path,
        store: BlobStore,
        run: RunUid,
        hashes: Hashes,
        stop: threading.Event,
        tell: Tell,
        retry_first_s: float = RETRY_FIRST_S,
    ) -> None:
        self._state_dir = state_dir
        self._work_dir = work_dir
        self._store = store
        self._run = run
        self._hashes = hashes
        self._stop = stop
        self._tell = tell
        self._retry_first_s = retry_first_s

    def take(self, wanted: TakePart) -> Part:
        """Returns when all of the part is in the store.

        Raises:
            TornError, UnreadableError, AbandonedError.
        """
        shutil.rmtree(self._work_dir, ignore_errors=True)
        try:
            self._work_dir.mkdir(parents=True, mode=0o700)
            files = [entry for entry in wanted.entries if entry.kind is EntryKind.FILE]
            held = [
                self._hold(entry, self._work_dir / str(number), copy=wanted.copy)
                for number, entry in enumerate(files)
            ]
            if wanted.is_whole:
                self._check_whole(wanted)
            return self._store_all(wanted, held)
        except OSError as error:
            name = shown(os.fsdecode(error.filename or b"?"))
            raise UnreadableError(
                f"A checkpoint of this rank could not be taken: '{name}' {error.strerror}."
            ) from error
        finally:
            shutil.rmtree(self._work_dir, ignore_errors=True)

    # ---- holding still -----------------------------------------------------------------------------

    def _hold(self, entry: Entry, place: Path, *, copy: bool) -> Held:
        source = self._state_dir / entry.path
        try:
            if entry.is_log:
                return self._copied_log(entry, source, place)
            if copy:
                return self._copied(entry, source, place)
            try:
                os.link(source, place, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                return self._copied(entry, source, place)
        except FileNotFoundError as error:
            raise TornError(entry.path) from error
        held = Held(entry=entry, place=place, is_own=False)
        _check_unchanged(held)
        return held

    def _copied(self, entry: Entry, source: Path, place: Path) -> Held:
        try:
            with source.open("rb") as reading, place.open("wb") as writing:
                _clone_or_copy(reading.fileno(), writing.fileno())
                if file_entry(entry.path, os.fstat(reading.fileno())) != entry:
                    raise TornError(entry.path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            place.unlink(missing_ok=True)  # rule 3: no room
            held = Held(entry=entry, place=source, is_own=False)
            _check_unchanged(held)
            return held
        return Held(entry=entry, place=place, is_own=True)

    def _copied_log(self, entry: Entry, source: Path, place: Path) -> Held:
        """As far as it is written now; a line may be half."""
        with source.open("rb") as reading, place.open("wb") as writing:
            _clone_or_copy(reading.fileno(), writing.fileno())
        facts = file_entry(entry.path, place.stat())
        return Held(
            entry=Entry(
                path=entry.path, kind=entry.kind, mode=entry.mode, size=facts.size,
                mtime_ns=facts.mtime_ns, inode=facts.inode,
            ),
            place=place,
            is_own=True,
        )  # fmt: skip

    def _check_whole(self, wanted: TakePart) -> None:
        """Nothing came, went or changed since the look: all files are of one moment."""
        wanted_entries = tuple(entry for entry in wanted.entries if not entry.is_log)
        now = look(self._state_dir, sure=wanted_entries)
        kept = tuple(entry for entry in now.entries if entry.kind in _KINDS and not entry.is_log)
        changed = first_difference(wanted_entries, kept)
        if changed is not None or now.is_saving or now.trouble:
            raise TornError(changed or "")

    # ---- storing -----------------------------------------------------------------------------------

    def _store_all(self, wanted: TakePart, held: list[Held]) -> Part:
        with ThreadPoolExecutor(FILES_AT_ONCE, "checkpoint", initializer=lower_priority) as pool:
            hashes = dict(zip((h.entry.path for h in held), pool.map(self._store_file, held), strict=True))
        sizes = {h.entry.path: h.entry.size for h in held}
        files = tuple(
            FileRecord(
                path=entry.path,
                kind=_KINDS[entry.kind],
                mode=entry.mode,
                size=sizes.get(entry.path, 0),
                sha256=hashes.get(entry.path, ""),
                target=entry.target,
            )
            for entry in wanted.entries
        )
        part = Part(steps=wanted.steps, files=files)
        for one in held:  # an older checkpoint that had it too may have been removed meanwhile
            if self._insist(lambda one=one: self._store.size(self._blob(hashes[one.entry.path]))) is None:  # type: ignore[misc]
                self._send(one, hashes[one.entry.path])
        self._insist(lambda: self._store.put_bytes(part_key(self._run, part.digest), part.encode()))
        return part

    def _store_file(self, held: Held) -> str:
        sha256 = None if held.is_own else self._hashes.of(held.entry)
        if sha256 is None:
            digest = hashlib.sha256()
            for chunk in self._chunks(held):
                digest.update(chunk)
            sha256 = digest.hexdigest()
            if not held.entry.is_log:
                self._hashes.note(held.entry, sha256)
        if self._insist(lambda: self._store.size(self._blob(sha256))) != held.entry.size:
            self._send(held, sha256)
        return sha256

    def _send(self, held: Held, sha256: str) -> None:
        def checked() -> Iterator[bytes]:
            digest = hashlib.sha256()
            for chunk in self._chunks(held):
                digest.update(chunk)
                yield chunk
            if digest.hexdigest() != sha256:
                raise TornError(held.entry.path)

        self._insist(lambda: self._store.put_stream(self._blob(sha256), from_caller(checked())))

    def _chunks(self, held: Held) -> Iterator[bytes]:
        """The file's bytes; TornError when they are not those of the look."""
        left = held.entry.size
        with held.place.open("rb") as file:
            while left > 0:
                if self._stop.is_set():
                    raise AbandonedError
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise TornError(held.entry.path)
                left -= len(chunk)
                yield chunk
        _check_unchanged(held)

    def _blob(self, sha256: str) -> str:
        return blob_key(self._run, sha256)

    def _insist(self, call: Callable[[], T]) -> T:
        return insist(call, stop=self._stop, tell=self._tell, retry_first_s=self._retry_first_s)


_KINDS = {
    EntryKind.FILE: FileKind.FILE,
    EntryKind.DIRECTORY: FileKind.DIRECTORY,
    EntryKind.LINK: FileKind.LINK,
}


def _check_unchanged(held: Held) -> None:
    if held.is_own:
        return
    try:
        facts = held.place.lstat()
    except FileNotFoundError as error:
        raise TornError(held.entry.path) from error
    if file_entry(held.entry.path, facts) != held.entry:
        raise TornError(held.entry.path)


def _clone_or_copy(source: int, target: int) -> None:
    """By reference where the file system can, else byte by byte."""
    with suppress(OSError):
        fcntl.ioctl(target, _FICLONE, source)
        return
    while chunk := os.read(source, CHUNK_BYTES):
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
