"""Writes private files beside the loop, one after the other in the order of asking.

Rules of this file:
1. Each has its turn also when who asked is cancelled: a thread that has begun goes on, and must not meet the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mesh.private_files import write_private


class PrivateWriter:
    """Of the files of one folder."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="private writer")

    async def write(self, path: Path, text: str | Callable[[], str]) -> None:
        """See `write_private`. A text that takes long to make is made beside the loop, too, when it is a function."""

        def work() -> None:
            write_private(path, text if isinstance(text, str) else text())

        await asyncio.get_running_loop().run_in_executor(self._thread, work)
