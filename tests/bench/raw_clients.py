"""Thousands of a store's clients in one process: real sockets, frames made beforehand, answers counted by their bytes.

The same driver speaks to both stores, so that what it costs is the same for both. It decodes nothing: of each answer it
is known how long it is.
"""

from __future__ import annotations

import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

CONNECT_LIMIT_S = 30.0
ANSWER_LIMIT_S = 120.0
FILES_SPARE = 200
TCPSTORE_MAGIC = 0x3C85F7CE
_VALIDATE, _SET, _GET, _ADD, _WAIT, _MULTI_GET, _PING = 0, 1, 3, 4, 6, 10, 13
"""`QueryType` of torch 2's TCPStoreBackend.hpp; everything is little-endian."""

Step = tuple[bytes, int]
"""What to send, and how many bytes come back."""


def allow_sockets(count: int) -> None:
    """Raises this process's limit on open files. RuntimeError when it may not be as high."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + FILES_SPARE:
        raise RuntimeError(
            f"{count} sockets are more than this machine allows a process: {hard} (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + FILES_SPARE, hard))


class RawClients:
    """So many connections to 127.0.0.1."""

    def __init__(self, port: int, count: int) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._epoll = select.epoll()
        self.files: list[int] = []
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port), timeout=CONNECT_LIMIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
            self._sockets[connection.fileno()] = connection
            self.files.append(connection.fileno())
            self._epoll.register(connection.fileno(), select.EPOLLIN)

    def close(self) -> None:
        self._epoll.close()
        for connection in self._sockets.values():
            connection.close()

    def _send(self, file: int, frame: bytes) -> None:
        """All of it. The stores read whatever they are sent, so that a large frame does not stand for long."""
        connection = self._sockets[file]
        sent = connection.send(frame)
        if sent < len(frame):
            connection.settimeout(ANSWER_LIMIT_S)
            connection.sendall(frame[sent:])
            connection.setblocking(False)

    def play(self, next_step: Callable[[int, int, bytes], Step | None]) -> float:
        """Every client takes its steps, one answer at a time; the seconds until the last one has its last answer.

        `next_step(client, step number, last bytes of the answer before)`; None ends a client's part. The beginning of
        the first step of each is sent before anybody listens, as if they all came at once.
        """
        places = {file: place for place, file in enumerate(self.files)}
        steps = [0] * len(self.files)
        wanted: dict[int, int] = {}
        buffer = memoryview(bytearray(256 * 1024))
        began = time.perf_counter()
        for place, file in enumerate(self.files):
            first = next_step(place, 0, b"")
            assert first is not None
            self._send(file, first[0])
            wanted[file] = first[1]
        while wanted:
            ready = self._epoll.poll(ANSWER_LIMIT_S, 4096)
            if not ready:
                raise RuntimeError(f"{len(wanted)} clients got no answer in {ANSWER_LIMIT_S:g} s")
            for file, _ in ready:
                count = self._sockets[file].recv_into(buffer)
                if count == 0:
                    raise RuntimeError("the store closed a connection")
                wanted[file] -= count
                if wanted[file] > 0:
                    continue
                if wanted[file] < 0:
                    raise RuntimeError("an answer is longer than it should be")
                place = places[file]
                steps[place] += 1
                following = next_step(place, steps[place], bytes(buffer[max(0, count - 16) : count]))
                if following is None:
                    del wanted[file]
                else:
                    self._send(file, following[0])
                    wanted[file] = following[1]
        return time.perf_counter() - began

    def ask_all(self, frames: Sequence[bytes], answer_bytes: int) -> float:
        """Each client sends its frame and gets an answer of that length."""
        return self.play(lambda place, step, _: (frames[place], answer_bytes) if step == 0 else None)


# ---- TCPStore's frames --------------------------------------------------------------------------------


def tcpstore_hello() -> Step:
    """What its client says first, and a ping's answer."""
    return struct.pack("<BI", _VALIDATE, TCPSTORE_MAGIC) + struct.pack("<BI", _PING, 7), 4


def tcpstore_set(key: bytes, value: bytes) -> bytes:
    """Has no answer."""
    return bytes([_SET]) + _text(key) + _text(value)


def tcpstore_add(key: bytes) -> Step:
    return bytes([_ADD]) + _text(key) + struct.pack("<q", 1), 8


def tcpstore_wait(key: bytes) -> Step:
    return struct.pack("<BQ", _WAIT, 1) + _text(key), 1


def tcpstore_get(key: bytes, value_bytes: int) -> Step:
    return bytes([_GET]) + _text(key), 8 + value_bytes


def tcpstore_multi_get(keys: Sequence[bytes], value_bytes: int) -> Step:
    asked = struct.pack("<BQ", _MULTI_GET, len(keys)) + b"".join(map(_text, keys))
    return asked, len(keys) * (8 + value_bytes)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value
