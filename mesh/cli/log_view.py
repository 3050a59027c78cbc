"""Lines of several ranks on one terminal, or in one pipe.

A preview of an unfinished line (a progress bar) is shown on a terminal only, at the bottom, and replaced by what
comes next; in a pipe every line comes once, when it is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
import time
from collections.abc import Mapping
from typing import Any

from mesh.cli.terminal import OutputClosedError, Terminal, write_err, write_out

BUFFER_CHARACTERS_MAX = 1024 * 1024
_RANK_COLOURS = ("blue", "magenta", "green", "yellow")
_CLEAR_LINE = "\r\x1b[2K"


class LogView:
    """Turns lines into text. Pure but for the terminal's width and what it last showed.

    Args:
        prefixed: say which rank a line is of.
        epochs: say also which epoch.
    """

    def __init__(
        self, terminal: Terminal, *, prefixed: bool, epochs: bool = False, timestamps: bool = False
    ) -> None:
        self._terminal = terminal
        self._prefixed = prefixed
        self._epochs = epochs
        self._timestamps = timestamps
        self._preview_shown = False

    def render(self, line: Mapping[str, Any]) -> str:
        """What to write for this line; empty for a preview that nobody would see."""
        if line["partial"]:
            return self._preview(line) if self._terminal.stdout_is_terminal else ""
        end = "" if line["continued"] and not self._prefixed else "\n"
        return f"{self._clear()}{self._prefix(line)}{line['text']}{end}"

    def finish(self) -> str:
        """What to write at the end."""
        return self._clear()

    def _clear(self) -> str:
        shown, self._preview_shown = self._preview_shown, False
        return _CLEAR_LINE if shown else ""

    def _preview(self, line: Mapping[str, Any]) -> str:
        room = shutil.get_terminal_size().columns - 1 - len(self._plain_prefix(line))
        cleared = self._clear()
        self._preview_shown = True
        return f"{cleared}{self._prefix(line)}{line['text'][-max(10, room) :]}"

    def _prefix(self, line: Mapping[str, Any]) -> str:
        plain = self._plain_prefix(line)
        if not plain:
            return ""
        return self._terminal.paint(plain, _RANK_COLOURS[line["rank"] % len(_RANK_COLOURS)])

    def _plain_prefix(self, line: Mapping[str, Any]) -> str:
        stamp = ""
        if self._timestamps:
            at = line["at"]
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at * 1000) % 1000:03d}Z "
        if not self._prefixed:
            return stamp
        epoch = f" epoch {line['epoch']}" if self._epochs else ""
        return f"{stamp}[rank {line['rank']}{epoch}] "


def as_json(line: Mapping[str, Any]) -> str:
    """A line for programs: one JSON object."""
    return json.dumps(line, ensure_ascii=False) + "\n"


class OutputPump:
    """Writes text to stdout (or stderr) in a thread, so that a slow reader never blocks Ctrl-C.

    What comes in while a write is under way is written together next. At most BUFFER_CHARACTERS_MAX wait; then `put`
    waits, and so does the stream that feeds it.
    """

    def __init__(self, *, to_stderr: bool = False) -> None:
        self._to_stderr = to_stderr
        self._parts: list[str] = []
        self._size = 0
        self._changed = asyncio.Condition()
        self._failure: OutputClosedError | None = None
        self._ended = False
        self._task = asyncio.create_task(self._write_on(), name="output")

    @property
    def waiting_characters(self) -> int:
        """How much has been taken over and is not written yet."""
        return self._size

    async def put(self, text: str) -> None:
        """Takes text over. Raises OutputClosedError once the reader has gone."""
        async with self._changed:
            while self._size >= BUFFER_CHARACTERS_MAX and self._failure is None:
                await self._changed.wait()
            if self._failure is not None:
                raise self._failure
            self._parts.append(text)
            self._size += len(text)
            self._changed.notify_all()

    async def drain(self) -> None:
        """Returns when everything has been written. Raises OutputClosedError."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()
        await self._task
        if self._failure is not None:
            raise self._failure

    async def _write_on(self) -> None:
        while True:
            async with self._changed:
                while not self._parts and not self._ended:
                    await self._changed.wait()
                if not self._parts:
                    return
                text = "".join(self._parts)
                self._parts.clear()
            failure = await self._write_in_thread(text)
            if failure is not None:
                await self._fail(failure)
                return
            async with self._changed:
                self._size -= len(text)
                self._changed.notify_all()

    async def _fail(self, error: OutputClosedError) -> None:
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def _write_in_thread(self, text: str) -> OutputClosedError | None:
        """A thread for every write: one that never returns must not keep the process from ending."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[OutputClosedError | None] = loop.create_future()

        def settle(failure: OutputClosedError | None) -> None:
            if not written.done():
                written.set_result(failure)

        def write() -> None:
            failure = None
            try:
                if self._to_stderr:
                    write_err(text)
                else:
                    write_out(text.encode("utf-8", "backslashreplace"))
            except OutputClosedError as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, failure)

        threading.Thread(target=write, name="write", daemon=True).start()
        return await written
