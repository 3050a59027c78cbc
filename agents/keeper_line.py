"""A keeper's line to the store: one socket, never blocking, and what the kernel says of the store at its other end.

Rules of this file:
1. On the store's own machine the line is the short way (`mesh.store.local`), elsewhere TCP. A machine that is
   simulated there is cut off (`agents.chaos`) by `leave_short_way`: TCP from its own address, which the cut drops.
2. What is told of the store's process is told by the kernel of the machine that it runs on, and only there: bytes
   that it has not read (SIOCOUTQ), a process that has exited (pidfd), an address that nobody listens on. Elsewhere a
   refusal may come from something between.
3. A time that is told errs on the careful side: `seen_at` is read before looking, `since` after sending, and a
   suspended machine's time does not count as time in which the store stood still: its clock stood as well.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Callable

from agents import lease_wire
from agents.core import lease_events as le
from mesh.errors import RemoteProtocolError
from mesh.store.local import connect_locally, listener_pid
from mesh.store.protocol import ReplyStream

READ_BYTES = 64 * 1024
REPLY_BYTES_MAX = 1024 * 1024
SIOCOUTQ = 0x5411


class StoreLine:
    """One connection at a time.

    Args:
        address: the store's host and port.
        now: the keeper's clock.
        source: the address to connect from by TCP; None leaves it to the kernel.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        *,
        now: Callable[[], float],
        source: str | None = None,
    ) -> None:
        self._source = source
        self._may_be_short = True
        self._address = address
        self._secret = secret
        self._now = now
        self._socket: socket.socket | None = None
        self._is_connecting = False
        self._is_local = False
        self._stream = ReplyStream(bytes_max=REPLY_BYTES_MAX)
        self._sent_running = 0.0
        """When the last request or hello had been sent, on the clock that stands while this machine is suspended."""
        self._tried_at = 0.0
        """When the last try to connect began."""
        self._pidfd: int | None = None
        """The store's process, when it was last seen on this machine."""

    def register(self, poll: select.poll) -> None:
        """What to wait for."""
        if self._socket is not None:
            poll.register(self._socket, select.POLLOUT if self._is_connecting else select.POLLIN)

    def connect(self) -> list[le.LeaseEvent]:
        """Drops any connection and begins another one."""
        self.close()
        self._tried_at = self._now()
        local = connect_locally(*self._address) if self._may_be_short else None
        if local is not None:
            self._socket, self._is_local = local, True
            self._remember_process(local)
            return self._greet()
        host, port = self._address
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            self._socket = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._source is not None:
                self._socket.bind((self._source, 0))
            code = self._socket.connect_ex(target)
        except OSError as error:
            return self._lost(error.errno or 0)
        if code not in (0, errno.EINPROGRESS):
            return self._lost(code)
        self._is_connecting = True
        return []

    def send(self, frame: bytes) -> list[le.LeaseEvent]:
        """A few hundred bytes into an empty socket buffer: whole, or the connection is of no use."""
        if self._socket is None:
            return [le.ConnectionLost()]
        try:
            if self._socket.send(frame) == len(frame):
                self._sent_running = time.monotonic()
                return []
            code = errno.EAGAIN
        except OSError as error:
            code = error.errno or 0
        return self._lost(code)

    def happened(self) -> list[le.LeaseEvent]:
        """What the store said, and what can be seen of it."""
        if self._socket is None:
            return []
        if self._is_connecting:
            return self._finish_connecting(self._socket)
        still = self._look_for_unread(self._socket)
        events: list[le.LeaseEvent] = []
        try:
            while data := self._socket.recv(READ_BYTES):
                told = map(lease_wire.event_of, self._stream.feed(data))
                events += [event for event in told if event is not None]
            return [*events, *self._lost(errno.ECONNRESET)]
        except BlockingIOError:
            return events or still
        except OSError as error:
            return [*events, *self._lost(error.errno or 0)]
        except RemoteProtocolError as error:
            self.close()
            return [*events, le.ConnectionLost(message=str(error))]

    def leave_short_way(self) -> list[le.LeaseEvent]:
        """From now on by TCP, as from another machine: nothing is seen of the store's process any more."""
        self._may_be_short = False
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if not self._is_local:
            return []
        self.close()
        return [le.ConnectionLost(message="This machine is cut off.")]

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._is_connecting = self._is_local = False

    # --- inside ---------------------------------------------------------------------------------

    def _greet(self) -> list[le.LeaseEvent]:
        self._is_connecting = False
        self._stream = ReplyStream(bytes_max=REPLY_BYTES_MAX)
        return self.send(lease_wire.hello(secret=self._secret))

    def _finish_connecting(self, connection: socket.socket) -> list[le.LeaseEvent]:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        if not poll.poll(0):
            return []
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return self._lost(code) if code else self._greet()

    def _lost(self, code: int) -> list[le.LeaseEvent]:
        self.close()
        lost = le.ConnectionLost(message=f"Last: {os.strerror(code)}." if code else "")
        if code == errno.ECONNREFUSED and self._is_process_dead():
            return [le.StoreGone(seen_at=self._tried_at), lost]
        return [lost]

    # --- what can be seen -----------------------------------------------------------------------

    def _remember_process(self, local: socket.socket) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        try:
            self._pidfd = os.pidfd_open(listener_pid(local))
        except OSError:
            self._pidfd = None  # in another pid namespace, or gone already: nothing can be seen of it

    def _is_process_dead(self) -> bool:
        """True when the store was seen on this machine, and that process has exited."""
        if self._pidfd is None:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _look_for_unread(self, connection: socket.socket) -> list[le.LeaseEvent]:
        if not self._is_local:
            return []
        seen_at, seen_running = self._now(), time.monotonic()
        unread = bytearray(4)
        try:
            fcntl.ioctl(connection, SIOCOUTQ, unread)
        except OSError:
            return []
        if struct.unpack("i", unread)[0] == 0:
            return []
        return [le.StoreStoodStill(since=seen_at - (seen_running - self._sent_running), seen_at=seen_at)]
