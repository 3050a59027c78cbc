"""What runs beside everything else: tasks of which nobody waits for the end.

Rules of this file:
1. A fault of ours in one is logged by its name, and is no other's; who owns it can hear of it.
2. Who tries again what fails tries again after a fault of ours, too (`as_errors`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from mesh.errors import InternalError, MeshError

_log = logging.getLogger(__name__)


def guarded_task(
    work: Coroutine[Any, Any, None], *, name: str, on_fault: Callable[[str], object] = lambda why: None
) -> asyncio.Task[None]:
    """For who stops it itself. `on_fault` hears, in words, of a fault of ours that has ended it."""

    def on_done(task: asyncio.Task[None]) -> None:
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            _log.error("%s: a fault of this program", task.get_name(), exc_info=fault)
            on_fault(f"a fault of this program: {fault!r}")

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(on_done)
    return task


@contextlib.contextmanager
def as_errors(what: str) -> Iterator[None]:
    """A fault of ours is logged with its story and raised as InternalError; MeshError and OSError are what they are."""
    try:
        yield
    except (MeshError, OSError):
        raise
    except Exception as fault:
        _log.exception("%s: a fault of this program", what)
        raise InternalError(f"A fault of this program: {fault!r}.") from fault


class GuardedTasks:
    """Of one owner, who stops them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        task = guarded_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self, *, limit_s: float) -> None:
        """Cancels all. May be called again."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)
