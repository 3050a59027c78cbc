"""The one writer of an attempt's log on disk.

Rules of this file:
1. Blocking; one call at a time, and none after `close`. Once open, never raises OSError for what a disk can do: it
   drops, and what is dropped shows as a gap between two segments. The job must go on, so it is acknowledged like
   the rest.
2. Written means handed to the kernel: it survives kill -9 of this process. Segments are synced when they are full
   and when the output ends, so a power cut of the head's machine costs at most the last segment of an attempt.
3. Opening cuts away a last record that is not whole: the shipper sends it again.
4. Over the limit, the oldest segments go, but never the first one: how a run began and how it ended matter most.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agents.spool import SEGMENT_BYTES, Record, SpoolCorruptError, parse_records
from coordinator.logs import layout
from coordinator.logs.layout import Segment
from mesh.errors import LocalProtocolError, RemoteProtocolError
from mesh.log_protocol import OFFSET_MAX

logger = logging.getLogger(__name__)

RETENTION_BYTES = 1024 * 1024 * 1024
RETRY_AFTER_LOSS_S = 1.0
"""How long a disk that refused is left alone."""
HOLE_BYTES_MAX = 1024 * 1024 * 1024 * 1024
"""A jump ahead by more than this is nonsense, not a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is kept of one attempt. At least three segments fit, or nothing could be dropped between two."""

    retention_bytes: int = RETENTION_BYTES
    segment_bytes: int = SEGMENT_BYTES


class AttemptWriter:
    """Appends records to one attempt's folder, from where an earlier writer stopped.

    Args:
        directory: the attempt's folder; made, with its token, when the first record comes.
        token: the incarnation's token.
        limits: how much is kept.
        clock: monotonic seconds.
    """

    def __init__(
        self, directory: Path, *, token: str, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.directory = directory
        self.token = token
        self._limits = limits
        self._clock = clock
        self._file = -1
        """The open segment, or -1."""
        self._base = 0
        """Where the open segment begins."""
        self._retry_at = 0.0
        self.refused = ""
        """Why the disk refused the last time it was asked; empty when it did not."""
        self.last_record_at: float | None = None
        """Time of the last record that this writer was given."""
        self._kept = layout.segments(directory)
        """Every segment on disk, the open one last. Sizes of full ones only."""
        self.end = 0
        """The offset that is expected next; everything before it is written or given up."""
        self.ended = False
        """The output is complete."""
        self._closed = False
        self._lock = threading.Lock()
        """A connection that is replaced closes while a thread may still be writing for it."""
        self._recover()

    def _recover(self) -> None:
        while self._kept:
            last = self._kept[-1]
            whole = _whole_bytes(last.path)
            if whole:
                if whole < last.size:
                    os.truncate(last.path, whole)
                self._kept[-1] = last._replace(size=whole)
                self.end = last.base + whole
                break
            last.path.unlink()
            del self._kept[-1]
        end = layout.read_number(self.directory / layout.END_NAME)
        if end is not None:
            self.ended = True
            self.end = max(self.end, end)

    def append(self, offset: int, data: bytes) -> None:
        """Writes whole records that begin at `offset`, or gives them up when the disk refuses.

        Raises RemoteProtocolError for data that is not records, that was given before, or far ahead.
        """
        with self._lock:
            self._check_open()
            self._append(offset, data)

    def _append(self, offset: int, data: bytes) -> None:
        if self.ended:
            raise RemoteProtocolError("The log shipper sent output after it had said that there is no more.")
        self._check_offset(offset)
        records = _checked(data)
        self.last_record_at = records[-1].at
        if not layout.meets(self.end, offset):
            self._close_segment()
        self.end = offset + len(data)
        if self.refused and self._clock() < self._retry_at:
            return
        try:
            self._write(offset, data)
        except OSError as error:
            self._give_up(error)
        else:
            if self.refused:
                logger.warning("The log in %s is written again.", self.directory)
            self.refused = ""

    def finish(self, offset: int) -> None:
        """The output ends here. Raises RemoteProtocolError for an offset that cannot be."""
        with self._lock:
            self._check_open()
            if not self.ended:
                self._finish(offset)

    def _finish(self, offset: int) -> None:
        self._check_offset(offset)
        self._close_segment()
        self.end = max(self.end, offset)
        self.ended = True
        try:
            self._prepare_directory()
            _replace_file(self.directory / layout.END_NAME, f"{self.end}\n")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Releases the open file; nothing can be written afterwards. Idempotent."""
        with self._lock:
            self._closed = True
            self._close_file()

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError("This log is written by a newer connection.")

    def _close_file(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _check_offset(self, offset: int) -> None:
        if not self.end <= offset <= min(self.end + HOLE_BYTES_MAX, OFFSET_MAX):
            raise RemoteProtocolError(
                f"The log shipper went on at offset {offset}; {self.end} was expected.", offset=offset
            )

    def _write(self, offset: int, data: bytes) -> None:
        at_hand = self._file >= 0 and self._base + self._kept[-1].size == offset
        if at_hand and self._kept[-1].size + len(data) > self._limits.segment_bytes:
            at_hand = False
        if not at_hand:
            self._close_segment()
            self._open_segment(offset)
        written = 0
        while written < len(data):
            written += os.write(self._file, data[written:] if written else data)
        self._kept[-1] = self._kept[-1]._replace(size=self._kept[-1].size + len(data))

    def _open_segment(self, base: int) -> None:
        last = self._kept[-1] if self._kept else None
        if last and last.base + last.size == base and last.size < self._limits.segment_bytes // 2:
            self._base, path = last.base, last.path
        else:
            self._prepare_directory()
            self._base, path = base, layout.segment_path(self.directory, base)
            self._kept.append(Segment(base, 0, path))
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            if self._kept[-1].size == 0:
                del self._kept[-1]
            raise
        self._trim()

    def _prepare_directory(self) -> None:
        """The attempt's folder appears with its token in it, or not at all."""
        if (self.directory / layout.TOKEN_NAME).exists():
            return
        unready = self.directory.with_name(f"new-{self.directory.name}")
        shutil.rmtree(unready, ignore_errors=True)
        unready.mkdir(parents=True, mode=0o700)
        (unready / layout.TOKEN_NAME).write_text(self.token, "ascii")
        unready.rename(self.directory)

    def _close_segment(self) -> None:
        if self._file < 0:
            return
        try:
            os.fdatasync(self._file)
        except OSError as error:
            # What could not be synced may be lost in a power cut; the bytes are still there to read.
            logger.warning("The log in %s could not be synced: %s.", self.directory, error.strerror)
        self._close_file()

    def _give_up(self, error: OSError) -> None:
        """The disk refused: what was written in full stays, the rest is lost."""
        if not self.refused:
            logger.warning("The log in %s cannot be written: %s.", self.directory, error.strerror)
        self.refused = error.strerror or str(error)
        self._retry_at = self._clock() + RETRY_AFTER_LOSS_S
        self._close_file()
        if not self._kept:
            return
        last = self._kept[-1]
        try:
            whole = _whole_bytes(last.path)
            if whole:
                os.truncate(last.path, whole)
                self._kept[-1] = last._replace(size=whole)
            else:
                last.path.unlink()
                del self._kept[-1]
        except OSError as second:
            # Readers take whole records only, and the next segment begins behind the torn one.
            logger.warning("The log in %s has a torn end: %s.", self.directory, second.strerror)

    def _trim(self) -> None:
        """Drops the oldest segments but the first until what is kept, and a new segment, are in the limit."""
        room = self._limits.retention_bytes - self._limits.segment_bytes
        total = sum(segment.size for segment in self._kept)
        trimmed = 0
        while total > room and len(self._kept) > 2:
            oldest = self._kept.pop(1)
            oldest.path.unlink(missing_ok=True)
            total -= oldest.size
            trimmed = oldest.base + oldest.size
        if trimmed:
            # Only the wording of the gap's notice depends on it.
            with contextlib.suppress(OSError):
                _replace_file(self.directory / layout.TRIMMED_NAME, f"{trimmed}\n")


def _checked(data: bytes) -> list[Record]:
    try:
        records, used = parse_records(data)
    except SpoolCorruptError as error:
        raise RemoteProtocolError("The log shipper sent what is no record.") from error
    if used != len(data) or not records:
        raise RemoteProtocolError("The log shipper sent a record that is not whole.")
    return records


def _whole_bytes(path: Path) -> int:
    """How many bytes at the start of a segment are whole records."""
    try:
        return parse_records(path.read_bytes())[1]
    except SpoolCorruptError:
        return 0


def _replace_file(path: Path, text: str) -> None:
    unready = path.with_suffix(".new")
    unready.write_text(text, "ascii")
    unready.replace(path)
