"""What machines and relays do alike at the head's API: joining, news, being dialled back, certificates, leaving.

Rules of this file:
1. Each of them shows a join token in its request, or as its bearer token the secret that it got when it joined.
2. A handler is made for a desk: that of machines, or that of relays.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from aiohttp import web

from coordinator.api.auth import bearer_of
from coordinator.api.endpoints import CONTEXT, EndpointHandler, Parameter, Query, read_json
from coordinator.api.mesh_service import MeshService
from coordinator.api.relay_service import RelayService
from mesh.errors import ConflictError, SpecError

ADDRESSES_MAX = 8
AFTER = Parameter(name="after", kind="string", text="The version of the news that was heard last.")


DeskOf = Callable[[web.Request], MeshService | RelayService]


def mesh_of(request: web.Request) -> MeshService:
    """Raises ConflictError."""
    mesh = request.app[CONTEXT].mesh
    if mesh is None:
        raise ConflictError(
            "This deployment has no mesh port; machines cannot join it through one.",
            hint="Start it with one: mesh up --listen HOST:PORT.",
        )
    return mesh


def joins(desk_of: DeskOf, *, what: str) -> EndpointHandler:
    async def join(request: web.Request, query: Query) -> web.StreamResponse:
        body = await object_of(request, what)
        return web.json_response(await desk_of(request).join(body))

    return join


def follows(desk_of: DeskOf) -> EndpointHandler:
    async def follow(request: web.Request, query: Query) -> web.StreamResponse:
        news = await desk_of(request).follow(
            request.match_info["name"], bearer_of(request), query["after"] or "", is_gone=_is_gone_of(request)
        )
        return web.json_response(news)

    return follow


def reaches(desk_of: DeskOf, *, what: str) -> EndpointHandler:
    async def reach(request: web.Request, query: Query) -> web.StreamResponse:
        body = await object_of(request, what)
        port = body.get("port")
        if port is not None and not _is_port(port):
            raise SpecError("port is that which it listens on, or null.", field="port", got=str(port)[:80])
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        found = await desk_of(request).reach(
            request.match_info["name"],
            bearer_of(request),
            addresses=_addresses(body.get("addresses")),
            port=port,
            seen_from=peer[1] if peer else 0,
        )
        return web.json_response({"addresses": [list(address) for address in found]})

    return reach


def renews(desk_of: DeskOf) -> EndpointHandler:
    async def renew(request: web.Request, query: Query) -> web.StreamResponse:
        wanted = (await object_of(request, "a certificate request")).get("request")
        if not isinstance(wanted, str):
            raise SpecError("request is a certificate signing request, PEM.", field="request")
        certificate = await desk_of(request).renew(request.match_info["name"], bearer_of(request), wanted)
        return web.json_response({"certificate": certificate})

    return renew


def leaves(desk_of: DeskOf) -> EndpointHandler:
    async def left(request: web.Request, query: Query) -> web.StreamResponse:
        await desk_of(request).left(request.match_info["name"], bearer_of(request))
        return web.json_response({})

    return left


async def object_of(request: web.Request, what: str) -> dict[str, Any]:
    """Raises SpecError."""
    body = await read_json(request, what=what)
    if not isinstance(body, dict):
        raise SpecError(f"The request takes {what}, as an object.")
    return body


def _is_gone_of(request: web.Request) -> Callable[[], bool]:
    """Whether who asked does not wait any more, or the API stops."""
    stopping = request.app[CONTEXT].stopping
    return lambda: request.transport is None or request.transport.is_closing() or stopping.is_set()


def _is_port(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536


def _addresses(given: Any) -> list[tuple[str, int]]:
    if not isinstance(given, list) or len(given) > ADDRESSES_MAX:
        raise SpecError(f"addresses is a list of at most {ADDRESSES_MAX}.", field="addresses")
    found = []
    for pair in given:
        try:
            host, port = pair
            address = str(ipaddress.ip_address(host))
        except (TypeError, ValueError):
            address, port = "", None
        if not address or not _is_port(port):
            raise SpecError(
                "Each of addresses is an IP address and a port.", field="addresses", got=str(pair)[:80]
            )
        found.append((address, port))
    return found
