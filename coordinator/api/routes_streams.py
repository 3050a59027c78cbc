"""What goes on: events and logs, as one answer or as a stream to follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus

from aiohttp import web
from typing_extensions import TypedDict

from coordinator.api.endpoints import CONTEXT, Answer, ApiContext, Endpoint, Parameter, Query
from coordinator.api.failures import REQUEST_ID, REQUEST_ID_HEADER
from coordinator.api.retry import ask
from coordinator.api.routes_deployment import SELECTOR
from coordinator.api.streams import NDJSON_TYPE, SSE_TYPE, cut, ndjson, sse, stream, wants_sse
from mesh.errors import MeshError, NotFoundError, SpecError
from mesh.resources import Event, LogLine, Run
from mesh.selectors import JOB_LABEL, Selector, event_labels, parse_selector

EVENTS_PER_PULL = 200
EVENTS_PER_ANSWER_MAX = 1000
EVENTS_WAIT_S_MAX = 30.0
EVENTS_PULL_WAIT_S = 5.0
STREAM_PATIENCE_S = 60.0
"""How long an open stream of events outlasts a coordinator that does not answer."""
TAIL_MAX = 100_000
RUN_UID_HEADER = "X-Run-Uid"
LAST_EVENT_ID_HEADER = "Last-Event-ID"


class EventList(TypedDict):
    """Events in order, and the `after` with which to go on."""

    events: list[Event]
    next: int


async def get_events(request: web.Request, query: Query) -> web.StreamResponse:
    context = request.app[CONTEXT]
    selector = parse_selector(query["labelSelector"] or "")
    run = query["run"] or selector.equalities.get(JOB_LABEL)
    after = query["after"] or 0
    if wants_sse(request):
        after = max(after, _last_event_id(request))
        items = _all_events(context, after, run, selector)
        return await stream(request, items, framing=sse(id_key="seq"), stopping=context.stopping, headers={})
    limit = query["limit"] or EVENTS_PER_PULL
    events = await _pull(context, after, run, limit, query["wait"] or 0.0)
    following = events[-1]["seq"] if events else after
    chosen = [event for event in events if selector.selects(event_labels(event))]
    return web.json_response({"events": chosen, "next": following})


def _last_event_id(request: web.Request) -> int:
    given = request.headers.get(LAST_EVENT_ID_HEADER, "0")
    return int(_LAST_EVENT_ID.parse(given))


async def _pull(context: ApiContext, after: int, run: str | None, limit: int, wait_s: float) -> list[Event]:
    """Events, or nothing when the server stops meanwhile."""
    call = asyncio.ensure_future(
        ask(
            lambda: context.service.events(after, run, limit, wait_s),
            limit_s=STREAM_PATIENCE_S + wait_s,
        )
    )
    stop = asyncio.ensure_future(context.stopping.wait())
    try:
        await asyncio.wait({call, stop}, return_when=asyncio.FIRST_COMPLETED)
        return call.result() if call.done() else []
    finally:
        stop.cancel()
        call.cancel()


async def _all_events(
    context: ApiContext, after: int, run: str | None, selector: Selector
) -> AsyncIterator[Event]:
    while not context.stopping.is_set():
        for event in await _pull(context, after, run, EVENTS_PER_PULL, EVENTS_PULL_WAIT_S):
            after = event["seq"]
            if selector.selects(event_labels(event)):
                yield event


async def get_logs(request: web.Request, query: Query) -> web.StreamResponse:
    context = request.app[CONTEXT]
    run = await _run_of(request, query)
    cursor = query["cursor"] or request.headers.get(LAST_EVENT_ID_HEADER)
    lines = context.logs.lines(
        run["metadata"]["uid"],
        rank=_existing_rank(run, query["rank"]),
        epoch=query["epoch"],
        tail=None if cursor else query["tail"],
        cursor=cursor,
        follow=bool(query["follow"]),
    )
    framing = sse(id_key="cursor") if wants_sse(request) else ndjson()
    headers = {RUN_UID_HEADER: run["metadata"]["uid"]}
    return await stream(request, lines, framing=framing, stopping=context.stopping, headers=headers)


async def _run_of(request: web.Request, query: Query) -> Run:
    """The run that is meant: of this name and, when the reader comes back for the rest, of the same uid."""
    name = request.match_info["name"]
    run = await ask(lambda: request.app[CONTEXT].service.get_run(name))
    if query["uid"] and run["metadata"]["uid"] != query["uid"]:
        raise NotFoundError(
            f"The run {name} that was read before has been deleted; another run has its name now.",
            hint="Read from the start, without a cursor, for the new one.",
            run=name,
        )
    return run


def _existing_rank(run: Run, rank: int | None) -> int | None:
    nodes = int(run["status"]["topology"]["nodes"])
    if rank is not None and rank >= nodes:
        raise NotFoundError(
            f"The run {run['metadata']['name']} has no rank {rank}; its ranks are 0 to {nodes - 1}.",
            rank=rank,
        )
    return rank


async def get_raw_log(request: web.Request, query: Query) -> web.StreamResponse:
    context = request.app[CONTEXT]
    run = await _run_of(request, query)
    rank = _existing_rank(run, query["rank"])
    if rank is None:
        raise SpecError("A raw log is one rank's; say which: rank=0.", field="rank")
    epoch = query["epoch"] or int(run["status"]["epoch"])
    chunks = context.logs.raw(run["metadata"]["uid"], rank, epoch)
    first = await anext(aiter(chunks), b"")  # what is wrong comes out here, before an answer has begun
    response = web.StreamResponse(
        headers={
            "Content-Type": "application/octet-stream",
            REQUEST_ID_HEADER: request[REQUEST_ID],
            RUN_UID_HEADER: run["metadata"]["uid"],
        }
    )
    await response.prepare(request)
    try:
        await response.write(first)
        async for chunk in chunks:
            await response.write(chunk)
            if context.stopping.is_set():
                cut(request)
                break
        await response.write_eof()
    except (ConnectionError, MeshError):
        cut(request)
    return response


_LAST_EVENT_ID = Parameter(
    name=LAST_EVENT_ID_HEADER, kind="integer", text="The id of the last event that was seen.", smallest=0
)
_UID = Parameter(name="uid", kind="string", text="The uid that the run must have: for coming back to it.")
_RANK = Parameter(name="rank", kind="integer", text="Of this rank only.", smallest=0)
_EPOCH = Parameter(name="epoch", kind="integer", text="Of this epoch only.", smallest=1)

ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/events",
        operation="getEvents",
        summary="What happened; with `Accept: text/event-stream` also what happens from now on",
        handler=get_events,
        parameters=(
            SELECTOR,
            Parameter(name="run", kind="string", text="Of this run only: a name or a uid."),
            Parameter(name="after", kind="integer", text="Events after this seq.", smallest=0),
            Parameter(
                name="limit",
                kind="integer",
                text="At most this many; 200 when left out.",
                smallest=1,
                largest=EVENTS_PER_ANSWER_MAX,
            ),
            Parameter(
                name="wait",
                kind="number",
                text="Seconds to wait for the first event when there is none yet.",
                smallest=0,
                largest=EVENTS_WAIT_S_MAX,
            ),
        ),
        headers={LAST_EVENT_ID_HEADER: "As `after`: a stream goes on behind this event."},
        answers=(Answer(text="Events.", shape=EventList), Answer(text="The stream.", media=(SSE_TYPE,))),
    ),
    Endpoint(
        method="GET",
        path="/v1/runs/{name}/logs",
        operation="getLogs",
        summary="What the ranks printed, merged; a clean end of the answer means that it is all",
        handler=get_logs,
        parameters=(
            _RANK,
            _EPOCH,
            Parameter(name="tail", kind="integer", text="The last lines only.", smallest=0, largest=TAIL_MAX),
            Parameter(name="follow", kind="boolean", text="Go on until the run has ended."),
            Parameter(name="cursor", kind="string", text="Go on behind the line that had this cursor."),
            _UID,
        ),
        headers={LAST_EVENT_ID_HEADER: "As `cursor`."},
        answers=(Answer(text="Lines (LogLine objects).", shape=LogLine, media=(NDJSON_TYPE, SSE_TYPE)),),
        errors=(HTTPStatus.NOT_FOUND,),
    ),
    Endpoint(
        method="GET",
        path="/v1/runs/{name}/logs/raw",
        operation="getRawLog",
        summary="The bytes that one rank printed, exactly",
        handler=get_raw_log,
        parameters=(_RANK, _EPOCH, _UID),
        answers=(Answer(text="Bytes.", media=("application/octet-stream",)),),
        errors=(HTTPStatus.NOT_FOUND,),
    ),
)
