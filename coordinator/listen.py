"""Where the API listens: `HOST:PORT`, bound before anything is started, so that a taken port fails at once."""

from __future__ import annotations

import errno
import ipaddress
import socket

from mesh.errors import DeploymentError, SpecError
from mesh.reasons import Reason

BACKLOG = 256


def parse_listen(text: str, *, option: str = "--api") -> tuple[str, int]:
    """Host and port of `127.0.0.1:8470`, `[::1]:8470`, `:8470` (every interface) or `0.0.0.0:0`. Raises SpecError."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not port.isdigit() or not port.isascii() or int(port) > 65535:
        raise SpecError(
            f"{option} takes HOST:PORT, such as 127.0.0.1:8470 (port 0 takes a free one); got {text!r}.",
            field=option,
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


def mesh_listen(text: str, *, has_machines: bool, has_address: bool) -> tuple[str, int]:
    """The value of `--listen`: an address of this host and the mesh port. Raises SpecError."""
    host, port = parse_listen(text, option="--listen")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise SpecError(
            f"--listen takes an address of this host, such as 0.0.0.0:{port or 8471}, not the name {host[:80]!r}.",
            field="--listen",
            got=text[:80],
        ) from None
    if port == 0:
        raise SpecError(
            "--listen takes a port of its own choice: machines have to find it again.",
            hint=f"For example --listen {text.rpartition(':')[0]}:8471.",
            field="--listen",
            got=text[:80],
        )
    for given, option in ((has_machines, "--machines"), (has_address, "--address")):
        if given:
            raise SpecError(
                f"{option} and --listen exclude each other: machines join a mesh port by `mesh join`.",
                hint="Leave one of them out.",
                field=option,
            )
    return str(address), port


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
            hint="Choose another one with --api HOST:PORT; port 0 takes a free one.",
            reason=Reason.PORT_TAKEN,
            port=port,
        )
    return DeploymentError(
        f"The API cannot listen on {host}:{port}: {error.strerror or error}.",
        hint="Use an address of this host with --api HOST:PORT.",
        reason=Reason.UNREACHABLE,
        port=port,
    )


def reached_at(listener: socket.socket) -> tuple[str, int]:
    """Address and port for a client on this host; a wildcard address is reached through loopback."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return str(address), port


def url_of(listener: socket.socket) -> str:
    """The URL for a client on this host."""
    host, port = reached_at(listener)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
