"""Several attempts' lines as one sequence: which line comes next. Nothing here waits or knows a clock.

Rules of this file:
1. Within an attempt lines keep their order, always.
2. Across attempts: older epochs first (no two epochs of a gang run at one time, whatever the machines' clocks say),
   then by time, then by rank.
3. A line that arrived while a reader follows is held back behind others' older lines for `HOLD_S` at most: a rank that
   floods must not hide the one that whispers.
4. An epoch's files are read when the epochs before it are through, so memory follows the ranks, not the epochs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.logs.layout import AttemptKey
from coordinator.logs.render import Line
from coordinator.logs.scan import LineScanner

HOLD_S = 0.5
PREVIEW_INTERVAL_S = 0.2
"""An unfinished line is shown after this time, and again at most this often while it changes."""
_READS_PER_FILL = 16


@dataclass(slots=True, eq=False)
class Source:
    """One attempt that is being read."""

    key: AttemptKey
    scanner: LineScanner
    live_from: int
    """Offset behind which everything arrived after the reader came."""
    lines: deque[Line] = field(default_factory=deque)
    """Read and not given yet: one batch."""
    filled_at: float = 0.0
    """When the batch was read, monotonic."""
    may_have_more: bool = True
    """Worth reading when `lines` is empty."""
    finished: bool = False
    """Nothing will follow `lines`."""
    is_live: bool = False
    """The batch arrived after the reader came."""
    changed_at: float | None = None
    """Since when the unfinished lines are other than those shown; None when they are not."""
    shown: tuple[str, ...] = ()
    """The unfinished lines as they were shown last."""

    def fill(self) -> list[Line]:
        """Blocking: the next batch; empty when there is none yet, or when it takes longer to find one."""
        for _ in range(_READS_PER_FILL):
            if lines := self.scanner.read():
                return lines
            if self.scanner.caught_up:
                break
        return []

    @property
    def is_past_start(self) -> bool:
        return self.scanner.offset >= self.live_from

    def take_previews(self, now: float) -> list[Line]:
        """The unfinished lines, when it is time to show them (again)."""
        if self.lines or self.changed_at is None or now - self.changed_at < PREVIEW_INTERVAL_S:
            return []
        self.changed_at = None
        previews = self.scanner.previews()
        texts = tuple(preview.text for preview in previews)
        if texts == self.shown:
            return []
        self.shown = texts
        return previews


def to_fill(sources: Iterable[Source]) -> list[Source]:
    """The sources to read from before `choose` can be asked."""
    open_ones = [source for source in sources if source.lines or source.may_have_more]
    if not open_ones:
        return []
    epoch = min(source.key.epoch for source in open_ones)
    return [
        source
        for source in open_ones
        if not source.lines and (source.key.epoch == epoch or source.is_past_start)
    ]


def choose(sources: Iterable[Source], now: float) -> Source | None:
    """The source whose first line comes next; None when there is no line."""
    ready = [source for source in sources if source.lines]
    overdue = [source for source in ready if source.is_live and now - source.filled_at >= HOLD_S]
    if overdue:
        return min(overdue, key=lambda source: source.filled_at)
    return min(ready, key=_order, default=None)


def _order(source: Source) -> tuple[int, float, int, int]:
    epoch, rank, again = source.key
    return epoch, source.lines[0].at, rank, again
