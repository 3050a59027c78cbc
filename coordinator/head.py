"""The head process of a deployment: starts everything in stages, watches it, and takes it down in stages.

Theory of operation. `run` starts stage by stage; each stage that is up leaves its own end on a stack, so that whatever
was reached is undone in reverse order, each step with a limit of its own, whether the start failed, was interrupted, or
the deployment is stopped. Then everything that still carries the deployment's mark is ended. The head decides nothing
about runs: that is the coordinator's.

Rules of this file:
1. Every process below is a child or grandchild of this one, which is their subreaper, and carries the mark.
2. When Ray's directory or the head's own raylet ends by itself, the cluster is lost with every member in it. The head
   says so, takes everything down, and asks its caller to begin again (`Outcome.RESTART`) on the same folder and
   port. The journal says what was running.
3. A simulated machine that is lost is replaced by another one, under a new name, as long as the head is not stopping.
4. A head whose state folder was removed can be found by nobody, so it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from agents import chaos
from agents.mesh_ports import MeshPorts
from agents.raylet import LOOPBACK, MESH_RAY_SETTINGS
from coordinator import leftovers
from coordinator.deployment import GpuShape, StateFolder, state_errors
from coordinator.head_parts import HeadActors, HeadLogs, StoppableService
from coordinator.insistence import for_ever
from coordinator.listen import reached_at, url_of
from coordinator.machine_keeper import MachineKeeper
from coordinator.mesh_head import MeshHead
from coordinator.providers.joined import JoinedMachines
from coordinator.providers.local import LocalProvider
from coordinator.ray_processes import DIRECTORY_NAME, HEAD_NAME, RayProcesses
from mesh import __version__
from mesh.deployment import RECORD_NAME, DeploymentRecord, process_started, write_record
from mesh.errors import InternalError, MeshError, MeshTimeoutError
from mesh.messages import RAY_NAMESPACE
from mesh.resources import Machine

RUNS_STOP_LIMIT_S = 45.0
"""A run that obeys SIGTERM is fenced at once; its grace period is 30 s unless it asks for another."""
STAGE_LIMIT_S = 15.0
SWEEP_GRACE_S = 1.0
LEFTOVER_GRACE_S = 2.0
MACHINE_SEEN_LIMIT_S = 30.0
MACHINE_LOOK_S = 0.1
HOUSEKEEPING_S = 5.0
SLOW_MODULES = ("coordinator.api.app", "coordinator.logs.sink", "coordinator.logs.reader")

_log = logging.getLogger(__name__)

Tell = Callable[[Mapping[str, Any]], None]
Stage = tuple[str, float, Callable[[], Awaitable[object]]]


class Outcome(Enum):
    """How a head's life ended."""

    STOPPED = "stopped"
    RESTART = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """What a head is told."""

    machines: int
    address: str = LOOPBACK
    """Where the head's own parts listen: loopback, or an address that machines elsewhere reach."""
    mesh: MeshSettings | None = None
    """The mesh port, where there is one; `address` is the head's overlay address then."""
    gpu: GpuShape | None = None
    db: str | None = None
    allows_chaos: bool = False
    """Ranks may be harmed on purpose here though machines join from elsewhere; where they are simulated they may."""
    checkpoints: str | None = None
    """URL of the checkpoint store; None where none is kept."""
    started_with: Mapping[str, str] = field(default_factory=dict)
    """See `DeploymentRecord`."""
    user_environment: Mapping[str, str]
    """As the head found it: what the users' commands get."""
    ray_environment: Mapping[str, str]

    @property
    def is_open(self) -> bool:
        """Whether machines join from elsewhere; there are no simulated ones then."""
        return self.address != LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """Of a head that machines join through one port."""

    listen: tuple[str, int]
    ports: MeshPorts


