"""How a machine is told to do itself harm: a task on it, through Ray (`agents.chaos`).

Rules of this file:
1. The machine is asked first whether it can. Its answer also means that a worker is there: the harm then comes at once.
2. A machine that has killed itself does not answer. That is no error, and not waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agents import chaos
from mesh.errors import InternalError, TransportError
from mesh.states import HarmKind

ASK_LIMIT_S = 20.0
DO_LIMIT_S = 10.0
LAST_WORD_LIMIT_S = 1.0

_log = logging.getLogger(__name__)


async def why_not(order: chaos.HarmOrder, node_id: str) -> str | None:
    """See `Fleet.why_no_harm`."""
    try:
        async with asyncio.timeout(ASK_LIMIT_S):
            refusal: str | None = await _there(chaos.why_not, order, node_id)
            return refusal
    except (TimeoutError, RayError) as error:
        return f"{order.machine} does not answer ({type(error).__name__})."


async def left_of(order: chaos.HarmOrder, node_id: str) -> str | None:
    """See `Fleet.left_of_harm`."""
    try:
        async with asyncio.timeout(ASK_LIMIT_S):
            left: str | None = await _there(chaos.left_of, order, node_id)
            return left
    except (TimeoutError, RayError) as error:
        raise TransportError(f"{order.machine} does not answer ({type(error).__name__}).") from error


async def perform(order: chaos.HarmOrder, node_id: str) -> None:
    """See `Fleet.harm`."""
    limit_s = LAST_WORD_LIMIT_S if order.kind is HarmKind.LOSE_MACHINE else DO_LIMIT_S
    answer = asyncio.ensure_future(_answer(_there(chaos.perform, order, node_id)))
    await asyncio.wait([answer], timeout=limit_s)
    if not answer.done():
        answer.cancel()
        return
    error = answer.exception()
    if isinstance(error, RayTaskError):
        raise InternalError(f"{order.machine} failed at it: {error.cause!r}.") from error
    if error is not None:
        _log.info("%s says nothing any more: %s", order.machine, type(error).__name__)


async def _answer(reference: Any) -> Any:
    return await reference


def _there(call: Callable[[chaos.HarmOrder], Any], order: chaos.HarmOrder, node_id: str) -> Any:
    task: Any = ray.remote(num_cpus=0, max_retries=0)(call)
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(order)
