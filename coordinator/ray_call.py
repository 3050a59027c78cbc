"""How a coroutine asks Ray: its calls block, so each runs in a thread, and its errors become ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ray.exceptions import RayError

from mesh.errors import TransportError

T = TypeVar("T")


async def ask_ray(call: Callable[..., T], *arguments: Any) -> T:
    """A blocking call into Ray. What Ray cannot do now may be asked again. ValueError: no such thing."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except ValueError:
        raise
    except (RayError, RuntimeError, OSError) as error:
        raise TransportError(f"Ray cannot be asked now: {error}.") from error
