"""Where the API listens: `HOST:PORT`, bound before anything is started, so that a taken port fails at once."""

from __future__ import annotations

import errno
import ipaddress
import socket

from mesh.errors import DeploymentError, SpecError
from mesh.reasons import Reason

BACKLOG = 256


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:8470`, `[::1]:8470`, `:8470` (every interface) or `0.0.0.0:0`. Raises SpecError."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not port.isdigit() or not port.isascii() or int(port) > 65535:
        raise SpecError(
            f"--listen takes HOST:PORT, such as 127.0.0.1:8470 (port 0 takes a free one); got {text!r}.",
            field="--listen",
            got=text[:80],
        )
    return host or "0.0.0.0", int(port)


def checked_address(text: str, *, has_machines: bool) -> str:
    """The value of `--address`, as the kernel writes it. Raises SpecError."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_loopback or address.is_multicast:
        raise SpecError(
            f"--address takes one IPv4 address of this host that other machines reach, not {text[:80]!r}.",
            hint="See them with `ip address`. Without --address everything stays on this host.",
            field="--address",
            got=text[:80],
        )
    if has_machines:
        raise SpecError(
            "--machines and --address exclude each other: simulated machines have loopback addresses.",
            hint="Let machines join, as many as you like: python -m agents join",
            field="--machines",
        )
    return str(address)


def listen_default(address: str) -> str:
    """Where the API listens unless told: a free port at the address that everything else has."""
    return f"{address}:0"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        DeploymentError: (PortTaken) somebody listens there; (Unreachable) the host has no such address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _cannot(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _cannot(host, port, error) from error
    return listener


def _cannot(host: str, port: int, error: OSError) -> DeploymentError:
    if error.errno == errno.EADDRINUSE:
        return DeploymentError(
            f"Port {port} on {host} is taken by another program.",
            hint="Choose another one with --listen HOST:PORT; port 0 takes a free one.",
            reason=Reason.PORT_TAKEN,
            port=port,
        )
    return DeploymentError(
        f"The API cannot listen on {host}:{port}: {error.strerror or error}.",
        hint="Use an address of this host with --listen HOST:PORT.",
        reason=Reason.UNREACHABLE,
        port=port,
    )


def url_of(listener: socket.socket) -> str:
    """The URL for a client on this host; a wildcard address is reached through loopback."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"
