"""The one place where a command's failure becomes a message and an exit code.

What a user can cause is told in a sentence. What nobody foresaw is told in one line, with its traceback in
a file.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from mesh.cli.exit_codes import ExitCode, code_of_error
from mesh.cli.terminal import OutputClosedError, printable, write_err
from mesh.errors import MeshError

Work = Callable[[], Awaitable[int | None]]


def execute(work: Work, *, state: Path | None = None) -> NoReturn:
    """Runs the command's coroutine and exits with its code (None is 0)."""
    leave(guarded(lambda: asyncio.run(_as_coroutine(work)), state=state))


def execute_waiting(work: Callable[[], int | None]) -> NoReturn:
    """The same for what awaits nothing, and may block: in a loop of asyncio's the first Ctrl-C would not end it."""
    leave(guarded(lambda: work() or ExitCode.OK))


async def _as_coroutine(work: Work) -> int:
    return await work() or ExitCode.OK


def guarded(run: Callable[[], int], *, state: Path | None = None) -> int:
    """The exit code of `run`, whatever it raises."""
    try:
        return run()
    except MeshError as error:
        return report(error)
    except OutputClosedError as error:
        return _output_lost(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the guard: no user sees a traceback
        write_err(_crash_line(error, state))
        return ExitCode.FAILED


def _output_lost(error: OutputClosedError) -> int:
    """A reader that has gone wants no more; a disk that is full leaves the user without what was asked for."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        write_err(f"mesh: The output cannot be written: {cause.strerror}. What runs goes on.\n")
        return ExitCode.FAILED
    return ExitCode.PIPE_CLOSED


def open_missing_streams() -> None:
    """Standard streams that the caller has closed become /dev/null, before anything else is opened.

    Else the next file to be opened, a lock or a connection, would take the number and get our output.
    """
    for descriptor, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            stream = os.fdopen(opened, mode, encoding="utf-8")
            setattr(sys, ("stdin", "stdout", "stderr")[descriptor], stream)


def report(error: MeshError, code_of: Callable[[MeshError], ExitCode] = code_of_error) -> int:
    """Says what went wrong and what to do; returns the exit code."""
    lines = [f"mesh: {line}" if i == 0 else line for i, line in enumerate(error.message.splitlines() or [""])]
    lines += error.hint.splitlines()
    write_err("".join(printable(line) + "\n" for line in lines))
    return code_of(error)


def leave(code: int) -> NoReturn:
    """Ends the process with this code, without waiting for a reader of stdout that may never read."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        # the interpreter would complain about the same on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = code or ExitCode.PIPE_CLOSED
    sys.exit(int(code))


def _crash_line(error: Exception, state: Path | None) -> str:
    import tempfile
    import time
    import traceback

    from mesh.deployment import state_folder

    name = f"crash-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
    text = "".join(traceback.format_exception(error))
    for folder in (state_folder(state), Path(tempfile.gettempdir())):
        try:
            path = folder / name
            # For its owner only, and never through a link that somebody left in a folder that all may write to: the
            # command line has values that are secrets.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{sys.argv!r}\n{text}")
        except OSError:
            continue
        where = f"The traceback is in {path}; please report it."
        return f"mesh: a fault of this program ({type(error).__name__}: {printable(str(error))}). {where}\n"
    return f"mesh: a fault of this program, and no place to write its traceback:\n{text}"
