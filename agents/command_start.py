# The supervisor imports this module, and pathlib alone would double its start.
# ruff: noqa: PTH110, PTH112, PTH113, PTH118
"""From a fork to the user's command: the child's side of a start, and the sentences for every way in which it fails.

Rules of this file
- Standard library only, and nothing heavy: the supervisor loads this module by path.
- `become_command` runs in the forked child only. It never returns: the child becomes the command, or writes why not
  (`reason NUL message`) into the report pipe and ends. The pipe closes by itself when the command runs.
- The command gets a clean start, as from a login: its own session and process group, every signal at its default
  and none blocked, /dev/null to read from, no file but 0, 1 and 2, and exactly the environment it was given.
- The program is looked up on the PATH of the command's own environment, never on ours.
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn
else:
    # The public module makes enums of the same numbers, which costs 7 ms of the supervisor's start.
    import _signal as signal

COMMAND_NOT_FOUND = "CommandNotFound"
COMMAND_NOT_EXECUTABLE = "CommandNotExecutable"
COMMAND_START_FAILED = "CommandStartFailed"
WORKING_DIR_MISSING = "WorkingDirMissing"

STRING_BYTES_MAX = 128 * 1024
"""Linux MAX_ARG_STRLEN (32 pages): one argument, or one NAME=value, with its closing NUL."""

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FAILED_START_EXIT_CODE = 127
SHEBANG_BYTES_MAX = 256
FOLDERS_SHOWN = 3
"""Of a PATH, in a sentence: a virtual environment comes first."""


class StartError(Exception):
    """The command cannot be started: `reason` as in mesh.reasons, and a sentence for the user."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    def to_bytes(self) -> bytes:
        return f"{self.reason}\0{self.message}".encode("utf-8", "surrogateescape")

    @classmethod
    def from_bytes(cls, report: bytes) -> StartError:
        reason, _, message = report.decode("utf-8", "surrogateescape").partition("\0")
        return cls(reason, message)


def become_command(
    *,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    working_directory: str | None,
    output: int,
    errors: int,
    report: int,
    before_exec: Callable[[], None],
) -> NoReturn:
    """Become the command, in a child that was just forked. `output`, `errors`, `report` are file descriptors.

    `before_exec` is called first (parent-death signal, control group).
    """
    try:
        before_exec()
        reset_signals()
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        _enter(working_directory)
        _execute(arguments, environment)
    except StartError as error:
        os.write(report, error.to_bytes())
    except BaseException as error:  # noqa: BLE001 - the child's guard: it must not come back
        os.write(
            report, StartError(COMMAND_START_FAILED, f"the command could not be started: {error}").to_bytes()
        )
    finally:
        os._exit(FAILED_START_EXIT_CODE)


def reset_signals() -> None:
    """Every signal at its default, none blocked: whatever Ray, a terminal or nohup left behind."""
    for number in signal.valid_signals():
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # SIGKILL, SIGSTOP and those that the C library keeps for itself
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def find_program(name: str, environment: Mapping[str, str]) -> str:
    """The path of the program, as a shell would find it. Raises StartError."""
    if not name:
        raise StartError(COMMAND_NOT_FOUND, "the command is empty: its first word names the program to run")
    if "/" in name:
        return name
    path = environment.get("PATH", DEFAULT_PATH)
    found_but_unusable = ""
    for directory in path.split(":"):
        candidate = os.path.join(directory or ".", name)
        if not os.path.isfile(_bytes(candidate)):
            continue
        if os.access(_bytes(candidate), os.X_OK):
            return candidate
        found_but_unusable = found_but_unusable or candidate
    if found_but_unusable:
        raise StartError(
            COMMAND_NOT_EXECUTABLE,
            f"'{found_but_unusable}' is not executable: run `chmod +x {found_but_unusable}`,"
            " or start it with its interpreter",
        )
    hint = (
        f"; there is a file './{name}' in the working directory: write ./{name}"
        if os.path.exists(_bytes(name))
        else ""
    )
    folders = list(dict.fromkeys(path.split(":")))  # a login's PATH often names one twice
    rest = f" and {len(folders) - FOLDERS_SHOWN} more" if len(folders) > FOLDERS_SHOWN else ""
    looked_in = ":".join(folders[:FOLDERS_SHOWN]) + rest
    raise StartError(COMMAND_NOT_FOUND, f"command not found: '{name}' (looked in PATH={looked_in}){hint}")


