"""Who comes back to a head that takes it for one that is still there: it asks until the head has noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agents.told import TOLD
from mesh.errors import ConflictError
from mesh.reasons import Reason

IN_USE_LIMIT_S = 60.0
"""How long a head may believe that somebody is still there whose connection was cut without a word: 30 s."""
IN_USE_AGAIN_S = 2.0

T = TypeVar("T")


async def ask_until_free(ask: Callable[[], Awaitable[T]], *, patience_s: float) -> T:
    """What the head answers. Raises what `ask` raises; IdentityInUse only when patience is over."""
    deadline = asyncio.get_running_loop().time() + patience_s
    was_said = False
    while True:
        try:
            return await ask()
        except ConflictError as error:
            late = asyncio.get_running_loop().time() > deadline
            if error.reason is not Reason.IDENTITY_IN_USE or late:
                raise
            if not was_said:
                TOLD.info("%s Asking again, for %g s at most.", error.message, patience_s)
                was_said = True
        await asyncio.sleep(IN_USE_AGAIN_S)
