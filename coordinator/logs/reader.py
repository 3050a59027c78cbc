"""What a run printed, for those who ask: all ranks merged, from a cursor, from the end, as it comes, or byte for byte.

Rules of this file:
1. `lines` gives every line once, and with each the cursor from which reading goes on behind it. Only previews of
   unfinished lines (`partial`) come more than once; the line itself still follows them.
2. Following from the start and reading afterwards give the same lines in the same order for each rank.
3. Memory is bounded by the ranks of one epoch, a batch of lines each, whatever has been printed and however slowly the
   lines are taken.
4. A coordinator that cannot be asked whether the run has ended is no reason to stop following.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from coordinator.logs import layout
from coordinator.logs.cursor import Cursor
from coordinator.logs.layout import AttemptKey
from coordinator.logs.merge import Source, choose, to_fill
from coordinator.logs.render import START, Line
from coordinator.logs.scan import (
    CaughtUp,
    Complete,
    LineScanner,
    Records,
    RecordScanner,
    TailLine,
    last_lines,
)
from coordinator.logs.store import LogStore
from mesh.errors import MeshTimeoutError, NotFoundError, SpecError, TransportError

LOOK_INTERVAL_S = 0.05
"""A follower that is busy giving lines looks for others' new ones this often."""
IDLE_INTERVAL_S = 0.25
"""One that has nothing to give asks this often whether the run has ended."""
LATE_OUTPUT_S = 10.0
"""After the run has ended, a shipper that is still connected is waited for so long."""
TAIL_LINES_MAX = 100_000
_LINES_PER_BATCH = 256

IsEnded = Callable[[str], Awaitable[bool]]


class LogReader:
    """Reads the store. Any number of readers at a time.

    Args:
        store: where the logs are.
        is_ended: whether the run of this uid has reached a terminal state; a NotFoundError counts as yes.
    """

    def __init__(self, store: LogStore, *, is_ended: IsEnded) -> None:
        self._store = store
        self._is_ended = is_ended

    async def lines(
        self,
        uid: str,
        *,
        rank: int | None = None,
        epoch: int | None = None,
        tail: int | None = None,
        cursor: str | None = None,
        follow: bool = False,
    ) -> AsyncIterator[dict[str, Any]]:
        """Lines of a run as `{"cursor", "at", "rank", "epoch", "stream", "text", "partial", "continued"}`.

        `stream` is stdout, stderr, or system for a notice that something is missing. `partial`: a preview of a line
        that has not ended. `continued`: a piece of a line over 1 MiB; the next line of that stream goes on with it.

        Args:
            uid: the run. One that has printed nothing (yet) has no lines.
            rank: only this node rank.
            epoch: only this epoch.
            tail: begin with the last so many lines, TAIL_LINES_MAX at most. A cursor goes before it.
            cursor: begin behind the line that had this cursor.
            follow: go on until the run has ended and everything was given.

        Raises:
            NotFoundError: this is not the uid of a run.
            SpecError: a cursor that is none, a tail that is negative or too large.
        """
        if tail is not None and not 0 <= tail <= TAIL_LINES_MAX:
            raise SpecError(
                f"The number of last lines must be between 0 and {TAIL_LINES_MAX}.", field="tail", got=tail
            )
        start = Cursor.parse(cursor, uid=uid) if cursor else Cursor(uid)
        reading = _Reading(self._store, self._ended, uid, rank=rank, epoch=epoch, cursor=start, follow=follow)
        with self._store.changes(uid) as changed:
            try:
                await reading.begin(None if cursor else tail)
                async for batch in reading.batches(changed):
                    for line in batch:
                        yield line
            finally:
                reading.close()

    async def raw(self, uid: str, rank: int, epoch: int) -> AsyncIterator[bytes]:
        """The bytes that one rank printed in one epoch, both streams as they came, up to now.

        Raises NotFoundError when there is no such attempt.
        """
        keys = [
            k for k in await self._store.run(self._store.attempts, uid) if (k.epoch, k.rank) == (epoch, rank)
        ]
        if not keys:
            raise NotFoundError(f"Rank {rank} has no output in epoch {epoch}.", rank=rank, epoch=epoch)
        for key in keys:
            directory = self._store.directory(uid, key)
            stop = await self._store.run(_size, self._store, uid, key)
            scanner = RecordScanner(directory)
            try:
                while scanner.offset < stop:
                    found = await self._store.run(scanner.read)
                    if isinstance(found, Records):
                        yield b"".join(record.data for record in found.records)
                    elif isinstance(found, CaughtUp | Complete):
                        break
            finally:
                self._store.later(scanner.close)

    async def last_output_at(self, uid: str) -> dict[int, float]:
        """When each rank last printed, in seconds since 1970; ranks that printed nothing are not in it."""
        return await self._store.run(self._store.last_output_at, uid)

    async def delete(self, uid: str) -> None:
        """Forgets what a run printed."""
        await self._store.run(self._store.delete, uid)
        self._store.notify(uid)

    async def _ended(self, uid: str) -> bool:
        try:
            return await self._is_ended(uid)
        except NotFoundError:
            return True
        except (TransportError, MeshTimeoutError):
            return False


