"""The short way to a store on the same machine: a Unix socket beside the TCP port.

A round trip over it costs two thirds of one over the loopback interface. Its name is an abstract one (no file, nothing
to clean up, and not seen from another network namespace), made of the TCP address. Anybody on the machine could
take such a name first, so a client looks who listens before it says a secret: only its own user, or root.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


def local_name(host: str, port: int) -> str:
    """The abstract name of the store that listens on this TCP address."""
    return f"\0gangmesh-store/{host}/{port}"


def connect_locally(host: str, port: int) -> socket.socket | None:
    """A connected, non-blocking socket; None where there is no short way, or a stranger listens on it."""
    if not _is_mine(host):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with contextlib.suppress(OSError):
        connection.connect(local_name(host, port))
        if _listener_uid(connection) in (0, os.geteuid()):
            return connection
    connection.close()
    return None


def _is_mine(host: str) -> bool:
    """True for an address of this machine; a name is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def listener_pid(connection: socket.socket) -> int:
    """The process that listens at the other end, by the kernel's word; 0 when it is not in this pid namespace."""
    return _credentials(connection)[0]


def _listener_uid(connection: socket.socket) -> int:
    return _credentials(connection)[1]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(found)
    return pid, uid, gid
