"""Asking a service that may be restarting: again and again, for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mesh.errors import MeshTimeoutError, TransportError

ANSWER_LIMIT_S = 10.0
"""A restarted coordinator has read its journal long before; past this the caller is told to come back."""
BACKOFF_FIRST_S = 0.05
BACKOFF_LONGEST_S = 1.0

Answer = TypeVar("Answer")


async def ask(call: Callable[[], Awaitable[Answer]], *, limit_s: float = ANSWER_LIMIT_S) -> Answer:
    """The answer of `call`, which is made again while the coordinator cannot be asked, for at most `limit_s`.

    Only for calls that may take effect twice. Raises the last TransportError, and at once whatever else is
    raised.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + limit_s
    pause_s = BACKOFF_FIRST_S
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                return await call()
        except TimeoutError as error:
            raise TransportError(
                f"The coordinator has not answered within {limit_s:g} s.",
                hint="It may be restarting; runs go on meanwhile. Try again in a moment.",
            ) from error
        except (TransportError, MeshTimeoutError):
            if clock() + pause_s >= deadline:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, BACKOFF_LONGEST_S)
