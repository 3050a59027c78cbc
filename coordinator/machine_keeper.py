"""Keeps as many machines as were asked for: one that is lost is made sure of to be gone, and another one is acquired.

Rules of this file:
1. It looks at what is missing, not at what was lost: a `grow` at the same time, or many losses at once, lead to as many
   machines as are wanted and never to more.
2. A machine that cannot be had is tried again, under another name, after AGAIN_FIRST_S, doubled up to AGAIN_MAX_S.
3. What is on its way is told (`tell_coming`), so that a run that waits can say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from coordinator.providers.base import MachineGone, Provider
from mesh.errors import MeshError

AGAIN_FIRST_S, AGAIN_MAX_S = 1.0, 60.0
GONE_LIMIT_S = 10.0
GONE_LOOK_S = 0.1

_log = logging.getLogger(__name__)


class MachineKeeper:
    """See above. `run` it as long as the deployment lives.

    Args:
        tell_coming: hears the names of all machines that are being acquired, whenever that changes.
        again_first_s: see rule 2.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        tell_coming: Callable[[Sequence[str]], Awaitable[None]],
        again_first_s: float = AGAIN_FIRST_S,
    ) -> None:
        self._provider = provider
        self._tell_coming = tell_coming
        self._again_first_s = again_first_s
        self._coming: set[str] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for gone in self._provider.watch():
                tasks.create_task(self._replace(gone), name=f"in place of {gone.name}")

    async def _replace(self, gone: MachineGone) -> None:
        pause_s = self._again_first_s
        while True:
            try:
                await self._make_sure(gone.name)
                await self._fill()
            except MeshError as error:
                _log.warning("no machine in place of %s yet, again in %g s: %s", gone.name, pause_s, error)
            except Exception:  # noqa: BLE001 - the guard: one machine's fault must not end the watch over all
                _log.exception("no machine in place of %s yet, again in %g s", gone.name, pause_s)
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(AGAIN_MAX_S, pause_s * 2)

    async def _make_sure(self, name: str) -> None:
        """A machine that Ray holds for dead may only be frozen: it is ended, so that it does not come back."""
        await self._provider.release(name)
        try:
            async with asyncio.timeout(GONE_LIMIT_S):
                while not await self._provider.confirm(name):  # noqa: ASYNC110 - a provider is asked
                    await asyncio.sleep(GONE_LOOK_S)
        except TimeoutError:
            _log.warning("%s was lost and is not confirmed to be gone", name)

    async def _fill(self) -> None:
        while (name := await self._provider.vacancy()) is not None:
            self._coming.add(name)
            try:
                await self._tell_coming(sorted(self._coming))
                await self._provider.acquire(name)
                _log.info("%s has joined", name)
            finally:
                self._coming.discard(name)
                await self._tell_coming(sorted(self._coming))
