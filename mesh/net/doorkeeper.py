"""Accepts for a gateway or a relay, and keeps its door. Shell; door.py has the places.

Rules of this file:
1. Who comes when the source has its share already is closed at once: an accept and a close is all that it costs.
2. Who fails in the door keeps its place for PENALTY_S more. A handshake costs a hundred times what a refusal costs, so
   a source that only fails gets as many a second as it has places, and no more; who does not fail waits for nobody.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from mesh.net.accepting import Acceptor
from mesh.net.door import Door, source_of
from mesh.net.refusals import Refusal
from mesh.net.sockets import listen, reset

PENALTY_S = 1.0


class Doorkeeper:
    """Listens, and lets in.

    Args:
        count: of what is refused here.
        let_in: takes a connection over, with its source; it has a place in the door until `leave`.
    """

    def __init__(
        self,
        door: Door,
        *,
        count: Callable[[Refusal], None],
        let_in: Callable[[socket.socket, str], None],
    ) -> None:
        self._door = door
        self._count = count
        self._let_in = let_in
        self._acceptors: list[Acceptor] = []

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [acceptor.address for acceptor in self._acceptors]

    @property
    def inside(self) -> int:
        """How many places are taken."""
        return self._door.taken

    def open(self, listen_on: tuple[tuple[str, int], ...]) -> None:
        """Raises OSError; then nothing listens."""
        listeners: list[socket.socket] = []
        try:
            for host, port in listen_on:
                listeners.append(listen(host, port))
        except OSError:
            for sock in listeners:
                sock.close()
            raise
        self._acceptors = [
            Acceptor(sock, on_connection=self._on_connection, is_full=lambda: self._door.is_full)
            for sock in listeners
        ]

    def close(self) -> None:
        """May be called again."""
        for acceptor in self._acceptors:
            acceptor.close()

    def enter(self, sock: socket.socket, source: str) -> bool:
        """A place for this connection; False when it was refused, counted and reset."""
        if self._door.enter(source):
            return True
        self._count(Refusal.SOURCE_LIMIT)
        reset(sock)
        return False

    def leave(self, source: str, *, has_failed: bool) -> None:
        """Gives the place back, now or after the penalty."""
        if has_failed:
            asyncio.get_running_loop().call_later(PENALTY_S, self._give_back, source)
        else:
            self._give_back(source)

    def _give_back(self, source: str) -> None:
        self._door.leave(source)
        for acceptor in self._acceptors:
            acceptor.resume()

    def _on_connection(self, sock: socket.socket, address: Any) -> None:
        source = source_of(address[0])
        if self.enter(sock, source):
            self._let_in(sock, source)
