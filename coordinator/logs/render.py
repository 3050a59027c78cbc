"""Bytes to lines: pure, incremental, bounded.

Rules of this file:
1. Lines depend on the bytes alone, never on how they were cut into records: a character, a CRLF or an escape
   sequence that lies across two records comes out whole.
2. Only a line feed ends a line. Carriage returns before it belong to the line's end (CRLF gives no blank
   line); elsewhere they go back to the start of the line, and what counts is what was written after the last
   one: a progress bar is one logical line, its last state.
3. Bytes that are not UTF-8 come out as `\\xNN`, and so do control characters (NUL, bell, a lone escape …):
   nothing that a rank prints can move a reader's cursor, ring, or set a title. Colours (`ESC [ … m`) and tabs
   stay, every other escape sequence is left out, a backspace takes back one character. The bytes as they were
   stay in the raw log.
4. A line over `LINE_BYTES_MAX` is given in pieces, each but the last `continued`, never cut in the middle of
   a character.
5. A line's time is that of the record that ended it, so within a rank times follow the order of the lines.
6. Every line knows the `Position` from which reading on gives what follows it, with nothing lost and nothing
   twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from mesh.printable import printable

LINE_BYTES_MAX = 1024 * 1024
"""A longer line is given in pieces of at most this many bytes."""

PARTIAL_BYTES_MAX = 4096
"""A preview of an unfinished line shows at most this many of its last bytes."""

_ESCAPE_BYTES_MAX = 32
"""A piece is not cut within an escape sequence of up to this length."""

STREAM_NAMES = {1: "stdout", 2: "stderr"}
NOTICE = "system"
"""The stream of a line that no rank printed: it says what is missing here."""


class Position(NamedTuple):
    """Where to read on in one attempt's stream: offsets, in bytes.

    Records from `scan` (the start of one) on are read; of their bytes, those of stdout before `stdout` and those
    of stderr before `stderr` were given already and are skipped.
    """

    scan: int
    stdout: int
    stderr: int


START = Position(0, 0, 0)


class Line(NamedTuple):
    """One line of one attempt.

    `partial`: a preview of a line that has not ended; the whole line follows. `continued`: the next line of
    this stream goes on with this one.
    """

    at: float
    stream: str
    text: str
    partial: bool
    continued: bool
    position: Position


@dataclass(slots=True)
class _Pending:
    """The unfinished line of one stream."""

    name: str
    done: int
    """Every byte of the stream before this offset was given; the pending text, if any, starts here."""
    record: int = 0
    """Start of the record that holds the first pending byte. Meaningless while nothing is pending."""
    text: bytearray = field(default_factory=bytearray)
    """What is visible of the line so far: at most LINE_BYTES_MAX bytes between two feeds."""
    returned: bool = False
    """A carriage return came after the text: more text replaces it. Never set while there is no text."""
    tail: list[tuple[int, int, int]] = field(default_factory=list)
    """(index in text, offset of that byte, record) of the runs that make up the text's end, so that a cut
    there finds its offset. Covers at least the last _ESCAPE_BYTES_MAX + 4 bytes."""
    at: float = 0.0
    """Time of the record that last added to this line."""

    def reset(self, done: int) -> None:
        self.done = done
        self.text.clear()
        self.tail.clear()
        self.returned = False

    def restart(self, text: bytes, offset: int, record: int) -> None:
        """The text is replaced by what came after a carriage return."""
        self.reset(offset)
        self.extend(text, offset, record)

    def extend(self, text: bytes, offset: int, record: int) -> None:
        if not self.text:
            self.done, self.record = offset, record
        self.tail.append((len(self.text), offset, record))
        self.text += text

    def locate(self, index: int) -> tuple[int, int]:
        """(offset, record) of the byte at `index`, which lies in the part that `tail` covers."""
        for start, offset, record in reversed(self.tail):
            if start <= index:
                return offset + index - start, record
        raise AssertionError("a cut before what the tail covers")

    def cut(self, index: int) -> bytes:
        """Takes the first `index` bytes away and returns them."""
        offset, record = self.locate(index)
        piece = bytes(self.text[:index])
        del self.text[:index]
        kept = [(s - index, o, r) for s, o, r in self.tail if s > index]
        self.tail = [(0, offset, record), *kept]
        self.done, self.record = offset, record
        return piece

    def prune(self) -> None:
        """Drops the runs that no cut can need any more."""
        keep_from = len(self.text) - (_ESCAPE_BYTES_MAX + 4)
        while len(self.tail) > 1 and self.tail[1][0] <= keep_from:
            del self.tail[0]


class LineRenderer:
    """Turns the records of one attempt into lines, from a position on.

    Feed it every record from `position.scan` on, in order. It keeps at most LINE_BYTES_MAX bytes per stream.
    """

    def __init__(self, position: Position = START, *, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        assert line_bytes_max > _ESCAPE_BYTES_MAX + 4, "a cut must leave something"
        self._line_bytes_max = line_bytes_max
        self._next = position.scan
        self._out = _Pending(name=STREAM_NAMES[1], done=position.stdout)
        self._err = _Pending(name=STREAM_NAMES[2], done=position.stderr)

    @property
    def next_offset(self) -> int:
        """The offset of the record that is expected next."""
        return self._next

    def position(self) -> Position:
        """Where a new renderer has to start to stand where this one stands."""
        return self._position(self._next)

    def _position(self, reached: int) -> Position:
        """`reached`: the first record that is not given in full (pending lines aside)."""
        out, err = self._out, self._err
        if out.text and out.record < reached:
            reached = out.record
        if err.text and err.record < reached:
            reached = err.record
        return Position(reached, out.done, err.done)

    def feed(self, *, offset: int, end: int, at: float, stream: int, data: bytes) -> list[Line]:
        """The lines that this record completes.

        Args:
            offset: where the record starts.
            end: where it ends; its bytes are the last `len(data)` before that.
            at: its time.
            stream: 1 or 2.
        """
        self._next = end
        pending = self._out if stream == 1 else self._err
        start = end - len(data)
        if pending.done > start and not pending.text:  # bytes that were given before the reader was here
            data = data[pending.done - start :]
            start = end - len(data)
        if not data:
            return []
        lines: list[Line] = []
        pending.at = at
        *complete, rest = data.split(b"\n")
        for part in complete:
            after = start + len(part) + 1
            reached = end if after == end else offset
            if pending.text or len(part) > self._line_bytes_max or b"\r" in part:
                self._add(pending, part, start, offset, reached, lines)
                text = printable(bytes(pending.text))
                pending.reset(after)
            else:
                text = printable(part)
                pending.done = after
            lines.append(Line(at, pending.name, text, False, False, self._position(reached)))
            start = after
        if rest:
            self._add(pending, rest, start, offset, end, lines)
            pending.prune()
        return lines

    def _add(
        self, pending: _Pending, part: bytes, start: int, record: int, reached: int, lines: list[Line]
    ) -> None:
        """Adds bytes without a line feed to the pending line; gives pieces when it gets too long."""
        for run in re.finditer(rb"[^\r]+|\r+", part):
            if part[run.start()] == 0x0D:
                pending.returned = bool(pending.text)
                continue
            if pending.returned:
                pending.restart(run.group(), start + run.start(), record)
            else:
                pending.extend(run.group(), start + run.start(), record)
            while len(pending.text) > self._line_bytes_max:
                piece = pending.cut(_cut_index(pending.text, self._line_bytes_max))
                at, name = pending.at, pending.name
                lines.append(Line(at, name, printable(piece), False, True, self._position(reached)))

    def previews(self) -> list[Line]:
        """The unfinished lines as they stand, as `partial` lines; they stay pending."""
        position = self.position()
        return [
            Line(p.at, p.name, _preview(p.text), True, False, position)
            for p in (self._out, self._err)
            if p.text
        ]

    def flush(self) -> list[Line]:
        """Nothing more will come: the unfinished lines as lines."""
        lines: list[Line] = []
        for pending in sorted((self._out, self._err), key=lambda p: p.at):
            if pending.text:
                text = printable(bytes(pending.text))
                pending.reset(self._next)
                lines.append(Line(pending.at, pending.name, text, False, False, self._position(self._next)))
        return lines

    def skip_to(self, offset: int, *, at: float, notice: str) -> list[Line]:
        """Bytes up to `offset` are missing: ends the unfinished lines and says so in a line of its own."""
        lines = self.flush()
        self._next = offset
        for pending in (self._out, self._err):
            pending.reset(offset)
        lines.append(Line(at, NOTICE, notice, False, False, self.position()))
        return lines


def _cut_index(text: bytearray, limit: int) -> int:
    """Where to cut a text longer than `limit`: there, or before the character or escape sequence there."""
    index = limit
    while index > limit - 4 and text[index] & 0xC0 == 0x80:
        index -= 1
    if text[index] & 0xC0 == 0x80:  # four continuation bytes in a row are no character
        index = limit
    escape = text.rfind(b"\x1b", max(0, index - _ESCAPE_BYTES_MAX), index)
    if escape > 0 and not _WHOLE_ESCAPE.match(text, escape, index):
        index = escape
    return index


_WHOLE_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[ -/]*[0-Z\\^-~])")
_UNFINISHED_END = re.compile(
    rb"(?:\x1b(?:\[[0-?]*[ -/]*|[ -/]*)|[\xc2-\xf4]|[\xe0-\xf4][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2})$"
)


def _preview(text: bytearray) -> str:
    """The end of an unfinished line, without a character or escape sequence that has only begun."""
    end = bytes(text[-PARTIAL_BYTES_MAX:])
    if len(text) > PARTIAL_BYTES_MAX:
        end = re.sub(rb"^[\x80-\xbf]{1,3}", b"", end)
    return printable(_UNFINISHED_END.sub(b"", end))
