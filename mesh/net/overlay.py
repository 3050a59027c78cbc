"""Which overlay addresses a machine has, and the member on it. Pure.

Rules of this file:
1. A machine has a number of its own while it is in the deployment; both addresses follow from it. The head's is 0.
2. A machine has one member at a time, so the member's address follows from the machine's: nothing is allotted.

    machine n   198.18.x.y   fd67:6d00::n+1        x.y is n + 1
    its member  198.19.x.y   fd67:6d00:1::n+1
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

HEAD_NUMBER = 0
NUMBER_MAX = 65_533
"""x.y is never 0.0 nor 255.255."""
MACHINES_V4 = "198.18.0.0/16"
MEMBERS_V4 = "198.19.0.0/16"
MEMBERS_V6 = "fd67:6d00:1::/48"
_MACHINE_BASES = (IPv4Address("198.18.0.0"), IPv6Address("fd67:6d00::"))
_MEMBER_BASES = (IPv4Address("198.19.0.0"), IPv6Address("fd67:6d00:1::"))


def machine_overlay(number: int) -> tuple[str, str]:
    """A machine's own addresses, IPv4 first. Raises ValueError for a number that no machine has."""
    return _addresses(_MACHINE_BASES, number)


def member_overlay(number: int) -> tuple[str, str]:
    """Those of the member on this machine, IPv4 first. Raises ValueError."""
    return _addresses(_MEMBER_BASES, number)


def number_of(address: str) -> int | None:
    """The machine's number of an IPv4 overlay address, its own or its member's; None for any other address."""
    try:
        value = int(IPv4Address(address))
    except ValueError:
        return None
    for base in (_MACHINE_BASES[0], _MEMBER_BASES[0]):
        number = value - int(base) - 1
        if 0 <= number <= NUMBER_MAX:
            return number
    return None


def _addresses(bases: tuple[IPv4Address, IPv6Address], number: int) -> tuple[str, str]:
    if not 0 <= number <= NUMBER_MAX:
        raise ValueError(f"a machine's number is 0 to {NUMBER_MAX}, not {number}")
    first, second = bases
    return str(first + number + 1), str(second + number + 1)
