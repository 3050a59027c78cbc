"""The relays of one machine: a line to each of them, and which one a dial goes through.

Theory of operation. Who cannot be dialled has a line to every relay, so any of them leads to it, and who dials chooses.
The relays of the deployment come first, each target's in an order of its own, so that they share the load;
the head's own relay comes last, and is what is left when the others are gone. Only the head itself asks its own
first: it is on the same host.

Rules of this file:
1. A relay that cannot be reached, or to which this machine has no line, is asked last until it can be again.
2. A relay that has no line of the target, or no place, leads to the next one; a refusal of another kind is the answer.
3. Relays come and go while others' lines stay. Streams that run are not touched: a relay that dies breaks its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesh.ids import MachineName
from mesh.net.dialling import DialRefused, Leg
from mesh.net.gate import Refused
from mesh.net.identity import PeerCertificate
from mesh.net.refusals import Refusal
from mesh.net.relay_client import RelayClient, RelayDown, RelayLine, RelayPlace

DOWN_S = 10.0
"""For so long a relay that could not be reached is asked last."""
SAME_MOMENT_S = 3.0
"""A stream that breaks so near to its relay's line broke with the relay, and not at the peer's."""
ENDED_S = 60.0
"""For so long it is known of a relay that is none any more when it ended."""
NEXT_ONE = frozenset({Refusal.NOT_LISTENING, Refusal.STREAM_LIMIT, Refusal.PEER_UNREACHABLE})


@dataclass(slots=True, kw_only=True)
class _Way:
    client: RelayClient
    line: RelayLine
    failed_at: float = -math.inf
    """When the relay could not be reached last, by the loop's clock."""

    def is_down(self, now: float) -> bool:
        """A line that was opened after it had failed has shown that it is back."""
        if not self.line.is_open:
            return True
        return self.failed_at >= self.line.opened_at and now < self.failed_at + DOWN_S


class RelayWays:
    """Make it on the loop; `set_places`, `dial`, `stop`.

    Args:
        machine: this one.
        check: whether a relay's certificate is to be believed (the gate's `check_peer`).
        context: the machine's own, the newest.
        on_leg: gets every leg that somebody has dialled to this machine.
    """

    def __init__(
        self,
        *,
        deployment: str,
        machine: MachineName,
        check: Callable[[PeerCertificate], Refused | None],
        context: Callable[[], ssl.SSLContext],
        on_leg: Callable[[Leg], None],
    ) -> None:
        self._deployment = deployment
        self._machine = machine
        self._check = check
        self._context = context
        self._on_leg = on_leg
        self._ways: dict[RelayPlace, _Way] = {}
        self._ended: dict[MachineName, float] = {}
        """The relays that are no places any more: since when, by the loop's clock. Those of the last ENDED_S."""
        self._breaks = 0
        """Of lines that are not kept any more."""

    async def set_places(self, places: Sequence[RelayPlace]) -> None:
        """These and no others. The lines to those that were there before stay."""
        now = asyncio.get_running_loop().time()
        gone = [self._ways.pop(place) for place in list(self._ways) if place not in places]
        ended = self._ended | {way.client.place.machine: now for way in gone}
        self._ended = {relay: at for relay, at in ended.items() if at >= now - ENDED_S}
        for place in places:
            if place not in self._ways:
                client = RelayClient(deployment=self._deployment, place=place, check=self._check)
                line = RelayLine(client=client, context=self._context, on_leg=self._on_leg)
                line.start()
                self._ways[place] = _Way(client=client, line=line)
        for way in gone:
            self._breaks += way.line.breaks
            await way.line.stop()

    async def stop(self) -> None:
        """May be called again."""
        await asyncio.gather(*(way.line.stop() for way in self._ways.values()))

    def __len__(self) -> int:
        return len(self._ways)

    @property
    def lines_open(self) -> list[MachineName]:
        """The relays through which this machine can be reached now."""
        return sorted(place.machine for place, way in self._ways.items() if way.line.is_open)

    def was_lost(self, relay: MachineName, at: float) -> bool:
        """Whether it had ended at this time of the loop's clock, or ended then: its line broke and was not back, or it
        was none any more. A host that vanished breaks its idle line in half a minute, and a stream that sends later.
        """
        lines = [way.line for place, way in self._ways.items() if place.machine == relay]
        spans = [(line.broke_at, line.opened_at) for line in lines]
        ended_at, back_at = max(spans, default=(self._ended.get(relay, -math.inf), -math.inf))
        if ended_at == -math.inf:
            return False
        until = back_at if back_at > ended_at else math.inf
        return ended_at - SAME_MOMENT_S <= at <= max(until, ended_at + SAME_MOMENT_S)

    @property
    def breaks(self) -> int:
        """How often lines broke, or could not be opened."""
        return self._breaks + sum(way.line.breaks for way in self._ways.values())

    async def dial(self, machine: MachineName, context: ssl.SSLContext) -> Leg:
        """A leg that ends at this machine. Raises DialRefused."""
        loop = asyncio.get_running_loop()
        said = DialRefused(Refusal.PEER_UNREACHABLE, f"{machine} has no address, and there is no relay.")
        for place in self._order(machine, loop.time()):
            way = self._ways.get(place)
            if way is None:  # it went away while another one was asked
                continue
            try:
                return await way.client.dial(machine, context)
            except RelayDown as refused:
                way.failed_at = loop.time()
                said = refused
            except DialRefused as refused:
                if refused.reason not in NEXT_ONE:
                    raise
                said = refused
        raise said

    def _order(self, machine: MachineName, now: float) -> list[RelayPlace]:
        def rank(place: RelayPlace) -> int:
            if place.is_gateway:
                return 0 if place.machine == self._machine else 2
            return 1

        return sorted(
            self._ways,
            key=lambda place: (
                self._ways[place].is_down(now),
                rank(place),
                preference(place.machine, machine),
            ),
        )


def preference(relay: MachineName, target: MachineName) -> bytes:
    """Which of several relays leads to a target: that with the smallest. The same for everybody, and few change their
    relay when one comes or goes.
    """
    return hashlib.sha256(f"{relay} {target}".encode()).digest()
