"""The items of the API's long answers: JSON objects, one a line or one a server-sent event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from mesh.errors import MeshError, RemoteProtocolError
from mesh.http_transport import Backoff, HttpStream
from mesh.sse import EventParser


def item_of(text: bytes | str) -> dict[str, Any]:
    """Raises RemoteProtocolError."""
    try:
        item = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError("The server sent an item that is no JSON.") from error
    if not isinstance(item, dict):
        raise RemoteProtocolError("The server sent an item that is no object.")
    return item


async def event_items(stream: HttpStream, backoff: Backoff) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, up to its end. Raises what an error event says."""
    parser = EventParser()
    async for line in stream.lines():
        backoff.succeeded()
        event = parser.feed(line)
        if event is None:
            continue
        if event.event == "error":
            raise MeshError.from_wire(item_of(event.data))
        if event.event == "message":
            yield item_of(event.data)
