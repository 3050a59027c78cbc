"""What a member gets ready on its machine before it goes to the barrier: folders and the rendezvous port.

Layout, below the machine's folder:

    runs/<uid>/<rank>/state                      the rank's state folder, kept over epochs
    runs/<uid>/<rank>/epochs/<epoch>-<token>/    one life: spool/, checkpointing/, error.json

Rules of this file:
1. Nothing here runs the user's code, and nothing talks to another machine.
2. What the machine cannot do (full, not writable, no free port) is a MeshError with the reason a user reads.
3. Blocking: call it in a thread.
4. An incarnation is prepared once on its machine. Its actor may have died after the barrier opened, and a coordinator
   that was away meanwhile orders it again: the store lets it pass as long as its lease is not over, and a second
   command would start beside the first. So what is left of the first is ended, and this one takes no part.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agents import machine, process_tree
from agents.core.events import Arrival
from agents.signing_in import sign_in
from mesh.errors import ConflictError, StorageError
from mesh.ids import Incarnation, RunUid
from mesh.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where one incarnation's files are."""

    state: Path
    life: Path

    @property
    def spool(self) -> Path:
        return self.life / "spool"

    @property
    def error_file(self) -> Path:
        """What TORCHELASTIC_ERROR_FILE names."""
        return self.life / "error.json"

    @property
    def checkpointing(self) -> Path:
        """Links and copies of what is being stored: this life's own, since a call that hangs in a store may end, and
        clean up, in the middle of the next life."""
        return self.life / "checkpointing"

    @classmethod
    def of(cls, incarnation: Incarnation, *, machine_dir: Path) -> Folders:
        rank_dir = machine_dir / "runs" / incarnation.run_uid / str(incarnation.rank)
        return cls(
            state=rank_dir / "state",
            life=rank_dir / "epochs" / f"{incarnation.epoch}-{incarnation.token}",
        )


@dataclass(slots=True)
class Preparation:
    """Everything that was made ready; `release` lets go of it."""

    folders: Folders
    arrival: Arrival
    port: machine.PortReservation | None

    def release(self, *, keep_output: bool) -> None:
        """Lets go of the port; removes this life's folder unless its output was not delivered. Idempotent."""
        if self.port is not None:
            self.port.release()
        if not keep_output:
            shutil.rmtree(self.folders.life, ignore_errors=True)


def prepare(incarnation: Incarnation, *, machine_dir: Path, address: str) -> Preparation:
    """Makes the folders and, on rank 0, reserves the rendezvous port.

    Raises:
        ConflictError: this incarnation was prepared here before (rule 4).
        StorageError: the folders cannot be made.
        PlacementError: no port is free.
    """
    folders = Folders.of(incarnation, machine_dir=machine_dir)
    if folders.life.exists():
        process_tree.kill_incarnation(str(incarnation))
        raise ConflictError(
            f"Rank {incarnation.rank} has begun on this machine before, and its agent has died since.",
            reason=Reason.PREPARATION_FAILED,
        )
    if not os.path.lexists(folders.state):  # what a life before this one has put there is for the restore
        _make(folders.state)
    for folder in (folders.life, folders.spool):
        _make(folder)
    with _storage_errors(folders.life):
        is_open = sign_in(folders.life)
    if not is_open:
        raise ConflictError(
            f"Rank {incarnation.rank} was given up on this machine.", reason=Reason.PREPARATION_FAILED
        )
    port = machine.reserve_port() if incarnation.rank == 0 else None
    arrival = Arrival(address=address, master_port=0 if port is None else port.port)
    return Preparation(folders=folders, arrival=arrival, port=port)


def _make(folder: Path) -> None:
    with _storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(
            f"The folder {folder} cannot be made on this machine: {error.strerror}.",
            reason=Reason.STORAGE_FULL if is_full else Reason.STATE_NOT_WRITABLE,
            path=str(folder),
        ) from error


def remove_run(run_uid: RunUid, *, machine_dir: Path) -> None:
    """Removes everything that a run's ranks kept on this machine. Nothing there is no error."""
    shutil.rmtree(machine_dir / "runs" / run_uid, ignore_errors=True)
