"""The gang checkpoints of a deployment in their store: verified, published, listed, removed.

Rules of this file:
1. A manifest is written only when every part of it, and every file's content, is in the store with its size.
2. A manifest is created, never overwritten: its number names it. One that is there already and says the same was
   written before a crash, and counts as written now. One that says something else is somebody else's: nothing is
   committed.
3. Cleaning removes nothing that a manifest which stays, a part which stays, or a part that is young refers to; of files
   that no known part has, only what is older than an upload may take.
4. Blocking work is done in threads of its own: a store that hangs costs nobody else the coordinator's. Each call to the
   store has its limit (`mesh.blob_store`).
5. A run's checkpoints are cleaned or committed, never both at once: what was verified as whole could be gone before it
   is published. A commit waits for the cleaning before it, and then sees what is left.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from coordinator.core.checkpoints import CleanCheckpointStore, CommitCheckpoint
from mesh.blob_store import BlobStore, ObjectFact, shown
from mesh.checkpoint_format import (
    MANIFEST_BYTES_MAX,
    FileKind,
    FileRecord,
    Manifest,
    ManifestPart,
    Part,
    blob_key,
    blobs_key,
    manifest_key,
    manifests_key,
    part_key,
    parts_key,
    run_key,
)
from mesh.errors import CheckpointError, CheckpointStoreError
from mesh.ids import Rank, RunUid

PART_GRACE_S = 60.0
"""A part younger than this may be on its way to the coordinator. One that took longer is taken again."""
UPLOAD_LIMIT_S = 6 * 3600.0
"""A content that no part has is kept so long: its part may still be under way."""
LIST_FROM = 64
"""From so many contents on, one list is cheaper than a question for each."""

THREADS = 16

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The manifest is in the store."""

    uri: str
    size_bytes: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """It is not, and will not be: the store lacks something of these parts."""

    parts: tuple[str, ...]
    """Digests; empty when it was not the parts."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What was removed."""

    manifests: int = 0
    parts: int = 0
    blobs: int = 0


