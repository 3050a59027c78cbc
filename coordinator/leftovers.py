"""Finding and ending processes that belong to a deployment, by their marks, never by their names.

Rules of this file:
1. A process is of a deployment when its environment says so: `GANGMESH_DEPLOYMENT` with the deployment's id (what the
   head started), or `NODUS_STATE_DIR` inside the deployment's folder (the users' commands, whose environment is clean
   of everything else), or when it is below the head (`Owner.head_pid`), which is the reaper of its orphans: whoever
   threw its environment away is found by that.
2. It is signalled through a pidfd, and its marks are read again once that is open: no reused pid is ever hit.
3. First SIGTERM and some patience, since a supervisor that is asked ends its command's whole tree, then SIGKILL.
4. This process and its ancestors are never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from agents.ray_environment import MARK as MARK

RANK_STATE_MARK = "NODUS_STATE_DIR"
GONE = frozenset("ZX")
LOOK_S = 0.05
KILL_LIMIT_S = 5.0
_ENVIRON_BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose processes are meant."""

    deployment_id: str
    state: Path
    head_pid: int | None = None
    """Of the head, when what is below it is meant too: once Ray is down, nothing there is to live on."""


def find(owner: Owner) -> list[int]:
    """The pids of every process of this deployment, zombies left out."""
    spared = _self_and_ancestors()
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid not in spared and _belongs(pid, owner)]


async def end_all(owner: Owner, *, grace_s: float) -> list[int]:
    """Ends them; returns the pids of those that could not be killed."""
    left = await asyncio.to_thread(_signal_all, owner, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
    if not left:
        return []
    if grace_s > 0:
        left = await _wait_for_none(owner, grace_s)
    deadline = time.monotonic() + KILL_LIMIT_S
    while left and time.monotonic() < deadline:
        # again and again: what is killed may just have started another one
        await asyncio.to_thread(_signal_all, owner, signal.SIGKILL)
        left = await _wait_for_none(owner, LOOK_S)
    return left


async def _wait_for_none(owner: Owner, limit_s: float) -> list[int]:
    deadline = time.monotonic() + limit_s
    while left := await asyncio.to_thread(find, owner):
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(LOOK_S)
    return left


def _signal_all(owner: Owner, number: signal.Signals) -> list[int]:
    found = find(owner)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            handle = os.pidfd_open(pid)
            try:
                if not select.select([handle], [], [], 0)[0] and _belongs(pid, owner):
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)
    return found


def _belongs(pid: int, owner: Owner) -> bool:
    if owner.head_pid is not None and _is_below(pid, owner.head_pid):
        return True
    environment = _environment(pid)
    if environment.get(MARK.encode()) == owner.deployment_id.encode():
        return True
    state = environment.get(RANK_STATE_MARK.encode())
    return state is not None and Path(os.fsdecode(state)).is_relative_to(owner.state)


def _environment(pid: int) -> dict[bytes, bytes]:
    """Empty for a zombie, for another user's process, and for one that is gone."""
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            block = file.read(_ENVIRON_BYTES_MAX)
    except OSError:
        return {}
    return dict(entry.split(b"=", 1) for entry in block.split(b"\0") if b"=" in entry)


def _is_below(pid: int, ancestor: int) -> bool:
    """Whether a living process descends from the other one."""
    return _state_and_parent(pid)[0] not in GONE and ancestor in _with_ancestors(pid) - {pid}


def _self_and_ancestors() -> set[int]:
    return {0, 1} | _with_ancestors(os.getpid())


def _with_ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid and pid not in found:
        found.add(pid)
        pid = _state_and_parent(pid)[1]
    return found


def _state_and_parent(pid: int) -> tuple[str, int]:
    """As in /proc/PID/stat. The name before them may hold anything, text or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "X", 0
    return fields[0].decode(), int(fields[1])
