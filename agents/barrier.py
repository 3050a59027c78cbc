"""Waiting at the start barrier, through lost connections and restarted stores.

Rules of this file:
1. An arrival may be said twice: the store keeps it by rank and token.
2. Only an answer that cannot change ends the wait (an older epoch, a payload that is too large). Whoever waits is
   ended by its fence or by its lease, never by a clock of its own; so a lease that the store does not know (it has
   just been restarted) is waited for as well.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import msgpack

from agents.core.events import Arrival
from mesh.errors import MeshError, RemoteProtocolError, TransportError
from mesh.messages import JoinOrder
from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.protocol import ReplyStream, encode_request, error_of

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0
CONNECT_LIMIT_S = 5.0
READ_BYTES = 64 * 1024
HELLO_ID, ARRIVE_ID = 1, 2
PASSING_REASONS = frozenset({Reason.UNREACHABLE, Reason.UNKNOWN_GANG, Reason.LEASE_LOST, Reason.TIMEOUT})

_log = logging.getLogger(__name__)


async def arrive(order: JoinOrder, arrival: Arrival) -> tuple[Arrival, ...]:
    """Returns every rank's arrival, in rank order, when the barrier has opened.

    Raises:
        MeshError: the store will never let this member through.
    """
    incarnation = order.incarnation
    request = ms.Arrive(
        ARRIVE_ID,
        incarnation.run_uid,
        incarnation.epoch,
        incarnation.rank,
        incarnation.token,
        ms.START_BARRIER,
        msgpack.packb(arrival.to_payload()),
    )
    pause_s = PAUSE_FIRST_S
    while True:
        try:
            return _arrivals(await _ask(order.store, request))
        except MeshError as error:
            if error.reason not in PASSING_REASONS:
                raise
            _log.info("Not through the barrier yet: %s", error)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(PAUSE_MAX_S, pause_s * 2)


def _arrivals(opened: ms.Opened) -> tuple[Arrival, ...]:
    try:
        return tuple(Arrival.from_payload(msgpack.unpackb(payload)) for payload in opened.payloads)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RemoteProtocolError(f"The barrier opened with a payload that is none: {error!r}.") from error


async def _ask(endpoint: Endpoint, request: ms.Arrive) -> ms.Opened:
    """One connection: closed when the answer is there, or when the caller does not want it any more."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(encode_request(ms.Hello(HELLO_ID, endpoint.secret, ms.PROTOCOL_VERSION)))
        writer.write(encode_request(request))
        return await _opened(reader)
    except (OSError, TimeoutError) as error:
        raise TransportError(f"The store cannot be reached: {error!r}.") from error
    finally:
        if writer is not None:
            writer.close()


async def _opened(reader: asyncio.StreamReader) -> ms.Opened:
    stream = ReplyStream()
    while data := await reader.read(READ_BYTES):
        for message in stream.feed(data):
            answer: Any = message
            if isinstance(answer, ms.Refused):
                raise error_of(answer)
            if isinstance(answer, ms.Opened):
                return answer
    raise TransportError("The store closed the connection.")
