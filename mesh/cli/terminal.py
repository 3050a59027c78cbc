"""What goes where: results on stdout, everything about them on stderr.

Rules of this file:
1. stdout carries results only, so that it can be piped; progress, warnings and summaries go to stderr.
2. Colours and moving lines appear on terminals only, and never with `--tty-free` or $NO_COLOR.
3. Text from elsewhere (messages, names) is shown without its control characters.
4. A reader of stdout that goes away is no error: `OutputClosedError` ends the command quietly.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import unicodedata
from types import TracebackType
from typing import Self, TextIO

SPINNER_DELAY_S = 1.0
SPINNER_FRAME_S = 0.12
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_FRAMES = "|/-\\"
_CLEAR_LINE = "\r\x1b[2K"
_COLOURS = {
    "dim": "2",
    "bold": "1",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
}


class OutputClosedError(Exception):
    """Whoever read our standard output has gone."""


def printable(text: str) -> str:
    """The text on one line, without control characters (a tab stays a blank)."""
    cleaned = (
        " " if c in "\t\n\r" else c if unicodedata.category(c) not in ("Cc", "Cs") else "�" for c in text
    )
    return "".join(cleaned)


def is_terminal(stream: TextIO) -> bool:
    """True when a person looks at this stream."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Terminal:
    """Standard output and standard error of one command."""

    def __init__(self, *, tty_free: bool = False) -> None:
        self.stdout_is_terminal = is_terminal(sys.stdout) and not tty_free
        self.stderr_is_terminal = is_terminal(sys.stderr) and not tty_free
        self._no_color = bool(os.environ.get("NO_COLOR"))
        self._spinner: Spinner | None = None

    def paint(self, text: str, style: str, *, stderr: bool = False) -> str:
        """The text in a colour, where there are colours."""
        shown = self.stderr_is_terminal if stderr else self.stdout_is_terminal
        if not shown or self._no_color:
            return text
        return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m"

    def out(self, text: str) -> None:
        """A result, with a newline behind it. Raises OutputClosedError."""
        write_out((text + "\n").encode("utf-8", "backslashreplace"))

    def note(self, text: str) -> None:
        """A line about what goes on, to stderr."""
        self._to_stderr(text)

    def warn(self, text: str) -> None:
        """Something that the user should know, to stderr."""
        self._to_stderr(self.paint("warning: ", "yellow", stderr=True) + printable(text))

    def _to_stderr(self, line: str) -> None:
        if self.stderr_is_terminal:
            line = _CLEAR_LINE + line
        write_err(line + "\n")

    def working(self, text: str) -> Spinner:
        """Shows that something is under way, once it has taken a second; for `async with`."""
        return Spinner(text, shown=self.stderr_is_terminal)


class Spinner:
    """A moving line on a terminal's stderr. Does nothing elsewhere."""

    def __init__(self, text: str, *, shown: bool) -> None:
        self._text = text
        self._shown = shown
        self._task: asyncio.Task[None] | None = None

    def say(self, text: str) -> None:
        """Replaces the text."""
        self._text = text

    async def __aenter__(self) -> Self:
        if self._shown:
            self._task = asyncio.create_task(self._spin(), name="spinner")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes the line away. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            write_err(_CLEAR_LINE)

    async def _spin(self) -> None:
        await asyncio.sleep(SPINNER_DELAY_S)
        encoding = (sys.stderr.encoding or "").lower()
        frames = _FRAMES if encoding.startswith("utf") else _PLAIN_FRAMES
        step = 0
        while True:
            write_err(f"{_CLEAR_LINE}{frames[step % len(frames)]} {self._text}")
            step += 1
            await asyncio.sleep(SPINNER_FRAME_S)


def write_out(data: bytes) -> None:
    """Bytes to standard output, all of them, now. Raises OutputClosedError.

    The descriptor is written to directly: a thread that hangs in a write must not hold the lock of `sys.stdout`,
    which the interpreter takes when it ends.
    """
    try:
        _write_all(1, data)
    except OSError as error:
        raise OutputClosedError from error


def write_err(text: str) -> None:
    """Text to standard error; what cannot be written there has nobody to be told about."""
    try:
        _write_all(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        return


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # somebody else made this terminal non-blocking
            select.select([], [descriptor], [])
