"""Joins two sockets in the kernel: splice(2) through a pipe moves pages, and no byte comes into this process.

Rules of this file:
1. A pipe is borrowed while something is in it: an idle stream has two sockets and nothing else.
2. What is in the pipe goes out before more is taken in: a slow reader slows its writer down, and one pipe for each
   direction is all that is held.
3. Ends and resets are passed on as pump.py does it. A turn of the loop moves one pipe's worth of one stream.
4. All bytes are counted when they are out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Callable

from mesh.net.sockets import is_dead, reset

PIPE_BYTES = 1024 * 1024
"""The kernel's limit for users. A byte costs 0.6 of the CPU that it costs with 256 KiB, and half of that with 2 or
4 MiB, where what describes the pages leaves the cache. Held in it are pages of sockets."""
SPARE_PIPES_MAX = 64
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


class Pipes:
    """Pipes that are lent out, empty, and come back empty or not at all."""

    def __init__(self) -> None:
        self._spare: list[tuple[int, int]] = []

    def borrow(self) -> tuple[int, int]:
        """(read end, write end). Raises OSError when there are no descriptors left."""
        if self._spare:
            return self._spare.pop()
        ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # over the user's quota: the kernel's own size does as well
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return ends

    def give_back(self, ends: tuple[int, int]) -> None:
        if len(self._spare) < SPARE_PIPES_MAX:
            self._spare.append(ends)
        else:
            discard(ends)

    def close(self) -> None:
        while self._spare:
            discard(self._spare.pop())


def discard(ends: tuple[int, int]) -> None:
    os.close(ends[0])
    os.close(ends[1])


class _Direction:
    """From one socket to the other. Raises OSError out of `read` and `write` when a connection is gone."""

    def __init__(self, source: socket.socket, sink: socket.socket, early: bytes) -> None:
        self.source = source
        self.sink = sink
        self.early = early
        """What was read already, before the splice."""
        self.pipe: tuple[int, int] | None = None
        self.held = 0
        """Bytes in the pipe."""
        self.has_ended = False
        """The source has sent its last byte."""
        self.is_shut = False
        """And the sink has been told."""

    @property
    def is_waiting(self) -> bool:
        return bool(self.held or self.early)


class Joint:
    """Two sockets that are joined until both directions are over; owns and closes them. `on_end` is called once."""

    def __init__(
        self,
        one: tuple[socket.socket, bytes],
        other: tuple[socket.socket, bytes],
        *,
        pipes: Pipes,
        on_bytes: Callable[[int], None],
        on_end: Callable[[], None],
    ) -> None:
        self._pipes = pipes
        self._on_bytes = on_bytes
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._directions = (_Direction(one[0], other[0], one[1]), _Direction(other[0], one[0], other[1]))
        self._has_ended = False

    def start(self) -> None:
        for direction in self._directions:
            if direction.early:
                self._loop.add_writer(direction.sink, self._step, self._write, direction)
            else:
                self._loop.add_reader(direction.source, self._step, self._read, direction)

    def cut(self) -> None:
        """Resets both sides now."""
        self._end(in_order=False)

    def look(self) -> None:
        """Ends the stream if a side was reset while it is not read."""
        for direction in self._directions:
            unread = direction.is_waiting or direction.has_ended
            back = self._directions[0 if direction is self._directions[1] else 1]
            if not self._has_ended and unread and not back.is_shut and is_dead(direction.source):
                self._end(in_order=False)

    def _step(self, step: Callable[[_Direction], None], direction: _Direction) -> None:
        if self._has_ended:
            return
        try:
            step(direction)
        except BlockingIOError:
            return
        except OSError:
            self._end(in_order=False)

    def _read(self, direction: _Direction) -> None:
        if direction.is_waiting or direction.has_ended:
            return
        if direction.pipe is None:
            direction.pipe = self._pipes.borrow()
        try:
            count = os.splice(direction.source.fileno(), direction.pipe[1], PIPE_BYTES, flags=_FLAGS)
        except BlockingIOError:
            self._release(direction)
            return
        if count == 0:
            direction.has_ended = True
            self._loop.remove_reader(direction.source)
            self._release(direction)
            self._shut(direction)
            return
        direction.held = count
        if is_dead(direction.source):  # libuv reports a socket with an error only once; see pump.py
            self._loop.call_soon(self._step, self._read, direction)
        self._drain(direction)
        if direction.is_waiting:
            self._loop.remove_reader(direction.source)
            self._loop.add_writer(direction.sink, self._step, self._write, direction)

    def _write(self, direction: _Direction) -> None:
        if direction.early:
            sent = direction.sink.send(direction.early)
            direction.early = direction.early[sent:]
            self._on_bytes(sent)
        self._drain(direction)
        if not direction.is_waiting:
            self._loop.remove_writer(direction.sink)
            self._loop.add_reader(direction.source, self._step, self._read, direction)

    def _drain(self, direction: _Direction) -> None:
        while direction.held:
            assert direction.pipe is not None
            try:
                sent = os.splice(direction.pipe[0], direction.sink.fileno(), direction.held, flags=_FLAGS)
            except BlockingIOError:
                return
            direction.held -= sent
            self._on_bytes(sent)
        self._release(direction)

    def _release(self, direction: _Direction) -> None:
        if direction.pipe is not None:
            self._pipes.give_back(direction.pipe)
            direction.pipe = None

    def _shut(self, direction: _Direction) -> None:
        direction.is_shut = True
        direction.sink.shutdown(socket.SHUT_WR)
        if all(each.is_shut for each in self._directions):
            self._end(in_order=True)

    def _end(self, *, in_order: bool) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        for direction in self._directions:
            self._loop.remove_reader(direction.source)
            self._loop.remove_writer(direction.sink)
            if direction.pipe is not None:
                discard(direction.pipe)  # something may be in it
                direction.pipe = None
        for direction in self._directions:
            if in_order:
                direction.source.close()
            else:
                reset(direction.source)
        self._on_end()
