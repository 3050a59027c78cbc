# The supervisor imports this module, and pathlib alone would double its start.
# ruff: noqa: PTH103, PTH108, PTH110, PTH208
"""The spool: what a rank printed, on the disk of its machine, until the head has it.

Rules of this file
- Standard library only, and nothing heavy: the supervisor loads this module by path (`python -I -S`).
- One writer (the supervisor), any number of readers (the log shipper, a person with `cat`).
- A record is never split, never rewritten, and only whole records are ever seen by a reader.
- The writer never raises for what a disk can do: it drops, counts, and says in the stream how much was dropped.

Format
    <directory>/00000000.seg, 00000001.seg, …   whole records, at most SEGMENT_BYTES of them per file
    <directory>/end                             nothing more will come; holds "<final offset> <bytes lost>\\n"
    <directory>/reserve                         room for the last words on a full disk; deleted at the end
    record = struct ">dBI" (unix time, stream: 1 stdout, 2 stderr, length) + that many bytes as they were read

Offsets. A place in the spool is one number: `index * SEGMENT_BYTES + place in that file`. So a reader finds any
offset without a table, also after the segments before it are gone. A record never crosses from one segment into
the next, so a segment may be a little shorter than SEGMENT_BYTES: it is complete when a later one exists.
Offsets only grow, and only their order and (nearly) their distance mean something.
"""

from __future__ import annotations

import errno
import os
import struct

STDOUT = 1
STDERR = 2

SEGMENT_BYTES = 8 * 1024 * 1024
RECORD_DATA_BYTES_MAX = 64 * 1024
READ_BYTES_MAX = 1024 * 1024
RESERVE_BYTES = 4096
"""Kept in a file of its own and given back at the end, so that a full disk can still take the last words."""

RETRY_AFTER_LOSS_S = 1.0
"""How long the writer drops without trying again: a full disk is not asked a thousand times a second."""

HEADER = struct.Struct(">dBI")
HEADER_BYTES = HEADER.size
END_NAME = "end"
RESERVE_NAME = "reserve"
SEGMENT_SUFFIX = ".seg"


class SpoolCorruptError(Exception):
    """Bytes that no writer of ours wrote: a torn page after a machine's crash, or a foreign file."""


