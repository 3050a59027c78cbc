"""A child process that speaks JSON lines: objects in on its stdin, objects out on its stdout.

Rules of this file:
1. The end of its stdout is the news of its death; nothing else is asked.
2. Nothing blocks the loop, whichever loop it is (asyncio's or uvloop's, in any thread): the pipes are watched
   by the loop, and only reaping runs in a thread, once the process is known to have ended.
3. A line that is not a JSON object is a fault of this program, told with the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from mesh.errors import RemoteProtocolError

LINE_BYTES_MAX = 1024 * 1024
REAP_LIMIT_S = 5.0


class LineProcess:
    """One such process. Make it with `start`; always `close` it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        read_transport: asyncio.ReadTransport,
        write_transport: asyncio.WriteTransport,
    ) -> None:
        self._process = process
        self._reader = reader
        self._read_transport = read_transport
        self._write_transport = write_transport

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None = None
    ) -> LineProcess:
        """Starts it in a session of its own. Raises OSError when it cannot be started."""
        loop = asyncio.get_running_loop()
        process = subprocess.Popen(  # noqa: ASYNC220 - vfork and exec, no waiting
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        read_transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        write_transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        return cls(process, reader, read_transport, write_transport)

    @property
    def pid(self) -> int:
        return self._process.pid

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
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.kill(self._process.pid, signal.SIGKILL)

    async def close(self, *, limit_s: float = REAP_LIMIT_S) -> int | None:
        """Closes both pipes and reaps: its return code, or None when it is still there after `limit_s`."""
        self._write_transport.close()
        try:
            return await asyncio.to_thread(self._process.wait, limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._read_transport.close()
