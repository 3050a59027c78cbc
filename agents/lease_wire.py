"""The few messages of the store's protocol that a keeper speaks, as lease events; without the asyncio client."""

from __future__ import annotations

from agents.core import lease as ls
from agents.core import lease_events as le
from mesh.ids import Incarnation
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.protocol import ID_MAX, encode_request

HELLO_ID = ID_MAX
"""Away from the requests' own ids, which count up from 1."""
FINAL_REASONS = frozenset(
    {
        Reason.STALE_EPOCH,
        Reason.LEASE_LOST,
        Reason.CONFLICT,
        Reason.FORBIDDEN,
        Reason.UNAUTHENTICATED,
        Reason.LIMIT_EXCEEDED,
        Reason.PROTOCOL,
    }
)
"""Denials that asking again cannot change. Whatever else the store says may pass (it has just been restarted)."""


def hello(*, secret: str) -> bytes:
    """The first frame of a connection."""
    return encode_request(ms.Hello(HELLO_ID, secret, ms.PROTOCOL_VERSION))


def request(op: str, *, request_id: int, incarnation: Incarnation, terms: ls.LeaseTerms) -> bytes:
    """`op` is grant, renew or release. A grant with the same token renews."""
    me = (incarnation.run_uid, incarnation.epoch, incarnation.rank, incarnation.token)
    if op == "release":
        return encode_request(ms.ReleaseLease(request_id, *me))
    return encode_request(ms.GrantLease(request_id, *me, terms.ttl_s, terms.guard_s))


def event_of(message: ms.Message) -> le.LeaseEvent | None:
    """What one message from the store means; None for what is not about this lease."""
    if isinstance(message, ms.Welcome):
        return le.Connected()
    if isinstance(message, ms.Done):
        return le.Confirmed(request_id=message.id)
    if not isinstance(message, ms.Refused):
        return None
    is_final = message.reason in FINAL_REASONS
    if message.id in (0, HELLO_ID):
        return le.ConnectionLost(message=message.message, is_final=is_final)
    return le.Denied(request_id=message.id, reason=message.reason, message=message.message, is_final=is_final)
