"""A machine's agent: asks the head to be taken in, runs a Ray node that belongs to its cluster, and asks again.

Theory of operation. `run` asks the head for a name and the way to its cluster, starts a raylet with them, and waits.
A raylet ends by itself when the cluster has given it up (the network was cut for too long) or is gone (the head began
again): then everything below this process is ended and the head is asked anew, and what comes is a fresh machine
under a fresh name. Members, launchers and commands are Ray's to start; this process is the subreaper of all of them.

Rules of this file:
1. One agent per folder, by a lock that lives as long as the process.
2. Nothing of an earlier life runs when the next one asks to join.
3. A head that refuses ends the agent. Once it has joined, whatever else is wrong (no connection, a disk that is full
   here or there) is tried again for as long as it takes: a machine cannot know when the cable is put back.
4. This process decides nothing about runs. Its raylet dies with it, and with the raylet what Ray started.
5. Told to stop, it tells the head that this machine goes away, and stays until the run that has it has left, for a
   grace period; told again, it stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import os
import platform
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents import process_tree
from agents.child import Child, become_subreaper, spawn
from agents.machine_folder import FOLDER_VARIABLE, note_environment
from agents.orphans import OrphanReaper
from agents.ray_environment import ray_environment, source_folder, user_environment
from agents.raylet import ADDRESS_LABEL, MACHINE_LABEL, SLOT_RESOURCE, RayNode, raylet_command
from agents.raylet_process import (
    RAYLET_GRACE_S,
    find_install,
    log_tail,
    or_end,
    prepare,
    start_limit,
    until_alive,
)
from mesh import __version__
from mesh.errors import AuthenticationError, ConflictError, DeploymentError, MeshError, SpecError
from mesh.http_transport import HttpTransport, checked_url
from mesh.reasons import Reason

WORKERS_READY = 2
"""A member and its launcher."""
HOUSEKEEPING_S = 5.0
AGAIN_FIRST_S, AGAIN_MAX_S = 0.5, 10.0
GRACE_S_LARGEST = 3600.0
LEAVE_LOOK_S = 0.25
END_LIMIT_S = 8.0
"""Of everything below this process, once the raylet is gone: a supervisor ends its command's tree by itself."""
REFUSALS = (SpecError, ConflictError, AuthenticationError)
SOCKETS_PREFIX = "gangmesh-"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What an agent is told."""

    head: str
    token: str = field(repr=False)
    address: str
    labels: Mapping[str, str]
    grace_s: float
    """How long a run may take to save and to leave this machine, when the agent is told to stop."""

    @classmethod
    def read(
        cls, *, head: str, token_file: Path, address: str, labels: Sequence[str], grace_s: float
    ) -> JoinSettings:
        """From the command line. Raises SpecError."""
        try:
            token = token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(
                f"The token file {token_file} cannot be read: {error}.", field="--token-file"
            ) from error
        try:
            own = str(ipaddress.IPv4Address(address))
        except ValueError:
            raise SpecError(
                f"--address takes the IPv4 address of this machine, not {address[:80]!r}.",
                hint="See it with `ip address`.",
                field="--address",
            ) from None
        pairs = dict(label.partition("=")[::2] for label in labels)
        if "" in pairs:
            raise SpecError("--label takes KEY=VALUE.", field="--label")
        if not 0 <= grace_s <= GRACE_S_LARGEST:
            raise SpecError(f"--grace takes 0 to {GRACE_S_LARGEST:g} seconds.", field="--grace", got=grace_s)
        return cls(head=checked_url(head), token=token, address=own, labels=pairs, grace_s=grace_s)


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


@contextlib.contextmanager
def machine_state(folder: Path) -> Iterator[MachineState]:
    """Makes and claims the folder. Raises DeploymentError."""
    path = folder.expanduser().absolute()
    try:
        for made in (path, path / "ray", path / "machine"):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
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
            raise DeploymentError(
                f"An agent runs from {path} already.",
                hint="One folder is one machine: name another one with --state DIR.",
                reason=Reason.DEPLOYMENT_BUSY,
                path=str(path),
            ) from None
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


def take_environment(state: MachineState, original: Mapping[str, str]) -> None:
    """Notes the owner's environment for the users' commands, and makes this process's own a clean one."""
    source = source_folder()
    note_environment(state.machine, user_environment(original, source=source))
    clean = ray_environment(original, token_file=state.cluster_token, deployment_id=state.id, source=source)
    os.environ.clear()
    os.environ.update({**clean, FOLDER_VARIABLE: str(state.machine)})


async def run(settings: JoinSettings, state: MachineState) -> None:
    """Until SIGTERM or SIGINT. Raises MeshError when the head refuses, or cannot be reached the first time."""
    await _Agent(settings, state).run()


