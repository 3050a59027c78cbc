"""The streams of a gateway that run, and whose right to them can end.

Rules of this file:
1. A stream begins in `join`, which asks the gate a last time; between that and the first byte nothing else runs.
2. Whenever the gate knows something new, `apply` looks at every stream: whose owner may not go on is cut.
3. Streams that run and streams that are being made are bounded together.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mesh.ids import Epoch, MachineName, RunUid
from mesh.net.channel import Channel
from mesh.net.gate import Gate
from mesh.net.identity import Identity, MemberIdentity
from mesh.net.pump import Pump, PumpEnd
from mesh.net.sockets import reset

LOOK_EVERY_S = 2.0
"""How late a reset is noticed on a side that is not read at the moment."""

Owners = tuple[Identity, ...]
"""Everybody whose right to a stream can end."""


@dataclass(slots=True, eq=False)
class _Stream:
    owners: Owners
    relay: MachineName | None
    pump: Pump | None = None


class Full(Exception):
    """There is no room for another stream."""


class Streams:
    """Call `start` on the loop, `close` at the end."""

    def __init__(self, gate: Gate, *, streams_max: int) -> None:
        self._gate = gate
        self._streams_max = streams_max
        self._running: set[_Stream] = set()
        self._making = 0
        self._timer: asyncio.TimerHandle | None = None
        self.ends: Counter[PumpEnd] = Counter()
        self._broken: dict[tuple[RunUid, Epoch], dict[MachineName, float]] = {}
        """By the epoch, which is current: when its streams through a relay broke last, by the loop's clock."""
        self.changed = asyncio.Event()
        """Set and replaced at each `apply`: who waits for the gate to know more waits for this."""

    def __len__(self) -> int:
        return len(self._running)

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for stream in list(self._running):
            assert stream.pump is not None
            stream.pump.cut()

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Room for a stream while it is being made. Raises Full."""
        if len(self._running) + self._making >= self._streams_max:
            raise Full
        self._making += 1
        try:
            yield
        finally:
            self._making -= 1

    def join(
        self,
        plain: socket.socket,
        channel: Channel,
        owners: Owners,
        *,
        relay: MachineName | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """Starts the stream, or resets both sides when it may not be any more. Takes the sockets over,
        also when it raises.

        `relay` is what the stream goes through.
        `on_end` is called once, when it is over. What comes back cuts it; when it is over that does nothing.
        """
        if not self._may_go_on(owners):
            self.ends[PumpEnd.CUT] += 1
            reset(plain)
            reset(channel.socket)
            on_end()
            return lambda: None
        stream = _Stream(owners, relay)

        def ended(end: PumpEnd) -> None:
            self._running.discard(stream)
            self.ends[end] += 1
            if end is PumpEnd.PEER_RESET and relay is not None:
                self._note_broken(owners, relay)
            on_end()

        try:
            stream.pump = Pump(plain=plain, channel=channel, on_end=ended)
            self._running.add(stream)
            stream.pump.start()
        except BaseException:
            if stream.pump is not None:
                stream.pump.cut()
            else:
                reset(plain)
                reset(channel.socket)
                on_end()
            raise
        return stream.pump.cut

    def broken(self, run: RunUid, epoch: Epoch) -> Mapping[MachineName, float]:
        """When streams of this epoch broke last on the other side, by the relay that they went through, by the
        loop's clock."""
        return self._broken.get((run, epoch), {})

    def _note_broken(self, owners: Owners, relay: MachineName) -> None:
        now = asyncio.get_running_loop().time()
        for owner in owners:
            if isinstance(owner, MemberIdentity):
                self._broken.setdefault((owner.run, owner.epoch), {})[relay] = now

    def apply(self) -> None:
        """The gate knows something new."""
        current = {(run, roster.epoch) for run, roster in self._gate.rosters.items()}
        self._broken = {which: relays for which, relays in self._broken.items() if which in current}
        for stream in list(self._running):
            if not self._may_go_on(stream.owners):
                assert stream.pump is not None
                stream.pump.cut()
        self.changed.set()
        self.changed = asyncio.Event()

    def _may_go_on(self, owners: Owners) -> bool:
        return all(map(self._gate.still_admits, owners))

    def _look(self) -> None:
        for stream in list(self._running):
            assert stream.pump is not None
            stream.pump.look()
        self.start()
