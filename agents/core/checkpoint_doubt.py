"""Which files of a state directory are whole for sure, by who had them open and who has ended since.

Rules of this file:
1. A file is whole for sure when it was seen closed after its last change, and whoever had it open was seen to live on.
   Until then it is not sure; when its writer ended first (or, where nobody was seen to write it, anybody did), it is in
   doubt: it may be half of what it should be.
2. Doubt ends when the file is written again and is whole for sure, or when the command has outlived it: what the end
   means to the command it has shown by then.
3. How long that takes depends on who ended. What the command consists of takes it down, but not at once: a launcher
   stops the other workers first, within its shutdown timeout. A helper of the command, begun later (`cp` in a script
   that saves every minute), has somebody waiting for it, and a command that needed it fails within seconds. When one
   of the first kind ends while a helper's file is in doubt, that file's doubt is as long as any.
4. What a life of the rank before this one has left, which did not end well, is in doubt when it is first seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from agents.core.checkpoint_events import KEPT, Entry, EntryKind, Look, ProcessKey

DOUBT_S = 120.0
"""A command that goes on for so long after one of its processes has died did not need it (torchrun gives up within its
shutdown timeout, which is why a longer grace period makes this longer)."""
HELPER_DOUBT_S = 30.0
"""The same, of a process that was begun later than that after the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doubt:
    since: float
    until: float


@dataclass(slots=True, kw_only=True)
class Doubts:
    """Of one state directory, look by look."""

    doubt_s: float = DOUBT_S
    is_left_behind: bool = False
    """See rule 4."""
    begun_at: float = 0.0
    """When the command was started."""
    _open: dict[str, set[ProcessKey]] = field(default_factory=dict)
    """Files that changed and were not seen closed since, each with who was seen to have it open."""
    _doubtful: dict[str, _Doubt] = field(default_factory=dict)
    _first: set[ProcessKey] = field(default_factory=set)
    """What the command consists of: processes that were there within `doubt_s` of its start."""

    @property
    def is_sure(self) -> bool:
        """Every file was seen closed since it changed. It may be in doubt all the same."""
        return not self._open

    @property
    def is_whole(self) -> bool:
        """No file may be half-written."""
        return not self._open and not self._doubtful

    @property
    def unsure_path(self) -> str | None:
        """One that was not seen closed."""
        return min(self._open, default=None)

    def doubtful(self, *, older_than_s: float, now: float) -> list[tuple[str, float]]:
        """Files that have been in doubt for so long, and for how long they are in all."""
        old = {path: d for path, d in self._doubtful.items() if now - d.since >= older_than_s}
        return [(path, doubt.until - doubt.since) for path, doubt in old.items()]

    def judge(self, before: Look | None, look: Look, now: float) -> None:
        """Takes what was seen, after what had been seen before."""
        old = {} if before is None else {entry.path: entry for entry in firm(before.entries)}
        ended = frozenset() if before is None else before.processes - look.processes
        if now - self.begun_at < self.doubt_s:
            self._first |= look.processes
        if ended & self._first:  # what it leads to is seen later
            self._prolong(now)
        writers = _by_path(look)
        unsure: dict[str, set[ProcessKey]] = {}
        doubtful: dict[str, _Doubt] = {}
        for entry in firm(look.entries):
            path = entry.path
            has_changed = old.get(path) != entry
            if entry.kind is not EntryKind.FILE or not (has_changed or path in self._open):
                if path in self._doubtful and self._doubtful[path].until > now:
                    doubtful[path] = self._doubtful[path]
                continue
            who = self._open.get(path, set()) | writers.get(path, set())
            is_left = self.is_left_behind and before is None and path not in writers
            suspects = ended & who if who else ended
            if is_left or suspects:
                is_helpers = not is_left and not suspects & self._first
                length_s = min(HELPER_DOUBT_S, self.doubt_s) if is_helpers else self.doubt_s
                doubtful[path] = _Doubt(since=now, until=now + length_s)
            elif has_changed or path in writers:
                unsure[path] = who
        self._open, self._doubtful = unsure, doubtful

    def _prolong(self, now: float) -> None:
        for path, doubt in self._doubtful.items():
            self._doubtful[path] = _Doubt(since=doubt.since, until=max(doubt.until, now + self.doubt_s))


def _by_path(look: Look) -> dict[str, set[ProcessKey]]:
    found: dict[str, set[ProcessKey]] = {}
    for path, process in look.writers:
        found.setdefault(path, set()).add(process)
    return found


def firm(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """What a part is about: what is kept, without logs."""
    return tuple(entry for entry in entries if entry.kind in KEPT and not entry.is_log)
