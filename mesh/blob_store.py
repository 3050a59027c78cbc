"""Objects in a checkpoint store, whatever it is: any URL that fsspec knows (file://, s3://, gs://, memory:// …).

Rules of this file:
1. The one module that imports fsspec. What it raises is CheckpointStoreError: which store, which object, what to do.
2. Blocking: call it in a thread. But it never blocks for ever: work that makes no progress for `stall_s` is given
   up, and its thread is left behind (it ends when it moves again). With too many of those the store counts as away, at
   once.
3. An object is there whole or not at all. Where a file system shows half-written files (a disk), they get another name
   first; object stores show an object when it is complete.
4. What may pass (network, throttling) is tried again by the caller; `retryable` says so. A full store may pass as well.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mesh.errors import CheckpointError, CheckpointStoreError
from mesh.reasons import Reason

STALL_S = 60.0
"""Without a byte moved or an answer given for so long, a call is given up."""
LEFT_BEHIND_MAX = 8
CHUNK_BYTES = 1 << 20
TEMPORARY_MARK = ".tmp-"
"""In the names of what is being written; never an object."""
ATOMIC_PROTOCOLS = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "r2", "tos"}
)
"""Whose objects appear when they are complete."""

T = TypeVar("T")
Progress = Callable[[], None]


class Writable(Protocol):
    """An open file, as far as it is needed here."""

    def write(self, chunk: bytes, /) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFact:
    """One object of a listing."""

    key: str
    size: int
    modified_at: float | None
    """Wall clock of the store; None where it does not say."""


class BlobStore:
    """Objects below one URL. Thread-safe.

    Args:
        url: where; a path without a scheme is a local directory.
        options: for fsspec's file system (credentials, endpoint).
        stall_s: see rule 2.
    """

    def __init__(self, url: str, *, options: dict[str, Any] | None = None, stall_s: float = STALL_S) -> None:
        self.url = normal_url(url)
        self._stall_s = stall_s
        self._left_behind = 0
        self._lock = threading.Lock()
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **(options or {}))
        except (ImportError, ValueError, OSError) as error:
            raise CheckpointStoreError(
                f"The checkpoint store {shown(self.url)} cannot be used: {error}.",
                hint="Give a URL that fsspec knows, and install what it needs (s3fs for s3://, gcsfs for gs://).",
                url=shown(self.url),
            ) from error
        self._root = self._root.rstrip("/")
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._is_atomic = bool(ATOMIC_PROTOCOLS.intersection(protocols))

    def uri(self, key: str) -> str:
        """The full URL of an object."""
        return f"{self.url}/{key}"

    # ---- writing -----------------------------------------------------------------------------------

    def put_bytes(self, key: str, data: bytes) -> None:
        """Writes an object; one that is there already is replaced."""
        self._limited(f"write {key}", lambda progress: self._write(key, iter([data]), progress))

    def create_bytes(self, key: str, data: bytes) -> None:
        """Writes an object that must not be there. Raises FileExistsError when it is."""

        def work(progress: Progress) -> None:
            if self._is_local:
                self._create_locally(key, data)
            else:
                self._fs.pipe_file(self._path(key), data, mode="create")

        self._limited(f"create {key}", work, expected=FileExistsError)

    def put_stream(self, key: str, chunks: Iterator[bytes]) -> None:
        """Writes an object from chunks. What the iterator raises ends it, and nothing of the object is left."""
        self._limited(f"write {key}", lambda progress: self._write(key, chunks, progress))

    def _write(self, key: str, chunks: Iterator[bytes], progress: Progress) -> None:
        final = self._path(key)
        place = final if self._is_atomic else f"{final}{TEMPORARY_MARK}{secrets.token_hex(6)}"
        if not self._is_atomic:
            self._fs.makedirs(final.rpartition("/")[0], exist_ok=True)
        file = self._fs.open(place, "wb")
        try:
            for chunk in chunks:
                file.write(chunk)
                progress()
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
            file.close()
            if place != final:
                self._fs.mv(place, final)
        except BaseException:
            self._drop(file, place)
            raise

    def _drop(self, file: Any, place: str) -> None:
        """An upload that failed leaves nothing: not a half, and no object store must complete it on close."""
        try:
            if self._is_atomic:
                file.discard()
                file.closed = True
            else:
                file.close()
                self._fs.rm_file(place)
        except Exception:  # noqa: BLE001 - the guard: the first error is the one to tell
            pass

    def _create_locally(self, key: str, data: bytes) -> None:
        """A link gives a whole file its name only when nobody has it: atomic on a disk and on NFS."""
        final = Path(self._path(key))
        final.parent.mkdir(parents=True, exist_ok=True)
        place = final.with_name(f"{final.name}{TEMPORARY_MARK}{secrets.token_hex(6)}")
        try:
            with place.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(place, final)
        finally:
            place.unlink(missing_ok=True)
        _flush_folder(final.parent)

    # ---- reading -----------------------------------------------------------------------------------

    def get_bytes(self, key: str, *, bytes_max: int) -> bytes:
        """An object's content. Raises FileNotFoundError when there is none, CheckpointError when it is too large."""

        def work(progress: Progress) -> bytes:
            with self._fs.open(self._path(key), "rb") as file:
                found = bytearray()
                while chunk := file.read(CHUNK_BYTES):
                    found += chunk
                    progress()
                    if len(found) > bytes_max:
                        raise CheckpointError(f"{key} is larger than {bytes_max} bytes.", file=key)
                return bytes(found)

        return self._limited(f"read {key}", work, expected=FileNotFoundError)

    def get_file(self, key: str, target: Writable) -> str:
        """Copies an object into an open file and returns its sha256.

        Raises FileNotFoundError when there is none; what writing the file raises comes as it is.
        """

        def work(progress: Progress) -> str:
            digest = hashlib.sha256()
            with self._fs.open(self._path(key), "rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    _write_out(target, chunk)
                    digest.update(chunk)
                    progress()
            return digest.hexdigest()

        return self._limited(f"read {key}", work, expected=FileNotFoundError)

    def size(self, key: str) -> int | None:
        """An object's size in bytes; None when there is none."""

        def work(progress: Progress) -> int | None:
            try:
                return int(self._fs.info(self._path(key))["size"])
            except FileNotFoundError:
                return None

        return self._limited(f"look for {key}", work)

    def list_below(self, prefix: str) -> list[ObjectFact]:
        """Every object below a key; on a disk also what is being written, under its other name."""

        def work(progress: Progress) -> list[ObjectFact]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                return []
            start = len(self._path("")) if self._root else 0
            return [
                ObjectFact(
                    key=path[start:].lstrip("/"),
                    size=int(info.get("size") or 0),
                    modified_at=_modified_at(info),
                )
                for path, info in sorted(found.items())
            ]

        return self._limited(f"list {prefix}", work)

    # ---- removing ----------------------------------------------------------------------------------

    def remove(self, keys: list[str]) -> None:
        """Removes objects; one that is not there is no error."""

        def work(progress: Progress) -> None:
            for key in keys:
                progress()
                with suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(key))

        self._limited("remove objects", work)

    def remove_below(self, prefix: str) -> None:
        """Removes everything below a key, folders included; nothing there is no error."""

        def work(progress: Progress) -> None:
            with suppress(FileNotFoundError):
                self._fs.rm(self._path(prefix), recursive=True)

        self._limited(f"remove {prefix}", work)

    # ---- the limit ---------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _limited(
        self, what: str, work: Callable[[Progress], T], *, expected: type[OSError] | None = None
    ) -> T:
        """Runs work in a thread of its own; gives up when it stalls. Maps what goes wrong but what is `expected`."""
        with self._lock:
            if self._left_behind >= LEFT_BEHIND_MAX:
                raise self._error(what, f"{self._left_behind} earlier calls still hang", retryable=True)
        call = _Call(work)
        call.start()
        if not call.wait(self._stall_s):
            with self._lock:
                self._left_behind += 1
            call.on_late_end(self._came_back)
            raise self._error(what, f"nothing has moved for {self._stall_s:g} s", retryable=True)
        if call.error is None:
            return call.result  # type: ignore[no-any-return]
        if expected is not None and isinstance(call.error, expected):
            raise call.error
        raise self._mapped(what, call.error)

    def _came_back(self) -> None:
        with self._lock:
            self._left_behind -= 1

    def _mapped(self, what: str, error: BaseException) -> BaseException:
        if isinstance(error, CheckpointError | CheckpointStoreError):
            return error
        if isinstance(error, _CallerError):
            return error.error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._error(what, "it is full", reason=Reason.STORAGE_FULL, cause=error)
        if isinstance(error, PermissionError):
            return self._error(what, f"not allowed: {error}", retryable=False, cause=error)
        return self._error(what, f"{type(error).__name__}: {error}", cause=error)

    def _error(
        self,
        what: str,
        why: str,
        *,
        retryable: bool = True,
        reason: Reason = Reason.CHECKPOINT_STORE_FAILED,
        cause: BaseException | None = None,
    ) -> CheckpointStoreError:
        hint = "Free some space there." if reason is Reason.STORAGE_FULL else ""
        error = CheckpointStoreError(
            f"The checkpoint store {shown(self.url)} could not {what}: {why.rstrip('.')}.",
            hint=hint,
            reason=reason,
            url=shown(self.url),
            may_pass=retryable,
        )
        error.__cause__ = cause
        return error