def explain_exec_error(
    error: OSError, path: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> StartError:
    """What a failed execve means, in words."""
    if error.errno == errno.E2BIG:
        return StartError(COMMAND_START_FAILED, explain_too_big(arguments, environment))
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
        return _explain_missing(path)
    if error.errno == errno.EACCES and os.path.isdir(_bytes(path)):
        return StartError(COMMAND_NOT_EXECUTABLE, f"'{path}' is a directory, not a program")
    if error.errno == errno.EACCES:
        return StartError(
            COMMAND_NOT_EXECUTABLE,
            f"'{path}' may not be executed: run `chmod +x {path}`, or start it with its interpreter"
            " (if it is executable, its disk is mounted noexec or a folder above it is closed to us)",
        )
    if error.errno == errno.ENOEXEC:
        return StartError(
            COMMAND_NOT_EXECUTABLE,
            f"'{path}' is not a program for this machine: it has neither a first line like `#!/bin/bash`"
            " nor a format that this processor runs; start a script as `bash SCRIPT` or `python SCRIPT`",
        )
    return StartError(COMMAND_START_FAILED, f"'{path}' could not be started: {error.strerror}")


def explain_too_big(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Which string is too large; or, when none alone is, the sum and the largest."""
    sizes = [
        (f"argument {i} ({_shortened(text)})", len(_bytes(text)) + 1) for i, text in enumerate(arguments)
    ]
    sizes += [
        (f"environment variable {name}", len(_bytes(name)) + len(_bytes(value)) + 2)
        for name, value in environment.items()
    ]
    sizes.sort(key=lambda item: -item[1])
    name, size = sizes[0]
    if size > STRING_BYTES_MAX:
        return (
            f"{name} is too large: {size} bytes, and Linux takes at most {STRING_BYTES_MAX} for one string;"
            " put it into a file and pass the file's name"
        )
    total = sum(size for _, size in sizes)
    largest = ", ".join(f"{name} ({size} bytes)" for name, size in sizes[:3])
    return (
        f"the command's arguments and environment are too large together: {total} bytes, and this machine takes at most"
        f" {_exec_bytes_max()} (a quarter of the stack limit, and no more than 6 MiB); the largest: {largest}"
    )


def _enter(directory: str | None) -> None:
    if directory is None:
        return
    try:
        os.chdir(_bytes(directory))
    except FileNotFoundError:
        raise StartError(
            WORKING_DIR_MISSING, f"the working directory '{directory}' does not exist on this machine"
        ) from None
    except NotADirectoryError:
        raise StartError(
            WORKING_DIR_MISSING, f"the working directory '{directory}' is not a directory"
        ) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise StartError(
            WORKING_DIR_MISSING, f"the working directory '{directory}' cannot be entered: {why}"
        ) from None


def _execute(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    path = find_program(arguments[0] if arguments else "", environment)
    encoded = {_bytes(name): _bytes(value) for name, value in environment.items()}
    try:
        os.execve(_bytes(path), [_bytes(argument) for argument in arguments], encoded)
    except OSError as error:
        raise explain_exec_error(error, path, arguments, environment) from None
    except ValueError:
        raise StartError(COMMAND_START_FAILED, _explain_unusable(arguments, environment)) from None


def _explain_missing(path: str) -> StartError:
    if not os.path.lexists(_bytes(path)):
        return StartError(COMMAND_NOT_FOUND, f"command not found: '{path}' does not exist on this machine")
    interpreter = _interpreter(path)
    if not interpreter:
        return StartError(
            COMMAND_NOT_EXECUTABLE,
            f"'{path}' is there, but what it needs to start is not:"
            " a broken link, or a program built for another system",
        )
    hint = (
        "; the line ends in a carriage return: save it with Unix line ends"
        if interpreter.endswith("\r")
        else ""
    )
    return StartError(
        COMMAND_NOT_EXECUTABLE,
        f"'{path}' is a script whose first line names an interpreter that does not exist: {interpreter!r}{hint}",
    )


def _interpreter(path: str) -> str:
    """The interpreter that a script's first line names; empty when there is none."""
    try:
        file = os.open(_bytes(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        first_line = os.read(file, SHEBANG_BYTES_MAX).split(b"\n")[0]
    except OSError:
        return ""
    finally:
        os.close(file)
    if not first_line.startswith(b"#!"):
        return ""
    words = first_line[2:].strip(b" \t").split(b" ")
    return words[0].decode("utf-8", "replace")


def _explain_unusable(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    for index, argument in enumerate(arguments):
        if "\0" in argument:
            return f"argument {index} holds a NUL character, which no program can receive"
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name:
            return f"{name!r} cannot be the name of an environment variable"
        if "\0" in value:
            return f"the environment variable {name} holds a NUL character, which no program can receive"
    return "the command's arguments or environment cannot be passed to a program"


def _exec_bytes_max() -> int:
    """Linux: a quarter of the stack limit, at least 128 KiB, at most three quarters of 8 MiB (fs/exec.c)."""
    import resource  # only needed on this path

    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    most = 6 * 1024 * 1024
    return (
        most if stack_bytes == resource.RLIM_INFINITY else max(min(stack_bytes // 4, most), STRING_BYTES_MAX)
    )


def _bytes(text: str) -> bytes:
    """UTF-8 whatever our own locale is; bytes that were no UTF-8 come back as they were."""
    return text.encode("utf-8", "surrogateescape")


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
