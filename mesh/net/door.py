"""How many strangers may stand in the door: limits on connections that are not streams yet. Pure.

Rules of this file:
1. A connection is in the door from its accept until its preface is read; the shell limits how long that takes.
2. One source (an IPv4 address, an IPv6 /64) has a share of the door; what is above is closed at once. So one source
   alone never fills the door.
3. When the door is full, nobody is accepted: who comes waits in the kernel's queue, which is bounded too.
"""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address, ip_address


class Door:
    """Who is in the door. `enter` and `leave` come in pairs."""

    def __init__(self, *, places: int, places_per_source: int) -> None:
        self._places = places
        self._places_per_source = places_per_source
        self._inside: Counter[str] = Counter()
        self.taken = 0
        """The sum of all sources' places; never above `places`."""

    @property
    def is_full(self) -> bool:
        return self.taken >= self._places

    def enter(self, source: str) -> bool:
        """A place for this source; False when it has its share already or the door is full."""
        if self.is_full or self._inside[source] >= self._places_per_source:
            return False
        self._inside[source] += 1
        self.taken += 1
        return True

    def leave(self, source: str) -> None:
        self._inside[source] -= 1
        if self._inside[source] == 0:
            del self._inside[source]
        self.taken -= 1


def source_of(address: str) -> str:
    """What counts as one source: one IPv4 address, also one written as IPv6; of IPv6 the /64."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(IPv6Address(int(ip) >> 64 << 64))
    return str(ip)