class CheckpointStore:
    """One deployment's.

    Args:
        url: any that fsspec knows.
        options: for fsspec (credentials, endpoint).
    """

    def __init__(
        self, url: str, *, options: dict[str, Any] | None = None, blobs: BlobStore | None = None
    ) -> None:
        self._blobs = blobs or BlobStore(url, options=options)
        self.url = self._blobs.url
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoints")
        self._locks: dict[RunUid, threading.Lock] = {}
        """Of each run that was committed or cleaned and is not deleted."""

    async def check(self) -> None:
        """Writes, reads and removes a small object. Raises CheckpointStoreError when that is not possible.

        A store that lets somebody create an object that is there already (S3 servers that do not know conditional
        writes) is refused: a member of an older epoch could publish in it.
        """
        await self._in_thread(self.check_now)

    async def commit(self, run: RunUid, wish: CommitCheckpoint) -> Written | Lacking:
        """Rules 1 and 2. Raises CheckpointStoreError when the store does not work; try again then."""
        return await self._in_thread(lambda: self._alone(run, lambda: self._commit(run, wish)))

    async def manifest(self, run: RunUid, number: int) -> Manifest:
        """A committed checkpoint. Raises CheckpointError when it is missing or damaged."""
        return await self._in_thread(lambda: self._manifest(run, number))

    async def clean(self, run: RunUid, staying: CleanCheckpointStore) -> Cleaned:
        """Rule 3. May be called again at any time."""
        return await self._in_thread(lambda: self._alone(run, lambda: self._clean(run, staying, time.time())))

    async def delete_run(self, run: RunUid) -> None:
        """Removes all of a run's checkpoints."""
        await self._in_thread(lambda: self._alone(run, lambda: self._blobs.remove_below(run_key(run))))
        self._locks.pop(run, None)

    # ---- in threads --------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _alone(self, run: RunUid, work: Callable[[], T]) -> T:
        """Rule 5. A lock of threads: one whose caller was cancelled still works."""
        with self._locks.setdefault(run, threading.Lock()):
            return work()

    def check_now(self) -> None:
        """`check`, blocking."""
        key = f"checks/{secrets.token_hex(8)}"
        self._blobs.create_bytes(key, b"gangmesh")
        try:
            self._blobs.get_bytes(key, bytes_max=64)
            with suppress(FileExistsError):
                self._blobs.create_bytes(key, b"another")
                raise CheckpointStoreError(
                    f"The checkpoint store {shown(self.url)} overwrites an object that was to be created once.",
                    hint="It does not know conditional writes (If-None-Match). Take another one, or a shared folder.",
                    url=shown(self.url),
                    may_pass=False,
                )
        finally:
            self._blobs.remove([key])

    def _commit(self, run: RunUid, wish: CommitCheckpoint) -> Written | Lacking:
        parts: dict[str, Part] = {}
        for digest in dict.fromkeys(wish.parts):
            part = self._part(run, digest)
            if part is None:
                return Lacking(parts=(digest,), message=f"Part {digest[:12]} is missing or damaged.")
            parts[digest] = part
        manifest = Manifest(
            run=run,
            epoch=wish.epoch,
            number=wish.number,
            step=wish.step,
            created_at=time.time(),
            parts=tuple(
                ManifestPart(rank=Rank(rank), digest=digest, files=parts[digest].at_step(wish.step))
                for rank, digest in enumerate(wish.parts)
            ),
        )
        lacking = self._lacking(run, manifest)
        if lacking is not None:
            return lacking
        return self._publish(run, manifest)

    def _part(self, run: RunUid, digest: str) -> Part | None:
        """None when the store does not have it whole."""
        try:
            data = self._blobs.get_bytes(part_key(run, digest), bytes_max=MANIFEST_BYTES_MAX)
            return Part.decode(data) if hashlib.sha256(data).hexdigest() == digest else None
        except (FileNotFoundError, CheckpointError):
            return None

    def _lacking(self, run: RunUid, manifest: Manifest) -> Lacking | None:
        wanted = {file.sha256 for part in manifest.parts for file in _contents(part.files)}
        sizes = self._sizes(run, wanted)
        for part in manifest.parts:
            for file in _contents(part.files):
                if sizes.get(file.sha256) != file.size:
                    return Lacking(
                        parts=(part.digest,),
                        message=f"The content of '{file.path}' of rank {part.rank} is not whole in the store.",
                    )
        return None

    def _sizes(self, run: RunUid, wanted: set[str]) -> dict[str, int | None]:
        if len(wanted) < LIST_FROM:
            return {sha256: self._blobs.size(blob_key(run, sha256)) for sha256 in wanted}
        return {_name(fact.key): fact.size for fact in self._blobs.list_below(blobs_key(run))}

    def _publish(self, run: RunUid, manifest: Manifest) -> Written | Lacking:
        key = manifest_key(run, manifest.number)
        try:
            self._blobs.create_bytes(key, manifest.encode())
        except FileExistsError:
            return self._published_before(run, manifest)
        return self._written(manifest)

    def _published_before(self, run: RunUid, manifest: Manifest) -> Written | Lacking:
        try:
            found = self._manifest(run, manifest.number)
        except CheckpointError as error:
            return Lacking(parts=(), message=error.message)
        same = (found.epoch, found.step, [part.digest for part in found.parts]) == (
            manifest.epoch,
            manifest.step,
            [part.digest for part in manifest.parts],
        )
        if not same:
            return Lacking(parts=(), message=f"Checkpoint {manifest.number} exists with other content.")
        return self._written(found)

    def _written(self, manifest: Manifest) -> Written:
        return Written(
            uri=self._blobs.uri(manifest_key(manifest.run, manifest.number)),
            size_bytes=manifest.size_bytes,
            created_at=manifest.created_at,
        )

    def _manifest(self, run: RunUid, number: int) -> Manifest:
        key = manifest_key(run, number)
        try:
            found = Manifest.decode(self._blobs.get_bytes(key, bytes_max=MANIFEST_BYTES_MAX))
        except FileNotFoundError as error:
            raise CheckpointError(f"The manifest {key} is missing.", number=number) from error
        if (found.run, found.number) != (run, number):
            raise CheckpointError(f"The manifest {key} is another one's.", number=number)
        return found

    # ---- cleaning ----------------------------------------------------------------------------------

    def _clean(self, run: RunUid, staying: CleanCheckpointStore, now: float) -> Cleaned:
        """Manifests first: from then on nothing offers what goes next."""
        newest = max(staying.numbers, default=0)
        manifests = [
            fact.key
            for fact in self._blobs.list_below(manifests_key(run))
            if (number := _number(fact.key)) is not None and number < newest and number not in staying.numbers
        ]
        needed: set[str] = set()
        dropped: set[str] = set()
        for fact in self._blobs.list_below(manifests_key(run)):
            try:
                data = self._blobs.get_bytes(fact.key, bytes_max=MANIFEST_BYTES_MAX)
                found = Manifest.decode(data)
            except (FileNotFoundError, CheckpointError):
                _log.warning("%s is no manifest; what it may refer to is kept for a while.", fact.key)
                continue
            files = {file.sha256 for part in found.parts for file in _contents(part.files)}
            (dropped if fact.key in manifests else needed).update(files)
        parts = self._sort_parts(run, staying, now, needed, dropped)
        self._blobs.remove(manifests)
        self._blobs.remove(parts)
        blobs = [
            fact.key
            for fact in self._blobs.list_below(blobs_key(run))
            if _name(fact.key) not in needed
            and (_name(fact.key) in dropped or _is_old(fact, now, UPLOAD_LIMIT_S))
        ]
        self._blobs.remove(blobs)
        return Cleaned(manifests=len(manifests), parts=len(parts), blobs=len(blobs))

    def _sort_parts(
        self, run: RunUid, staying: CleanCheckpointStore, now: float, needed: set[str], dropped: set[str]
    ) -> list[str]:
        """Adds to `needed` and `dropped` what parts refer to; returns the parts to remove."""
        removed: list[str] = []
        for fact in self._blobs.list_below(parts_key(run)):
            digest = _name(fact.key).removesuffix(".json")
            part = self._part(run, digest)
            files = set() if part is None else {file.sha256 for file in _contents(part.files)}
            if digest in staying.parts or not _is_old(fact, now, PART_GRACE_S):
                needed.update(files)
            else:
                dropped.update(files)
                removed.append(fact.key)
        return removed


def _contents(files: Iterable[FileRecord]) -> Iterator[FileRecord]:
    return (file for file in files if file.kind is FileKind.FILE)


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _number(key: str) -> int | None:
    name = _name(key).removesuffix(".json")
    return int(name) if name.isdecimal() else None


def _is_old(fact: ObjectFact, now: float, limit_s: float) -> bool:
    """A store that does not say when something was written keeps it."""
    return fact.modified_at is not None and now - fact.modified_at > limit_s
