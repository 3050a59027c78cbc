"""The REST API as an aiohttp application. `make_app` is the one way in.

Theory of operation. Every request passes two doors: the guard (`failures.guard_requests`), which turns
whatever goes wrong into an answer, and the token check. Endpoints are records in the `routes_*` files; each
asks the `CoordinatorService` or the `LogReader` and gives back what they say. Nothing is kept here between
requests, so an API server can be stopped and started at any time; its open streams are cut and their
readers come back.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from aiohttp import web

from coordinator.api import (
    routes_deployment,
    routes_mesh,
    routes_network,
    routes_rehearsal,
    routes_relays,
    routes_runs,
    routes_streams,
)
from coordinator.api.auth import bearer_middleware
from coordinator.api.endpoints import CONTEXT, ApiContext
from coordinator.api.failures import guard_requests
from coordinator.api.mesh_service import MeshService
from coordinator.api.openapi import build_document
from coordinator.api.routes_deployment import DOCUMENT
from coordinator.api.service import Admit, CoordinatorService, Grow, LogReader
from mesh import __version__
from mesh.spec import DeploymentFacts

BODY_BYTES_MAX = 8 * 1024 * 1024
"""A megabyte of environment, every byte of it escaped in JSON, fits in."""

ENDPOINTS = (
    *routes_deployment.ENDPOINTS,
    *routes_mesh.ENDPOINTS,
    *routes_relays.ENDPOINTS,
    *routes_runs.ENDPOINTS,
    *routes_rehearsal.ENDPOINTS,
    *routes_network.ENDPOINTS,
    *routes_streams.ENDPOINTS,
)


def make_app(
    service: CoordinatorService,
    logs: LogReader,
    *,
    token: str,
    deployment_facts: DeploymentFacts,
    grow: Grow | None = None,
    admit: Admit | None = None,
    mesh: MeshService | None = None,
) -> web.Application:
    """The application, ready for a runner.

    Args:
        service: the coordinator.
        logs: what was printed.
        token: what every request must carry; not empty.
        deployment_facts: what jobs are admitted to; the machines in it are replaced by those there are.
        grow: adds simulated machines; None where the deployment's machines are real ones.
        admit: takes in a machine from elsewhere; None where nothing can reach this host.
        mesh: takes in machines of the mesh; None where there is no mesh port.
    """
    app = web.Application(
        middlewares=[guard_requests, bearer_middleware(token)], client_max_size=BODY_BYTES_MAX
    )
    stopping = asyncio.Event()
    app[CONTEXT] = ApiContext(
        service=service,
        logs=logs,
        facts=deployment_facts,
        grow=grow,
        admit=admit,
        mesh=mesh,
        stopping=stopping,
    )
    app[DOCUMENT] = document()
    for endpoint in ENDPOINTS:
        app.router.add_route(endpoint.method, endpoint.path, endpoint.__call__)
    app.on_shutdown.append(_end_streams)
    return app


async def _end_streams(app: web.Application) -> None:
    app[CONTEXT].stopping.set()


@functools.cache
def document() -> dict[str, Any]:
    """The OpenAPI document of this version, without a server."""
    return build_document(ENDPOINTS, version=__version__)
