"""Where a deployment keeps its state, and whether the one that a state folder names is alive.

Rules of this file:
1. `deployment.json` is written by the head process only, whole or not at all, readable by its owner only.
2. A file says nothing about life: the head can have been killed. It is alive when its pid exists and was
   started when the file says (a pid is reused sooner or later, a pid with its start time is not).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mesh.errors import DeploymentError, SpecError
from mesh.joining import IDENTITY_NAME, MACHINE_STATE
from mesh.private_files import write_private
from mesh.reasons import Reason

STATE_VARIABLE = "GANGMESH_STATE"
URL_VARIABLE = "GANGMESH_URL"
TOKEN_VARIABLE = "GANGMESH_TOKEN"
AUTHORITY_VARIABLE = "GANGMESH_AUTHORITY"
"""A file: the certificates of a deployment's authority, for its API behind a mesh port (`authority/bundle.pem`)."""
DB_VARIABLE = "GANGMESH_DB"
CHECKPOINTS_VARIABLE = "GANGMESH_CHECKPOINTS"
RECORD_NAME = "deployment.json"
LOCK_NAME = "lock"
"""Held by the head for its life; its pid is in it."""
RECORD_BYTES_MAX = 64 * 1024
START_TIME_TOLERANCE_S = 2.0
"""A process's start time is derived from the boot time, which the kernel adjusts by fractions of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """How to reach a deployment. `pid_started` is in seconds since 1970."""

    version: str
    url: str
    token: str
    pid: int
    pid_started: float
    local: bool
    machines: int
    mesh_port: int = 0
    """Where machines join; 0 where they cannot."""
    started_with: Mapping[str, str] = field(default_factory=dict)
    """What it was started with and keeps while it runs: `{"--listen": "0.0.0.0:8471", "--allow-chaos": ""}`."""

    @property
    def is_alive(self) -> bool:
        started_s = process_started(self.pid)
        return started_s is not None and abs(started_s - self.pid_started) <= START_TIME_TOLERANCE_S


def as_words(options: Mapping[str, str]) -> list[str]:
    """Options of `mesh up` as its command line has them; one that takes no value has an empty one."""
    return [word for flag, value in options.items() for word in ((flag, value) if value else (flag,))]


def start_again(state: str | Path, started_with: Mapping[str, str], *more: str) -> str:
    """What ends this deployment and starts it again as it was, with these options besides."""
    folder = [] if Path(state) == Path("~/.gangmesh").expanduser() else ["--state", str(state)]
    up = shlex.join(["mesh", "up", *as_words(started_with), *more, *folder])
    return f"`{shlex.join(['mesh', 'down', *folder])}`, then: {up}"


def without_password(url: str) -> str:
    """A database's URL as it may be shown."""
    scheme, separator, rest = url.partition("://")
    account, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{account.partition(':')[0]}:***@{place}" if at and ":" in account else url


def state_folder(explicit: str | Path | None = None) -> Path:
    """The state folder: as given, or `$GANGMESH_STATE`, or `~/.gangmesh`. Absolute; it need not exist.

    Raises SpecError for an empty name: an unset variable on the command line must not mean the current folder.
    """
    if explicit is not None and not str(explicit):
        raise SpecError("--state is empty.", hint="Give a folder, or leave --state out.", field="--state")
    chosen = explicit or os.environ.get(STATE_VARIABLE) or "~/.gangmesh"
    return Path(chosen).expanduser().absolute()


def process_started(pid: int) -> float | None:
    """When a process was started, in seconds since 1970; None when there is none (a zombie is none)."""
    import psutil  # takes longer to import than `mesh --help` may take altogether

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return float(process.create_time())
    except psutil.AccessDenied:
        return None
    except psutil.NoSuchProcess:
        return None


def read_record(state: Path) -> DeploymentRecord | None:
    """The record in this state folder; None when there is none. Says nothing about whether the head lives.

    Raises:
        DeploymentError: the file cannot be read or is not what the head writes.
    """
    path = state / RECORD_NAME
    try:
        with path.open("rb") as file:
            text = file.read(RECORD_BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DeploymentError(
            f"The deployment's record {path} cannot be read: {error.strerror}.",
            hint="Use the account that started the deployment, or another folder: --state DIR.",
            path=str(path),
        ) from error
    try:
        data = json.loads(text)
        return DeploymentRecord(
            version=str(data["version"]),
            url=str(data["url"]),
            token=str(data["token"]),
            pid=int(data["pid"]),
            pid_started=float(data["pid_started"]),
            local=bool(data["local"]),
            machines=int(data["machines"]),
            mesh_port=int(data.get("mesh_port", 0)),
            started_with={
                str(flag): str(value) for flag, value in dict(data.get("started_with", {})).items()
            },
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DeploymentError(
            f"{path} is damaged ({type(error).__name__}: {error}).",
            hint="If no deployment runs from this folder, remove that file; `mesh up` writes a new one.",
            path=str(path),
        ) from error


def write_record(state: Path, record: DeploymentRecord) -> None:
    """Puts the record in place at once and for its owner only. Raises OSError."""
    write_private(state / RECORD_NAME, json.dumps(asdict(record)))


def live_record(state: Path) -> DeploymentRecord | None:
    """The record of a deployment that is alive, or None. Raises DeploymentError for a damaged record."""
    record = read_record(state)
    return record if record is not None and record.is_alive else None


def claimed_by(state: Path) -> int | None:
    """The pid of the head that has this folder, also while it starts or stops and there is no record of it."""
    path = state / LOCK_NAME
    try:
        lock = path.stat()
        pid = int(path.read_text(encoding="utf-8"))
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except (OSError, ValueError):
        return None
    for link in opened:  # the number may be another process's by now; the open lock is its own
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), lock):
                return pid
    return None


def joined_head() -> str | None:
    """The head that an agent on this host works for, in the folder that is `mesh join`'s own; None when none does."""
    folder = MACHINE_STATE.expanduser()
    if claimed_by(folder) is None:
        return None
    try:
        return str(json.loads((folder / IDENTITY_NAME).read_text(encoding="utf-8"))["head"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def not_running(state: Path) -> DeploymentError:
    """The error for a call that needs a deployment where none is running."""
    if (pid := claimed_by(state)) is not None:
        return DeploymentError(
            f"The deployment in {state} is starting or stopping (process {pid}).",
            hint="Wait for it with `mesh up`, or see its head.log there.",
            reason=Reason.DEPLOYMENT_NOT_RUNNING,
            path=str(state),
            pid=pid,
        )
    if (head := joined_head()) is not None:
        return DeploymentError(
            f"No deployment is running from {state}; this is a machine of {head}.",
            hint=f"Ask on that head, or with --url {head}, ${TOKEN_VARIABLE} and ${AUTHORITY_VARIABLE}.",
            reason=Reason.DEPLOYMENT_NOT_RUNNING,
            path=str(state),
        )
    record_left = (state / RECORD_NAME).exists()
    story = "ended without taking its record away (it was killed, or the machine restarted)"
    return DeploymentError(
        f"No deployment is running from {state}" + (f"; the last one {story}." if record_left else "."),
        hint="Start one with `mesh up`, or name another: --state DIR, or --url with $" + TOKEN_VARIABLE + ".",
        reason=Reason.DEPLOYMENT_NOT_RUNNING,
        path=str(state),
    )
