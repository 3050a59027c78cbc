"""Waiting at the start barrier, through lost connections and restarted stores.

Rules of this file:
1. An arrival may be said twice: the store keeps it by rank and token.
2. Only an answer that cannot change ends the wait (an older epoch, a payload that is too large). Whoever waits is
   ended by its fence or by its lease, never by a clock of its own; so a lease that the store does not know (it has
   just been restarted) is waited for as well.
3. A wait may last for minutes. Its connection is kept alive, and one on which nothing is answered is made anew.
"""

from __future__ import annotations

import asyncio
import logging
import random

import msgpack

from agents.core.events import Arrival
from mesh.errors import MeshError, RemoteProtocolError
from mesh.messages import JoinOrder
from mesh.reasons import Reason
from mesh.store.client import StoreClient

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0
ALIVE_S = 10.0
"""Between two signs of life on the connection of a wait: a middlebox forgets one that is idle, after a minute or so."""
ALIVE_LIMIT_S = 5.0
PASSING_REASONS = frozenset({Reason.UNREACHABLE, Reason.UNKNOWN_GANG, Reason.LEASE_LOST, Reason.TIMEOUT})

_log = logging.getLogger(__name__)


async def arrive(order: JoinOrder, arrival: Arrival) -> tuple[Arrival, ...]:
    """Returns every rank's arrival, in rank order, when the barrier has opened.

    Raises:
        MeshError: the store will never let this member through.
    """
    payload = msgpack.packb(arrival.to_payload())
    pause_s = PAUSE_FIRST_S
    while True:
        try:
            return _arrivals(await _ask(order, payload))
        except MeshError as error:
            if error.reason not in PASSING_REASONS:
                raise
            _log.info("Not through the barrier yet: %s", error)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(PAUSE_MAX_S, pause_s * 2)


def _arrivals(payloads: tuple[bytes, ...]) -> tuple[Arrival, ...]:
    try:
        return tuple(Arrival.from_payload(msgpack.unpackb(payload)) for payload in payloads)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RemoteProtocolError(f"The barrier opened with a payload that is none: {error!r}.") from error


async def _ask(order: JoinOrder, payload: bytes) -> tuple[bytes, ...]:
    """One connection: closed when the answer is there, or when the caller does not want it any more."""
    me = order.incarnation
    client = await StoreClient.connect(order.store)
    arriving = asyncio.create_task(
        client.arrive(me.run_uid, me.epoch, me.rank, me.token, payload=payload, timeout_s=None),
        name=f"arrival of {me}",
    )
    try:
        while not (await asyncio.wait([arriving], timeout=ALIVE_S))[0]:
            await client.ping(timeout_s=ALIVE_LIMIT_S)
        return arriving.result()
    finally:
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)
        client.abort()
