"""Keeps worker processes ready on Ray's nodes: asks each raylet how many wait there, and lets it start what is missing.

Theory of operation. Ray's Python interface has neither question nor order, its raylets have both, as gRPC calls that
Ray's own dashboard and core use: `GetNodeStats` tells of every worker what it is doing, `PrestartWorkers` starts
some. (The way round them, a task that is cancelled before its worker has come up, uses up a worker that waits already:
Ray gives none that has run a task to an actor.) What is imported ahead is a setting of the raylet
(`RAY_preload_python_modules`). When and how many is `coordinator.warm_workers`.

Rules of this file:
1. Whatever fails leaves a node cold, no more: it is logged, and tried again when the node is due.
2. A call has a limit, and so has the number of them: a node that does not answer holds up no other for longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from coordinator.warm_workers import SpareWorkers, WorkerNode

ANSWER_LIMIT_S = 3.0
THREADS = 4

_log = logging.getLogger(__name__)


class NoAnswerError(Exception):
    """A raylet did not answer, or not well."""


class Raylets(Protocol):
    """What is asked of a raylet at host:port. Blocking; both raise NoAnswerError."""

    def idle(self, raylet: str) -> frozenset[bytes]:
        """The ids of the workers that wait there, and can become an actor."""

    def start(self, raylet: str, count: int) -> None:
        """Lets it start so many; does not wait until they are up."""


class WorkerKeeper:
    """Keeps the workers that `SpareWorkers` wants, from the first node that is seen on. See there for the methods."""

    def __init__(self, raylets: Raylets | None = None) -> None:
        self._raylets: Raylets = raylets or GrpcRaylets()
        self._spares = SpareWorkers()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ask raylet")
        self._changed = asyncio.Event()
        self._looks: dict[str, asyncio.Task[None]] = {}
        """By node: the one that is under way."""
        self._driver: asyncio.Task[None] | None = None

    def seen(self, nodes: Iterable[WorkerNode]) -> None:
        self._spares.seen(nodes, time.monotonic())
        self._wake()

    def used(self, node_id: str, member: str) -> None:
        self._spares.used(node_id, member, time.monotonic())

    def look_at(self, node_id: str) -> None:
        self._spares.look_at(node_id, time.monotonic())
        self._wake()

    async def close(self) -> None:
        """Starts nothing any more."""
        tasks = [*self._looks.values(), *([self._driver] if self._driver else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._threads.shutdown(wait=False)

    def _wake(self) -> None:
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive(), name="spare workers")
        self._changed.set()

    async def _drive(self) -> None:
        while True:
            self._changed.clear()
            for node in self._spares.take_due(time.monotonic(), busy=self._looks):
                look = asyncio.create_task(self._look(node), name=f"workers of {node.node_id[:8]}")
                self._looks[node.node_id] = look
                look.add_done_callback(functools.partial(self._looked, node.node_id))
            due_s = self._spares.next_due_s(busy=self._looks)
            wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
            with contextlib.suppress(TimeoutError):
                # `asyncio.wait_for` of Python 3.11 swallows a cancellation that comes with what it waits for.
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    def _looked(self, node_id: str, look: asyncio.Task[None]) -> None:
        del self._looks[node_id]
        self._changed.set()
        if not look.cancelled() and (error := look.exception()) is not None:
            _log.error("%s failed", look.get_name(), exc_info=error)

    async def _look(self, node: WorkerNode) -> None:
        ask = asyncio.get_running_loop().run_in_executor
        missing = 0
        try:
            idle = await ask(self._threads, self._raylets.idle, node.raylet)
            missing = self._spares.counted(node.node_id, idle, time.monotonic())
            if missing:
                await ask(self._threads, self._raylets.start, node.raylet, missing)
        except NoAnswerError as error:
            _log.info("the raylet at %s: %s", node.raylet, error)
            self._spares.no_answer(node.node_id, time.monotonic(), not_started=missing)


class GrpcRaylets:
    """Real ones."""

    def idle(self, raylet: str) -> frozenset[bytes]:
        from ray.core.generated import common_pb2, node_manager_pb2

        answer = _call(raylet, "GetNodeStats", node_manager_pb2.GetNodeStatsRequest())
        return frozenset(
            stats.worker_id
            for stats in answer.core_workers_stats
            if stats.worker_type == common_pb2.WORKER
            and _is_nil(stats.job_id)
            and _is_nil(stats.actor_id)
            and not stats.num_executed_tasks
            and not stats.num_running_tasks
        )

    def start(self, raylet: str, count: int) -> None:
        from ray.core.generated import common_pb2, node_manager_pb2

        request = node_manager_pb2.PrestartWorkersRequest(language=common_pb2.PYTHON, num_workers=count)
        _call(raylet, "PrestartWorkers", request)


def _is_nil(binary_id: bytes) -> bool:
    """Whether this is Ray's id of nothing."""
    return binary_id.count(b"\xff") == len(binary_id)


def _call(raylet: str, method: str, request: Any) -> Any:
    """One call, on a connection of its own: they are rare. Ray adds its token."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import node_manager_pb2_grpc

    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    with init_grpc_channel(raylet, options=options) as channel:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        try:
            return getattr(stub, method)(request, timeout=ANSWER_LIMIT_S)
        except grpc.RpcError as error:
            raise NoAnswerError(f"{method}: {error}") from error
