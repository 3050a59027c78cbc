"""Who is told to stop while it asks to be taken in does not wait for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives; None when the stop comes first: it has been cancelled, and is over, then. Raises as `work`."""
    working = asyncio.create_task(work, name="until it is told to stop")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopped.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
