"""Facts of this machine: the interface that has an address, a free port.

Rules of this file:
1. No host names and no DNS: addresses come from sockets and interfaces (a host name may resolve to loopback,
   to another machine, or not at all).
2. A port is looked at by binding, never by connecting: a probe that connects can eat the one connection that a
   worker waits for.
3. A reserved port is guarded by an abstract Unix socket. It has the scope of the port itself (the
   network namespace), binds atomically for every user, needs no file, and ends with its holder.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import psutil

from mesh.errors import PlacementError
from mesh.plan import Endpoint
from mesh.reasons import Reason

MASTER_PORT_FIRST = 29500
"""torch's own default, and the port that the first document names."""
MASTER_PORT_LAST = 29599
"""Other choices lie below the kernel's ephemeral range (32768 on), so no connection takes them by chance."""


def interface_for(address: str) -> str | None:
    """The name of the interface that has `address`; the loopback interface for all of 127.0.0.0/8.

    gloo wants one exact name. None when no interface has the address (it is another machine's, or behind NAT).
    """
    wanted = ipaddress.ip_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = ipaddress.ip_address(entry.address.partition("%")[0])
            if own == wanted or (own.is_loopback and wanted.is_loopback and own.version == wanted.version):
                return name
    return None


def from_here(endpoint: Endpoint, address: str) -> Endpoint:
    """The endpoint as a machine of this address connects to it: from that address where both are on loopback.

    Elsewhere the kernel knows better which of the machine's addresses leads there.
    """
    ends = (endpoint.host, address)
    try:
        is_simulated = all(ipaddress.ip_address(end).is_loopback for end in ends) and len(set(ends)) == 2
    except ValueError:  # a name
        is_simulated = False
    return replace(endpoint, source=address) if is_simulated else endpoint


@dataclass(slots=True)
class PortReservation:
    """A port that no other run on this host is given while this object is open."""

    port: int
    _guard: socket.socket = field(repr=False)

    def release(self) -> None:
        """Lets others have the port. Idempotent."""
        self._guard.close()


def reserve_port(*, wanted: int = MASTER_PORT_FIRST, last: int = MASTER_PORT_LAST) -> PortReservation:
    """`wanted`, or the next port that is free on every address of this host and reserved by no other run.

    Raises:
        PlacementError: all of them are taken; `PortTaken`.
    """
    for port in range(wanted, last + 1):
        reservation = _try_to_reserve(port)
        if reservation is not None:
            return reservation
    raise PlacementError(
        f"Every port from {wanted} to {last} is taken on this machine.",
        hint="End what listens there, or run on another machine.",
        reason=Reason.PORT_TAKEN,
        port=wanted,
    )


def _try_to_reserve(port: int) -> PortReservation | None:
    guard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        guard.bind(f"\0gangmesh-port-{port}")
    except OSError:
        guard.close()
        return None
    if not is_free(port):
        guard.close()
        return None
    return PortReservation(port=port, _guard=guard)


def is_free(port: int) -> bool:
    """True when nothing listens on `port` on any address of this host.

    With SO_REUSEADDR, as torch's store binds: a finished run's closed connections do not keep the port taken,
    a listener on any one address does.
    """
    return all(_can_bind(family, address, port) for family, address in _wildcards())


def _wildcards() -> Iterable[tuple[socket.AddressFamily, str]]:
    yield socket.AF_INET, "0.0.0.0"
    if socket.has_ipv6:
        yield socket.AF_INET6, "::"


def _can_bind(family: socket.AddressFamily, address: str, port: int) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return True  # a kernel without this family: nobody can listen there
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return _is_family_missing(error)
    return True


def _is_family_missing(error: OSError) -> bool:
    return error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
