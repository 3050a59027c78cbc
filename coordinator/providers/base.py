"""Where machines come from: the seam between the head and whoever acquires and releases them.

Rules of this file:
1. What is asked for has a name before it is asked for: `acquire` twice with one name is one machine.
2. `release` asks; only `confirm` says that a machine is gone (and, where machines cost money, is paid for no longer).
3. A machine that is lost is not replaced by its provider: `coordinator.machine_keeper` acquires another one, under
   another name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineGone:
    """A machine was lost without having been released."""

    name: str
    message: str


class Provider(Protocol):
    """A set of machines."""

    async def acquire(self, name: str) -> None:
        """Gets a machine and returns when it has joined.

        Raises:
            PlacementError: (MachineRefused, NoCapacity) it cannot be had.
        """
        ...

    async def vacancy(self) -> str | None:
        """A name that nobody had, for a machine that is wanted and not there or on its way; None when none is.

        The caller acquires it: until then it counts as on its way.
        """
        ...

    def watch(self) -> AsyncIterator[MachineGone]:
        """Every loss from now on, each once."""
        ...

    async def release(self, name: str) -> None:
        """Asks for the machine's end; a name that is not there is no error."""
        ...

    async def confirm(self, name: str) -> bool:
        """True once the machine is gone."""
        ...
