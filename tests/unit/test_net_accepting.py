"""Accepting: it stops when there is no room, and goes on when there is."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from mesh.net.accepting import Acceptor
from mesh.net.sockets import listen


class NoDescriptors(socket.socket):
    """A listener of a process that has no descriptors left, for a while."""

    failures = 3

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def arrival(got: list[socket.socket], count: int) -> None:
    async with asyncio.timeout(10):
        while len(got) < count:
            await asyncio.sleep(0.005)


@pytest.fixture
def got() -> list[socket.socket]:
    return []


async def test_without_descriptors_it_pauses_and_tries_again(got: list[socket.socket]) -> None:
    plain = listen("127.0.0.1", 0)
    listener = NoDescriptors(fileno=plain.detach())
    listener.setblocking(False)
    acceptor = Acceptor(listener, on_connection=lambda sock, address: got.append(sock))
    with socket.create_connection(acceptor.address):
        await arrival(got, 1)
        assert listener.failures == 0
        acceptor.close()
        got[0].close()


async def test_when_it_is_full_it_waits_to_be_told(got: list[socket.socket]) -> None:
    room = 1
    acceptor = Acceptor(
        listen("127.0.0.1", 0),
        on_connection=lambda sock, address: got.append(sock),
        is_full=lambda: len(got) >= room,
    )
    with socket.create_connection(acceptor.address), socket.create_connection(acceptor.address):
        await arrival(got, 1)
        acceptor.resume()
        await asyncio.sleep(0)
        assert len(got) == 1
        room = 2
        acceptor.resume()
        await arrival(got, 2)
        acceptor.close()
        acceptor.close()
        acceptor.resume()  # closed is closed
        for sock in got:
            sock.close()
