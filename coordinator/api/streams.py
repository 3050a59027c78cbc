"""Long answers: NDJSON and server-sent events over a chunked response.

Rules of this file:
1. A stream pulls. The next item is asked for when the last one was taken over by the socket, so a slow
   reader slows its own stream only, and nothing but one chunk is ever held for it.
2. A clean end of the response means that everything was given. A stream that stops for any other reason
   (the server stops, the source fails) ends in an error item or a cut connection, and the reader comes back
   with its cursor.
3. While nothing happens a heartbeat goes out, so that both sides notice a dead connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from coordinator.api.failures import REQUEST_ID, REQUEST_ID_HEADER
from mesh.errors import MeshError

HEARTBEAT_S = 10.0
CHUNK_BYTES = 64 * 1024
SSE_RETRY_MS = 1000
SSE_TYPE = "text/event-stream"
NDJSON_TYPE = "application/x-ndjson"

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """How items, heartbeats, errors and the end look on the wire."""

    content_type: str
    opening: bytes
    heartbeat: bytes
    ending: bytes
    encode: Callable[[Item], bytes]
    encode_error: Callable[[Item], bytes]


def compact_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _json_bytes(value: object) -> bytes:
    # a lone surrogate (from undecodable output) has no UTF-8 form; it travels as its JSON escape
    try:
        return compact_json(value).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def ndjson() -> Framing:
    """One JSON object a line; an empty line is a heartbeat; `{"error": …}` ends a stream that failed."""
    return Framing(
        content_type=NDJSON_TYPE,
        opening=b"",
        heartbeat=b"\n",
        ending=b"",
        encode=lambda item: _json_bytes(item) + b"\n",
        encode_error=lambda error: _json_bytes({"error": error}) + b"\n",
    )


def sse(*, id_key: str) -> Framing:
    """Server-sent events: `id` is the cursor to come back with; `end` and `error` events close a stream."""

    def encode(item: Item) -> bytes:
        return b"id: %s\ndata: %s\n\n" % (str(item[id_key]).encode(), _json_bytes(item))

    return Framing(
        content_type=SSE_TYPE,
        opening=b"retry: %d\n\n" % SSE_RETRY_MS,
        heartbeat=b": still here\n\n",
        ending=b"event: end\ndata: {}\n\n",
        encode=encode,
        encode_error=lambda error: b"event: error\ndata: %s\n\n" % _json_bytes(error),
    )


def wants_sse(request: web.Request) -> bool:
    """True when the client asks for server-sent events."""
    return SSE_TYPE in request.headers.get("Accept", "")


async def stream(
    request: web.Request,
    items: AsyncIterator[Item],
    *,
    framing: Framing,
    stopping: asyncio.Event,
    headers: dict[str, str],
    heartbeat_s: float = HEARTBEAT_S,
) -> web.StreamResponse:
    """Sends all items as one response.

    Args:
        stopping: set when the server stops: the connection is cut then.

    Raises:
        MeshError: the source refused at once; nothing has been sent.
    """
    first = asyncio.ensure_future(_next(items))
    await asyncio.sleep(0)
    if first.done():
        first.result()
    response = web.StreamResponse(
        headers={
            "Content-Type": f"{framing.content_type}; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
            REQUEST_ID_HEADER: request[REQUEST_ID],
            **headers,
        }
    )
    is_whole = False
    try:
        await response.prepare(request)
        await response.write(framing.opening)
        await _pump(response, items, first, framing, stopping, heartbeat_s)
        await response.write(framing.ending)
        await response.write_eof()
        is_whole = True
    except MeshError as error:
        await response.write(framing.encode_error(error.to_wire()))
        await response.write_eof()
        is_whole = True
    except (ConnectionError, _ServerStoppingError):
        pass  # cut, as whatever else may come up to the guard
    finally:
        if not is_whole:
            cut(request)
        first.cancel()
    return response


def cut(request: web.Request) -> None:
    """Closes the connection without the last chunk, so that no reader takes this for the end."""
    if request.transport is not None:
        request.transport.close()


class _ServerStoppingError(Exception):
    pass


async def _pump(
    response: web.StreamResponse,
    items: AsyncIterator[Item],
    following: asyncio.Future[Item | None],
    framing: Framing,
    stopping: asyncio.Event,
    heartbeat_s: float,
) -> None:
    chunk = bytearray()
    stop = asyncio.ensure_future(stopping.wait())
    try:
        while True:
            if not following.done():
                await asyncio.sleep(0)  # an item that is at hand already is there after one turn of the loop
            if not following.done():
                if chunk:
                    await response.write(bytes(chunk))
                    chunk.clear()
                awaited: set[asyncio.Future[Any]] = {following, stop}
                await asyncio.wait(awaited, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
                if not following.done() and not stop.done():
                    await response.write(framing.heartbeat)
                    continue
            if stop.done():
                raise _ServerStoppingError
            try:
                item = following.result()
            except MeshError:
                if chunk:
                    await response.write(bytes(chunk))
                raise
            if item is None:
                break
            chunk += framing.encode(item)
            if len(chunk) >= CHUNK_BYTES:
                await response.write(bytes(chunk))
                chunk.clear()
            following = asyncio.ensure_future(_next(items))
        if chunk:
            await response.write(bytes(chunk))
    finally:
        await _close(following, stop, items)


async def _next(items: AsyncIterator[Item]) -> Item | None:
    return await anext(items, None)


async def _close(following: asyncio.Future[Item | None], stop: asyncio.Future[Any], items: object) -> None:
    """Lets the source go: its iterator is closed only after a read in progress has been cancelled."""
    stop.cancel()
    following.cancel()
    await asyncio.wait({following})
    if not following.cancelled():
        following.exception()  # seen: it was raised above, or nobody is left to hear it
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()