class Record:
    """One piece of output. `offset` is the place after it: where a reader that has it carries on."""

    __slots__ = ("at", "data", "offset", "stream")

    def __init__(self, *, at: float, stream: int, data: bytes, offset: int) -> None:
        self.at = at
        self.stream = stream
        self.data = data
        self.offset = offset

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return (self.at, self.stream, self.data, self.offset) == (
            other.at,
            other.stream,
            other.data,
            other.offset,
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Record(at={self.at}, stream={self.stream}, offset={self.offset}, {len(self.data)} bytes)"


def encode_record(*, at: float, stream: int, data: bytes) -> bytes:
    return HEADER.pack(at, stream, len(data)) + data


def parse_records(buffer: bytes, *, base: int = 0) -> tuple[list[Record], int]:
    """The whole records at the start of `buffer`, and how many bytes they take.

    `base` is the offset of the buffer's first byte. A truncated record at the end is left for the next time. Raises
    SpoolCorruptError when the buffer starts with bytes that are no record; a later fault only ends the list.
    """
    records: list[Record] = []
    place = 0
    while place + HEADER_BYTES <= len(buffer):
        at, stream, length = HEADER.unpack_from(buffer, place)
        if stream not in (STDOUT, STDERR) or length > RECORD_DATA_BYTES_MAX:
            if not records:
                raise SpoolCorruptError(f"no record at offset {base}")
            break
        after = place + HEADER_BYTES + length
        if after > len(buffer):
            break
        data = buffer[place + HEADER_BYTES : after]
        records.append(Record(at=at, stream=stream, data=data, offset=base + after))
        place = after
    return records, place


def segment_path(directory: str, index: int) -> str:
    return f"{directory}/{index:08d}{SEGMENT_SUFFIX}"


def segment_indexes(directory: str) -> list[int]:
    """The segments that exist, in order; none when the directory does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name[:8]) for name in names if name.endswith(SEGMENT_SUFFIX) and name[:8].isdigit())


def delete_acked(directory: str, offset: int) -> None:
    """Delete the segments that lie wholly before `offset`."""
    first_kept = offset // SEGMENT_BYTES
    for index in segment_indexes(directory):
        if index < first_kept:
            _unlink_if_there(segment_path(directory, index))


def mark_end(directory: str) -> None:
    """Say that nothing more will come: for the survivor of a supervisor that was killed. Idempotent.

    On a disk that refuses it, nobody is told: the shipper then waits as long as its `drain` says.
    """
    if not os.path.exists(f"{directory}/{END_NAME}"):
        try:
            _write_file(f"{directory}/{END_NAME}", b"")
        except OSError:
            return


def loss_mark(byte_count: int, why: str) -> str:
    return f"[gangmesh] {byte_count} bytes of output were lost here: {why}\n"


class SpoolWriter:
    """Appends records; knows what is written, acknowledged and lost. Never raises OSError after its making."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file = -1
        """The open segment, or -1: none yet, full, or the disk refused it."""
        self.written = 0
        """Offset after the last record. Only whole records count."""
        self.acked = 0
        """Offset up to which the head has everything; never beyond `written`."""
        self.lost_pending = 0
        """Bytes dropped since the last loss mark."""
        self.lost_total = 0
        self.failure = ""
        """Why the disk refused, in words, the last time it did."""
        self._retry_at = 0.0
        self._at_line_start = True
        """Whether a mark on stderr would begin a line."""
        self._prepare()

    def append(self, stream: int, data: bytes, *, now: float) -> None:
        """Keep `data` (at most RECORD_DATA_BYTES_MAX a record; more is split)."""
        for start in range(0, len(data), RECORD_DATA_BYTES_MAX):
            self._append_some(stream, data[start : start + RECORD_DATA_BYTES_MAX], now)

    def unacked(self) -> int:
        return self.written - self.acked

    def acknowledge(self, offset: int) -> None:
        """The head has everything before `offset`: delete what lies wholly before it. An older one changes
        nothing.
        """
        offset = min(offset, self.written)
        if offset <= self.acked:
            return
        before = self.acked // SEGMENT_BYTES
        self.acked = offset
        for index in range(before, offset // SEGMENT_BYTES):
            _unlink_if_there(segment_path(self._directory, index))

    def finish(self, *, now: float) -> None:
        """Write the last loss mark and `end`, with the room of the reserve when the disk is full."""
        self._retry_at = 0.0
        end = f"{self._directory}/{END_NAME}"
        for reserve_given_back in (False, True):
            if reserve_given_back:
                _unlink_if_there(f"{self._directory}/{RESERVE_NAME}")
            if self.lost_pending and not self._write_mark_and(b"", now):
                continue
            try:
                _write_file(end, f"{self.written} {self.lost_total}\n".encode())
            except OSError as error:
                self.failure = _words(error)
                continue
            break
        _unlink_if_there(f"{self._directory}/{RESERVE_NAME}")
        self._close_segment()

    def _prepare(self) -> None:
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            _unlink_if_there(f"{self._directory}/{END_NAME}")
            earlier = segment_indexes(self._directory)
            if earlier:
                # Another writer died here: its last record may be torn, so we start a segment of our own.
                self.written = _next_segment(earlier[-1] * SEGMENT_BYTES)
                self.acked = earlier[0] * SEGMENT_BYTES
            _write_file(f"{self._directory}/{RESERVE_NAME}", bytes(RESERVE_BYTES))
        except OSError as error:
            self.failure = _words(error)

    def _append_some(self, stream: int, data: bytes, now: float) -> None:
        if self.lost_pending:
            kept = now >= self._retry_at and self._write_mark_and(data, now, stream=stream)
        else:
            kept = self._write(encode_record(at=now, stream=stream, data=data), now)
        if not kept:
            self.lost_pending += len(data)
            self.lost_total += len(data)
        elif stream == STDERR:
            self._at_line_start = data.endswith(b"\n")

    def _write_mark_and(self, data: bytes, now: float, *, stream: int = STDERR) -> bool:
        """The mark and what follows it, or neither: a full disk must not fill up with marks."""
        why = f"the log spool could not be written ({self.failure})"
        mark = ("" if self._at_line_start else "\n") + loss_mark(self.lost_pending, why)
        records = encode_record(at=now, stream=STDERR, data=mark.encode("utf-8", "replace"))
        if data:
            records += encode_record(at=now, stream=stream, data=data)
        if not self._write(records, now):
            return False
        self.lost_pending = 0
        self._at_line_start = True
        return True

    def _write(self, data: bytes, now: float) -> bool:
        """All of `data` (whole records), or nothing and the failure kept."""
        if self.written % SEGMENT_BYTES + len(data) > SEGMENT_BYTES:
            self._close_segment()
            self.written = _next_segment(self.written)
        try:
            if self._file < 0:
                self._open_segment()
            if os.write(self._file, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.failure = _words(error)
            self._retry_at = now + RETRY_AFTER_LOSS_S
            self._take_back_torn_record()
            return False
        self.written += len(data)
        if self.written % SEGMENT_BYTES == 0:
            self._close_segment()  # exactly full: the offset is already the next one's
        return True

    def _open_segment(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(segment_path(self._directory, self.written // SEGMENT_BYTES), flags, 0o600)

    def _close_segment(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _take_back_torn_record(self) -> None:
        """Half a record must never stay before a whole one."""
        if self._file < 0:
            return
        try:
            os.ftruncate(self._file, self.written % SEGMENT_BYTES)
        except OSError as error:
            # Then nothing may follow it: the next record opens a segment of its own.
            self.failure = _words(error)
            self._close_segment()
            self.written = _next_segment(self.written)


class SpoolReader:
    """Tails a spool from an offset. Reads what is there and never waits: ask again when it returned nothing.

    A hole (segments deleted, or bytes that are no records) is skipped and shown as a record on stderr that says so;
    a reader never dies of what it reads. OSError is raised for what only the machine can mend (no permission,
    I/O error).
    """

    def __init__(self, directory: str, *, offset: int = 0) -> None:
        self._directory = directory
        self.position = offset
        """Everything before this offset was returned, or is gone."""
        self.ended = False
        """Nothing more will come: `end` is there and everything before it was returned."""
        self._last_at = 0.0
        self._seen = (0, 0)

    def has_changed(self) -> bool:
        """Whether there may be something that the last `read` did not see: far cheaper than to read.

        Now and then wrong about an end or a next segment, which are told by the folder's time: read once in a while.
        """
        return self._look() != self._seen

    def _look(self) -> tuple[int, int]:
        """When the folder changed, and how long the segment is that is being read."""
        try:
            changed_at = os.stat(self._directory).st_mtime_ns  # noqa: PTH116 - it is asked all the time
            segment = segment_path(self._directory, self.position // SEGMENT_BYTES)
            return changed_at, os.stat(segment).st_size  # noqa: PTH116
        except OSError:
            return 0, 0

    def read(self, *, bytes_max: int = READ_BYTES_MAX) -> list[Record]:
        """The next whole records, about `bytes_max` at most, in order; empty when there are none yet."""
        bytes_max = max(bytes_max, HEADER_BYTES + RECORD_DATA_BYTES_MAX)
        while True:
            self._seen = self._look()
            # Looked up before reading, or a record written between the two would be passed over.
            end_marked = os.path.exists(f"{self._directory}/{END_NAME}")
            later = [i for i in segment_indexes(self._directory) if i > self.position // SEGMENT_BYTES]
            records, unreadable_bytes = self._read_segment(bytes_max, is_last=not later)
            if records:
                self._last_at = records[-1].at
                return records
            if later:
                self.position = later[0] * SEGMENT_BYTES
            elif unreadable_bytes and end_marked:
                self.position += unreadable_bytes
            else:
                self.ended = end_marked
                return []
            if unreadable_bytes:
                mark = loss_mark(unreadable_bytes, "the spool no longer has them in a readable form")
                return [
                    Record(at=self._last_at, stream=STDERR, data=mark.encode(), offset=self.position),
                ]

    def _read_segment(self, bytes_max: int, *, is_last: bool) -> tuple[list[Record], int]:
        """The records from `position` on; when there are none, how many bytes lie there that are not (yet) one."""
        index, place = divmod(self.position, SEGMENT_BYTES)
        try:
            file = os.open(segment_path(self._directory, index), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            # The last one is not there yet; an earlier one was deleted before we read it.
            return [], 0 if is_last else SEGMENT_BYTES - place
        try:
            buffer = os.pread(file, bytes_max, place)
            size = os.fstat(file).st_size
        finally:
            os.close(file)
        try:
            records, used = parse_records(buffer, base=self.position)
        except SpoolCorruptError:
            return [], max(size - place, 0)
        self.position += used
        return records, 0 if records else max(size - place, 0)


def _next_segment(offset: int) -> int:
    return (offset // SEGMENT_BYTES + 1) * SEGMENT_BYTES


def _write_file(path: str, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(file, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        # Not there, or the disk refuses: a file too many costs room, and nothing that is still needed.
        return


def _words(error: OSError) -> str:
    return error.strerror or str(error)
