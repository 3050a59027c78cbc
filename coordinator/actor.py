"""The coordinator as a Ray actor, and the proxy through which the API reaches it.

Rules of this file:
1. Thin: the actor passes calls on.
2. Across the actor's boundary failure is data: an answer is `(True, value)` or `(False, error as data)`, because
   Ray wraps exceptions in classes of its own.
3. The actor is detached and Ray restarts it for ever; it finds everything it needs in its configuration.
4. Whoever gets the actor's handle by its name loads its class, and imports this file for it: every member does, at
   its first report, while its gang waits to start. So what the coordinator is made of is imported by the actor only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, cast

import ray
from ray.exceptions import RayError, RayTaskError

from mesh.errors import InternalError, MeshError, MeshTimeoutError, TransportError
from mesh.ids import Incarnation, MachineName
from mesh.messages import COORDINATOR_NAME, MemberReport
from mesh.netcheck.limits import CHECK_CALL_LIMIT_S
from mesh.network_resources import NetworkReport, ProviderPath
from mesh.resources import (
    Attempt,
    DeploymentStatus,
    Event,
    Harm,
    Machine,
    Run,
)

CALL_TIMEOUT_S = 20.0
HARM_LIMIT_S = 30.0
"""More than other calls may take: a machine may have to start a process for it."""


class CoordinatorActor:
    """See `coordinator.serving`, which also says what is in `config`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from coordinator.serving import ServingCoordinator  # rule 4

        self._serving = ServingCoordinator(config)

    async def ping(self) -> bool:
        """True once the journal has been read and everything under way goes on. Raises what the start raised."""
        return await self._serving.ping()

    async def report(self, report: MemberReport) -> bool:
        """A member's report; True when it is durable and needs not be repeated."""
        return await self._serving.report(report)

    async def sign_member(
        self, incarnation: Incarnation, machine: MachineName, request_pem: bytes
    ) -> tuple[bool, Any]:
        """A member's certificate. See `coordinator.member_certificates`."""
        return await self._serving.sign_member(incarnation, machine, request_pem)

    async def serve(self, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """One call of the CoordinatorService."""
        return await self._serving.serve(method, arguments)


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

    async def check_network(self, machines: list[str], nodes: int | None) -> NetworkReport:
        asked = ("check_network", machines, nodes)
        return cast(NetworkReport, await self._ask(*asked, extra_s=CHECK_CALL_LIMIT_S))

    async def list_paths(self, parameters: float | None, members: int) -> list[ProviderPath]:
        return cast(list[ProviderPath], await self._ask("list_paths", parameters, members))

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