class _Reading:
    """One call of `lines`."""

    def __init__(
        self,
        store: LogStore,
        is_ended: IsEnded,
        uid: str,
        *,
        rank: int | None,
        epoch: int | None,
        cursor: Cursor,
        follow: bool,
    ) -> None:
        self._store = store
        self._is_ended = is_ended
        self._uid = uid
        self._rank = rank
        self._epoch = epoch
        self._cursor = cursor
        self._follow = follow
        self._sources: dict[AttemptKey, Source] = {}
        """Everything that matches and is not read to its end."""
        self._newest_epoch = 0
        """The newest epoch that has printed: nothing of the older ones runs any more."""
        self._has_ended = False
        """The run had ended when it was last asked."""
        self._over_at = 0.0
        """When the run was found to have ended, monotonic."""

    async def begin(self, tail: int | None) -> None:
        if not self._follow:
            self._has_ended = await self._is_ended(self._uid)
        if tail is not None:
            await self._seek_last(tail)
        await self._discover(is_first=True)

    def close(self) -> None:
        for source in self._sources.values():
            self._store.later(source.scanner.close)

    async def batches(self, changed: asyncio.Event) -> AsyncIterator[list[dict[str, Any]]]:
        look_at = time.monotonic() + LOOK_INTERVAL_S
        while True:
            await self._fill()
            now = time.monotonic()
            batch = self._next_batch(now)
            if batch:
                yield batch
                await asyncio.sleep(0)  # the one who takes may never wait for anything
            elif not self._follow:
                return
            if not self._follow or (batch and now < look_at):
                continue
            if previews := self._previews(now):
                yield previews
            if not batch:
                if await self._is_over(now):
                    return
                await _wait(changed, IDLE_INTERVAL_S if self._is_quiet() else LOOK_INTERVAL_S)
            changed.clear()
            await self._look()
            look_at = time.monotonic() + LOOK_INTERVAL_S

    def _next_batch(self, now: float) -> list[dict[str, Any]]:
        """The next lines, as far as they can be told without reading."""
        batch: list[dict[str, Any]] = []
        while len(batch) < _LINES_PER_BATCH:
            source = choose(self._sources.values(), now)
            if source is None:
                break
            batch.append(self._give(source, source.lines.popleft()))
            if not source.lines:
                break
        return batch

    # Finding and reading

    async def _discover(self, *, is_first: bool = False) -> None:
        """Opens what has appeared. Nothing is new to a reader that has just come."""
        for key in await self._matching():
            if key in self._sources or self._cursor.is_done(key):
                continue
            directory = self._store.directory(self._uid, key)
            position = self._cursor.position(key) or START
            size = await self._store.run(_size, self._store, self._uid, key) if is_first else 0
            scanner = LineScanner(directory, position=position)
            self._sources[key] = Source(key=key, scanner=scanner, live_from=size)

    async def _matching(self) -> list[AttemptKey]:
        everything = await self._store.run(self._store.attempts, self._uid)
        self._newest_epoch = max((key.epoch for key in everything), default=0)
        return [
            key for key in everything if self._rank in (None, key.rank) and self._epoch in (None, key.epoch)
        ]

    async def _look(self) -> None:
        await self._discover()
        for source in self._sources.values():
            source.may_have_more = not source.finished

    async def _fill(self) -> None:
        """Reads until every source that matters has a line, or none for now."""
        while wanted := to_fill(self._sources.values()):
            offsets = [source.scanner.offset for source in wanted]
            batches = await asyncio.gather(*(self._store.run(source.fill) for source in wanted))
            now = time.monotonic()
            for source, offset, lines in zip(wanted, offsets, batches, strict=True):
                source.is_live = self._follow and offset >= source.live_from
                source.filled_at = now
                if source.changed_at is None and source.scanner.offset != offset:
                    source.changed_at = now
                self._take(source, lines)

    def _take(self, source: Source, lines: list[Line]) -> None:
        scanner = source.scanner
        source.lines.extend(lines)
        if lines:
            source.shown = ()
        stop_here = not self._follow and scanner.offset > source.live_from
        if not scanner.caught_up and not stop_here:
            return
        source.may_have_more = False
        if scanner.complete:
            self._finish(source)
        elif self._is_cut_off(source.key):
            source.lines.extend(scanner.flush())
        elif not self._follow:
            source.lines.extend(scanner.previews())

    def _is_cut_off(self, key: AttemptKey) -> bool:
        """Nothing more will come, though nobody could say so: its machine was lost."""
        is_over = self._has_ended or key.epoch < self._newest_epoch
        return is_over and not self._store.is_open(self._uid, key)

    def _finish(self, source: Source) -> None:
        """The attempt was read to its end."""
        source.finished = True
        source.lines.extend(source.scanner.flush())
        if not source.lines:
            self._drop(source)

    def _drop(self, source: Source) -> None:
        del self._sources[source.key]
        self._cursor.finish(source.key)
        self._store.later(source.scanner.close)

    # Giving

    def _give(self, source: Source, line: Line) -> dict[str, Any]:
        self._cursor.advance(source.key, line.position)
        if source.finished and source.scanner.complete and not source.lines:
            self._drop(source)
        return {
            "cursor": self._cursor.text(),
            "at": line.at,
            "rank": source.key.rank,
            "epoch": source.key.epoch,
            "stream": line.stream,
            "text": line.text,
            "partial": line.partial,
            "continued": line.continued,
        }

    def _previews(self, now: float) -> list[dict[str, Any]]:
        return [self._give(s, line) for s in [*self._sources.values()] for line in s.take_previews(now)]

    def _is_quiet(self) -> bool:
        """Nothing has changed that is still to be shown."""
        return not self._over_at and all(source.changed_at is None for source in self._sources.values())

    async def _is_over(self, now: float) -> bool:
        """Whether the run has ended and everything was read; the last unfinished lines are made lines first."""
        if not self._over_at:
            if await self._is_ended(self._uid):
                self._over_at = now
            return False  # what was written before the end is looked for once more
        late = [k for k, s in self._sources.items() if not s.finished and self._store.is_open(self._uid, k)]
        if late and now - self._over_at < LATE_OUTPUT_S:
            return False
        for source in self._sources.values():
            if not source.finished:
                source.finished = True
                source.may_have_more = False
                source.lines.extend(source.scanner.flush())
        return not any(source.lines for source in self._sources.values())

    # The last lines

    async def _seek_last(self, count: int) -> None:
        """Puts the cursor before the last `count` lines, newest epochs first."""
        left = count
        keys = await self._matching()
        for epoch in sorted({key.epoch for key in keys}, reverse=True):
            ones = [key for key in keys if key.epoch == epoch]
            found = await asyncio.gather(
                *(self._store.run(last_lines, self._store.directory(self._uid, key), left) for key in ones)
            )
            chosen = _count_last([tail for tail, _ in found], left)
            for key, (tail, end), kept in zip(ones, found, chosen, strict=True):
                self._cursor.advance(key, tail[-kept].before if kept else end)
            left -= sum(chosen)


def _count_last(tails: list[list[TailLine]], count: int) -> list[int]:
    """How many of the last `count` lines of all are of each."""
    merged = heapq.merge(*([(line.at, index) for line in tail] for index, tail in enumerate(tails)))
    chosen = [0] * len(tails)
    for _, index in list(merged)[-count:] if count else []:
        chosen[index] += 1
    return chosen


def _size(store: LogStore, uid: str, key: AttemptKey) -> int:
    listed = layout.segments(store.directory(uid, key))
    return listed[-1].base + listed[-1].size if listed else 0


async def _wait(changed: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await changed.wait()
    except TimeoutError:
        return
