"""The network between machines: a check of it now, and what all checks have shown."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from coordinator.api.endpoints import CONTEXT, Answer, Endpoint, Parameter, Query, read_json
from coordinator.api.retry import ask
from mesh.errors import SpecError
from mesh.netcheck.estimate import MEMBERS_MIN, parse_model_size
from mesh.network_resources import NetworkReport, ProviderPath

NODES_LARGEST = 64
NAMES_MAX = 64
NAME_LENGTH_MAX = 253


class CheckRequest(TypedDict):
    """Which free machines; all of them when nothing is said."""

    machines: NotRequired[list[str]]
    nodes: NotRequired[int | None]
    """So many of them."""


class PathList(TypedDict):
    """Pairs of providers, by name."""

    paths: list[ProviderPath]


async def check_network(request: web.Request, query: Query) -> web.StreamResponse:
    body = await read_json(request, what="which machines") if await request.read() else {}
    machines, nodes = _checked(body)
    # not made again when it is not answered: it may still be under way
    return web.json_response(await request.app[CONTEXT].service.check_network(machines, nodes))


def _checked(body: Any) -> tuple[list[str], int | None]:
    """Raises SpecError, by field."""
    if not isinstance(body, dict) or body.keys() - CheckRequest.__annotations__.keys():
        raise SpecError('The request takes an object: {"machines": ["machine-1", "machine-2"], "nodes": 2}.')
    machines, nodes = body.get("machines") or [], body.get("nodes")
    is_list = isinstance(machines, list) and len(machines) <= NAMES_MAX
    if not is_list or not all(isinstance(n, str) and 0 < len(n) <= NAME_LENGTH_MAX for n in machines):
        raise SpecError(f"machines must be at most {NAMES_MAX} names of machines.", field="machines")
    if nodes is not None and not _is_count(nodes):
        raise SpecError(
            f"nodes must be a whole number from {MEMBERS_MIN} to {NODES_LARGEST}.",
            field="nodes",
            got=str(nodes)[:80],
        )
    return machines, nodes


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and MEMBERS_MIN <= value <= NODES_LARGEST


async def list_paths(request: web.Request, query: Query) -> web.StreamResponse:
    size, members = query["modelSize"], query["nodes"] or MEMBERS_MIN
    if not _is_count(members):
        raise SpecError(f"nodes must be from {MEMBERS_MIN} to {NODES_LARGEST}.", field="nodes")
    parameters = None if size is None else parse_model_size(size)
    service = request.app[CONTEXT].service
    return web.json_response({"paths": await ask(lambda: service.list_paths(parameters, members))})


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/network/check",
        operation="checkNetwork",
        summary="Measure the network between free machines, every pair in both directions, without a run",
        handler=check_network,
        body=CheckRequest,
        body_required=False,
        answers=(Answer(text="What was seen, and what is wrong.", shape=NetworkReport),),
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
    Endpoint(
        method="GET",
        path="/v1/paths",
        operation="listPaths",
        summary="What all network checks have shown, by pairs of providers",
        handler=list_paths,
        parameters=(
            Parameter(
                name="modelSize",
                kind="string",
                text="Parameters of a model, such as 7B: how long one all-reduce of its gradients would take.",
            ),
            Parameter(name="nodes", kind="integer", text="Between so many machines; 2 when left out."),
        ),
        answers=(Answer(text="Paths.", shape=PathList),),
    ),
)
