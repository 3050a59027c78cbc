"""The state folder of a deployment, as the head process owns it.

Rules of this file:
1. One head per folder: `claim` takes a lock that lives as long as the process; whoever comes second is told the pid.
2. Secrets are made once per folder and readable by its owner only.
3. Machines keep their names and addresses over restarts; a name is never given to another machine.
4. What has to lie outside the folder (sockets, when the folder's path is too long for them) is noted in the folder
   before it is made, so that a head that was killed leaves nothing that the next one does not take away.
5. Every `OSError` of the folder comes out as a `MeshError` that says what is wrong with the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mesh.deployment import LOCK_NAME, STATE_VARIABLE
from mesh.errors import DeploymentError, MeshError, SpecError, StorageError
from mesh.private_files import write_private
from mesh.reasons import Reason

MACHINES_MAX = 64
"""Simulated machines of one deployment: each is a raylet and a few processes on this host."""
GPUS_PER_MACHINE_MAX = 8
SOCKET_PATH_BYTES_MAX = 107
"""Linux: `sun_path` holds 108 bytes, the last of them zero."""
SOCKET_NAME_LONGEST = "000.plasma"
SECRET_BYTES = 32
PROBE_BYTES = 64 * 1024
"""A deployment that cannot write this much cannot journal a run."""
OUTSIDE_PREFIX = "gangmesh-"

_GPU_TYPE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,38}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShape:
    """The accelerators that every simulated machine declares."""

    type: str
    count: int

    @classmethod
    def parse(cls, text: str) -> GpuShape:
        """From `H100:8`. Raises SpecError."""
        kind, separator, count = text.rpartition(":")
        if not separator or not _GPU_TYPE.fullmatch(kind) or not re.fullmatch(r"[0-9]{1,3}", count):
            raise SpecError(
                f"--gpu takes TYPE:COUNT, such as H100:8; got {text!r}.", field="--gpu", got=text[:80]
            )
        if not 1 <= int(count) <= GPUS_PER_MACHINE_MAX:
            raise SpecError(
                f"--gpu takes 1 to {GPUS_PER_MACHINE_MAX} accelerators per machine; got {count}.",
                field="--gpu",
                got=count,
            )
        return cls(type=kind, count=int(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The simulated machines of a folder.

    `subnet` is the second and third byte of their addresses, drawn once, so that two deployments on one host
    have different ones. `next_index` is above every index that was ever given. `indexes` are those of the
    machines there are, oldest first.
    """

    subnet: tuple[int, int]
    next_index: int = 1
    indexes: tuple[int, ...] = ()

    @classmethod
    def draw(cls) -> Inventory:
        """An empty one. 127.0.x.y is left alone: people use it by hand."""
        return cls(subnet=(1 + secrets.randbelow(254), secrets.randbelow(256)))

    def with_count(self, count: int) -> Inventory:
        """The first `count` machines of this one, with new ones added where there are fewer."""
        missing = max(0, count - len(self.indexes))
        added = tuple(range(self.next_index, self.next_index + missing))
        return replace(self, indexes=(*self.indexes, *added)[:count], next_index=self.next_index + missing)

    def without(self, index: int) -> Inventory:
        return replace(self, indexes=tuple(i for i in self.indexes if i != index))

    def address(self, index: int) -> str:
        """A loopback address of the machine's own (Linux answers on all of 127.0.0.0/8)."""
        return f"127.{self.subnet[0]}.{self.subnet[1]}.{1 + index % 254}"


def machine_name(index: int) -> str:
    return f"local-{index}"


