"""Errors on the wire: which HTTP status a `MeshError` has, and the body that carries it."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from mesh.errors import (
    AuthenticationError,
    ConflictError,
    DeploymentError,
    InternalError,
    MeshError,
    MeshTimeoutError,
    NotFoundError,
    PlacementError,
    ProtocolError,
    RendezvousError,
    SpecError,
    StorageError,
    TransportError,
)
from mesh.reasons import Reason

_log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
RETRY_AFTER_S = 2
_REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")

_STATUS_OF_REASON = {
    Reason.LIMIT_EXCEEDED: HTTPStatus.TOO_MANY_REQUESTS,
    Reason.FORBIDDEN: HTTPStatus.FORBIDDEN,
    Reason.DEPLOYMENT_BUSY: HTTPStatus.CONFLICT,
}
_STATUS_OF_CLASS: tuple[tuple[type[MeshError], HTTPStatus], ...] = (
    (SpecError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (ConflictError, HTTPStatus.CONFLICT),
    (AuthenticationError, HTTPStatus.UNAUTHORIZED),
    (PlacementError, HTTPStatus.CONFLICT),
    (ProtocolError, HTTPStatus.BAD_REQUEST),
    (StorageError, HTTPStatus.INSUFFICIENT_STORAGE),
    (TransportError, HTTPStatus.SERVICE_UNAVAILABLE),
    (RendezvousError, HTTPStatus.SERVICE_UNAVAILABLE),
    (MeshTimeoutError, HTTPStatus.SERVICE_UNAVAILABLE),
    (DeploymentError, HTTPStatus.SERVICE_UNAVAILABLE),
)
_CLASS_OF_STATUS: dict[int, tuple[type[MeshError], Reason]] = {
    HTTPStatus.NOT_FOUND: (NotFoundError, Reason.NOT_FOUND),
    HTTPStatus.METHOD_NOT_ALLOWED: (SpecError, Reason.INVALID_SPEC),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (SpecError, Reason.LIMIT_EXCEEDED),
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status_of(error: MeshError) -> int:
    """The HTTP status that fits this error."""
    if error.reason in _STATUS_OF_REASON:
        return _STATUS_OF_REASON[error.reason]
    return next((s for c, s in _STATUS_OF_CLASS if isinstance(error, c)), HTTPStatus.INTERNAL_SERVER_ERROR)


def error_response(error: MeshError, *, request_id: str, status: int | None = None) -> web.Response:
    """The answer that carries this error."""
    status = status or status_of(error)
    headers = {REQUEST_ID_HEADER: request_id}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="gangmesh"'
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    body = {"error": error.to_wire(), "requestId": request_id}
    return web.json_response(body, status=status, headers=headers, dumps=_dumps)


def _dumps(value: object) -> str:
    # what was got may be half a surrogate pair, which has no UTF-8 form: it goes back as its JSON escape
    return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode()


@web.middleware
async def guard_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one guard: whatever happens in a handler becomes an answer with a body that programs can read."""
    offered = request.headers.get(REQUEST_ID_HEADER, "")
    request_id = offered if _REQUEST_ID_PATTERN.fullmatch(offered) else secrets.token_hex(8)
    request[REQUEST_ID] = request_id
    try:
        response = await handler(request)
    except MeshError as error:
        return error_response(error, request_id=request_id)
    except web.HTTPException as error:
        return _plain_http_error(error, request, request_id)
    except ConnectionError:
        # the client has gone while it was answered: nobody is left to tell
        return web.Response(status=499, reason="Client Closed Request")
    except Exception:  # noqa: BLE001 - the guard: a fault of ours becomes an answer and a log entry
        _log.exception("request %s: %s %s failed", request_id, request.method, request.path)
        fault = InternalError(
            "The server failed on this request; the traceback is in its log (head.log in the state folder).",
            hint=f"Look there for request {request_id}.",
        )
        return error_response(fault, request_id=request_id)
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = request_id
    return response


def _plain_http_error(error: web.HTTPException, request: web.Request, request_id: str) -> web.Response:
    """aiohttp's own errors (no such route, wrong method, body too large) in our words."""
    error_class, reason = _CLASS_OF_STATUS.get(error.status, (ProtocolError, Reason.PROTOCOL))
    message, hint = f"{request.method} {request.path}: {error.reason}.", ""
    if isinstance(error, web.HTTPNotFound):
        message = f"There is no {request.path} here."
        hint = "GET /v1/openapi.json lists what there is."
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not possible on {request.path}; it takes {allowed}."
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        limit_bytes = request.client_max_size
        message = f"The request's body is over the limit of {limit_bytes} bytes."
        hint = "Large inputs belong into files in the working directory, not into env or command."
    fault = error_class(message, hint=hint, reason=reason)
    response = error_response(fault, request_id=request_id, status=error.status)
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    return response
