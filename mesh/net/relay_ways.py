"""The relays of one machine: a line to each of them, and which one a dial goes through.

Theory of operation. Who cannot be dialled has a line to every relay, so any of them leads to it, and who dials chooses.
The relays of the deployment come first, each target's in an order of its own, so that they share the load;
the head's own relay comes last, and is what is left when the others are gone.

Rules of this file:
1. A relay that cannot be reached, or to which this machine has no line, is asked last until it can be again.
2. A relay that has no line of the target, or no place, leads to the next one; a refusal of another kind is the answer.
3. Relays come and go while others' lines stay. Streams that run are not touched: a relay that dies breaks its own.
"""

from __future__ import annotations

import asyncio
import hashlib
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
NEXT_ONE = frozenset({Refusal.NOT_LISTENING, Refusal.STREAM_LIMIT, Refusal.PEER_UNREACHABLE})


@dataclass(slots=True, kw_only=True)
class _Way:
    client: RelayClient
    line: RelayLine
    down_until: float = 0.0


class RelayWays:
    """Make it on the loop; `set_places`, `dial`, `stop`.

    Args:
        check: whether a relay's certificate is to be believed (the gate's `check_peer`).
        context: the machine's own, the newest.
        on_leg: gets every leg that somebody has dialled to this machine.
    """

    def __init__(
        self,
        *,
        deployment: str,
        check: Callable[[PeerCertificate], Refused | None],
        context: Callable[[], ssl.SSLContext],
        on_leg: Callable[[Leg], None],
    ) -> None:
        self._deployment = deployment
        self._check = check
        self._context = context
        self._on_leg = on_leg
        self._ways: dict[RelayPlace, _Way] = {}
        self._breaks = 0
        """Of lines that are not kept any more."""

    async def set_places(self, places: Sequence[RelayPlace]) -> None:
        """These and no others. The lines to those that were there before stay."""
        gone = [self._ways.pop(place) for place in list(self._ways) if place not in places]
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
                way.down_until = loop.time() + DOWN_S
                said = refused
            except DialRefused as refused:
                if refused.reason not in NEXT_ONE:
                    raise
                said = refused
        raise said

    def _order(self, machine: MachineName, now: float) -> list[RelayPlace]:
        def is_down(place: RelayPlace) -> bool:
            way = self._ways[place]
            return now < way.down_until or not way.line.is_open

        return sorted(
            self._ways,
            key=lambda place: (is_down(place), place.is_gateway, preference(place.machine, machine)),
        )


def preference(relay: MachineName, target: MachineName) -> bytes:
    """Which of several relays leads to a target: that with the smallest. The same for everybody, and few change their
    relay when one comes or goes.
    """
    return hashlib.sha256(f"{relay} {target}".encode()).digest()
