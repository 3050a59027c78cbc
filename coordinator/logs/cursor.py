"""Where a reader stands in a whole run, as a text that it can give back. Pure.

    1.<uid, 8 digits>_<epoch>-<ranks done, a hexadecimal set of bits>…_<epoch>.<rank>.<again>.<scan>.<stdout>.<stderr>…

Rules of this file:
1. Opaque to everybody else; letters that need no quoting in a URL.
2. An attempt that is not in it has not been read: a rank that appears later is read from its start.
3. Attempts that were read to their end take a bit each, so a run of many epochs keeps a short cursor.
4. The two offsets are relative to `scan` (they may lie before it; then they do not matter).
"""

from __future__ import annotations

import re

from coordinator.logs.layout import EPOCH_MAX, RANK_MAX, AttemptKey
from coordinator.logs.render import Position
from mesh.errors import SpecError
from mesh.log_protocol import OFFSET_MAX

CURSOR_CHARACTERS_MAX = 64 * 1024
_HEAD = re.compile(r"1\.([0-9a-f]{1,8})", re.ASCII)
_DONE = re.compile(r"([0-9]{1,10})-([0-9a-f]{1,16384})", re.ASCII)
_OPEN = re.compile(
    r"([0-9]{1,10})\.([0-9]{1,5})\.([0-9]{1,5})\.([0-9a-f]{1,16})\.([0-9a-f]{1,16})\.([0-9a-f]{1,16})",
    re.ASCII,
)


class Cursor:
    """The positions of one reader. Mutable: the reader notes what it gives, and takes the text with every line."""

    def __init__(self, uid: str) -> None:
        self._head = f"1.{uid[:8]}"
        self._done: dict[int, int] = {}
        """Per epoch, the bits of the ranks whose only incarnation was read to its end."""
        self._open: dict[AttemptKey, Position] = {}
        self._parts: dict[AttemptKey, str] = {}
        """`_open`, each as text."""
        self._front = self._head
        """Head and `_done` as text."""

    def text(self) -> str:
        return "_".join([self._front, *self._parts.values()])

    def position(self, key: AttemptKey) -> Position | None:
        """Where to read on; None when nothing of it was read. Ask `is_done` first."""
        return self._open.get(key)

    def is_done(self, key: AttemptKey) -> bool:
        """Whether it was read to its end."""
        return key.again == 0 and bool(self._done.get(key.epoch, 0) >> key.rank & 1)

    def advance(self, key: AttemptKey, position: Position) -> None:
        """Everything before `position` was given."""
        self._open[key] = position
        scan, stdout, stderr = position
        out, err = max(0, stdout - scan), max(0, stderr - scan)
        self._parts[key] = f"{key.epoch}.{key.rank}.{key.again}.{scan:x}.{out:x}.{err:x}"

    def finish(self, key: AttemptKey) -> None:
        """Everything was given and nothing will follow. (A second incarnation keeps its position instead.)"""
        if key.again:
            return
        self._open.pop(key, None)
        self._parts.pop(key, None)
        self._take_done(key.epoch, 1 << key.rank)
        self._renew_front()

    @classmethod
    def parse(cls, text: str, *, uid: str) -> Cursor:
        """The inverse of `text()`. Raises SpecError for anything that no reader of this run gave out."""
        cursor = cls(uid)
        head, *parts = text.split("_") if len(text) <= CURSOR_CHARACTERS_MAX else [""]
        if not _HEAD.fullmatch(head):
            raise _none_of_ours(text)
        if head != cursor._head:
            raise SpecError(
                "This cursor is from the logs of another run.",
                hint="Leave it out to read from the start.",
                field="cursor",
            )
        for part in parts:
            if match := _DONE.fullmatch(part):
                cursor._take_done(int(match[1]), int(match[2], 16))
            elif match := _OPEN.fullmatch(part):
                key = AttemptKey(int(match[1]), int(match[2]), int(match[3]))
                scan, out, err = (int(match[i], 16) for i in (4, 5, 6))
                if key.epoch > EPOCH_MAX or key.rank > RANK_MAX or max(scan, out, err) > OFFSET_MAX:
                    raise _none_of_ours(text)
                cursor.advance(key, Position(scan, scan + out, scan + err))
            else:
                raise _none_of_ours(text)
        cursor._renew_front()
        return cursor

    def _take_done(self, epoch: int, ranks: int) -> None:
        self._done[epoch] = self._done.get(epoch, 0) | ranks

    def _renew_front(self) -> None:
        self._front = "_".join([self._head, *(f"{e}-{ranks:x}" for e, ranks in self._done.items())])


def _none_of_ours(text: str) -> SpecError:
    return SpecError(
        "This is not a cursor of these logs.",
        hint="Use the cursor of a line as it was given, or leave it out to read from the start.",
        field="cursor",
        got=text[:64],
    )
