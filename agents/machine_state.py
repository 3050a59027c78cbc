"""The folder of a machine's agent, claimed, and the environment of everything below the agent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.gateway_wire import CONTROL_NAME
from agents.machine_folder import FOLDER_VARIABLE, GATEWAY_VARIABLE, note_environment
from agents.ray_environment import ray_environment, user_environment
from mesh.deployment import claimed_by
from mesh.errors import DeploymentError
from mesh.own_source import source_folder
from mesh.reasons import Reason

SOCKETS_PREFIX = "gangmesh-"
LEAVING_NAME = "leaving"
"""In the agent's folder, when it ends because it leaves the deployment for good."""
LOCK_NAME = "lock"
"""Held by the agent for its life; its pid is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """The agent's own folder, claimed. `sockets` lies elsewhere: its path has to be short."""

    path: Path
    sockets: Path
    id: str

    @property
    def ray(self) -> Path:
        return self.path / "ray"

    @property
    def machine(self) -> Path:
        return self.path / "machine"

    @property
    def cluster_token(self) -> Path:
        return self.path / "ray-token"

    @property
    def gateway(self) -> Path:
        """The folder of the machine's gateway process."""
        return self.sockets / "g"


@contextlib.contextmanager
def claimed(path: Path, *parts: str) -> Iterator[None]:
    """Makes the folder, and parts of it, and is alone in it. Raises DeploymentError."""
    try:
        for made in (path, *(path / part for part in parts)):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DeploymentError(
            f"The machine's folder {path} cannot be used: {error.strerror}.",
            hint="Name another one: --state DIR.",
            reason=Reason.STATE_NOT_WRITABLE,
            path=str(path),
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = claimed_by(path)
            process, ending = ("", "SIGTERM") if pid is None else (f" (process {pid})", f"kill {pid}")
            raise DeploymentError(
                f"An agent runs from {path} already{process}.",
                hint=f"One folder is one machine. End that agent first ({ending}: it can come back as the same; "
                "`mesh leave`: it is gone for good), or name another folder with --state DIR.",
                reason=Reason.DEPLOYMENT_BUSY,
                path=str(path),
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield


@contextlib.contextmanager
def machine_state(folder: Path) -> Iterator[MachineState]:
    """Makes and claims the folder. Raises DeploymentError."""
    path = folder.expanduser().absolute()
    with contextlib.ExitStack() as stack:
        stack.enter_context(claimed(path, "ray", "machine"))
        note = path / "sockets"
        if note.exists():
            _remove_sockets(Path(note.read_text(encoding="utf-8")))
        sockets = Path(tempfile.mkdtemp(prefix=SOCKETS_PREFIX, dir="/tmp"))
        note.write_text(str(sockets), encoding="utf-8")
        stack.callback(_remove_sockets, sockets)
        yield MachineState(path=path, sockets=sockets, id=secrets.token_hex(8))


def _remove_sockets(folder: Path) -> None:
    if folder.parent == Path("/tmp") and folder.name.startswith(SOCKETS_PREFIX) and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


def take_environment(state: MachineState, original: Mapping[str, str], *, has_gateway: bool = False) -> None:
    """Notes the owner's environment for the users' commands, and makes this process's own a clean one."""
    source = source_folder()
    note_environment(state.machine, user_environment(original, source=source))
    clean = ray_environment(original, token_file=state.cluster_token, deployment_id=state.id, source=source)
    os.environ.clear()
    os.environ.update({**clean, FOLDER_VARIABLE: str(state.machine)})
    if has_gateway:
        os.environ[GATEWAY_VARIABLE] = str(state.gateway / CONTROL_NAME)
