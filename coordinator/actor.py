"""The coordinator as a Ray actor, and the proxy through which the API reaches it.

Rules of this file:
1. Thin: the actor makes the parts, hands them to `Coordinator`, and passes calls on.
2. Across the actor's boundary failure is data: an answer is `(True, value)` or `(False, error as data)`, because
   Ray wraps exceptions in classes of its own.
3. The actor is detached and Ray restarts it for ever; it finds everything it needs in its configuration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, cast

import ray
from ray.exceptions import RayError, RayTaskError

from coordinator.checkpoint_store import CheckpointStore
from coordinator.coordinator import Coordinator
from coordinator.core.effects import OrderMember
from coordinator.journal import SqlJournal
from coordinator.ray_fleet import RayFleet
from coordinator.store_link import StoreLink
from coordinator.warm_workers import warm
from mesh.errors import InternalError, MeshError, MeshTimeoutError, StorageError, TransportError
from mesh.messages import COORDINATOR_NAME, JoinOrder, MemberReport
from mesh.plan import Endpoint, RunPlan
from mesh.resources import Attempt, DeploymentStatus, Event, Harm, Machine, Run
from mesh.states import Transport

CALL_TIMEOUT_S = 20.0
HARM_LIMIT_S = 30.0
"""More than other calls may take: a machine may have to start a process for it."""
START_AGAIN_S = 2.0

_SERVED = frozenset(
    {
        "submit",
        "get_run",
        "list_runs",
        "cancel",
        "suspend",
        "resume",
        "reclaim",
        "chaos",
        "delete",
        "list_attempts",
        "list_machines",
        "events",
        "status",
        "shutdown",
    }
)

_log = logging.getLogger(__name__)


class CoordinatorActor:
    """See `Coordinator`.

    Args:
        config: `db` (URL), `namespace`, `store_admin`, `store_member`, `logs` (Endpoints), `member` (what each
            MemberNode is constructed with), `checkpoints` (URL of their store, optional), `deployment`
            (facts for status).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._config = config
        self._fleet = RayFleet(
            namespace=config["namespace"],
            member_config=config["member"],
            used_by=lambda: self._coordinator.used_by(),
        )
        self._store = StoreLink(config["store_admin"], on_new_store=self._warm_head)
        self._warming: asyncio.Task[None] | None = None
        checkpoints = config.get("checkpoints")
        self._coordinator = Coordinator(
            journal=SqlJournal(config["db"]),
            fleet=self._fleet,
            store=self._store,
            join_order=self._join_order,
            deployment=config["deployment"],
            checkpoints=None if checkpoints is None else CheckpointStore(checkpoints),
        )
        self._started = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        """One that Ray restarted has gangs to look after: a journal that cannot be opened now is waited for."""
        while True:
            try:
                await self._coordinator.start()
                break
            except StorageError as error:
                if not ray.get_runtime_context().was_current_actor_reconstructed:
                    raise  # whoever made the deployment is told
                _log.error("the journal cannot be read, trying again in %g s: %s", START_AGAIN_S, error)
            await asyncio.sleep(START_AGAIN_S)
        self._store.start(self._coordinator)
        _log.info("the coordinator serves")
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._warm_head()

    def _warm_head(self) -> None:
        """The head's spare worker has become a store or a coordinator: the next death shall find one as well."""
        node_id = ray.get_runtime_context().get_node_id()
        self._warming = asyncio.create_task(asyncio.to_thread(warm, [node_id], workers=1), name="warm head")

    def _join_order(self, plan: RunPlan, effect: OrderMember) -> JoinOrder:
        return JoinOrder(
            incarnation=effect.incarnation,
            plan=plan,
            machine=effect.machine,
            store=cast(Endpoint, self._config["store_member"]),
            logs=cast(Endpoint, self._config["logs"]),
            transport=Transport.PRIVATE,
            checkpoints=self._config.get("checkpoints"),
            # Where nothing is kept, nothing can be brought back: then each machine keeps what it has.
            is_clean_start=effect.is_clean_start and self._config.get("checkpoints") is not None,
            restore=effect.restore,
            is_left_behind=effect.is_left_behind,
        )

    async def ping(self) -> bool:
        """True once the journal has been read and everything under way goes on. Raises what `start` raised."""
        await asyncio.shield(self._started)
        return True

    async def report(self, report: MemberReport) -> bool:
        """A member's report; True when it is durable and needs not be repeated."""
        await asyncio.shield(self._started)
        return await self._coordinator.report(report)

    async def serve(self, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """One call of the CoordinatorService."""
        if method not in _SERVED:
            return False, InternalError(f"The coordinator has no method '{method}'.").to_wire()
        try:
            await asyncio.shield(self._started)
            return True, await getattr(self._coordinator, method)(*arguments)
        except MeshError as error:
            return False, error.to_wire()


class RayCoordinator:
    """A CoordinatorService that asks the actor; TransportError while it is being restarted.

    Args:
        handle: of a `CoordinatorActor`.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def submit(self, job: dict[str, Any], plan: dict[str, Any], request_id: str | None) -> Run:
        return cast(Run, await self._ask("submit", job, plan, request_id))

    async def get_run(self, name: str) -> Run:
        return cast(Run, await self._ask("get_run", name))

    async def list_runs(self, labels: Mapping[str, str]) -> list[Run]:
        return cast(list[Run], await self._ask("list_runs", dict(labels)))

    async def cancel(self, name: str, reason: str) -> Run:
        return cast(Run, await self._ask("cancel", name, reason))

    async def suspend(self, name: str) -> Run:
        return cast(Run, await self._ask("suspend", name))

    async def resume(self, name: str) -> Run:
        return cast(Run, await self._ask("resume", name))

    async def reclaim(self, machine: str, grace_s: float, message: str) -> Machine:
        return cast(Machine, await self._ask("reclaim", machine, grace_s, message))

    async def chaos(self, name: str, kind: str, rank: int, seconds: float | None, one_way: bool) -> Harm:
        asked = ("chaos", name, kind, rank, seconds, one_way)
        return cast(Harm, await self._ask(*asked, extra_s=HARM_LIMIT_S))

    async def delete(self, name: str) -> None:
        await self._ask("delete", name)

    async def list_attempts(self, labels: Mapping[str, str]) -> list[Attempt]:
        return cast(list[Attempt], await self._ask("list_attempts", dict(labels)))

    async def list_machines(self) -> list[Machine]:
        return cast(list[Machine], await self._ask("list_machines"))

    async def events(self, after: int, run: str | None, limit: int, wait_s: float) -> list[Event]:
        return cast(list[Event], await self._ask("events", after, run, limit, wait_s, extra_s=wait_s))

    async def status(self) -> DeploymentStatus:
        return cast(DeploymentStatus, await self._ask("status"))

    async def shutdown(self, wait_s: float) -> list[str]:
        """Cancels every active run and waits at most so long; returns the names of those not finished."""
        return cast(list[str], await self._ask("shutdown", wait_s, extra_s=wait_s))

    async def ping(self) -> None:
        """Returns when the coordinator serves. Raises TransportError, MeshTimeoutError."""
        await _answer(self._handle.ping.remote(), CALL_TIMEOUT_S)

    async def _ask(self, method: str, *arguments: Any, extra_s: float = 0.0) -> Any:
        ok, value = await _answer(self._handle.serve.remote(method, arguments), CALL_TIMEOUT_S + extra_s)
        if not ok:
            raise MeshError.from_wire(value)
        return value


async def _answer(reference: Awaitable[Any], timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await reference
    except RayTaskError as error:  # it did answer: with a fault of its own, which no waiting mends
        if isinstance(error.cause, MeshError):
            raise error.cause from error
        raise InternalError(
            f"The coordinator failed on this: {error.cause!r}.",
            hint="The traceback is in its log, in the state folder under ray/head.",
        ) from error
    except TimeoutError as error:
        raise MeshTimeoutError("The coordinator did not answer.", timeout_s=timeout_s) from error
    except RayError as error:
        raise TransportError(
            "The coordinator cannot be asked now; it is being restarted.", hint="Try again in a moment."
        ) from error


def create_coordinator(config: Mapping[str, Any], *, resource: str) -> Any:
    """The deployment's coordinator: found by its name, or made. `resource` pins it to the head."""
    actor = ray.remote(CoordinatorActor)
    return actor.options(
        name=COORDINATOR_NAME,
        namespace=config["namespace"],
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=2000,
        num_cpus=0,
        resources={resource: 0.001},
    ).remote(dict(config))
