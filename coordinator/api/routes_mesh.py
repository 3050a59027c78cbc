"""Machines of the mesh: tokens to join with, joining, news, leaving.

Rules of this file:
1. Tokens are the deployment's owner's, as everything else. What a machine calls is open (`access`): it shows a join
   token in its request, or as its bearer token the secret that it got when it joined.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from aiohttp import web

from coordinator.api.auth import bearer_of
from coordinator.api.endpoints import CONTEXT, Answer, Endpoint, Query
from coordinator.api.mesh_service import (
    JoinedTerms,
    JoinTokenList,
    MeshJoinRequest,
    MeshNews,
    Reached,
    ReachRequest,
    Renewed,
    RenewRequest,
    RotationRequest,
    TokenRequest,
    TrustFacts,
)
from coordinator.api.retry import ask
from coordinator.api.routes_deployment import read_reclaim
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
from coordinator.mesh_requests import finite
from mesh.errors import SpecError
from mesh.resources import JoinTokenFacts, Machine, NewJoinToken, RotationFacts


async def get_authority(request: web.Request, query: Query) -> web.StreamResponse:
    return web.json_response(mesh_of(request).trust())


async def get_rotation(request: web.Request, query: Query) -> web.StreamResponse:
    return web.json_response(mesh_of(request).rotation.facts())


async def begin_rotation(request: web.Request, query: Query) -> web.StreamResponse:
    body = await object_of(request, "how long the overlap is") if await request.read() else {}
    facts = await mesh_of(request).rotation.begin(_seconds(body, "overlapSeconds"))
    return web.json_response(facts, status=HTTPStatus.ACCEPTED)


async def create_token(request: web.Request, query: Query) -> web.StreamResponse:
    mesh = mesh_of(request)
    body = await object_of(request, "how long it is good") if await request.read() else {}
    ttl_s, for_relay = _seconds(body, "ttlSeconds"), body.get("relay", False)
    if not isinstance(for_relay, bool):
        raise SpecError("relay is true or false.", field="relay", got=str(for_relay)[:80])
    token, facts = await mesh.create_token(ttl_s, for_relay=for_relay)
    return web.json_response({"token": token, "facts": facts}, status=HTTPStatus.CREATED)


async def list_tokens(request: web.Request, query: Query) -> web.StreamResponse:
    return web.json_response({"tokens": mesh_of(request).list_tokens()})


async def revoke_token(request: web.Request, query: Query) -> web.StreamResponse:
    return web.json_response(await mesh_of(request).revoke_token(request.match_info["id"]))


async def leave(request: web.Request, query: Query) -> web.StreamResponse:
    """As reclaim, by the machine itself."""
    name = await mesh_of(request).check(request.match_info["name"], bearer_of(request))
    grace_s, message = await read_reclaim(request)
    service = request.app[CONTEXT].service
    machine = await ask(lambda: service.reclaim(name, grace_s, message))
    return web.json_response(machine, status=HTTPStatus.ACCEPTED)


async def get_own(request: web.Request, query: Query) -> web.StreamResponse:
    name = await mesh_of(request).check(request.match_info["name"], bearer_of(request))
    machines = await ask(request.app[CONTEXT].service.list_machines)
    found = next((machine for machine in machines if machine["name"] == name), None)
    return web.json_response({"machine": found})


def _seconds(body: dict[str, Any], key: str) -> float | None:
    """None when it is not said. Raises SpecError."""
    value = body.get(key)
    if value is None:
        return None
    number = finite(value)
    if number is None:
        raise SpecError(f"{key} is a number.", field=key, got=str(value)[:80])
    return number


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/authority",
        operation="getAuthority",
        summary="The deployment's certificate authority; needs no token",
        handler=get_authority,
        access="open",
        answers=(Answer(text="Whom to trust.", shape=TrustFacts),),
        errors=(HTTPStatus.CONFLICT,),
    ),
    Endpoint(
        method="GET",
        path="/v1/authority/rotation",
        operation="getRotation",
        summary="Whom the machines of the mesh trust, and how far the rotation of the authority is",
        handler=get_rotation,
        answers=(Answer(text="Who signs, who will and who did.", shape=RotationFacts),),
        errors=(HTTPStatus.CONFLICT,),
    ),
    Endpoint(
        method="POST",
        path="/v1/authority/rotation",
        operation="beginRotation",
        summary="Begin to replace the deployment's certificate authority; it goes on by itself",
        handler=begin_rotation,
        body=RotationRequest,
        body_required=False,
        answers=(Answer(text="How far it is.", shape=RotationFacts, status=HTTPStatus.ACCEPTED),),
        errors=(HTTPStatus.CONFLICT,),
    ),
    Endpoint(
        method="POST",
        path="/v1/tokens",
        operation="createToken",
        summary="Make a token that lets one machine join, once and soon",
        handler=create_token,
        body=TokenRequest,
        body_required=False,
        answers=(Answer(text="The token.", shape=NewJoinToken, status=HTTPStatus.CREATED),),
        errors=(HTTPStatus.CONFLICT,),
    ),
    Endpoint(
        method="GET",
        path="/v1/tokens",
        operation="listTokens",
        summary="The join tokens",
        handler=list_tokens,
        answers=(Answer(text="Tokens, without their secrets.", shape=JoinTokenList),),
        errors=(HTTPStatus.CONFLICT,),
    ),
    Endpoint(
        method="DELETE",
        path="/v1/tokens/{id}",
        operation="revokeToken",
        summary="Let nobody join with this token any more",
        handler=revoke_token,
        answers=(Answer(text="The token.", shape=JoinTokenFacts),),
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
    Endpoint(
        method="POST",
        path="/v1/mesh/join",
        operation="joinMesh",
        summary="Take a machine into the mesh, by a join token or its secret: what its agent calls before it starts",
        handler=joins(mesh_of, what="a machine's request to join"),
        access="open",
        body=MeshJoinRequest,
        answers=(Answer(text="The machine's name, certificate and cluster.", shape=JoinedTerms),),
        errors=(HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS),
    ),
    Endpoint(
        method="GET",
        path="/v1/machines/{name}/mesh",
        operation="followMesh",
        summary="What is new in the mesh; waits for it. Takes the machine's secret",
        handler=follows(mesh_of),
        access="open",
        parameters=(AFTER,),
        answers=(Answer(text="Everything that there is to know now.", shape=MeshNews),),
        errors=(HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS),
    ),
    Endpoint(
        method="POST",
        path="/v1/machines/{name}/reach",
        operation="reachMachine",
        summary="Find out whether a machine's mesh port can be dialled. Takes the machine's secret",
        handler=reaches(mesh_of, what="a machine's addresses"),
        access="open",
        body=ReachRequest,
        answers=(Answer(text="Where it can.", shape=Reached),),
        errors=(HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS),
    ),
    Endpoint(
        method="POST",
        path="/v1/machines/{name}/certificate",
        operation="renewCertificate",
        summary="A newer certificate for a machine. Takes the machine's secret",
        handler=renews(mesh_of),
        access="open",
        body=RenewRequest,
        answers=(Answer(text="The certificate.", shape=Renewed),),
        errors=(HTTPStatus.CONFLICT,),
    ),
    Endpoint(
        method="POST",
        path="/v1/machines/{name}/leave",
        operation="leaveMachine",
        summary="A machine says that it goes away, as by reclaim. Takes the machine's secret",
        handler=leave,
        access="open",
        body=dict[str, object],
        body_required=False,
        answers=(Answer(text="The machine.", shape=Machine, status=HTTPStatus.ACCEPTED),),
        errors=(HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND),
    ),
    Endpoint(
        method="GET",
        path="/v1/machines/{name}/own",
        operation="getOwnMachine",
        summary="A machine as the deployment sees it, for itself. Takes the machine's secret",
        handler=get_own,
        access="open",
        answers=(Answer(text="The machine, or null.", shape=dict[str, object]),),
        errors=(HTTPStatus.CONFLICT,),
    ),
    Endpoint(
        method="DELETE",
        path="/v1/machines/{name}",
        operation="leftMachine",
        summary="A machine has left: its certificate is revoked. Takes the machine's secret",
        handler=leaves(mesh_of),
        access="open",
        answers=(Answer(text="Nothing.", shape=dict[str, object]),),
        errors=(HTTPStatus.CONFLICT,),
    ),
)