class _CallerError(Exception):
    """What the caller's own file or chunks raised: handed back as it was, and never taken for the store's."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _write_out(target: Writable, chunk: bytes) -> None:
    try:
        target.write(chunk)
    except OSError as error:
        raise _CallerError(error) from error


def from_caller(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """For `put_stream`: tells errors of the source from errors of the store."""
    try:
        yield from chunks
    except GeneratorExit:
        raise
    except BaseException as error:
        raise _CallerError(error) from error


class _Call:
    """One piece of work in a daemon thread, watched for progress."""

    def __init__(self, work: Callable[[Progress], Any]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._moved_at = time.monotonic()
        self._is_given_up = False
        self._lock = threading.Lock()
        self._late: Callable[[], None] | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="checkpoint store", daemon=True).start()

    def _run(self) -> None:
        lower_priority()
        try:
            self.result = self._work(self._progress)
        except BaseException as error:  # noqa: BLE001 - the guard: handed to the caller
            self.error = error
        with self._lock:
            self._ended.set()
            late = self._late
        if late is not None:
            late()

    def _progress(self) -> None:
        if self._is_given_up:  # whoever asked has gone on: what it does late could be wrong by now
            raise TimeoutError
        self._moved_at = time.monotonic()

    def wait(self, stall_s: float) -> bool:
        """False when it has stalled."""
        while True:
            left_s = self._moved_at + stall_s - time.monotonic()
            if self._ended.wait(max(0.0, left_s)):
                return True
            if self._moved_at + stall_s <= time.monotonic():
                return False

    def on_late_end(self, tell: Callable[[], None]) -> None:
        """It is given up: it ends at its next progress, and then this is told."""
        self._is_given_up = True
        with self._lock:
            if not self._ended.is_set():
                self._late = tell
                return
        tell()


def lower_priority() -> None:
    """This thread yields to the training beside it (Linux counts niceness per thread)."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def normal_url(url: str) -> str:
    """A URL with a scheme and without a slash at its end. A bare path becomes file://, absolute."""
    text = url.strip()
    if not text:
        raise CheckpointStoreError(
            "The checkpoint store's URL is empty.", hint="For example file:///data/checkpoints"
        )
    if urlsplit(text).password:
        raise CheckpointStoreError(
            f"The URL of the checkpoint store {shown(text)} has a password in it, and URLs are shown.",
            hint="Leave it out; give it in the environment or the file that the store's package reads.",
            url=shown(text),
        )
    if "://" not in text:
        text = f"file://{Path(text).expanduser().absolute()}"
    scheme, _, place = text.partition("://")
    if not place.strip("/") if scheme != "file" else not place.startswith("/"):
        # A relative folder would be another one in every process, and what has lost its slashes a folder's name.
        raise CheckpointStoreError(
            f"The checkpoint store's URL {shown(text)} names no place.",
            hint="For example file:///data/checkpoints, with three slashes, or s3://bucket/prefix",
            url=shown(text),
        )
    return text.rstrip("/")


def split_manifest_uri(uri: str) -> tuple[str, str]:
    """The store's URL and the manifest's key."""
    base, mark, rest = uri.rpartition("/runs/")
    if not mark:
        raise CheckpointError(f"{shown(uri)} is no manifest of a gang checkpoint.")
    return base, f"runs/{rest}"


def shown(url: str) -> str:
    """Without a password or a query, which may be a signature."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}" if parts.scheme else url


def _modified_at(info: dict[str, Any]) -> float | None:
    for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        value = info.get(name)
        if value is None:
            continue
        if isinstance(value, int | float):
            return float(value)
        if hasattr(value, "timestamp"):
            return float(value.timestamp())
    return None


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
