"""A child process of the head or of a machine's agent: a session of its own, killed by the kernel when that dies,
watched by pidfd.

Rules of this file:
1. Spawn from the main thread only: the kernel ties `PR_SET_PDEATHSIG` to the thread that forks.
2. `ended` is told once, by the loop; nobody else waits for the pid.
3. `stop` takes the whole process group, so that what the child started in it goes too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILL_LIMIT_S = 5.0
"""After SIGKILL: a process that is still there is in the kernel's hands."""

_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A running child. Make one with `spawn`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        """The exit code, or minus the signal."""
        self._handle = os.pidfd_open(process.pid)
        loop.add_reader(self._handle, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        code = self._process.wait()
        if not self.ended.done():
            self.ended.set_result(code)

    @property
    def is_running(self) -> bool:
        return not self.ended.done()

    async def stop(self, *, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL for the group. False when it cannot even be killed. May be called again."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return await self._wait(KILL_LIMIT_S)

    async def _wait(self, limit_s: float) -> bool:
        done, _ = await asyncio.wait([self.ended], timeout=limit_s)
        return bool(done)


def spawn(name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Child:
    """Starts a child; its output is appended to `log`. Raises OSError."""
    assert threading.current_thread() is threading.main_thread(), "rule 1"
    parent = os.getpid()

    def die_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return Child(name, process)


def become_subreaper() -> None:
    """From here on orphans below this process become its children, and can be found. Raises OSError."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot be made the reaper of its orphans")
