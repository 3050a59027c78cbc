"""Reading one attempt's log from disk: records in order, gaps where something was lost, lines.

Rules of this file:
1. Blocking, and never waiting: what is not there yet is not there (`CaughtUp`).
2. Only whole records are taken, so a reader may run beside the writer, in another process too.
3. Whether the writer went on in a new segment is decided from a listing taken *before* the last look at the old one,
   or bytes written between the two looks would seem lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agents.spool import (
    HEADER_BYTES,
    RECORD_DATA_BYTES_MAX,
    Record,
    SpoolCorruptError,
    loss_mark,
    parse_records,
)
from coordinator.logs import layout
from coordinator.logs.layout import Segment
from coordinator.logs.render import START, Line, LineRenderer, Position

READ_BYTES = 256 * 1024
_LOOKS_MAX = 8
"""Retention drops a segment in the time that it takes to fill one; so many in a row are not dropped under a reader."""
LINES_PER_BATCH = 2048
"""A batch of lines ends after the record that brings it there (one record may hold 64 Ki empty lines)."""
TAIL_SCAN_BYTES_MAX = 64 * 1024 * 1024
"""How far back the start of the last lines is looked for; more is a progress bar of days."""


class Records(NamedTuple):
    """Records that lie together, the first one at `base`."""

    base: int
    records: list[Record]


@dataclass(frozen=True, slots=True)
class Gap:
    """What lies between two offsets was lost; `at` is the time of the first record behind it (or before it)."""

    start: int
    end: int
    at: float
    trimmed: bool
    """Dropped to stay in the limit, not for want of room on the disk."""

    def notice(self) -> str:
        """What a reader sees in its place."""
        if self.trimmed:
            why = "dropped, to keep this rank's log within its limit"
        else:
            why = "they could not be kept (disk full, or the machine was lost)"
        return loss_mark(self.end - self.start, why).rstrip("\n")


class CaughtUp:
    """There is no more yet."""


class Complete:
    """There is no more, and never will be."""


class RecordScanner:
    """The records of one attempt, from an offset on at which a record starts."""

    def __init__(self, directory: Path, *, offset: int = 0) -> None:
        self._directory = directory
        self.offset = offset
        """Everything before it was returned."""
        self._file = -1
        self._base = 0
        self._last_at = 0.0
        self._closed = False
        self._lock = threading.Lock()
        """A reader that goes away closes while a thread may still be reading for it."""

    def close(self) -> None:
        """Releases the file; reading gives nothing more. Idempotent."""
        with self._lock:
            self._closed = True
            self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def read(self) -> Records | Gap | CaughtUp | Complete:
        """What comes next. After `Gap`, `offset` is behind it."""
        with self._lock:
            return CaughtUp() if self._closed else self._read()

    def _read(self) -> Records | Gap | CaughtUp | Complete:
        if self._file >= 0 and (found := self._read_open_segment()):
            return found
        for _ in range(_LOOKS_MAX):
            with contextlib.suppress(
                FileNotFoundError
            ):  # dropped since the listing: look for the one behind it
                return self._look_further()
        return CaughtUp()

    def _look_further(self) -> Records | Gap | CaughtUp | Complete:
        # Read before the listing: no segment can follow the end.
        end = layout.read_number(self._directory / layout.END_NAME)
        listed = layout.segments(self._directory)
        if self._file >= 0 and (found := self._read_open_segment()):
            return found
        if (segment := self._following(listed)) is not None:
            return self._enter(segment)
        if end is None:
            return CaughtUp()
        if end > self.offset and not layout.meets(self.offset, end):
            gap = Gap(self.offset, end, self._last_at, self._is_trimmed(end))
            self.offset = end
            return gap
        return Complete()

    def _following(self, listed: list[Segment]) -> Segment | None:
        """The segment that holds `offset`, when it is another than the open one; else the next one."""
        inside = [s for s in listed if s.base <= self.offset < s.base + s.size]
        if inside and (self._file < 0 or inside[-1].base != self._base):
            return inside[-1]
        return next((s for s in listed if s.base > self.offset), None)

    def _enter(self, segment: Segment) -> Records | Gap | CaughtUp:
        self._close_file()
        self._file = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        self._base = segment.base
        if segment.base <= self.offset:
            return self._read_open_segment() or CaughtUp()
        if layout.meets(self.offset, segment.base):
            self.offset = segment.base
            return self._read_open_segment() or CaughtUp()
        start, self.offset = self.offset, segment.base
        found = self._read_open_segment()
        self.offset = segment.base
        at = found.records[0].at if found else self._last_at
        return Gap(start, segment.base, at, self._is_trimmed(segment.base))

    def _read_open_segment(self) -> Records | None:
        """Whole records at `offset`, or None: none are there yet, or what is there is no record."""
        buffer = os.pread(self._file, READ_BYTES, self.offset - self._base)
        assert READ_BYTES > HEADER_BYTES + RECORD_DATA_BYTES_MAX, "a record always fits"
        try:
            records, used = parse_records(buffer, base=self.offset)
        except SpoolCorruptError:
            return None
        if not records:
            return None
        base, self.offset = self.offset, self.offset + used
        self._last_at = records[-1].at
        return Records(base, records)

    def _is_trimmed(self, end: int) -> bool:
        trimmed = layout.read_number(self._directory / layout.TRIMMED_NAME)
        return trimmed is not None and end <= trimmed + HEADER_BYTES + RECORD_DATA_BYTES_MAX


class LineScanner:
    """The lines of one attempt, from a position on."""

    def __init__(self, directory: Path, *, position: Position = START) -> None:
        self._records = RecordScanner(directory, offset=position.scan)
        self._renderer = LineRenderer(position)
        self._unread: Records | None = None
        self.complete = False
        """Everything was read and nothing will follow."""
        self.caught_up = False
        """At the last read there was nothing more yet."""

    @property
    def offset(self) -> int:
        """Everything before it was rendered."""
        return self._renderer.next_offset

    def close(self) -> None:
        self._records.close()

    def position(self) -> Position:
        return self._renderer.position()

    def read(self) -> list[Line]:
        """Some lines, in order. None and not `caught_up` means: read again."""
        unread, self._unread = self._unread, None
        found = unread or self._records.read()
        match found:
            case Records():
                self.caught_up = False
                return self._render(found)
            case Gap():
                self.caught_up = False
                return self._renderer.skip_to(found.end, at=found.at, notice=found.notice())
            case Complete():
                self.complete = self.caught_up = True
            case CaughtUp():
                self.caught_up = True
        return []

    def _render(self, found: Records) -> list[Line]:
        lines: list[Line] = []
        offset = found.base
        for index, record in enumerate(found.records):
            lines += self._renderer.feed(
                offset=offset, end=record.offset, at=record.at, stream=record.stream, data=record.data
            )
            offset = record.offset
            if len(lines) >= LINES_PER_BATCH and index + 1 < len(found.records):
                self._unread = Records(offset, found.records[index + 1 :])
                break
        return lines

    def previews(self) -> list[Line]:
        """The unfinished lines as they stand."""
        return self._renderer.previews()

    def flush(self) -> list[Line]:
        """The unfinished lines as lines: the output has ended, though nobody could say so."""
        return self._renderer.flush()


class TailLine(NamedTuple):
    """One of the last lines: its time, and the position from which it is read."""

    at: float
    before: Position


def last_lines(directory: Path, count: int) -> tuple[list[TailLine], Position]:
    """The last `count` lines of an attempt (unfinished ones too), oldest first, and the position behind them all.

    Reads backwards by segments until there are enough line feeds, then forward from there: the cost follows what is
    asked for, not the size of the log.
    """
    segments = layout.segments(directory)
    start = _tail_start(segments, count)
    stop = segments[-1].base + segments[-1].size if segments else 0  # a flood must not keep us here
    scanner = LineScanner(directory, position=start)
    kept: deque[TailLine] = deque(maxlen=max(1, count))
    before = start
    try:
        while not scanner.caught_up and scanner.offset < stop:
            for line in scanner.read():
                kept.append(TailLine(line.at, before))
                before = line.position
        end = scanner.position()
        kept.extend(TailLine(line.at, end) for line in scanner.previews())
    finally:
        scanner.close()
    return (list(kept) if count else []), end


def _tail_start(segments: list[Segment], count: int) -> Position:
    """Where a record starts behind which there are enough line feeds; the start of everything if nowhere."""
    wanted = count + 2  # the first line of either stream may have begun before
    scanned = 0
    for segment in reversed(segments):
        for record in reversed(_records_of(segment)):
            wanted -= record.data.count(b"\n")
            if wanted <= 0:
                start = record.offset - HEADER_BYTES - len(record.data)
                return Position(start, start, start)
        scanned += segment.size
        if scanned >= TAIL_SCAN_BYTES_MAX:
            return Position(segment.base, segment.base, segment.base)
    return START


def _records_of(segment: Segment) -> list[Record]:
    try:
        return parse_records(segment.path.read_bytes(), base=segment.base)[0]
    except (FileNotFoundError, SpoolCorruptError):
        return []
