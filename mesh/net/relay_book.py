"""What a relay remembers, and whom it joins. Pure; the shell is relay.py.

Rules of this file:
1. A machine has one line; a newer one takes the place of an older one.
2. A ticket is good once, for the machine that was dialled, until it is given up. The shell bounds how long it waits.
3. A run has two machines at most on a relay: relayed gangs are small (`RelayedLowBandwidth`).
4. Everything is bounded; what is above a limit is refused by name and counted.
5. Bytes are counted for each run and pair of machines until somebody takes the count; a relay whose counts nobody takes
   refuses new pairs rather than forget bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mesh.ids import MachineName, RunUid
from mesh.net.identity import Identity, MachineIdentity, MemberIdentity, RelayIdentity
from mesh.net.refusals import Refusal

MACHINES_PER_RUN_MAX = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Of one relay."""

    lines_max: int = 1024
    streams_max: int = 2048
    """Those that wait for the other side too."""
    streams_per_machine_max: int = 256
    """That one machine has dialled."""
    pairs_max: int = 10_000
    """Whose bytes nobody has taken yet."""
    door_places: int = 1024
    door_places_per_source: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What bytes are counted for."""

    run: RunUid | None
    """None for what machines do among themselves (Ray)."""
    dialler: MachineName
    target: MachineName


@dataclass(slots=True)
class RelayBook:
    """Lines, tickets, streams and bytes of one relay."""

    limits: RelayLimits = field(default_factory=RelayLimits)
    lines: set[MachineName] = field(default_factory=set)
    tickets: dict[str, Pair] = field(default_factory=dict)
    """Dialled, and not accepted yet."""
    streams: Counter[Pair] = field(default_factory=Counter)
    """Dialled or joined, and not ended."""
    usage: dict[Pair, int] = field(default_factory=dict)
    """Bytes, in both directions together, since they were taken last."""

    def open_line(self, identity: Identity) -> Refusal | None:
        if not isinstance(identity, MachineIdentity):
            return Refusal.NOT_OUR_NAME
        if identity.machine not in self.lines and len(self.lines) >= self.limits.lines_max:
            return Refusal.STREAM_LIMIT
        self.lines.add(identity.machine)
        return None

    def close_line(self, machine: MachineName) -> None:
        self.lines.discard(machine)

    def dial(self, identity: Identity, target: MachineName, ticket: str) -> Pair | Refusal:
        """Enters a stream that waits for its target. Undo it with `end`."""
        if isinstance(identity, RelayIdentity):
            return Refusal.NOT_OUR_NAME
        run = identity.run if isinstance(identity, MemberIdentity) else None
        pair = Pair(run=run, dialler=identity.machine, target=target)
        if target not in self.lines:
            return Refusal.NOT_LISTENING
        if run is not None and len(self._machines_of(run) | {pair.dialler, target}) > MACHINES_PER_RUN_MAX:
            return Refusal.RELAY_MEMBERS
        dialled = sum(count for other, count in self.streams.items() if other.dialler == pair.dialler)
        is_new = pair not in self.usage
        if (
            self.streams.total() >= self.limits.streams_max
            or dialled >= self.limits.streams_per_machine_max
            or (is_new and len(self.usage) >= self.limits.pairs_max)
        ):
            return Refusal.STREAM_LIMIT
        self.streams[pair] += 1
        self.tickets[ticket] = pair
        self.usage.setdefault(pair, 0)
        return pair

    def accept(self, identity: Identity, ticket: str) -> Refusal | None:
        """The ticket is used up, if this is the machine that was dialled."""
        pair = self.tickets.get(ticket)
        if pair is None or not isinstance(identity, MachineIdentity) or identity.machine != pair.target:
            return Refusal.UNKNOWN_TICKET
        del self.tickets[ticket]
        return None

    def end(self, pair: Pair, ticket: str) -> None:
        """The stream is over, joined or not."""
        self.tickets.pop(ticket, None)
        self.streams[pair] -= 1
        if self.streams[pair] == 0:
            del self.streams[pair]

    def count(self, pair: Pair, amount: int) -> None:
        self.usage[pair] = self.usage.get(pair, 0) + amount

    def take_usage(self) -> dict[Pair, int]:
        """The bytes since the last time, which are forgotten here; of pairs that carried none there is no word."""
        taken = {pair: amount for pair, amount in self.usage.items() if amount}
        self.usage = dict.fromkeys(self.streams, 0)
        return taken

    def _machines_of(self, run: RunUid) -> set[MachineName]:
        pairs = [pair for pair in self.streams if pair.run == run]
        return {pair.dialler for pair in pairs} | {pair.target for pair in pairs}
