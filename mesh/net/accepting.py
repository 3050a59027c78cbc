"""Accepts connections, and stops accepting while there is no room: who comes then waits in the kernel's queue."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

ACCEPTS_PER_TURN = 32
"""Then the other streams of the loop have their turn."""
NO_DESCRIPTORS_PAUSE_S = 0.1
_NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """A listener on the loop. `on_connection` gets a socket and the peer's address; it takes the socket over."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        on_connection: Callable[[socket.socket, Any], None],
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._listener = listener
        self._on_connection = on_connection
        self._is_full = is_full
        self._loop = asyncio.get_running_loop()
        self._is_reading = False
        self._timer: asyncio.TimerHandle | None = None
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.resume()

    def resume(self) -> None:
        """There may be room again. Costs nothing when it accepts already."""
        if (
            not self._is_reading
            and self._timer is None
            and self._listener.fileno() >= 0
            and not self._is_full()
        ):
            self._is_reading = True
            self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """May be called again."""
        self._pause()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._listener.close()

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if self._is_full():
                self._pause()
                return
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    continue  # this connection was gone before it was accepted
                self._pause()
                self._timer = self._loop.call_later(NO_DESCRIPTORS_PAUSE_S, self._after_pause)
                return
            self._on_connection(sock, address)

    def _after_pause(self) -> None:
        self._timer = None
        self.resume()
