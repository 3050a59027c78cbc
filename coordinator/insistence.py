"""Asking again until it is done, or for ever, with pauses that double up to a limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from coordinator.fleet import MemberGoneError
from mesh.errors import MeshError

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


def delays() -> Iterator[float]:
    """Endless waits in seconds: doubling up to a limit."""
    delay_s = RETRY_FIRST_S
    while True:
        yield delay_s
        delay_s = min(RETRY_MAX_S, delay_s * 2)


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats the call until it succeeds. The caller's cancellation ends it, and a member that is gone."""
    for delay_s in delays():
        try:
            return await call()
        except MemberGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - the guard: whatever goes wrong
            may_pass = isinstance(error, MeshError) and error.retryable
            _log.warning("trying again in %.1f s: %s", delay_s, error, exc_info=None if may_pass else error)
        await asyncio.sleep(delay_s)
    raise AssertionError("the delays are endless")


async def for_ever(turn: Callable[[], Awaitable[None]], *, what: str) -> None:
    """One turn after the other, until it is cancelled. One that fails is told of by `what`, and is not the last."""
    waits = delays()
    while True:
        try:
            await turn()
        except Exception as error:  # noqa: BLE001 - the guard: nobody would begin again what has to go on for ever
            delay_s = next(waits)
            is_told = error if not isinstance(error, MeshError) else None
            _log.warning("%s: failed, again in %.1f s: %s", what, delay_s, error, exc_info=is_told)
            await asyncio.sleep(delay_s)
        else:
            waits = delays()


async def discard(call: Awaitable[object]) -> None:
    await call


async def insist_on(call: Callable[[], Awaitable[None]]) -> None:
    """`insist` for calls without a result."""
    await insist(call)
