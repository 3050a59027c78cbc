"""Relays: taking part, news, what they have carried, leaving.

Rules of this file:
1. What a relay calls is open (`access`): it shows a join token in its request, or as its bearer token the secret that
   it got when it joined. The rest is the deployment's owner's.
"""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from coordinator.api.auth import bearer_of
from coordinator.api.endpoints import Answer, Endpoint, Parameter, Query
from coordinator.api.mesh_service import Reached, ReachRequest, Renewed, RenewRequest
from coordinator.api.relay_service import (
    RelayedList,
    RelayJoinRequest,
    RelayList,
    RelayNews,
    RelayReport,
    RelayService,
    RelayTerms,
)
from coordinator.api.routes_joined import (
    AFTER,
    follows,
    joins,
    leaves,
    mesh_of,
    object_of,
    reaches,
    renews,
)


def _relays(request: web.Request) -> RelayService:
    return mesh_of(request).relays


async def report(request: web.Request, query: Query) -> web.StreamResponse:
    body = await object_of(request, "what a relay has carried")
    await _relays(request).report(request.match_info["name"], bearer_of(request), body)
    return web.json_response({})


async def remove(request: web.Request, query: Query) -> web.StreamResponse:
    await _relays(request).remove(request.match_info["name"])
    return web.json_response({})


async def list_relays(request: web.Request, query: Query) -> web.StreamResponse:
    return web.json_response({"relays": _relays(request).facts()})


async def list_relayed(request: web.Request, query: Query) -> web.StreamResponse:
    return web.json_response({"relayed": _relays(request).relayed(query["run"])})


RUN = Parameter(name="run", kind="string", text="The uid of a run: its bytes only.")
CONFLICT = (HTTPStatus.CONFLICT,)

ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/relays",
        operation="listRelays",
        summary="The relays, the head's own first",
        handler=list_relays,
        answers=(Answer(text="Relays.", shape=RelayList),),
        errors=CONFLICT,
    ),
    Endpoint(
        method="GET",
        path="/v1/relayed",
        operation="listRelayed",
        summary="Bytes that relays have carried, by relay, run and pair of machines",
        handler=list_relayed,
        parameters=(RUN,),
        answers=(Answer(text="Bytes, both directions together.", shape=RelayedList),),
        errors=CONFLICT,
    ),
    Endpoint(
        method="DELETE",
        path="/v1/relays/{name}",
        operation="removeRelay",
        summary="Let nobody use or believe a relay any more: its certificate is revoked",
        handler=remove,
        answers=(Answer(text="Nothing.", shape=dict[str, object]),),
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
    Endpoint(
        method="POST",
        path="/v1/relays",
        operation="joinRelay",
        summary="Take a relay in, by a join token for relays or its secret",
        handler=joins(_relays, what="a relay's request to take part"),
        access="open",
        body=RelayJoinRequest,
        answers=(Answer(text="The relay's name and certificate.", shape=RelayTerms),),
        errors=(*CONFLICT, HTTPStatus.TOO_MANY_REQUESTS),
    ),
    Endpoint(
        method="GET",
        path="/v1/relays/{name}/news",
        operation="followAsRelay",
        summary="What is new for a relay; waits for it. Takes the relay's secret",
        handler=follows(_relays),
        access="open",
        parameters=(AFTER,),
        answers=(Answer(text="Everything that there is to know now.", shape=RelayNews),),
        errors=(*CONFLICT, HTTPStatus.TOO_MANY_REQUESTS),
    ),
    Endpoint(
        method="POST",
        path="/v1/relays/{name}/reach",
        operation="reachRelay",
        summary="Find out where a relay can be dialled. Takes the relay's secret",
        handler=reaches(_relays, what="a relay's addresses"),
        access="open",
        body=ReachRequest,
        answers=(Answer(text="Where it can.", shape=Reached),),
        errors=(HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS),
    ),
    Endpoint(
        method="POST",
        path="/v1/relays/{name}/certificate",
        operation="renewRelayCertificate",
        summary="A newer certificate for a relay. Takes the relay's secret",
        handler=renews(_relays),
        access="open",
        body=RenewRequest,
        answers=(Answer(text="The certificate.", shape=Renewed),),
        errors=CONFLICT,
    ),
    Endpoint(
        method="POST",
        path="/v1/relays/{name}/report",
        operation="reportRelayed",
        summary="What a relay has carried, entered once however often it is sent. Takes the relay's secret",
        handler=report,
        access="open",
        body=RelayReport,
        answers=(Answer(text="It is kept.", shape=dict[str, object]),),
        errors=CONFLICT,
    ),
    Endpoint(
        method="POST",
        path="/v1/relays/{name}/leave",
        operation="leaveAsRelay",
        summary="A relay has left: its certificate is revoked. Takes the relay's secret",
        handler=leaves(_relays),
        access="open",
        body=dict[str, object],
        body_required=False,
        answers=(Answer(text="Nothing.", shape=dict[str, object]),),
        errors=CONFLICT,
    ),
)
