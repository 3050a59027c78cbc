"""The mesh's books in the state folder: machines, join tokens, relays, and what relays have carried.

Rules of this file:
1. A change is on disk before anybody is told of it (`save` returns then).
2. A large book takes long to be put into words: that is done beside the loop, of a copy made at once.
3. A book that cannot be read is no reason to forget it: the head does not start.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from coordinator.deployment import state_errors
from coordinator.mesh_machines import MeshMachines
from coordinator.mesh_relays import MeshRelays
from coordinator.relay_ledger import RelayLedger
from mesh.errors import DeploymentError
from mesh.net.tokens import TokenBook, TokenRecord
from mesh.private_writer import PrivateWriter
from mesh.reasons import Reason

MACHINES_NAME = "mesh-machines.json"
TOKENS_NAME = "join-tokens.json"
RELAYS_NAME = "mesh-relays.json"
LEDGER_NAME = "relay-ledger.json"
NAMES = (MACHINES_NAME, TOKENS_NAME, RELAYS_NAME, LEDGER_NAME)


class MeshBooks:
    """Raises DeploymentError, StorageError."""

    def __init__(self, state_path: Path) -> None:
        self.path = state_path
        self.machines = MeshMachines()
        self.tokens = TokenBook()
        self.relays = MeshRelays()
        self.ledger = RelayLedger()
        self._writer = PrivateWriter()

    def load(self) -> None:
        """Blocking; once."""
        machines, tokens, relays, ledger = map(self._read, NAMES)
        try:
            if machines is not None:
                self.machines = MeshMachines.from_json(json.loads(machines))
            if tokens is not None:
                records = [TokenRecord(**words) for words in json.loads(tokens)]
                self.tokens = TokenBook(records={record.id: record for record in records})
            if relays is not None:
                self.relays = MeshRelays.from_json(json.loads(relays))
            if ledger is not None:
                self.ledger = RelayLedger.from_json(json.loads(ledger))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeploymentError(
                f"What is known of the mesh's machines in {self.path} is damaged: {error!r}.",
                hint=f"Put copies of {', '.join(NAMES)} back, or remove them: then machines and relays have to "
                "join with a new token.",
                reason=Reason.UNREADABLE,
                path=str(self.path),
            ) from error

    async def save(self, name: str) -> None:
        """The book of this name, as it is now; on disk when it returns."""
        with state_errors(self.path):
            await self._writer.write(self.path / name, self._text_of_now(name))

    def _text_of_now(self, name: str) -> Callable[[], str]:
        """Makes the text of the book as it is at this moment, later and in another thread: entries are frozen."""
        if name == TOKENS_NAME:
            records = list(self.tokens.records.values())
            return lambda: json.dumps([asdict(record) for record in records])
        books: dict[str, MeshMachines | MeshRelays | RelayLedger]
        books = {MACHINES_NAME: self.machines, RELAYS_NAME: self.relays, LEDGER_NAME: self.ledger}
        book = books[name].copy()
        return lambda: json.dumps(book.to_json())

    def _read(self, name: str) -> str | None:
        with state_errors(self.path):
            try:
                return (self.path / name).read_text(encoding="utf-8")
            except FileNotFoundError:
                return None
