"""What makes the head a good daemon: a session of its own, a bounded log.

The log is appended to and has a bound: past it, it is moved aside (one is kept) and begun anew, for the descriptors
that are open too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LOG_BYTES_MAX = 8 * 1024 * 1024


def leave_terminal() -> None:
    """A session of its own: what happens to the terminal does not happen to us. The cwd is given up by the caller."""
    with contextlib.suppress(PermissionError):  # we lead one already
        os.setsid()


class HeadLog:
    """`head.log`, as stdout and stderr of this process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> None:
        """Raises OSError."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        self.rotate()

    def rotate(self) -> None:
        """Begins a new one when this one is large. A disk that refuses costs the rotation, nothing else."""
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size > LOG_BYTES_MAX:
                self._path.replace(self._path.with_suffix(".log.1"))
                self.open()
