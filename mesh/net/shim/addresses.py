"""Which address of loopback stands for an overlay address on a machine whose programs have the shim. Pure.

Loopback has 16 million IPv4 addresses and one IPv6 address, so both families are found in the first: by arithmetic,
that native/addresses.c does too.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

OVERLAY = ("198.18.0.0/15", "fd67:6d00::/32")
"""What the shim knows as overlay addresses; there is no other choice."""
GATEWAY = "127.200.0.1"
"""Where the gateway listens for programs with the shim."""
SOURCE = "127.200.0.2"
"""Where they come from, unless they have bound an address themselves."""
_V4 = 198 << 24
_V6 = 0xFD676D00 << 96
_LOOPBACK = 127 << 24


def loopback_of(address: str) -> str | None:
    """198.18.x.y → 127.18.x.y, fd67:6d00:1::102 → 127.83.1.2; None for what is no overlay address of that form."""
    ip = ip_address(address)
    if isinstance(ip, IPv4Address):
        low = int(ip) - _V4
        return str(IPv4Address(_LOOPBACK | low)) if 18 << 16 <= low < 20 << 16 else None
    group, low = divmod(int(ip) - _V6, 1 << 80)
    return str(IPv4Address(_LOOPBACK | 82 + group << 16 | low)) if group in (0, 1) and low < 1 << 16 else None


def overlay_of(loopback: str) -> str | None:
    """The reverse."""
    low = int(IPv4Address(loopback)) - _LOOPBACK
    group, number = divmod(low, 1 << 16)
    if group in (18, 19):
        return str(IPv4Address(_V4 | low))
    if group in (82, 83):
        return str(IPv6Address(_V6 | group - 82 << 80 | number))
    return None


def loopbacks_of(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Of overlay addresses; what is none stays as it is."""
    return tuple(loopback_of(address) or address for address in addresses)


def source_like(target: str, overlay: tuple[str, ...]) -> str | None:
    """Where a delivery to `target` comes from, so that the program sees whose it is: the peer's, of that family."""
    meant = overlay_of(target) if ":" not in target else None
    if meant is None:
        return None
    same = [address for address in overlay if (":" in address) == (":" in meant)]
    return next(filter(None, map(loopback_of, same)), None)
