"""What an endpoint is: one record from which its route, its query checks and its documentation are made.

The record is the only place where a path is written, so the OpenAPI document cannot drift from the routes.
"""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from aiohttp import web

from coordinator.api.mesh_service import MeshService
from coordinator.api.service import Admit, CoordinatorService, Grow, LogReader
from mesh.errors import SpecError
from mesh.spec import DeploymentFacts

INTEGER_LARGEST = 2**63 - 1
"""What the journal's databases take."""

Query = Mapping[str, Any]
"""Checked query parameters: every declared one is there, None when it was not given."""
EndpointHandler = Callable[[web.Request, Query], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What handlers work with."""

    service: CoordinatorService
    logs: LogReader
    facts: DeploymentFacts
    """What the deployment is; machines and accelerators are asked for at every submit."""
    grow: Grow | None
    """None on a deployment whose machines are not ours to add."""
    admit: Admit | None
    """None on a deployment that listens on its own host only."""
    mesh: MeshService | None
    """None on a deployment without a mesh port."""
    stopping: asyncio.Event
    """Set when the server begins to stop: open streams end."""


CONTEXT: web.AppKey[ApiContext] = web.AppKey("context", ApiContext)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One query parameter. `smallest` and `largest` bound numbers, which are finite and fit a database's integer."""

    name: str
    kind: Literal["integer", "number", "boolean", "string"]
    text: str
    smallest: float | None = None
    largest: float | None = None

    def parse(self, given: str) -> Any:
        """The value. Raises SpecError, which says what this parameter takes."""
        try:
            value = _PARSERS[self.kind](given)
        except ValueError:
            value = None
        below = self.smallest is not None and value is not None and value < self.smallest
        above = self.largest is not None and value is not None and value > self.largest
        if value is None or below or above:
            raise SpecError(
                f"The query parameter {self.name}={given[:80]!r} is not possible; it takes {self._takes()}.",
                field=self.name,
                got=given[:80],
            )
        return value

    def _takes(self) -> str:
        words = {
            "integer": "a whole number",
            "number": "a number",
            "boolean": "true or false",
            "string": "text",
        }
        takes = words[self.kind]
        if self.smallest is not None:
            takes += f" from {self.smallest:g}"
        if self.largest is not None:
            takes += f" to {self.largest:g}"
        return takes


def _parse_boolean(given: str) -> bool:
    if given.lower() in ("true", "1", ""):
        return True
    if given.lower() in ("false", "0"):
        return False
    raise ValueError(given)


def _parse_integer(given: str) -> int:
    value = int(given)
    if abs(value) > INTEGER_LARGEST:
        raise ValueError(given)
    return value


def _parse_number(given: str) -> float:
    value = float(given)
    if not math.isfinite(value):  # a deadline that is no number confuses the timers of everybody else
        raise ValueError(given)
    return value


_PARSERS: dict[str, Callable[[str], Any]] = {
    "integer": _parse_integer,
    "number": _parse_number,
    "boolean": _parse_boolean,
    "string": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What comes back when all is well. `shape` is a type for JSON, None for what is no JSON."""

    text: str
    shape: Any = None
    status: HTTPStatus = HTTPStatus.OK
    media: tuple[str, ...] = ("application/json",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method on one path."""

    method: str
    path: str
    operation: str
    summary: str
    handler: EndpointHandler
    answers: tuple[Answer, ...]
    parameters: tuple[Parameter, ...] = ()
    headers: Mapping[str, str] | None = None
    """Request headers that mean something here, with what they mean."""
    body: Any = None
    """The type of the JSON body; None when there is none."""
    body_required: bool = True
    access: Literal["deployment", "open"] = "deployment"
    """Who may call it: whoever has the deployment's token, or anybody (then the handler looks for itself)."""
    errors: tuple[HTTPStatus, ...] = ()
    """Beside 401, 422, 500 and 503, which everything can answer with."""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        return await self.handler(request, read_query(request, self.parameters))


def is_open(request: web.Request) -> bool:
    """Whether what is called needs no token of the deployment."""
    endpoint = getattr(request.match_info.handler, "__self__", None)
    return isinstance(endpoint, Endpoint) and endpoint.access == "open"


def read_query(request: web.Request, parameters: tuple[Parameter, ...]) -> Query:
    """The checked query. Raises SpecError for an unknown, doubled or impossible parameter."""
    known = {parameter.name: parameter for parameter in parameters}
    values: dict[str, Any] = dict.fromkeys(known)
    for name in request.query:
        if name not in known:
            raise SpecError(
                f"The query parameter {name[:80]!r} is not known here.",
                hint=_nearest(name, known),
                field=name[:80],
            )
        if len(request.query.getall(name)) > 1:
            raise SpecError(f"The query parameter {name!r} is given more than once.", field=name)
        values[name] = known[name].parse(request.query[name])
    return values


def _nearest(name: str, known: Mapping[str, Parameter]) -> str:
    if not known:
        return "This takes none."
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]}?" if near else f"It takes {', '.join(known)}."


async def read_json(request: web.Request, *, what: str) -> Any:
    """The JSON body. Raises SpecError with line and column for text that is no JSON."""
    # imported here: only requests with a body need it
    import json

    try:
        data = await request.read()
    except web.RequestPayloadError as error:
        raise SpecError(
            f"The request's body is not {request.headers.get('Content-Encoding', 'readable')[:80]}: {error}."
        ) from error
    if not data.strip():
        raise SpecError(f"The request has no body; it takes {what} as JSON.")
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise SpecError(f"The request's body is not UTF-8 (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise SpecError(
            f"The request's body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except RecursionError as error:
        raise SpecError("The request's body is nested too deeply.") from error
    except ValueError as error:  # Python's own bound on the digits of an integer
        raise SpecError(f"A number in the request's body is too long: {error}.") from error
