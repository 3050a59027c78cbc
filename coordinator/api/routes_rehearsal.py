"""Rehearsals: harm that is done to a run's rank on purpose."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from coordinator.api.endpoints import CONTEXT, Answer, Endpoint, Query, read_json
from mesh.errors import SpecError
from mesh.resources import Harm
from mesh.states import HarmKind

SECONDS_DEFAULT = 10.0
SECONDS_LARGEST = 600.0
RANK_LARGEST = 7


class HarmRequest(TypedDict):
    """What is done to whom."""

    kind: str
    """LoseMachine, KillRank, Freeze or Cut."""
    rank: int
    seconds: NotRequired[float | None]
    """Of Freeze and Cut: after which it is undone; 10 when left out."""
    oneWay: NotRequired[bool]
    """Of Cut: only what leaves the machine is lost."""


async def harm_rank(request: web.Request, query: Query) -> web.StreamResponse:
    name = request.match_info["name"]
    kind, rank, seconds, one_way = _checked(await read_json(request, what="what is done to which rank"))
    # not made again when it is not answered: the harm may have been done
    harm = await request.app[CONTEXT].service.chaos(name, kind, rank, seconds, one_way)
    return web.json_response(harm, status=HTTPStatus.ACCEPTED)


def _checked(body: Any) -> tuple[str, int, float | None, bool]:
    """Raises SpecError, by field."""
    if not isinstance(body, dict):
        raise SpecError('The request takes an object: {"kind": "LoseMachine", "rank": 1}.')
    unknown = body.keys() - HarmRequest.__annotations__.keys()
    if unknown:
        raise _wrong(sorted(unknown)[0], None, "is not known here")
    kind, rank, seconds, one_way = (body.get(k) for k in ("kind", "rank", "seconds", "oneWay"))
    if kind not in list(HarmKind):
        raise _wrong("kind", kind, f"must be one of {', '.join(HarmKind)}")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank <= RANK_LARGEST:
        raise _wrong("rank", rank, f"must be a rank: 0 to {RANK_LARGEST}")
    if one_way is not None and (not isinstance(one_way, bool) or (one_way and kind != HarmKind.CUT)):
        raise _wrong("oneWay", one_way, "is true or false, and true for Cut only")
    if not HarmKind(kind).is_for_a_time:
        if seconds is not None:
            raise _wrong("seconds", seconds, f"cannot be given for {kind}, which is not undone")
        return str(kind), rank, None, False
    if seconds is None:
        seconds = SECONDS_DEFAULT
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= SECONDS_LARGEST:
        raise _wrong("seconds", seconds, f"must be over 0 and at most {SECONDS_LARGEST:g}")
    return str(kind), rank, float(seconds), bool(one_way)


def _wrong(field: str, got: object, what: str) -> SpecError:
    return SpecError(f"{field[:80]} {what}.", field=field[:80], got=str(got)[:80])


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/runs/{name}/chaos",
        operation="harmRank",
        summary="Do a rank harm on purpose, to rehearse its recovery; local deployments allow it, others when told to",
        handler=harm_rank,
        body=HarmRequest,
        answers=(Answer(text="It is done.", shape=Harm, status=HTTPStatus.ACCEPTED),),
        errors=(HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
)
