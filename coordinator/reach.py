"""Whether a machine's kernel answers at all: a sign of a machine that is gone, before it has a lease that could lapse.

Rules of this file:
1. A refused connection is an answer. So is one that something on the way accepts in the machine's place: then nothing
   can be seen from here, and nothing is concluded.
2. One silence says nothing. `SILENCES` in a row, each longer than it takes until a lost packet is sent again, are
   longer than any lease outlives.
3. A process that stands still, or a busy machine, is not silent: its kernel answers. That takes as long as it takes.
"""

from __future__ import annotations

import asyncio

TRY_S = 2.0
"""A lost packet of a handshake is sent again after one second."""
SILENCES = 5


class Reach:
    """Of one machine, while somebody waits for it."""

    def __init__(self) -> None:
        self._silences = 0

    async def is_lost(self, address: str, port: int) -> bool:
        """Tries once. True when it has been silent as often as it takes, without an answer in between."""
        self._silences = 0 if await answers(address, port) else self._silences + 1
        return self._silences >= SILENCES


async def answers(address: str, port: int) -> bool:
    """Whether anything comes back from there, a refusal too. Nothing is sent beyond the handshake."""
    try:
        async with asyncio.timeout(TRY_S):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionError:
        return True
    except OSError:  # TimeoutError is one; so is a route that does not lead there
        return False
    writer.transport.abort()
    return True
