"""A machine's agent: asks the head to be taken in, runs a Ray node that belongs to its cluster, and asks again.

Theory of operation. `run` asks the head for a name and the way to its cluster, starts a raylet with them, and waits.
A raylet ends by itself when the cluster has given it up (the network was cut for too long) or is gone (the head began
again): then everything below this process is ended and the head is asked anew, and what comes is a fresh machine
under a fresh name. Members, launchers and commands are Ray's to start; this process is the subreaper of all of them.
How the head is asked is a `Way`: over the mesh (join_mesh.py), or in a network in which everybody may be trusted
(join_plain.py).

Rules of this file:
1. One agent per folder, by a lock that lives as long as the process.
2. Nothing of an earlier life runs when the next one asks to join.
3. A head that refuses ends the agent. Once it has joined, whatever else is wrong (no connection, a disk that is full
   here or there) is tried again for as long as it takes: a machine cannot know when the cable is put back.
4. This process decides nothing about runs. Its raylet dies with it, and with the raylet what Ray started.
5. Told to stop, it tells the head that this machine goes away, and stays until the run that has it has left, for a
   grace period; told again, it stops at once. So does who has not joined yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agents import process_tree
from agents.child import Child, become_subreaper, spawn
from agents.machine_state import MachineState
from agents.mesh_ports import MeshPorts
from agents.orphans import OrphanReaper
from agents.raylet import MACHINE_LABEL, MEMBER_WORKERS, SLOT_RESOURCE, RayInstall, RayNode, raylet_command
from agents.raylet_process import (
    RAYLET_GRACE_S,
    find_install,
    log_tail,
    open_directory,
    or_end,
    prepare,
    start_limit,
    until_alive,
)
from agents.stopping import unless_stopped
from mesh.errors import AuthenticationError, ConflictError, MeshError, SpecError

HOUSEKEEPING_S = 5.0
AGAIN_FIRST_S, AGAIN_MAX_S = 0.5, 10.0
GRACE_S_LARGEST = 3600.0
LEAVE_LOOK_S = 0.25
END_LIMIT_S = 8.0
"""Of everything below this process, once the raylet is gone: a supervisor ends its command's tree by itself."""
GOODBYE_LIMIT_S = 10.0
REFUSALS = (SpecError, ConflictError, AuthenticationError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """As what this machine becomes part of the cluster."""

    name: str
    node_id: str
    session: str
    cluster_address: str
    cluster_id: str
    cluster_token: str = field(repr=False)
    address: str
    """Of the Ray node."""
    labels: Mapping[str, str]
    resources: Mapping[str, float] = field(default_factory=dict)
    """Beside its processors and its place for a member."""
    ports: MeshPorts | None = None


class Way(Protocol):
    """How this machine and the head speak with each other."""

    @property
    def head(self) -> str:
        """Where the head is, for people."""
        ...

    async def enter(self) -> Terms:
        """Asks to be taken in. Raises MeshError; one of REFUSALS when the head refuses."""
        ...

    async def until_over(self) -> str:
        """Waits until the head says that this life is over; why."""
        ...

    async def until_free(self, name: str, *, grace_s: float) -> None:
        """Says that this machine goes away, and waits until its run has left it. Raises MeshError."""
        ...

    async def say_goodbye(self, name: str) -> None:
        """Its raylet has been stopped, and does not come back. Raises MeshError."""
        ...

    async def close(self) -> None:
        """Of a life that is over, or never began. May be called again."""
        ...


async def run(
    way: Way, state: MachineState, *, grace_s: float, on_joined: Callable[[str], None] = lambda name: None
) -> None:
    """Until SIGTERM or SIGINT. Raises MeshError when the head refuses, or cannot be reached the first time.

    Args:
        grace_s: how long a run may take to save and to leave this machine, when the agent is told to stop.
        on_joined: hears the machine's name, whenever it has become part of the cluster.
    """
    await _Agent(way, state, grace_s=grace_s, on_joined=on_joined).run()


class _Agent:
    def __init__(
        self,
        way: Way,
        state: MachineState,
        *,
        grace_s: float,
        on_joined: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._way = way
        self._state = state
        self._grace_s = grace_s
        self._on_joined = on_joined
        self._install: asyncio.Future[RayInstall] | None = None
        """Ray takes a second to import: it is looked for while the head is asked."""
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
        self._install = asyncio.ensure_future(asyncio.to_thread(find_install))
        try:
            await self._join_again_and_again()
        finally:
            housekeeping.cancel()
            await asyncio.wait([housekeeping])
            await self._way.close()
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
            await self._way.close()
            await asyncio.to_thread(_end_everything_below)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
            pause_s = min(AGAIN_MAX_S, pause_s * 2)

    async def _live(self) -> None:
        """One life as one machine of the cluster, until the raylet ends or a stop is asked for."""
        entered = await unless_stopped(self._stop, self._enter())
        if entered is None:
            return
        node, raylet = entered
        self._has_joined = True
        _log.info("joined %s as %s (%s)", self._way.head, node.name, node.address)
        self._on_joined(node.name)
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        over = asyncio.create_task(self._way.until_over(), name="over")
        either: list[asyncio.Future[Any]] = [stop, over, raylet.ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            over.cancel()
        if not raylet.is_running:
            tail = log_tail(node.logs / "raylet.err")
            _log.error(
                "the raylet of %s ended by itself, code %d. %s", node.name, raylet.ended.result(), tail
            )
        elif self._stop.is_set():
            await self._leave(node.name, raylet)
            await raylet.stop(grace_s=RAYLET_GRACE_S)
            await self._say_goodbye(node.name)
        else:
            _log.warning("%s is not a machine any more: %s", node.name, over.result())
            await raylet.stop(grace_s=RAYLET_GRACE_S)

    async def _enter(self) -> tuple[RayNode, Child]:
        terms = await self._way.enter()
        node = self._node(terms)
        return node, await self._start(node, terms)

    async def _leave(self, name: str, raylet: Child) -> None:
        """Says that this machine goes away, and waits until its run has left it: as long as the grace period lasts."""
        leaving = asyncio.create_task(self._way.until_free(name, grace_s=self._grace_s), name="leaving")
        hurry = asyncio.create_task(self._hurry.wait(), name="hurry")
        either: list[asyncio.Future[Any]] = [leaving, hurry, raylet.ended]
        await asyncio.wait(either, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, hurry):
            task.cancel()
        [outcome, _] = await asyncio.gather(leaving, hurry, return_exceptions=True)
        if isinstance(outcome, MeshError):
            _log.warning("the head was not told that %s goes away: %s", name, outcome)
        elif outcome is not None:
            _log.warning("%s goes away while a run is there", name)

    async def _say_goodbye(self, name: str) -> None:
        try:
            async with asyncio.timeout(GOODBYE_LIMIT_S):
                await self._way.say_goodbye(name)
        except (MeshError, TimeoutError) as error:
            _log.warning("the head was not told that %s has left: %s", name, error)

    def _node(self, terms: Terms) -> RayNode:
        return RayNode(
            name=terms.name,
            node_id=terms.node_id,
            session=terms.session,
            temp=self._state.ray / terms.name,
            sockets=self._state.sockets,
            socket_name=terms.name.rpartition("-")[2],
            resources={
                SLOT_RESOURCE: 1,
                "CPU": max(os.cpu_count() or 1, MEMBER_WORKERS),
                **terms.resources,
            },
            address=terms.address,
            labels={**terms.labels, MACHINE_LABEL: terms.name},
            ports=terms.ports,
        )

    async def _start(self, node: RayNode, terms: Terms) -> Child:
        """Returns when the node is part of the cluster. Raises DeploymentError, MeshTimeoutError, TransportError."""
        assert self._install is not None
        install = await self._install
        descriptor = os.open(self._state.cluster_token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(terms.cluster_token)
        await asyncio.to_thread(prepare, node)
        address = terms.cluster_address
        raylet = spawn(
            node.name,
            raylet_command(install, node, gcs_address=address, cluster_id=terms.cluster_id),
            environment=dict(os.environ),
            log=node.logs / "raylet.start",
        )
        try:
            async with start_limit(f"{node.name} to join Ray"):
                client = await or_end(raylet, open_directory(address))
                await or_end(raylet, until_alive(client, node.node_id, where=address))
        except BaseException:
            await raylet.stop(grace_s=0.0)
            raise
        return raylet

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._reaper.look()


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
