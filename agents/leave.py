"""`python -m agents leave`: the agent of this machine ends, and the machine is forgotten by its head.

Rules of this file:
1. The agent itself says goodbye, after its run has left; this process tells it that it is for good, and waits.
2. An agent that is started again meanwhile, by what supervises it, is told so too.
3. Where no agent runs, or it could not tell its head, this process says goodbye, removes the identity, and its exit
   code says whether the head has heard it. A head that has not gives a machine up by itself; a relay it believes
   until somebody says that it has left.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
from pathlib import Path

from agents.join import GOODBYE_LIMIT_S, GRACE_S_LARGEST
from agents.leaving_afar import leave_from_afar
from agents.machine_identity import is_known
from agents.machine_state import LEAVING_NAME, LOCK_NAME, claimed
from agents.relay_folder import KNOWN_NAME
from mesh.cli.terminal import write_err
from mesh.errors import DeploymentError, MeshTimeoutError

AGENTS_MAX = 3
"""One after the other: what supervises an agent may start the next one at once."""
WAIT_LIMIT_S = GRACE_S_LARGEST + GOODBYE_LIMIT_S + 30.0


def leave(state: Path) -> int:
    """The exit code. Raises DeploymentError, MeshTimeoutError, OSError."""
    folder = state.expanduser().absolute()
    if not folder.is_dir():
        raise DeploymentError(
            f"No machine of a deployment has its folder in {folder}.", hint="Name it: --state DIR."
        )
    has_told_agent = False
    for _ in range(AGENTS_MAX):
        pid = _agent_of(folder)
        if pid is None:
            break
        _end_agent(folder, pid)
        has_told_agent = True
    if is_known(folder) or (folder / KNOWN_NAME).exists():
        with claimed(folder):  # no other agent is started from it meanwhile
            return _leave_alone(folder)
    if not has_told_agent:
        return _leave_alone(folder)
    write_err("This machine has left. To join again it needs a token.\n")
    return 0


def _end_agent(folder: Path, pid: int) -> None:
    """Tells it to leave, and waits for its end. Raises MeshTimeoutError."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        (folder / LEAVING_NAME).touch()
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        ended, _, _ = select.select([handle], [], [], WAIT_LIMIT_S)
    finally:
        os.close(handle)
    if not ended:
        raise MeshTimeoutError(
            "The agent still waits for its run to leave.",
            hint="It goes on waiting, and leaves then; `mesh leave` again waits for it.",
            timeout_s=WAIT_LIMIT_S,
        )
    (folder / LEAVING_NAME).unlink(missing_ok=True)


def _leave_alone(folder: Path) -> int:
    code = leave_from_afar(folder)
    if code is None:
        write_err("No agent runs here, and this folder is no machine's. To join it needs a token.\n")
        return 0
    return code


def _agent_of(folder: Path) -> int | None:
    """The pid of the agent that holds the folder's lock."""
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(lock, 32).strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(lock)
    return None
