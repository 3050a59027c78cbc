"""What the head process is made of, behind two small seams, so that tests can start a head without all of it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from agents.raylet import HEAD_RESOURCE, LOOPBACK
from coordinator.api.service import CoordinatorService, LogReader
from mesh.errors import DeploymentError, MeshError, MeshTimeoutError, NotFoundError
from mesh.messages import RAY_NAMESPACE
from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.resources import Run
from mesh.states import RunState

STORE_NAME = "store"
STORE_PORTS = range(20000, 29000)
"""Below the kernel's ephemeral range, so that no outgoing connection takes the port while the store is restarted."""
PORT_TRIES_MAX = 100
ACTOR_START_LIMIT_S = 60.0

_log = logging.getLogger(__name__)


class HeadLogs(Protocol):
    """The log sink and store, inside the head process."""

    async def start(self, folder: Path) -> Endpoint:
        """Listens; returns where members send their output."""
        ...

    def reader(self, service: CoordinatorService) -> LogReader: ...

    async def stop(self) -> None: ...


class StoppableService(CoordinatorService, Protocol):
    """What the head needs of the coordinator besides what the API needs."""

    async def shutdown(self, wait_s: float) -> list[str]:
        """Cancels every active run and waits at most so long; the names of those not finished."""
        ...


class HeadActors(Protocol):
    """The coordinator and the store in the Ray cluster that this process is connected to."""

    def preload(self) -> None:
        """Imports what `start` needs; called in a thread."""
        ...

    async def start(self, config: Mapping[str, Any]) -> StoppableService:
        """Finds or makes them; returns when the coordinator serves."""
        ...

    async def stop(self) -> None:
        """Ends them for good."""
        ...


class SinkLogs:
    """The real `HeadLogs`. Its sink listens at `address` and `port`; 0 takes a free one."""

    def __init__(self, address: str = LOOPBACK, port: int = 0) -> None:
        self._address = address
        self._port = port
        self._sink: Any = None
        self._store: Any = None

    async def start(self, folder: Path) -> Endpoint:
        from coordinator.logs.sink import LogSink
        from coordinator.logs.store import LogStore

        self._store = LogStore(folder)
        secret = secrets.token_hex(16)
        self._sink = LogSink(self._store, secret=secret, host=self._address, port=self._port)
        endpoint: Endpoint = await self._sink.start()
        return endpoint

    def reader(self, service: CoordinatorService) -> LogReader:
        from coordinator.logs.reader import LogReader as StoredLogs

        return StoredLogs(self._store, is_ended=RunEnds(service).has_ended)

    async def stop(self) -> None:
        if self._sink is not None:
            await self._sink.stop()
            await asyncio.to_thread(self._store.close)


class RunEnds:
    """Whether a run has ended, by its uid: what every follower of a log asks several times a second."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self._names: dict[str, str] = {}
        """Of followed runs that had not ended: all runs are looked through once for each, not at every question."""

    async def has_ended(self, uid: str) -> bool:
        """A run that is not there (any more) has, and one that is suspended says nothing more for now.

        Raises TransportError, MeshTimeoutError.
        """
        run = await self._find(uid)
        state = RunState.CANCELLED if run is None else RunState(run["status"]["state"])
        if run is None or state.is_terminal or state is RunState.SUSPENDED:
            self._names.pop(uid, None)
            return True
        self._names[uid] = run["metadata"]["name"]
        return False

    async def _find(self, uid: str) -> Run | None:
        name = self._names.get(uid)
        if name is None:
            return next((r for r in await self._service.list_runs({}) if r["metadata"]["uid"] == uid), None)
        try:
            run = await self._service.get_run(name)
        except NotFoundError:
            return None
        return run if run["metadata"]["uid"] == uid else None  # else deleted, and its name is another run's


class RayActors:
    """The real `HeadActors`. The store listens at `address` and `port`; None takes a free one."""

    def __init__(self, address: str = LOOPBACK, port: int | None = None) -> None:
        self._address = address
        self._port = port
        self._handles: list[Any] = []

    def preload(self) -> None:
        for module in ("coordinator.actor", "coordinator.store_actor"):
            importlib.import_module(module)

    async def start(self, config: Mapping[str, Any]) -> StoppableService:
        from ray.exceptions import RayError

        from coordinator.actor import RayCoordinator, create_coordinator

        admin, member = (secrets.token_hex(16) for _ in range(2))
        port = self._port if self._port is not None else await asyncio.to_thread(free_port, self._address)
        store, handle = await asyncio.gather(
            asyncio.to_thread(_create_store, self._address, port, admin, member),
            asyncio.to_thread(
                create_coordinator,
                {
                    **config,
                    "namespace": RAY_NAMESPACE,
                    "store_admin": Endpoint(host=self._address, port=port, secret=admin),
                    "store_member": Endpoint(host=self._address, port=port, secret=member),
                },
                resource=HEAD_RESOURCE,
            ),
        )
        self._handles = [handle, store]
        service = RayCoordinator(handle)
        try:
            async with asyncio.timeout(ACTOR_START_LIMIT_S):
                await store.endpoint.remote()
                await handle.ping.remote()
        except TimeoutError as error:
            raise MeshTimeoutError(
                "The coordinator and the store did not start.", timeout_s=ACTOR_START_LIMIT_S
            ) from error
        except RayError as error:
            raise _start_error(error) from error
        return service

    async def stop(self) -> None:
        await asyncio.to_thread(_kill_all, self._handles)
        self._handles = []


def _create_store(address: str, port: int, admin: str, member: str) -> Any:
    import ray

    from coordinator.store_actor import RendezvousStore

    return (
        ray.remote(RendezvousStore)
        .options(
            name=STORE_NAME,
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            resources={HEAD_RESOURCE: 0.001},
        )
        .remote(host=address, port=port, admin_secret=admin, member_secret=member)
    )


def _kill_all(handles: list[Any]) -> None:
    import ray
    from ray.exceptions import RayError

    for handle in handles:
        try:
            ray.kill(handle, no_restart=True)
        except RayError as error:
            _log.info("an actor could not be ended, Ray says: %s", error)


def _start_error(error: Exception) -> MeshError:
    """What an actor raised while it started, without Ray's story around it where it is one of ours."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, MeshError):
        return cause
    return DeploymentError(
        f"The coordinator or the store could not start: {error}",
        hint="Their logs are in the state folder, under ray/head.",
        reason=Reason.INTERNAL,
    )


def free_port(address: str = LOOPBACK) -> int:
    """A port that nothing listens on now at this address. Raises DeploymentError."""
    for _ in range(PORT_TRIES_MAX):
        port = secrets.choice(STORE_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise DeploymentError(
        f"No free port was found between {STORE_PORTS.start} and {STORE_PORTS.stop}.",
        reason=Reason.PORT_TAKEN,
    )
