"""Waiting at the start barrier, through lost connections and restarted stores.

Rules of this file:
1. An arrival may be said twice: the store keeps it by rank and token.
2. Only an answer that cannot change ends the wait (an older epoch, a payload that is too large): whoever waits
   is ended by its fence or its lease, never by a clock of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from agents.core.events import Arrival
from mesh.errors import MeshError, RemoteProtocolError, TransportError
from mesh.ids import Incarnation
from mesh.messages import JoinOrder
from mesh.plan import Endpoint
from mesh.wire import FrameParser, encode_frame

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0
CONNECT_LIMIT_S = 5.0
READ_BYTES = 64 * 1024

_log = logging.getLogger(__name__)


async def arrive(order: JoinOrder, arrival: Arrival) -> tuple[Arrival, ...]:
    """Returns every rank's arrival, in rank order, when the barrier has opened.

    Raises:
        MeshError: the store will never let this member through.
    """
    pause_s = PAUSE_FIRST_S
    while True:
        try:
            payloads = await _arrive_once(order.store, order.incarnation, arrival.to_payload())
            return tuple(Arrival.from_payload(payload) for payload in payloads)
        except MeshError as error:
            if not error.retryable:
                raise
            _log.info("Not through the barrier yet: %s", error)
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(
                f"The barrier opened with a payload that is none: {error!r}."
            ) from error
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(PAUSE_MAX_S, pause_s * 2)


async def _arrive_once(endpoint: Endpoint, incarnation: Incarnation, payload: dict[str, Any]) -> Any:
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(encode_frame({"id": 0, "op": "hello", "secret": endpoint.secret}))
        writer.write(
            encode_frame(
                {
                    "id": 1,
                    "op": "barrier_arrive",
                    "gang": incarnation.run_uid,
                    "epoch": incarnation.epoch,
                    "rank": incarnation.rank,
                    "token": incarnation.token,
                    "payload": payload,
                }
            )
        )
        return await _answer(reader)
    except (OSError, TimeoutError) as error:
        raise TransportError(f"The store cannot be reached: {error!r}.") from error
    finally:
        if writer is not None:
            writer.close()


async def _answer(reader: asyncio.StreamReader) -> Any:
    parser = FrameParser()
    while data := await reader.read(READ_BYTES):
        for message in parser.feed(data):
            if "error" in message:
                raise MeshError.from_wire(message["error"])
            if message["id"] == 1:
                return message["result"]
    raise TransportError("The store closed the connection.")
