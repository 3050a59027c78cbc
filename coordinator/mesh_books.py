"""The mesh's two books, of machines and of join tokens, in the state folder.

Rules of this file:
1. A change is on disk before anybody is told of it (`save` returns then).
2. A book that cannot be read is no reason to forget it: the head does not start.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from coordinator.deployment import state_errors, write_private
from coordinator.mesh_machines import MeshMachines
from mesh.errors import DeploymentError
from mesh.net.tokens import TokenBook, TokenRecord
from mesh.reasons import Reason

MACHINES_NAME = "mesh-machines.json"
TOKENS_NAME = "join-tokens.json"


class MeshBooks:
    """Raises DeploymentError, StorageError."""

    def __init__(self, state_path: Path) -> None:
        self._path = state_path
        self.machines = MeshMachines()
        self.tokens = TokenBook()

    def load(self) -> None:
        """Blocking; once."""
        machines, tokens = self._read(MACHINES_NAME), self._read(TOKENS_NAME)
        try:
            if machines is not None:
                self.machines = MeshMachines.from_json(json.loads(machines))
            if tokens is not None:
                records = [TokenRecord(**words) for words in json.loads(tokens)]
                self.tokens = TokenBook(records={record.id: record for record in records})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeploymentError(
                f"What is known of the mesh's machines in {self._path} is damaged: {error!r}.",
                hint=f"Put copies of {MACHINES_NAME} and {TOKENS_NAME} back, or remove both: then every machine has to "
                "join with a new token.",
                reason=Reason.UNREADABLE,
                path=str(self._path),
            ) from error

    def machines_text(self) -> str:
        return json.dumps(self.machines.to_json())

    def tokens_text(self) -> str:
        return json.dumps([asdict(record) for record in self.tokens.records.values()])

    def write(self, name: str, text: str) -> None:
        """Blocking; whole or not at all."""
        with state_errors(self._path):
            write_private(self._path / name, text)

    def _read(self, name: str) -> str | None:
        with state_errors(self._path):
            try:
                return (self._path / name).read_text(encoding="utf-8")
            except FileNotFoundError:
                return None
