"""What is set on the mesh's sockets, in one place."""

from __future__ import annotations

import contextlib
import functools
import socket
import struct

KEEPALIVE_IDLE_S = 15
KEEPALIVE_EVERY_S = 5
KEEPALIVE_PROBES = 3
"""A peer that is gone without a word is noticed after 30 s, when nothing is being sent. TCP_USER_TIMEOUT is not set:
the kernel would also cut a stream whose reader pauses for longer (tcp(7)), and a rank may pause for minutes."""
LISTEN_BACKLOG = 1024
_NO_LINGER = struct.pack("ii", 1, 0)
_IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h; Python has no name for it before 3.12
_TCP_CLOSE = 7  # include/net/tcp_states.h
_MIN_RTT_AT = 148  # of tcp_info, linux/tcp.h
NEAR_US = 1000
"""A round trip below it is one within a host or a site."""
UNPACED = (b"cubic", b"reno")
"""The first is what Linux comes with; the second is everybody's right to choose, on every kernel."""


def prepare(sock: socket.socket) -> None:
    """For a connected TCP socket: non-blocking, no Nagle, keepalive, and the pacing that its way asks for."""
    _set_options(sock)
    pace_if_far(sock)


def prepare_to_connect(sock: socket.socket) -> None:
    """The same for one that is not connected yet; `pace_if_far` is for when it is."""
    _set_options(sock)
    unpace(sock)


def _set_options(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def unpace(sock: socket.socket) -> None:
    """For a socket before it connects or listens, where the system's congestion control is BBR: another one.

    BBR sends by timers. On a way of less than a millisecond it has nothing to gain there, and a byte costs half as much
    CPU again. It cannot be undone later: a socket that has been BBR's once goes on being paced (net/ipv4/tcp_bbr.c).
    """
    if _paced_control() is None:
        return
    for name in UNPACED:
        with contextlib.suppress(OSError):  # not in this kernel, or not ours to choose
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def pace_if_far(sock: socket.socket) -> None:
    """A connection that is not within one site gets the system's congestion control back."""
    paced = _paced_control()
    if paced is None:
        return
    told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    (min_rtt_us,) = struct.unpack_from("=I", told, _MIN_RTT_AT)
    if min_rtt_us >= NEAR_US:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, paced)


@functools.cache
def _paced_control() -> bytes | None:
    """The system's congestion control, if it is one that sends by timers."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    return name if name.startswith(b"bbr") else None


def bind_source(sock: socket.socket, address: str) -> None:
    """It will come from this IPv4 address; the port is chosen when it connects. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    sock.bind((address, 0))


def reset(sock: socket.socket) -> None:
    """Closes so that the peer sees a reset, not an end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    sock.close()


def hang_up(sock: socket.socket) -> None:
    """Ends a connection that somebody else waits on: the wait is over, and who waited closes it.

    Closing it here would leave them waiting: uvloop keeps a socket open that is in use.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def is_dead(sock: socket.socket) -> bool:
    """Whether the peer has reset the connection, also while nobody reads from it."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE


def listen(host: str, port: int) -> socket.socket:
    """A listener; `::` takes IPv4 too. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind((host, port))
        unpace(sock)  # for those that it accepts
        sock.listen(LISTEN_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def has_ipv6() -> bool:
    """Whether this machine's loopback has an IPv6 address."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


_SO_ORIGINAL_DST = 80  # linux/netfilter_ipv4.h; IP6T_SO_ORIGINAL_DST is 80 as well


def original_target(sock: socket.socket) -> tuple[str, int] | None:
    """What a redirected connection was dialled to; None when it was not redirected."""
    try:
        if sock.family == socket.AF_INET6:
            raw = sock.getsockopt(socket.IPPROTO_IPV6, _SO_ORIGINAL_DST, 28)
            host, port = socket.inet_ntop(socket.AF_INET6, raw[8:24]), int.from_bytes(raw[2:4], "big")
        else:
            raw = sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
            host, port = socket.inet_ntop(socket.AF_INET, raw[4:8]), int.from_bytes(raw[2:4], "big")
    except OSError:  # the kernel tracks no connection here: nothing was redirected
        return None
    return None if (host, port) == sock.getsockname()[:2] else (host, port)
