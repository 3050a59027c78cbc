"""Starting a node's raylet: its folders, its process, its entry in Ray's directory.

Used by the head for its own nodes, and by the agent of a machine that joins from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from agents.child import Child
from agents.raylet import PORTS_TOLD, RayInstall, RayNode
from mesh.errors import DeploymentError, MeshTimeoutError, TransportError
from mesh.reasons import Reason

START_LIMIT_S = 60.0
LOOK_S = 0.02
RAYLET_GRACE_S = 2.0
"""A raylet with an actor that does not end waits for it far longer than anybody would."""
OLD_SESSIONS_KEPT = 1
NODE_ID_BYTES = 28
LOG_TAIL_BYTES = 2000
_NODE_ALIVE = 0
"""`GcsNodeInfo.ALIVE`."""

T = TypeVar("T")


def find_install() -> RayInstall:
    """Ray's files. Raises DeploymentError."""
    check_programs()
    import ray  # not before the head's environment is in place: Ray reads it when it is imported

    return _install(ray.__commit__)


def check_programs() -> None:
    """Without importing Ray, which takes a second. Raises DeploymentError."""
    install = _install("")
    for program in (install.gcs_server, install.raylet):
        if not os.access(program, os.X_OK):
            raise DeploymentError(
                f"Ray {version('ray')} has no program {program}.",
                hint="Install it again: pip install --force-reinstall ray.",
                reason=Reason.INTERNAL,
            )


def _install(commit: str) -> RayInstall:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.submodule_search_locations
    return RayInstall(
        ray=Path(next(iter(spec.submodule_search_locations))), python=sys.executable, commit=commit
    )


@contextlib.asynccontextmanager
async def start_limit(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(START_LIMIT_S):
            yield
    except TimeoutError as error:
        raise MeshTimeoutError(f"Waited for {what}, in vain.", timeout_s=START_LIMIT_S) from error


async def or_end(child: Child, waiting: Awaitable[T]) -> T:
    """What `waiting` gives, unless the child ends first. Raises DeploymentError."""
    task = asyncio.ensure_future(waiting)
    try:
        either: list[asyncio.Future[Any]] = [task, child.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DeploymentError(
                f"{child.name} ended while it was starting (code {child.ended.result()}).",
                hint="The log of the head process says more.",
                reason=Reason.INTERNAL,
            )
        return task.result()
    finally:
        task.cancel()


def prepare(node: RayNode) -> None:
    from ray._raylet import persist_port  # type: ignore[attr-defined]

    _forget_old_sessions(node)
    for folder in node.folders:
        folder.mkdir(parents=True, exist_ok=True)
    for name, port in PORTS_TOLD.items():
        persist_port(str(node.folder), node.node_id, name, port)


@contextlib.contextmanager
def directory_errors(where: str) -> Iterator[None]:
    """Raises TransportError for what Ray raises when its directory does not answer, or not any more."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, RuntimeError) as error:
        raise TransportError(f"Ray's directory at {where} does not answer: {error}") from error


async def open_directory(address: str) -> Any:
    """`ray._raylet.GcsClient`; its calls block. Raises TransportError."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    with directory_errors(address):
        return await asyncio.to_thread(GcsClient, address=address)


async def until_alive(client: Any, node_id: str, *, where: str) -> None:
    """Returns when Ray's directory knows the node. There is nothing to wait on, so it looks again and again.

    Raises TransportError.
    """
    while True:
        with directory_errors(where):
            nodes = await asyncio.to_thread(client.get_all_node_info)
        if any(key.hex() == node_id and info.state == _NODE_ALIVE for key, info in nodes.items()):
            return
        await asyncio.sleep(LOOK_S)


def _forget_old_sessions(node: RayNode) -> None:
    if not node.temp.exists():
        return
    sessions = sorted(node.temp.glob("session_*"), key=lambda p: p.lstat().st_mtime, reverse=True)
    for folder in [p for p in sessions if p != node.folder][OLD_SESSIONS_KEPT:]:
        shutil.rmtree(folder, ignore_errors=True)


def log_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read(LOG_TAIL_BYTES).decode("utf-8", errors="replace").strip()
    except OSError:
        return ""
