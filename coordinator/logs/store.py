"""The logs of a deployment: who writes what, who waits for it, what is forgotten.

Rules of this file:
1. Files are touched in the store's own few threads (`run`), never on the event loop, so a slow disk delays logs and
   nothing else.
2. An attempt has one writer at a time. The loop's methods (`changes`, `notify`, `is_open`) are for one loop only.
3. Nothing is kept in memory about an attempt that nobody writes or reads: after a restart of the head the folders say
   it all.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from coordinator.logs import layout
from coordinator.logs.layout import EPOCH_MAX, RANK_MAX, AttemptKey
from coordinator.logs.writer import AttemptWriter, Limits
from mesh.errors import NotFoundError, RemoteProtocolError, StorageError
from mesh.ids import Incarnation

logger = logging.getLogger(__name__)

THREADS = 4
FORGOTTEN_RUNS_MAX = 1024
"""So many deleted runs are remembered, to refuse what still comes for them."""

P = ParamSpec("P")
T = TypeVar("T")


class LogStore:
    """Everything under one folder. Made once by the head process.

    Args:
        root: `<state>/logs`; made when it is not there.
        limits: how much is kept of each attempt.
        clock: seconds since 1970.
    """

    def __init__(
        self, root: Path, *, limits: Limits | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._root = root
        self._limits = limits or Limits()
        self._clock = clock
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="logs")
        self._lock = threading.Lock()
        """Guards what follows, and the choice of a folder for an incarnation."""
        self._writers: dict[tuple[str, AttemptKey], AttemptWriter] = {}
        self._forgotten: dict[str, None] = {}
        """Deleted runs, the latest last."""
        self._waiting: dict[str, set[asyncio.Event]] = {}
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a blocking function in one of the store's threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def later(self, function: Callable[[], None]) -> None:
        """Calls a blocking function that never fails in one of the store's threads, some time soon."""
        try:
            self._threads.submit(function)
        except RuntimeError:  # the store was closed before its reader
            function()

    def close(self) -> None:
        """Waits for the threads; nothing may be asked of the store afterwards."""
        self._threads.shutdown(wait=True)
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    # Writing: called in a thread

    def open_writer(self, incarnation: Incarnation) -> AttemptWriter:
        """The writer for an incarnation, standing where the last one stopped. Give it back with `release`.

        Raises NotFoundError for a deleted run, RemoteProtocolError for numbers out of all range or a second writer,
        StorageError when the folder cannot be read.
        """
        run = layout.run_directory(self._root, incarnation.run_uid)
        epoch, rank = incarnation.epoch, incarnation.rank
        if not (0 <= epoch <= EPOCH_MAX and 0 <= rank <= RANK_MAX):
            raise RemoteProtocolError(f"There is no rank {rank} in epoch {epoch}.")
        with self._lock:
            if incarnation.run_uid in self._forgotten:
                raise NotFoundError("The run was deleted; its output is not kept.")
            key = self._claim(run, incarnation)
            if (incarnation.run_uid, key) in self._writers:
                raise RemoteProtocolError("This incarnation's log is being written already.")
            directory = run / key.directory_name()
            try:
                writer = AttemptWriter(directory, token=incarnation.token, limits=self._limits)
            except OSError as error:
                raise StorageError(f"The log in {directory} cannot be opened: {error.strerror}.") from error
            self._writers[incarnation.run_uid, key] = writer
        return writer

    @asynccontextmanager
    async def writing(self, incarnation: Incarnation) -> AsyncIterator[AttemptWriter]:
        """`open_writer` and `release`, whatever happens between them."""
        opening = asyncio.ensure_future(self.run(self.open_writer, incarnation))
        try:
            writer = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._release_opened)
            raise
        try:
            yield writer
        finally:
            # The next one may open when this task is over: a cancellation waits until the file is closed.
            await _to_its_end(asyncio.ensure_future(self.run(self.release, writer)))

    def _release_opened(self, opening: asyncio.Future[AttemptWriter]) -> None:
        """Nobody waits for this writer any more."""
        if not opening.cancelled() and opening.exception() is None:
            writer = opening.result()
            self.later(lambda: self.release(writer))

    def _claim(self, run: Path, incarnation: Incarnation) -> AttemptKey:
        """The incarnation's own folder: the one with its token, else the next free one."""
        again = 0
        while True:
            key = AttemptKey(incarnation.epoch, incarnation.rank, again)
            open_one = self._writers.get((incarnation.run_uid, key))
            token = open_one.token if open_one else layout.read_token(run / key.directory_name())
            if token in (None, incarnation.token):
                return key
            again += 1

    def release(self, writer: AttemptWriter) -> None:
        """Closes a writer, after what it is just writing. Idempotent."""
        writer.close()
        with self._lock:
            for place in [place for place, held in self._writers.items() if held is writer]:
                del self._writers[place]

    # Reading: called in a thread

    def directory(self, uid: str, key: AttemptKey) -> Path:
        return layout.run_directory(self._root, uid) / key.directory_name()

    def attempts(self, uid: str) -> list[AttemptKey]:
        """What there is of a run, by epoch and rank. Raises NotFoundError for what is no uid."""
        return layout.attempts(layout.run_directory(self._root, uid))

    def last_output_at(self, uid: str) -> dict[int, float]:
        """When each rank last printed something, in seconds since 1970; a rank that printed nothing is not in it.

        The machine's time of the last record, but no later than now on the head; for an attempt that nobody writes
        any more, when the head received it.
        """
        found: dict[int, float] = {}
        for key in self.attempts(uid):
            with self._lock:
                writer = self._writers.get((uid, key))
            at = writer.last_record_at if writer else None
            if at is None:
                at = _last_written_at(self.directory(uid, key))
            if at is not None:
                found[key.rank] = max(found.get(key.rank, 0.0), min(at, self._clock()))
        return found

    def delete(self, uid: str) -> None:
        """Forgets a run's output, and refuses what still comes. Nothing happens when there is none."""
        run = layout.run_directory(self._root, uid)
        with self._lock:
            self._forgotten.pop(uid, None)
            self._forgotten[uid] = None
            while len(self._forgotten) > FORGOTTEN_RUNS_MAX:
                self._forgotten.pop(next(iter(self._forgotten)))
        if run.exists():
            # A writer that is just making a file can disturb one pass; the sink has been told, so there is no third.
            shutil.rmtree(run, ignore_errors=True)
            if run.exists():
                shutil.rmtree(run)

    # On the loop

    def is_forgotten(self, uid: str) -> bool:
        return uid in self._forgotten

    def is_open(self, uid: str, key: AttemptKey) -> bool:
        """Whether a shipper is connected for this attempt."""
        return (uid, key) in self._writers

    def notify(self, uid: str) -> None:
        """Something was written for this run, or it ended: whoever follows it looks again."""
        for event in self._waiting.get(uid, ()):
            event.set()

    @contextmanager
    def changes(self, uid: str) -> Iterator[asyncio.Event]:
        """An event that `notify` sets; the one who waits clears it."""
        event = asyncio.Event()
        self._waiting.setdefault(uid, set()).add(event)
        try:
            yield event
        finally:
            waiting = self._waiting[uid]
            waiting.discard(event)
            if not waiting:
                del self._waiting[uid]


async def _to_its_end(future: asyncio.Future[None]) -> None:
    """Waits for it whatever happens, then lets a cancellation through."""
    cancellation: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancellation = error
    future.result()
    if cancellation is not None:
        raise cancellation


def _last_written_at(directory: Path) -> float | None:
    listed = [segment for segment in layout.segments(directory) if segment.size]
    try:
        return listed[-1].path.stat().st_mtime if listed else None
    except FileNotFoundError:
        return None
