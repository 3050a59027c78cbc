"""The deployment itself: version, status, machines, and this API's own description."""

from __future__ import annotations

from http import HTTPStatus
from typing import NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from coordinator.api.endpoints import CONTEXT, Answer, Endpoint, Parameter, Query, read_json
from coordinator.api.retry import ask
from mesh import __version__
from mesh.errors import DeploymentError, SpecError
from mesh.reasons import Reason
from mesh.resources import DeploymentStatus, Machine, VersionInfo
from mesh.selectors import machine_labels, parse_selector
from mesh.spec import API_VERSION

SELECTOR = Parameter(
    name="labelSelector",
    kind="string",
    text="Conditions on labels, all of which must hold: `key=value,key!=value`.",
)
MACHINES_LARGEST = 64
GRACE_S_DEFAULT = 120.0
GRACE_S_LARGEST = 86_400.0
MESSAGE_LENGTH_MAX = 500


class MachineList(TypedDict):
    """All machines, by name."""

    machines: list[Machine]


class GrowRequest(TypedDict):
    """How many machines there shall be in all."""

    count: int


class ReclaimRequest(TypedDict):
    """When the machine goes away, and why."""

    graceSeconds: NotRequired[float]
    """From now; 120 when left out. Ranks get at most their own grace period of it."""
    message: NotRequired[str]


class JoinRequest(TypedDict):
    """A machine that asks to join: its address for everybody else, and what runs on it."""

    address: str
    version: str
    python: str
    ray: str


class ClusterAddress(TypedDict):
    """The deployment's Ray cluster, and which one it is now."""

    address: str
    id: str
    session: str


class JoinTerms(TypedDict):
    """The machine's name from now on, and what its agent needs to become part of the cluster."""

    name: str
    nodeId: str
    cluster: ClusterAddress
    clusterToken: str


async def get_version(request: web.Request, query: Query) -> web.StreamResponse:
    return web.json_response({"version": __version__, "api": API_VERSION})


async def get_status(request: web.Request, query: Query) -> web.StreamResponse:
    context = request.app[CONTEXT]
    status = await ask(context.service.status)
    if context.stopping.is_set():
        status = {**status, "state": "Stopping"}
    return web.json_response(status)


async def list_machines(request: web.Request, query: Query) -> web.StreamResponse:
    selector = parse_selector(query["labelSelector"] or "")
    machines = await ask(request.app[CONTEXT].service.list_machines)
    return web.json_response({"machines": [m for m in machines if selector.selects(machine_labels(m))]})


async def grow_machines(request: web.Request, query: Query) -> web.StreamResponse:
    grow = request.app[CONTEXT].grow
    body = await read_json(request, what='{"count": N}')
    count = body.get("count") if isinstance(body, dict) else None
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MACHINES_LARGEST:
        raise SpecError(
            f"count must be a whole number from 1 to {MACHINES_LARGEST}: how many machines there shall be.",
            field="count",
            got=str(count)[:80],
        )
    if grow is None:
        raise DeploymentError(
            "This deployment's machines are not simulated ones; none can be added on request.",
            hint="Machines of your own join it by themselves.",
            reason=Reason.CONFLICT,
        )
    return web.json_response({"machines": await grow(count)})


async def reclaim_machine(request: web.Request, query: Query) -> web.StreamResponse:
    name = request.match_info["name"]
    grace_s, message = await read_reclaim(request)
    service = request.app[CONTEXT].service
    machine = await ask(lambda: service.reclaim(name, grace_s, message))
    return web.json_response(machine, status=HTTPStatus.ACCEPTED)


async def read_reclaim(request: web.Request) -> tuple[float, str]:
    """When a machine goes away (in seconds from now), and why. Raises SpecError."""
    body = await read_json(request, what="when it goes away") if await request.read() else {}
    if not isinstance(body, dict):
        raise SpecError('The request takes an object: {"graceSeconds": 120, "message": "…"}.')
    grace_s, message = body.get("graceSeconds", GRACE_S_DEFAULT), body.get("message", "")
    is_number = isinstance(grace_s, int | float) and not isinstance(grace_s, bool)
    if not is_number or not 0 <= grace_s <= GRACE_S_LARGEST:
        raise SpecError(
            f"graceSeconds must be a number from 0 to {GRACE_S_LARGEST:g}.",
            field="graceSeconds",
            got=str(grace_s)[:80],
        )
    if not isinstance(message, str) or len(message) > MESSAGE_LENGTH_MAX:
        raise SpecError(f"message must be text of at most {MESSAGE_LENGTH_MAX} characters.", field="message")
    return float(grace_s), message


async def admit_machine(request: web.Request, query: Query) -> web.StreamResponse:
    admit = request.app[CONTEXT].admit
    body = await read_json(request, what="a machine's address and versions")
    if admit is None:
        raise DeploymentError(
            "No machine can join this deployment by an address.",
            hint="Start it with a mesh port, mesh up --listen HOST:PORT, and let machines join by `mesh join`.",
            reason=Reason.CONFLICT,
        )
    return web.json_response(await admit(body))


async def get_openapi(request: web.Request, query: Query) -> web.StreamResponse:
    return web.json_response(request.app[DOCUMENT])


DOCUMENT: web.AppKey[dict[str, object]] = web.AppKey("document", dict)

ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/version",
        operation="getVersion",
        summary="The server's version and the API's",
        handler=get_version,
        answers=(Answer(text="Versions.", shape=VersionInfo),),
    ),
    Endpoint(
        method="GET",
        path="/v1/status",
        operation="getStatus",
        summary="How the deployment is",
        handler=get_status,
        answers=(Answer(text="The deployment's state.", shape=DeploymentStatus),),
    ),
    Endpoint(
        method="GET",
        path="/v1/openapi.json",
        operation="getDocument",
        summary="This document",
        handler=get_openapi,
        answers=(Answer(text="The OpenAPI document.", shape=dict[str, object]),),
    ),
    Endpoint(
        method="GET",
        path="/v1/machines",
        operation="listMachines",
        summary="The machines that members can run on",
        handler=list_machines,
        parameters=(SELECTOR,),
        answers=(Answer(text="Machines.", shape=MachineList),),
    ),
    Endpoint(
        method="POST",
        path="/v1/machines",
        operation="growMachines",
        summary="Bring a local deployment to at least this many machines",
        handler=grow_machines,
        body=GrowRequest,
        answers=(Answer(text="All machines, the new ones ready.", shape=MachineList),),
        errors=(HTTPStatus.CONFLICT,),
    ),
    Endpoint(
        method="POST",
        path="/v1/machines/join",
        operation="joinMachine",
        summary="Take in a machine from elsewhere: what its agent calls before it starts",
        handler=admit_machine,
        body=JoinRequest,
        answers=(Answer(text="The machine's name, and the cluster to become part of.", shape=JoinTerms),),
        errors=(HTTPStatus.CONFLICT,),
    ),
    Endpoint(
        method="POST",
        path="/v1/machines/{name}/reclaim",
        operation="reclaimMachine",
        summary="A notice that a machine goes away: whoever has it saves and gets another one, nobody else gets it",
        handler=reclaim_machine,
        body=ReclaimRequest,
        body_required=False,
        answers=(
            Answer(
                text="The machine; its run has left it when `run` is null.",
                shape=Machine,
                status=HTTPStatus.ACCEPTED,
            ),
        ),
        errors=(HTTPStatus.NOT_FOUND,),
    ),
)
