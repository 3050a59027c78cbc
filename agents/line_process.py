"""A child process that speaks JSON lines: objects in on its stdin, objects out on its stdout.

Rules of this file:
1. The end of its stdout is the news of its death; nothing else is asked.
2. Nothing blocks the loop, whichever loop it is (asyncio's or uvloop's, in any thread): the pipes are watched
   by the loop, and only reaping runs in a thread, once the process is known to have ended.
3. A line that is not a JSON object is a fault of this program, told with the line.
4. A detached process is nobody's child here, so that it outlives whoever ends the children of this process: a Ray
   worker that exits, or is killed through Ray, first sends SIGKILL to every child that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from io import FileIO
from typing import IO, Any

from agents import process_tree
from mesh.errors import RemoteProtocolError

LINE_BYTES_MAX = 1024 * 1024
REAP_LIMIT_S = 5.0
START_LIMIT_S = 10.0
DETACHING_SHELL = ("/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- & echo $!', "sh")
"""Starts its arguments as a process of its own, says its pid on the stdout that both have, and is gone."""


class LineProcess:
    """One such process. Make it with `start` or `start_detached`; always `close` it."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        read_transport: asyncio.ReadTransport,
        write_transport: asyncio.WriteTransport,
    ) -> None:
        self._child = child
        self._reader = reader
        self._read_transport = read_transport
        self._write_transport = write_transport
        self._process = process_tree.read_process(child.pid)
        """None when it has ended already."""
        self.pid = child.pid

    @classmethod
    async def start(cls, argv: Sequence[str], *, env: Mapping[str, str]) -> LineProcess:
        """Starts a child in a session of its own. Raises OSError when it cannot be started."""
        loop = asyncio.get_running_loop()
        child = subprocess.Popen(  # noqa: ASYNC220 - vfork and exec, no waiting
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(env), start_new_session=True
        )
        opened: list[asyncio.BaseTransport] = []
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
            read_transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), _for_loop(child.stdout, loop)
            )
            opened.append(read_transport)
            write_transport, _ = await loop.connect_write_pipe(
                asyncio.BaseProtocol, _for_loop(child.stdin, loop)
            )
            opened.append(write_transport)
            return cls(child, reader, read_transport, write_transport)
        except BaseException:  # given up, too
            for transport in opened:
                transport.close()
            for pipe in (child.stdout, child.stdin)[len(opened) :]:
                if pipe is not None:
                    with contextlib.suppress(OSError):  # a transport that was not made may have closed it
                        pipe.close()
            await _end_group(child)
            raise

    @classmethod
    async def start_detached(cls, argv: Sequence[str], *, env: Mapping[str, str]) -> LineProcess:
        """Starts a process that is nobody's child here. It must say nothing before it is told something.

        Raises OSError when it cannot be started.
        """
        line_process = await cls.start([*DETACHING_SHELL, *argv], env=env)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                first_line = await line_process._reader.readline()
            line_process.pid = int(first_line)
            line_process._process = process_tree.read_process(line_process.pid)
            await asyncio.to_thread(line_process._child.wait, START_LIMIT_S)
        except BaseException as error:  # given up, too
            line_process.kill()
            await _end_group(line_process._child)
            await line_process.close()
            if isinstance(error, ValueError | TimeoutError | subprocess.TimeoutExpired):
                raise OSError(errno.EAGAIN, f"the shell between did not start it ({error!r})") from error
            raise
        return line_process

    def send(self, message: Mapping[str, Any]) -> bool:
        """Hands one object over; False when the process can take nothing any more."""
        if self._write_transport.is_closing():
            return False
        self._write_transport.write(json.dumps(message).encode() + b"\n")
        return True

    async def receive(self) -> dict[str, Any] | None:
        """The next object; None when the process has ended (or closed its stdout).

        Raises:
            RemoteProtocolError: a line that is not a JSON object, or is too long.
        """
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise RemoteProtocolError(f"Process {self.pid} sent a line without an end.") from error
        except ConnectionError:
            return None
        if not line.endswith(b"\n"):
            return None  # what a killed process left unfinished says nothing
        try:
            message = json.loads(line)
        except ValueError as error:
            raise RemoteProtocolError(f"Process {self.pid} sent {line[:200]!r}.") from error
        if not isinstance(message, dict):
            raise RemoteProtocolError(f"Process {self.pid} sent {line[:200]!r}.")
        return message

    def kill(self) -> None:
        """SIGKILL to this one process. Idempotent."""
        if self._process is not None:
            process_tree.send_signal(self._process, signal.SIGKILL)

    async def close(self, *, limit_s: float = REAP_LIMIT_S) -> bool:
        """Closes both pipes and waits for its end: False when it is still there after `limit_s`."""
        self._write_transport.close()
        try:
            return await asyncio.to_thread(self._wait, limit_s)
        finally:
            self._read_transport.close()

    def _wait(self, limit_s: float) -> bool:
        try:
            self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        if self._process is None or self.pid == self._child.pid:
            return True
        process_tree.wait_until_one_ends([self._process], limit_ms=int(limit_s * 1000))
        now = process_tree.read_process(self.pid)
        return now is None or now.started != self._process.started or not now.is_alive


def _for_loop(pipe: IO[bytes], loop: asyncio.AbstractEventLoop) -> FileIO:
    """The same pipe for one of the loop's transports. asyncio's close the file object. uvloop's close the descriptor,
    and the file object after that, by when the number may be another thread's: that one closes nothing.
    """
    descriptor = os.dup(pipe.fileno())
    closes = isinstance(loop, asyncio.BaseEventLoop)
    mode = "rb" if pipe.readable() else "wb"
    pipe.close()
    return FileIO(descriptor, mode, closefd=closes)


async def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Of a child that nobody is going to have, and of what it has started in its session."""
    if child.returncode is None:  # else the number may be another's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(child.wait, REAP_LIMIT_S)
