"""How much goes into a stream whose reader does not read."""

from __future__ import annotations

import asyncio


async def until_stuck(transport: asyncio.Transport) -> int:
    """Writes until nothing moves any more; how much was written. Bounded: sockets' buffers and a chunk per hop."""
    sent, idle = 0, 0
    while idle < 20:
        if transport.get_write_buffer_size() == 0:
            transport.write(b"z" * 1_000_000)
            sent, idle = sent + 1_000_000, 0
            assert sent < 200_000_000, "somebody takes all of it and keeps it"
        else:
            idle += 1
        await asyncio.sleep(0.02)
    return sent
