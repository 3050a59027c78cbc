"""The network check of a gang's machines: everybody reaches everybody at once, then they push in pairs, round by round.

Rules of this file:
1. It ends within its limit, whatever hangs: what was not measured by then is missing, and the verdict says so.
2. Nothing is said of one bad measurement: what looks bad is measured again, and the best one counts. What a busy
   machine may have caused (a connection through which nothing comes, data that does not come through in time) is a
   fault only once it was looked at with patience; until then it was not measured.
3. It decides nothing: `mesh.netcheck.verdict` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

from mesh.errors import MeshError
from mesh.netcheck import tournament
from mesh.netcheck.limits import check_limit_s
from mesh.netcheck.measurements import MemberFacts, Push, Reach, Seen, Way
from mesh.netcheck.verdict import lossy, slow

PUSH_S = 0.12
"""How long is counted: by then the window has opened on paths of up to some 10 ms."""
LONGER_S = (0.25, 0.5, 1.0)
"""How long where a way still looks slow the second time."""
PUSH_LIMIT_S, PUSH_ROUND_TRIPS = 0.4, 5
"""How much longer a push may take: so long on a near path, and so many round trips."""
LITTLE_PATIENCE_S, PATIENCE_S = 0.5, 2.0
"""More, the last time before it is said that full-size packets, or all of much data, do not come through."""
SEGMENTS_TRIED = (1400, 1200, 536)
"""Bytes, where full-size ones are lost: what most tunnels leave, IPv6's least MTU and IPv4's, less their headers
(RFC 8200, section 5; RFC 9293, section 3.7.1)."""


class EndGoneError(MeshError):
    """A member's end does not answer: what it was to measure is missing, and the network is not to blame."""


class Probing(Protocol):
    """One member's end, wherever it is: `agents.probing.Prober`. Its methods may raise `EndGoneError`."""

    async def reach(
        self, others: Sequence[MemberFacts], *, is_patient: bool = False
    ) -> Mapping[int, Reach]: ...

    async def heard(self) -> Collection[int]: ...

    async def push(
        self, other: MemberFacts, *, seconds: float, limit_s: float, segment_bytes: int | None = None
    ) -> float | None: ...


async def check(
    members: Mapping[int, tuple[MemberFacts, Probing]],
    *,
    fresh: Collection[int] | None = None,
    limit_s: float | None = None,
) -> Seen:
    """What is seen between these members, by rank: of every pair, or of those that one of `fresh` is in.

    Raises, in an ExceptionGroup, what a member's end raises beside `EndGoneError`: a fault of ours.
    """
    one = _Check(members, fresh=members.keys() if fresh is None else fresh)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(check_limit_s(len(members)) if limit_s is None else limit_s):
            await one.run()
    return one.seen


class _Check:
    def __init__(self, members: Mapping[int, tuple[MemberFacts, Probing]], *, fresh: Collection[int]) -> None:
        self._members = members
        ways = {(a, b) for a in members for b in members if a != b and (a in fresh or b in fresh)}
        self.seen = Seen(members={rank: facts for rank, (facts, _) in members.items()}, asked=ways)

    async def run(self) -> None:
        await self._reach(self.seen.asked)
        closed = {way for way, reach in self.seen.reach.items() if not reach.is_open}
        # Dialling again takes seconds and no throughput.
        await asyncio.gather(self._reach(closed), self._in_rounds(self._open(), self._push))
        await asyncio.gather(*(self._heard(rank) for rank in {receiver for _, receiver in closed}))
        await self._in_rounds(self._open() - self.seen.push.keys(), self._push)
        await self._in_rounds([*lossy(self.seen), *slow(self.seen)], self._push)
        await self._in_rounds(lossy(self.seen), self._narrow)
        await self._look_patiently()
        for seconds in LONGER_S:
            await self._in_rounds(slow(self.seen), functools.partial(self._push, seconds=seconds))

    def _open(self) -> set[Way]:
        return {way for way, reach in self.seen.reach.items() if reach.is_open}

    async def _look_patiently(self) -> None:
        """At ways where a connection is made and nothing comes through it: who is busy answers late."""
        doubtful = {way for way, reach in self.seen.reach.items() if reach.is_doubtful}
        await self._reach(doubtful, is_patient=True)
        await self._in_rounds(self._open() & doubtful, self._push)

    async def _reach(self, ways: Collection[Way], *, is_patient: bool = False) -> None:
        async def of(rank: int) -> None:
            others = [self.seen.members[other] for sender, other in sorted(ways) if sender == rank]
            with contextlib.suppress(EndGoneError):
                found = await self._members[rank][1].reach(others, is_patient=is_patient)
                for other, reach in found.items():
                    self.seen.reach[rank, other] = reach
                    if is_patient:
                        self.seen.confirmed.add((rank, other))

        async with asyncio.TaskGroup() as group:
            for rank in {sender for sender, _ in ways}:
                group.create_task(of(rank))

    async def _heard(self, rank: int) -> None:
        with contextlib.suppress(EndGoneError):
            self.seen.heard.update((sender, rank) for sender in await self._members[rank][1].heard())

    async def _in_rounds(self, ways: Collection[Way], along: Callable[[Way], Awaitable[None]]) -> None:
        """These ways, in rounds of disjoint pairs, one direction after the other."""
        wanted = set(ways)
        pairs = {(min(way), max(way)) for way in wanted}
        for meetings in tournament.rounds_of(pairs, members=max(self._members, default=0) + 1):
            for direction in (meetings, [(b, a) for a, b in meetings]):
                await asyncio.gather(*(along(way) for way in direction if way in wanted))

    async def _push(self, way: Way, *, seconds: float = PUSH_S, patience_s: float = 0.0) -> None:
        with contextlib.suppress(EndGoneError):
            rate = await self._pushed(way, seconds=seconds, patience_s=patience_s)
            self.seen.add_push(way, Push(bytes_per_s=rate))

    async def _narrow(self, way: Way) -> None:
        """What size of packets comes through, where full-size ones do not. These have another chance, with patience."""
        with contextlib.suppress(EndGoneError):
            for segment_bytes in SEGMENTS_TRIED:
                if await self._pushed(way, seconds=PUSH_S, segment_bytes=segment_bytes) is not None:
                    await self._push(way, patience_s=LITTLE_PATIENCE_S)
                    if self.seen.push[way].bytes_per_s is None:
                        self.seen.push[way] = Push(segment_bytes_max=segment_bytes)
                    return
            await self._push(way, patience_s=PATIENCE_S)

    async def _pushed(
        self, way: Way, *, seconds: float, segment_bytes: int | None = None, patience_s: float = 0.0
    ) -> float | None:
        sender, receiver = way
        round_trip_s = self.seen.reach[way].round_trip_s or 0.0
        return await self._members[sender][1].push(
            self.seen.members[receiver],
            seconds=seconds,
            limit_s=seconds + PUSH_LIMIT_S + patience_s + PUSH_ROUND_TRIPS * round_trip_s,
            segment_bytes=segment_bytes,
        )
