"""Signals to the client, as values that a command waits for.

What they mean for `mesh run`, which is what its help says:

| signal  | comes from                     | meaning                                                              |
|---------|--------------------------------|----------------------------------------------------------------------|
| SIGINT  | Ctrl-C                         | cancel the run and wait until it is fenced; a second one: leave      |
| SIGTERM | kill, timeout(1), a CI system  | somebody wants this stopped: as Ctrl-C                               |
| SIGHUP  | the terminal or the connection | nobody asked for anything: the client leaves, the run goes on        |
|         | was closed                     |                                                                      |

A signal that was ignored when the client was started (nohup, a shell's background job) stays ignored.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Result = TypeVar("Result")


class SignalledError(Exception):
    """A signal came while something was under way that has been given up for it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


class Interrupts:
    """The signals of one command; for `with`."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._installed: list[signal.Signals] = []

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _WATCHED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._arrived.put_nowait, number)
                self._installed.append(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._installed:
            loop.remove_signal_handler(number)

    async def next(self) -> signal.Signals:
        """The next signal that arrives, or that arrived and was not taken yet."""
        return await self._arrived.get()

    async def race(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` returns. Raises SignalledError when a signal comes first; `work` has been cancelled then."""
        task = asyncio.create_task(work)
        signalled = asyncio.create_task(self.next())
        try:
            await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not signalled.done():
                return task.result()
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
            raise SignalledError(signalled.result())
        finally:
            signalled.cancel()
            task.cancel()
