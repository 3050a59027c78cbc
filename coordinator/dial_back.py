"""The head dials whoever has joined back, to find out where others can dial it: only where that may be its own place.

Theory of operation. A machine or relay says which addresses it takes for its own. The head dials them from inside its
own network, so the list could be a stranger's way to look around there. What is dialled is therefore bounded in kind
(rule 1), in number and in pace (rule 2), and only who answers there as that machine, by its certificate, is told of.

Rules of this file:
1. Dialled is the address that its connection comes from, whichever that is: who comes from there may look around there
   by itself (from loopback on the head's own host). Of those that it says: public ones, and private ones when it comes
   from a private address itself; never loopback, link-local (where clouds have their metadata), multicast, the overlay,
   or the head's own. And no port but the one that it listens on.
2. ADDRESSES_MAX at a time for one, ASKS_MAX in ASKS_WITHIN_S for one, under whatever names, ROUNDS_MAX at the same time
   for all, and the rest wait in a queue that has an end.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import psutil

from mesh.errors import TransportError
from mesh.ids import MachineName
from mesh.net.redirect import OVERLAY
from mesh.reasons import Reason

ADDRESSES_MAX = 4
ASKS_MAX = 6
ASKS_WITHIN_S = 60.0
"""A machine asks once each time that it joins, and again when the head has not answered."""
ROUNDS_MAX = 8
WAITING_MAX = 256
KNOWN_MAX = 10_000
METADATA = frozenset({ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("100.100.100.200")})
"""Of clouds that do not have it at a link-local address."""

Address = tuple[str, int]
Dial = Callable[[MachineName, Sequence[Address]], Awaitable[list[Address]]]
_NOBODY_S = tuple(
    ipaddress.ip_network(text) for text in (*OVERLAY, "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")
)
"""The overlay, and IPv6 that stands for some IPv4 address (NAT64, 6to4): it could be any."""


def may_dial(address: str, *, source: str | None, own: Sequence[str]) -> bool:
    """Whether who comes from `source` may have this address; both as text of an IP address. Pure.

    Args:
        own: the head's addresses.
    """
    if address == source:
        return True
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return False
    if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved:
        return False
    if ip in METADATA or any(ip in network for network in _NOBODY_S) or address in own:
        return False
    return ip.is_global or (source is not None and not ipaddress.ip_address(source).is_global)


class DialBack:
    """One head's."""

    def __init__(self) -> None:
        self._rounds = asyncio.Semaphore(ROUNDS_MAX)
        self._waiting = 0
        self._asked: dict[MachineName, deque[float]] = {}
        """When, of late, by what it was called first; the one that asked first longest ago first."""

    async def find(
        self,
        name: MachineName,
        said: Sequence[Address],
        *,
        origin: MachineName,
        source: str | None,
        port: int | None,
        dial: Dial,
    ) -> list[Address]:
        """Those addresses at which `dial` found it. Raises TransportError (LimitExceeded), and what `dial` raises.

        Args:
            said: what it takes for its own.
            origin: what it was called when it came the first time.
            source: where its connection comes from; None when that is not known.
            port: where it listens; None when it does not.
        """
        self._count(name, origin)
        if port is None:
            return []
        own = await asyncio.to_thread(_own_addresses)
        asked = [(host, at) for host, at in dict.fromkeys(said) if at == port]
        asked = [(host, at) for host, at in asked if may_dial(host, source=source, own=own)]
        asked = asked[:ADDRESSES_MAX]
        if source is not None and (source, port) not in asked:
            asked = [*asked[: ADDRESSES_MAX - 1], (source, port)]
        if not asked:
            return []
        if self._waiting >= WAITING_MAX:
            raise _too_many("Too many machines ask at the same time where they can be dialled.")
        self._waiting += 1
        try:
            async with self._rounds:
                return await dial(name, asked)
        finally:
            self._waiting -= 1

    def _count(self, name: MachineName, origin: MachineName) -> None:
        now = time.monotonic()
        times = self._asked.setdefault(origin, deque())
        while times and times[0] < now - ASKS_WITHIN_S:
            times.popleft()
        if len(times) >= ASKS_MAX:
            raise _too_many(f"{name} asks too often where it can be dialled.")
        times.append(now)
        while len(self._asked) > KNOWN_MAX:
            del self._asked[next(iter(self._asked))]


def _too_many(message: str) -> TransportError:
    return TransportError(
        message, hint=f"It may ask {ASKS_MAX} times in {ASKS_WITHIN_S:g} s.", reason=Reason.LIMIT_EXCEEDED
    )


def _own_addresses() -> list[str]:
    """Of the head's interfaces, but loopback's networks."""
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    return [address.partition("%")[0] for address in found]
