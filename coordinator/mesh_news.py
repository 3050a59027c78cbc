"""Who waits for news of the mesh, machines and relays alike, and how they are told.

Rules of this file:
1. Whoever follows says what it has heard last; a head that began again has other versions, so everybody hears it all.
2. Who asked and does not wait any more is no follower, within FOLLOW_LOOK_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from mesh.errors import TransportError
from mesh.ids import MachineName
from mesh.reasons import Reason

FOLLOW_LIMIT_S = 20.0
FOLLOWS_MAX = 8
"""Questions of one name that wait: an agent has one, and for a moment those of connections that broke."""
FOLLOW_LOOK_S = 0.5
"""Between two looks whether who follows is still there."""
NUMBER_DIGITS_MAX = 18
"""Of the number of news that somebody says to have heard."""


class MeshNewsroom:
    """One head's. Made on the loop.

    Args:
        changes: how often what is told has changed; only rises.
        on_change: called whenever there is something to tell.
    """

    def __init__(self, *, changes: Callable[[], int], on_change: Callable[[], None]) -> None:
        self._changes = changes
        self._on_change = on_change
        self._life = secrets.token_hex(4)
        self._changed = asyncio.Event()
        self._following: Counter[MachineName] = Counter()
        self._heard: dict[MachineName, int] = {}
        """The number of the news that each has heard last, in this life."""

    def version(self) -> str:
        """Of everything that could be told now."""
        return f"{self._life}.{self.number()}"

    def number(self) -> int:
        """Of the news that could be told now; only rises in a life of the head."""
        return self._changes()

    def lacking(self, names: Iterable[MachineName], number: int) -> set[MachineName]:
        """Those that have not asked for more after they heard this news or later ones. Forgets who is not named."""
        wanted = set(names)
        self._heard = {name: heard for name, heard in self._heard.items() if name in wanted}
        return {name for name in wanted if self._heard.get(name, -1) < number}

    def tell(self) -> None:
        """Something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def is_followed(self, name: MachineName) -> bool:
        """Whether somebody who has shown this name's secret waits right now."""
        return self._following[name] > 0

    async def until_new(self, name: MachineName, after: str, *, is_gone: Callable[[], bool]) -> None:
        """Returns when the version is another one, when who asked has gone, or after a while.

        Raises TransportError (LimitExceeded) when too many questions of this name wait already.
        """
        if self._following[name] >= FOLLOWS_MAX:
            raise TransportError(
                f"{FOLLOWS_MAX} questions of {name} wait for news already.",
                hint="One agent asks one question at a time: is there a copy of it?",
                reason=Reason.LIMIT_EXCEEDED,
            )
        life, _, number = after.partition(".")
        if (
            life == self._life
            and number.isascii()
            and number.isdecimal()
            and len(number) <= NUMBER_DIGITS_MAX
        ):
            self._heard[name] = min(int(number), self.number())
        with self._followed(name):
            deadline = asyncio.get_running_loop().time() + FOLLOW_LIMIT_S
            while self.version() == after and not is_gone():
                left_s = deadline - asyncio.get_running_loop().time()
                if left_s <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, FOLLOW_LOOK_S)):
                        await self._changed.wait()

    @contextlib.contextmanager
    def _followed(self, name: MachineName) -> Iterator[None]:
        self._following[name] += 1
        try:
            yield
        finally:
            self._following[name] -= 1
            if not self._following[name]:
                del self._following[name]
