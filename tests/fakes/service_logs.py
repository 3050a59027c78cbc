"""What the runs of a `FakeService` printed: its `LogReader`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from mesh.errors import NotFoundError, SpecError


class FakeLogs:
    """What the runs of a `FakeService` printed. A cursor is the number of the line behind it."""

    def __init__(self) -> None:
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._whole: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._news = asyncio.Condition()

    async def add(self, run: dict[str, Any], rank: int, verb: str, text: str) -> None:
        uid = run["metadata"]["uid"]
        lines = self._lines.setdefault(uid, [])
        async with self._news:
            is_partial = verb == "part"
            self._whole[uid] += not is_partial
            lines.append(
                {
                    "cursor": str(self._whole[uid]),
                    "at": time.time(),
                    "rank": rank,
                    "epoch": run["status"]["epoch"],
                    "stream": "stderr" if verb == "err" else "stdout",
                    "text": text,
                    "partial": is_partial,
                    "continued": False,
                }
            )
            self._news.notify_all()

    async def end(self, uid: str) -> None:
        async with self._news:
            self._ended.add(uid)
            self._news.notify_all()

    async def go_on(self, uid: str) -> None:
        async with self._news:
            self._ended.discard(uid)

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
        if cursor is not None and not cursor.isdigit():
            raise SpecError(f"{cursor!r} is no cursor.", field="cursor")
        known = self._lines.setdefault(uid, [])
        matching = [n for n, line in enumerate(known) if _is_of(line, rank, epoch) and not line["partial"]]
        position = len(known) if tail == 0 else matching[-tail] if tail and len(matching) >= tail else 0
        behind = int(cursor or 0)
        while True:
            while position < len(known):
                line = known[position]
                position += 1
                if _is_of(line, rank, epoch) and int(line["cursor"]) + line["partial"] > behind:
                    yield line
            async with self._news:
                if not follow or (uid in self._ended and position == len(known)):
                    return
                if position == len(known):
                    await self._news.wait()

    async def raw(self, uid: str, rank: int, epoch: int) -> AsyncIterator[bytes]:
        lines = [
            line for line in self._lines.get(uid, []) if _is_of(line, rank, epoch) and not line["partial"]
        ]
        if not lines:
            raise NotFoundError(f"Rank {rank} printed nothing in epoch {epoch}.", rank=rank, epoch=epoch)
        for line in lines:
            yield line["text"].encode("utf-8", "surrogateescape") + b"\n"

    async def last_output_at(self, uid: str) -> dict[int, float]:
        return {line["rank"]: line["at"] for line in self._lines.get(uid, [])}

    async def delete(self, uid: str) -> None:
        self._lines.pop(uid, None)


def _is_of(line: dict[str, Any], rank: int | None, epoch: int | None) -> bool:
    return rank in (None, line["rank"]) and epoch in (None, line["epoch"])