class Head:
    """One life of a head process.

    Args:
        state: claimed.
        settings: see there.
        listener: of the API; bound and listening, accepted from once everything is up.
        logs, actors: the parts that live in or beside this process.
        tell: progress for whoever started the head.
        housekeeping: called every few seconds.
        catch_signals: called once Ray is connected, which takes SIGTERM for itself.
    """

    def __init__(
        self,
        *,
        state: StateFolder,
        settings: HeadSettings,
        listener: socket.socket,
        logs: HeadLogs,
        actors: HeadActors,
        tell: Tell,
        housekeeping: Callable[[], None] = lambda: None,
        catch_signals: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._settings = settings
        self._listener = listener
        self._url = url_of(listener)
        self._logs = logs
        self._actors = actors
        self._tell = tell
        self._housekeeping = housekeeping
        self._catch_signals = catch_signals
        self._owner = leftovers.Owner(
            deployment_id=state.deployment_id, state=state.path, head_pid=os.getpid()
        )
        self._provider: LocalProvider | None = None
        self._joined: JoinedMachines | None = None
        self._mesh: MeshHead | None = None
        self._mesh_port = 0
        self._service: StoppableService | None = None
        self._stages: list[Stage] = []
        """How to undo what is up, the latest last."""
        self._end: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def stop(self, why: str) -> None:
        """Ends `run`; may be called at any moment and again."""
        _log.info("stopping: %s", why)
        self._finish(Outcome.STOPPED)

    def _finish(self, outcome: Outcome) -> None:
        if not self._end.done():
            self._end.set_result(outcome)

    async def run(self) -> Outcome:
        """Starts, serves until told to stop, stops. Raises MeshError when it cannot start."""
        starting = asyncio.ensure_future(self._start())
        try:
            either: list[asyncio.Future[Any]] = [starting, self._end]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                self._tell({"ready": True, "url": self._url})
                _log.info("ready at %s", self._url)
                await self._end
            return self._end.result()
        finally:
            self._is_stopping = True
            starting.cancel()
            await asyncio.wait([starting])
            await self._take_down()

    # ---- start ------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._stage("cleaning up after the last one")
        left = await leftovers.end_all(self._owner, grace_s=LEFTOVER_GRACE_S)
        if left:
            _log.warning("processes of an earlier deployment cannot be killed: %s", left)
        await self._remove_outside()
        self._state.prepare()
        self._spawn_task(self._keep_house(), "housekeeping")

        self._undo("files outside the folder", self._remove_outside)
        sockets = self._state.make_socket_folder()
        mesh = self._settings.mesh
        if mesh is not None:
            await self._open_mesh(mesh, sockets)
        self._stage("starting Ray")
        ray = RayProcesses(
            folder=self._state.ray,
            sockets=sockets,
            environment={
                **self._settings.ray_environment,
                **(MESH_RAY_SETTINGS if mesh is not None else {}),
            },
            on_lost=self._on_lost,
            address=self._settings.address,
            ports=mesh.ports if mesh is not None else None,
        )
        self._undo("Ray", ray.stop)
        address, _ = await asyncio.gather(ray.start_head(), asyncio.to_thread(self._preload))

        if self._mesh is not None:
            self._mesh.use(ray)
        elif self._settings.is_open:
            self._joined = JoinedMachines(state=self._state, ray=ray)
        machines = self._settings.machines
        self._stage(f"starting {machines} machine{'s' if machines != 1 else ''}")
        self._provider = LocalProvider(state=self._state, ray=ray, gpu=self._settings.gpu)
        self._undo("starts of machines", self._provider.stop)
        self._undo("log sink", self._logs.stop)
        logs, _, _ = await asyncio.gather(
            self._logs.start(self._state.logs), self._provider.begin(machines), self._connect(address)
        )
        self._stage("starting the coordinator")
        self._undo("coordinator and store", self._actors.stop)
        self._service = await self._actors.start(self._coordinator_config(logs))
        self._undo("runs", self._end_runs, limit_s=RUNS_STOP_LIMIT_S + STAGE_LIMIT_S)
        await self._open_api(self._service)
        keeper = MachineKeeper(self._provider, tell_coming=_tell_coming)
        self._spawn_task(keeper.run(), "machines")
        self._spawn_task(self._look_for_dead(self._provider, self._service), "dead machines")
        if self._mesh is not None:
            self._spawn_task(self._mesh.look_for_lost(self._service.list_machines), "lost machines")
        self._write_record()

    async def _open_mesh(self, settings: MeshSettings, sockets: Path) -> None:
        self._stage("opening the mesh port")
        self._mesh = MeshHead(
            state=self._state,
            listen=settings.listen,
            api=reached_at(self._listener),
            ports=settings.ports,
            sockets=sockets,
            environment=self._settings.ray_environment,
            spawn=self._spawn_task,
        )
        self._undo("mesh port", self._mesh.stop)
        self._mesh_port = await self._mesh.start()

    def _preload(self) -> None:
        """Imports what takes a second to import, while Ray's servers start."""
        for module in SLOW_MODULES:
            importlib.import_module(module)
        self._actors.preload()

    async def _connect(self, address: str) -> None:
        self._undo("connection to Ray", _disconnect)
        await asyncio.to_thread(_connect, address, self._settings.address)
        self._catch_signals()

    def _coordinator_config(self, logs: Any) -> dict[str, Any]:
        return {
            "state": str(self._state.path),
            "db": self._settings.db or sqlite_url(self._state),
            "logs": logs,
            "checkpoints": self._settings.checkpoints,
            "mesh": None if self._mesh is None else str(self._state.path),
            "member": {
                "machines_dir": str(self._state.machines),
                "environment": dict(self._settings.user_environment),
                "namespace": RAY_NAMESPACE,
            },
            "deployment": {
                "version": __version__,
                "local": not self._settings.is_open,
                "chaos": self._settings.allows_chaos or not self._settings.is_open,
                "url": self._url,
                "state": str(self._state.path),
                "checkpoints": self._settings.checkpoints,
                "startedWith": dict(self._settings.started_with),
            },
        }

    async def _open_api(self, service: StoppableService) -> None:
        from aiohttp import web

        from coordinator.api.app import make_app
        from mesh.spec import DeploymentFacts

        gpu = self._settings.gpu
        app = make_app(
            service,
            self._logs.reader(service),
            token=self._state.secret("token"),
            deployment_facts=DeploymentFacts(
                machines=self._settings.machines,
                gpus={gpu.type: gpu.count} if gpu else {},
                keeps_checkpoints=self._settings.checkpoints is not None,
            ),
            grow=None if self._settings.is_open else self.grow,
            admit=self._joined.admit if self._joined is not None else None,
            mesh=self._mesh.desk if self._mesh is not None else None,
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        self._stages.insert(-1, ("API", STAGE_LIMIT_S, runner.cleanup))  # readers see their runs end
        site = web.SockSite(runner, self._listener)
        await site.start()
        self._undo("API's door", site.stop)

    def _write_record(self) -> None:
        pid = os.getpid()
        with state_errors(self._state.path):
            write_record(
                self._state.path,
                DeploymentRecord(
                    version=__version__,
                    url=self._url,
                    token=self._state.secret("token"),
                    pid=pid,
                    pid_started=process_started(pid) or 0.0,
                    local=not self._settings.is_open,
                    machines=self._settings.machines,
                    mesh_port=self._mesh_port,
                    started_with=self._settings.started_with,
                ),
            )

    def _stage(self, text: str) -> None:
        _log.info("%s", text)
        self._tell({"stage": text})

    def _undo(
        self, name: str, step: Callable[[], Awaitable[object]], *, limit_s: float = STAGE_LIMIT_S
    ) -> None:
        self._stages.append((name, limit_s, step))

    # ---- life -------------------------------------------------------------------------------------

    async def grow(self, count: int) -> list[Machine]:
        """See `coordinator.api.service.Grow`."""
        if self._provider is None or self._service is None:
            raise InternalError("The deployment is not up yet.")
        await self._provider.grow(count)
        names = set(self._provider.machines)
        try:
            async with asyncio.timeout(MACHINE_SEEN_LIMIT_S):
                while True:
                    seen = await self._service.list_machines()
                    if names <= {machine["name"] for machine in seen}:
                        return seen
                    await asyncio.sleep(MACHINE_LOOK_S)
        except TimeoutError:
            raise MeshTimeoutError(
                "The new machines were started, but Ray has not told of them.",
                hint="Look again in a moment: mesh get machines",
                timeout_s=MACHINE_SEEN_LIMIT_S,
            ) from None

    def _on_lost(self, name: str, code: int, tail: str) -> None:
        if self._is_stopping:
            return
        if name in (HEAD_NAME, DIRECTORY_NAME) or self._provider is None:
            _log.error("Ray is lost with %s (code %d): every member is lost. Beginning again.", name, code)
            self._finish(Outcome.RESTART)
            return
        _log.warning("The machine %s is lost (code %d).", name, code)
        self._spawn_task(self._provider.node_lost(name, f"its agent ended (code {code})"), f"loss of {name}")

    async def _look_for_dead(self, provider: LocalProvider, service: StoppableService) -> None:
        """A raylet that stands still is alive for its parent, and dead for Ray. One that is to leave ends once free."""

        async def look() -> None:
            await asyncio.sleep(HOUSEKEEPING_S)
            for machine in await service.list_machines():
                if machine["name"] not in provider.machines:
                    continue
                if machine["state"] == "Leaving" and machine["run"] is None:
                    _log.info("The machine %s was wanted back, and is free: it is ended.", machine["name"])
                    await provider.retire(machine["name"])
                elif machine["state"] == "Lost":
                    _log.warning("The machine %s does not answer: Ray holds it for dead.", machine["name"])
                    await provider.node_lost(machine["name"], "it does not answer")

        await for_ever(look, what="looking for dead machines")

    async def _keep_house(self) -> None:
        async def look() -> None:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._housekeeping()
            if not await asyncio.to_thread(lambda: self._state.is_ours):
                self.stop("the state folder is gone, and with it every way to this deployment")

        await for_ever(look, what="housekeeping")

    def _spawn_task(self, work: Any, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)

    # ---- stop -------------------------------------------------------------------------------------

    async def _take_down(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STAGE_LIMIT_S)
        while self._stages:
            name, limit_s, step = self._stages.pop()
            await _guarded(name, limit_s, step)
        left = await leftovers.end_all(self._owner, grace_s=SWEEP_GRACE_S)
        if left:
            _log.error("processes that cannot be killed: %s", left)
        is_over = not self._end.done() or self._end.result() is Outcome.STOPPED
        if is_over and self._state.is_ours:
            (self._state.path / RECORD_NAME).unlink(missing_ok=True)
        _log.info("everything is down")

    async def _end_runs(self) -> None:
        if self._service is None or (self._end.done() and self._end.result() is Outcome.RESTART):
            return
        unfinished = await self._service.shutdown(RUNS_STOP_LIMIT_S)
        if unfinished:
            _log.warning("runs that were not fenced in time: %s", ", ".join(unfinished))

    async def _remove_outside(self) -> None:
        await asyncio.to_thread(self._state.remove_outside)
        await asyncio.to_thread(chaos.remove_cuts, self._state.deployment_id)


async def _guarded(name: str, limit_s: float, step: Callable[[], Awaitable[object]]) -> None:
    """One step of the way down: whatever goes wrong with it, the next one is taken."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            await step()
        _log.info("stopped: %s (%.2f s)", name, time.monotonic() - began)
    except TimeoutError:
        _log.error("stopping %s took longer than %g s; going on", name, limit_s)
    except MeshError as error:
        _log.error("stopping %s: %s", name, error)
    except Exception:  # noqa: BLE001 - the guard
        _log.exception("stopping %s failed", name)


def sqlite_url(state: StateFolder) -> str:
    """The journal in the state folder, whatever characters the folder's name has. Raises as `make_journal`."""
    import sqlalchemy as sa

    url = sa.URL.create("sqlite+aiosqlite", database=str(state.make_journal()))
    return url.render_as_string(hide_password=False)


def _connect(address: str, own_address: str) -> None:
    import ray

    ray.init(
        address=address,
        _node_ip_address=own_address,
        namespace=RAY_NAMESPACE,
        log_to_driver=False,
        logging_level=logging.WARNING,
        configure_logging=False,
    )


async def _tell_coming(names: Sequence[str]) -> None:
    """Tells the coordinator, which says it to the runs that wait. Nothing depends on it."""
    from ray.exceptions import RayError

    from coordinator import ray_notes

    try:
        await asyncio.to_thread(ray_notes.note_coming, names)
    except (RayError, RuntimeError, OSError) as error:
        _log.info("Ray does not take a note of the machines that are coming: %s", error)


async def _disconnect() -> None:
    import ray

    with contextlib.suppress(RuntimeError):
        await asyncio.to_thread(ray.shutdown)
