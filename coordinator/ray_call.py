"""How a coroutine asks Ray: its calls block, so each runs in a thread, and its errors become ours.

The threads are Ray's alone: what takes long for another reason (warming a machine, a disk) holds up no order and no
fence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ray.exceptions import RayError

from mesh.errors import TransportError

THREADS = 32

T = TypeVar("T")
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ask ray")


async def ask_ray(call: Callable[..., T], *arguments: Any) -> T:
    """A blocking call into Ray. What Ray cannot do now may be asked again. ValueError: no such thing."""
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, call, *arguments)
    except ValueError:
        raise
    except (RayError, RuntimeError, OSError) as error:
        raise TransportError(f"Ray cannot be asked now: {error}.") from error