class _Agent:
    def __init__(self, settings: JoinSettings, state: MachineState) -> None:
        self._settings = settings
        self._state = state
        self._install = find_install()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reaper = OrphanReaper()
        self._has_joined = False

    async def run(self) -> None:
        become_subreaper()
        os.chdir(self._state.ray)  # Ray puts the folder that it is started in on its workers' path
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        housekeeping = asyncio.create_task(self._keep_house(), name="housekeeping")
        try:
            await self._join_again_and_again()
        finally:
            housekeeping.cancel()
            await asyncio.wait([housekeeping])
            await asyncio.to_thread(_end_everything_below)

    def _on_signal(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _join_again_and_again(self) -> None:
        pause_s = AGAIN_FIRST_S
        while not self._stop.is_set():
            try:
                await self._live()
                pause_s = AGAIN_FIRST_S
            except (MeshError, OSError) as error:
                if not self._has_joined or isinstance(error, REFUSALS):
                    raise
                _log.warning("cannot join now, trying again in %g s: %s", pause_s, error)
            await asyncio.to_thread(_end_everything_below)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
            pause_s = min(AGAIN_MAX_S, pause_s * 2)

    async def _live(self) -> None:
        """One life as one machine of the cluster, until the raylet ends or a stop is asked for."""
        terms = await self._ask()
        node = self._node(terms)
        raylet = await self._start(node, terms)
        self._has_joined = True
        _log.info("joined %s as %s (%s)", self._settings.head, node.name, node.address)
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        either: list[asyncio.Future[Any]] = [stop, raylet.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if raylet.is_running:
            await self._leave(node.name, raylet)
            await raylet.stop(grace_s=RAYLET_GRACE_S)
        else:
            tail = log_tail(node.logs / "raylet.err")
            _log.error(
                "the raylet of %s ended by itself, code %d. %s", node.name, raylet.ended.result(), tail
            )

    async def _leave(self, name: str, raylet: Child) -> None:
        """Says that this machine goes away, and waits until its run has left it: as long as the grace period lasts."""
        leaving = asyncio.create_task(self._until_free(name), name="leaving")
        hurry = asyncio.create_task(self._hurry.wait(), name="hurry")
        either: list[asyncio.Future[Any]] = [leaving, hurry, raylet.ended]
        await asyncio.wait(either, timeout=self._settings.grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, hurry):
            task.cancel()
        [outcome, _] = await asyncio.gather(leaving, hurry, return_exceptions=True)
        if isinstance(outcome, MeshError):
            _log.warning("the head was not told that %s goes away: %s", name, outcome)
        elif outcome is not None:
            _log.warning("%s goes away while a run is there", name)

    async def _until_free(self, name: str) -> None:
        """Raises MeshError."""
        notice = {"graceSeconds": self._settings.grace_s, "message": "its agent was told to stop"}
        async with self._head() as head:
            await head.call("POST", f"/v1/machines/{name}/reclaim", body=notice)
            while await _has_run(head, name):  # noqa: ASYNC110 - the API has nothing to wait on
                await asyncio.sleep(LEAVE_LOOK_S)

    @contextlib.asynccontextmanager
    async def _head(self) -> AsyncIterator[HttpTransport]:
        transport = HttpTransport(url=self._settings.head, token=self._settings.token, fate=lambda: None)
        await transport.open()
        try:
            yield transport
        finally:
            await transport.close()

    async def _ask(self) -> dict[str, Any]:
        import ray

        request = {
            "address": self._settings.address,
            "version": __version__,
            "python": platform.python_version(),
            "ray": ray.__version__,
        }
        async with self._head() as head:
            terms: dict[str, Any] = await head.call("POST", "/v1/machines/join", body=request)
        return terms

    def _node(self, terms: Mapping[str, Any]) -> RayNode:
        name = str(terms["name"])
        return RayNode(
            name=name,
            node_id=str(terms["nodeId"]),
            session=str(terms["cluster"]["session"]),
            temp=self._state.ray / name,
            sockets=self._state.sockets,
            socket_name=name.rpartition("-")[2],
            resources={SLOT_RESOURCE: 1, "CPU": max(os.cpu_count() or 1, WORKERS_READY)},
            address=self._settings.address,
            labels={
                "provider": "joined",
                **self._settings.labels,
                MACHINE_LABEL: name,
                ADDRESS_LABEL: self._settings.address,
            },
            workers_ready=WORKERS_READY,
        )

    async def _start(self, node: RayNode, terms: Mapping[str, Any]) -> Child:
        """Returns when the node is part of the cluster. Raises DeploymentError, MeshTimeoutError."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        descriptor = os.open(self._state.cluster_token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(str(terms["clusterToken"]))
        await asyncio.to_thread(prepare, node)
        address = str(terms["cluster"]["address"])
        raylet = spawn(
            node.name,
            raylet_command(self._install, node, gcs_address=address, cluster_id=str(terms["cluster"]["id"])),
            environment=dict(os.environ),
            log=node.logs / "raylet.start",
        )
        try:
            async with start_limit(f"{node.name} to join Ray"):
                client = await or_end(raylet, asyncio.to_thread(GcsClient, address=address))
                await or_end(raylet, until_alive(client, node.node_id))
        except MeshError:
            await raylet.stop(grace_s=0.0)
            raise
        return raylet

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._reaper.look()


async def _has_run(head: HttpTransport, name: str) -> bool:
    machines = (await head.call("GET", "/v1/machines"))["machines"]
    return any(machine["name"] == name and machine["run"] for machine in machines)


def _end_everything_below() -> None:
    """Waits a little for what ends by itself, then kills the rest."""

    def look() -> dict[int, process_tree.Process]:
        return {pid: p for pid, p in process_tree.find_descendants(os.getpid()).items() if p.is_alive}

    waited_ms = 0
    step_ms = 100
    while (found := look()) and waited_ms < END_LIMIT_S * 1000:
        process_tree.wait_until_one_ends(found.values(), limit_ms=step_ms)
        waited_ms += step_ms
    if found:
        _log.warning("killing what is left: %s", sorted(found))
        process_tree.kill_found(found, look)
