"""The journal's seam.

Rules of this file:
1. When a method returns, what it wrote survives a crash of the process and of the machine.
2. A method that raises wrote nothing; `StorageError` means "try again later", and reading still works.
3. A run's record is replaced as a whole, together with the events that tell the change, in one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.core.effects import Announcement
from mesh.ids import RunUid


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run as it was last written. `job` is what the user submitted, `record` the gang's state."""

    uid: RunUid
    name: str
    job: dict[str, Any]
    record: dict[str, Any]
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """One announcement. `seq` grows over all runs and is never reused; `at` is wall-clock seconds."""

    seq: int
    at: float
    uid: RunUid
    run: str
    epoch: int
    rank: int | None
    kind: str
    reason: str | None
    message: str


class Journal(Protocol):
    """One deployment's memory. One writer at a time."""

    async def open(self) -> None:
        """Makes the tables when they are missing. Raises StorageError."""
        ...

    async def close(self) -> None: ...

    async def create_run(self, row: RunRow, *, request_id: str | None) -> RunRow:
        """Writes a new run.

        Returns `row`, or, when `request_id` was used before, the run of that first request.
        Raises ConflictError (AlreadyExists) when an undeleted run has the name.
        """
        ...

    async def commit(
        self, uid: RunUid, record: dict[str, Any], announcements: Sequence[Announcement], at: float
    ) -> None:
        """Replaces a run's record and adds its events."""
        ...

    async def runs(self) -> list[RunRow]:
        """Every undeleted run, oldest first. What cannot be read of a row is empty there, and stops nothing."""
        ...

    async def delete_run(self, uid: RunUid, at: float) -> None:
        """Forgets a run: its name is free again, its events are gone, and so are the values of its variables."""
        ...

    async def uncleared(self) -> list[RunUid]:
        """Deleted runs whose checkpoints may still be in their store."""
        ...

    async def cleared(self, uid: RunUid) -> None:
        """They are not any more."""
        ...

    async def keep(self, name: str, text: str) -> None:
        """Keeps one text of the deployment under a name, in place of what was kept there."""
        ...

    async def kept(self, name: str) -> str | None:
        """None when nothing is kept under this name."""
        ...

    async def events(self, *, after: int, uid: RunUid | None, limit: int) -> list[EventRow]:
        """At most `limit` events with `seq > after`, by `seq`."""
        ...
