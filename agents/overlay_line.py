"""Keeps one member known to its machine's gateway: tells it, and tells it again when the gateway was started anew.

Rules of this file:
1. A gateway knows nothing when it starts (agents/gateway.py). A connection that is held open says when it has ended.
2. Its agent starts it again within a second or so, so that it is waited for: before the command as well. Who cannot be
   told within AGAIN_LIMIT_S is lost, and so is a member whom the gateway refuses.
3. What was told last of each kind is told again, in the order of its first telling.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from agents.gateway_client import GatewayClient
from agents.gateway_wire import Request
from mesh.errors import MeshError, MeshTimeoutError, TransportError
from mesh.net.guarded_tasks import guarded_task

AGAIN_LIMIT_S = 30.0
AGAIN_PAUSE_S = 0.1

_log = logging.getLogger(__name__)
T = TypeVar("T")


class OverlayLine:
    """One member's. `start`, then `tell`, then `stop`."""

    def __init__(self, socket: Path, requests: Sequence[Request], *, on_lost: Callable[[str], None]) -> None:
        self._socket = socket
        self._requests = {type(request): request for request in requests}
        self._on_lost = on_lost
        self._one_at_a_time = asyncio.Lock()
        self._watch: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self.broke_at: float | None = None
        """When the gateway has ended under the member last, and its streams with it; on the monotonic clock."""

    async def start(self) -> None:
        """The gateway knows the member when it returns. Raises MeshError."""
        await patiently(self._begin)
        self._keeping = guarded_task(self._keep(), name="line to the gateway", on_fault=self._on_lost)

    async def tell(self, request: Request) -> None:
        """In place of what was told of this kind, from now on. Raises MeshError."""
        self._requests[type(request)] = request
        async with self._one_at_a_time:
            await ask(self._socket, request)

    async def stop(self) -> None:
        """Tells nothing more. May be called again."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        self._close_watch()

    async def _begin(self) -> None:
        """Watches first: one that ends while it is told is seen to end."""
        self._close_watch()
        try:
            self._watch = await asyncio.open_unix_connection(self._socket)
        except OSError as error:
            raise TransportError(
                f"The gateway at {self._socket} does not answer: {error.strerror}."
            ) from error
        async with self._one_at_a_time:
            await ask(self._socket, *self._requests.values())

    async def _keep(self) -> None:
        while True:
            assert self._watch is not None
            with contextlib.suppress(OSError):
                await self._watch[0].read(1)
            self.broke_at = time.monotonic()
            _log.warning("the gateway has ended: telling the next one")
            try:
                await patiently(self._begin)
            except MeshError as error:
                _log.error("the member is lost: %s", error)
                self._on_lost(error.message)
                return

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch[1].close()
            self._watch = None


async def patiently(attempt: Callable[[], Awaitable[T]]) -> T:
    """Tries until the gateway answers: its agent may be about to start it again. Raises MeshTimeoutError, MeshError."""
    try:
        async with asyncio.timeout(AGAIN_LIMIT_S):
            while True:
                try:
                    return await attempt()
                except (TransportError, MeshTimeoutError) as error:
                    _log.info("the gateway does not answer yet: %s", error)
                await asyncio.sleep(AGAIN_PAUSE_S)
    except TimeoutError:
        raise MeshTimeoutError(
            f"The gateway of this machine ended and was not back within {AGAIN_LIMIT_S:g} s.",
            timeout_s=AGAIN_LIMIT_S,
        ) from None


async def ask(socket: Path, *requests: Request) -> object:
    """Asks one after the other on a connection of their own; the last one's answer. Raises MeshError."""
    client = await GatewayClient.connect(socket)
    try:
        answer = None
        for request in requests:
            answer = await client.ask(request)
        return answer
    finally:
        client.close()