class StateFolder:
    """A claimed state folder. Make one with `claim`."""

    def __init__(self, path: Path, *, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock
        self.ray = path / "ray"
        self.machines = path / "machines"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.head_log = path / "head.log"
        self._outside_note = path / "outside"
        self._inventory = path / "machines.json"
        self._joined = path / "joined"

    @property
    def is_ours(self) -> bool:
        """False once the folder was removed, or its lock is another file: nobody finds this deployment any more."""
        if self._lock is None:
            return True
        try:
            return os.path.samestat((self.path / LOCK_NAME).stat(), os.fstat(self._lock))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a disk in trouble says nothing about whose it is
            return True

    def prepare(self) -> None:
        """Makes what lies in the folder. Raises DeploymentError, StorageError."""
        with state_errors(self.path):
            for folder in (self.ray, self.machines, self.logs):
                folder.mkdir(mode=0o700, exist_ok=True)

    def secret(self, name: str) -> str:
        """The secret kept under this name, made the first time. Raises DeploymentError, StorageError."""
        path = self.path / name
        with state_errors(self.path):
            if path.exists():
                text = path.read_text(encoding="ascii").strip()
                if text:
                    path.chmod(0o600)
                    return text
            text = secrets.token_hex(SECRET_BYTES)
            write_private(path, text)
            return text

    def make_journal(self) -> Path:
        """The journal's file, for the owner only: runs' environments are in it, and the folder may have been there
        before us, open to others. SQLite gives its side files the same mode. Raises DeploymentError, StorageError.
        """
        path = self.path / "journal.db"
        with state_errors(self.path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)
        return path

    @property
    def deployment_id(self) -> str:
        """Marks every process of this folder's deployments (`GANGMESH_DEPLOYMENT`)."""
        return self.secret("id")[:16]

    # ---- machines ---------------------------------------------------------------------------------

    def read_inventory(self) -> Inventory:
        """The machines of before; a fresh, empty inventory when there were none or the file is damaged."""
        with state_errors(self.path):
            try:
                data = json.loads(self._inventory.read_text(encoding="utf-8"))
                return Inventory(
                    subnet=(int(data["subnet"][0]), int(data["subnet"][1])),
                    next_index=int(data["next_index"]),
                    indexes=tuple(int(i) for i in data["indexes"]),
                )
            except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError):
                return Inventory.draw()

    def write_inventory(self, inventory: Inventory) -> None:
        """Raises DeploymentError, StorageError."""
        with state_errors(self.path):
            write_private(self._inventory, json.dumps(asdict(inventory)))

    def count_joined(self) -> int:
        """A number that no machine from elsewhere has had before. Raises DeploymentError, StorageError."""
        with state_errors(self.path):
            try:
                number = int(self._joined.read_text(encoding="ascii")) + 1
            except (FileNotFoundError, ValueError):
                number = 1
            write_private(self._joined, str(number))
            return number

    # ---- outside ----------------------------------------------------------------------------------

    def make_socket_folder(self) -> Path:
        """A folder for Unix sockets, short enough for them; see rule 4."""
        with state_errors(self.path):
            inside = self.ray / "sockets"
            if fits_socket(inside):
                shutil.rmtree(inside, ignore_errors=True)
                inside.mkdir(mode=0o700)
                return inside
            base = next(b for b in (Path(tempfile.gettempdir()), Path("/tmp")) if fits_socket(b / ("x" * 25)))
            outside = base / f"{OUTSIDE_PREFIX}{self.deployment_id}"
            write_private(self._outside_note, str(outside))
            _remove_ours(outside)
            outside.mkdir(mode=0o700)
            return outside

    def remove_outside(self) -> None:
        """Takes away what lies outside the folder, of this head or of one that was killed."""
        with state_errors(self.path):
            try:
                noted = Path(self._outside_note.read_text(encoding="utf-8"))
            except FileNotFoundError:
                return
            _remove_ours(noted)
            self._outside_note.unlink()


def fits_socket(folder: Path) -> bool:
    """Whether sockets can be bound in this folder."""
    return len(os.fsencode(folder / SOCKET_NAME_LONGEST)) <= SOCKET_PATH_BYTES_MAX


@contextmanager
def claim(path: Path) -> Iterator[StateFolder]:
    """Makes the folder, proves that it can be written to, and holds its lock.

    Raises:
        DeploymentError: (DeploymentBusy) another head has it; (StateNotWritable) it cannot be written to.
        StorageError: the disk is full.
    """
    with state_errors(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(path, os.read(descriptor, 32)) from None
        with state_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            _probe(path)
        yield StateFolder(path, lock=descriptor)
    finally:
        os.close(descriptor)


def _busy(path: Path, holder: bytes) -> DeploymentError:
    pid = int(holder) if holder.strip().isdigit() else None
    who = f" (process {pid})" if pid else ""
    return DeploymentError(
        f"A deployment already runs from {path}{who}.",
        hint="See it with `mesh status`, stop it with `mesh down`, or use another folder: --state DIR.",
        reason=Reason.DEPLOYMENT_BUSY,
        path=str(path),
        pid=pid,
    )


def _probe(path: Path) -> None:
    probe = path / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def state_errors(path: Path) -> Iterator[None]:
    """Turns the OSErrors of the state folder into what a user can act on."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> MeshError:
    """What this OSError means for the state folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"The disk of the state folder {path} is full.",
            hint="Make room, or use a folder on another disk: --state DIR.",
            path=str(path),
        )
    return DeploymentError(
        f"The state folder {path} cannot be used: {error.strerror or error}.",
        hint=f"Name another one: --state DIR, or ${STATE_VARIABLE}.",
        reason=Reason.STATE_NOT_WRITABLE,
        path=str(path),
    )


def _remove_ours(folder: Path) -> None:
    """Removes a folder outside the state folder, when it is plainly one that we made."""
    try:
        facts = folder.lstat()
    except FileNotFoundError:
        return
    if folder.name.startswith(OUTSIDE_PREFIX) and facts.st_uid == os.geteuid() and not folder.is_symlink():
        shutil.rmtree(folder)
