"""Whether harm that was done for a time is over when it should be. Asked of the machine itself."""

from __future__ import annotations

import asyncio

from agents.chaos import HarmOrder
from coordinator.fleet import Fleet
from mesh.errors import MeshError

LOOK_AFTER_S = 5.0
"""How long after its end a machine is asked; and until one that was slow to answer is asked again."""
LOOKS_MAX = 3


async def what_is_left(fleet: Fleet, order: HarmOrder, seconds: float) -> str | None:
    """Waits until the harm should be over. Returns what is still wrong, in a sentence; None when nothing is."""
    await asyncio.sleep(seconds + LOOK_AFTER_S)
    left: str | None = None
    for _ in range(LOOKS_MAX):
        try:
            left = await fleet.left_of_harm(order)
            break
        except MeshError as error:
            left = f"cannot be asked: {error.message}"
        await asyncio.sleep(LOOK_AFTER_S)
    if left is None:
        return None
    return f"A rehearsed fault was to be over: {order.machine} (rank {order.incarnation.rank}) {left}"
