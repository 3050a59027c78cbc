"""The few frames of the store's protocol that a keeper speaks, without the asyncio client's weight."""

from __future__ import annotations

from typing import Any

from agents.core import lease as ls
from mesh.errors import AuthenticationError, MeshError, RemoteProtocolError
from mesh.ids import Incarnation
from mesh.wire import encode_frame

HELLO_ID = 0


def hello(*, secret: str) -> bytes:
    """The first frame of a connection."""
    return encode_frame({"id": HELLO_ID, "op": "hello", "secret": secret})


def request(op: str, *, request_id: int, incarnation: Incarnation, ttl_s: float) -> bytes:
    """`op` is grant, renew or release."""
    return encode_frame(
        {
            "id": request_id,
            "op": f"lease_{op}",
            "gang": incarnation.run_uid,
            "epoch": incarnation.epoch,
            "rank": incarnation.rank,
            "token": incarnation.token,
            "ttl_s": ttl_s,
        }
    )


def event_of(message: Any) -> ls.LeaseEvent:
    """What one frame from the store means. Raises RemoteProtocolError for what is no answer."""
    if not isinstance(message, dict) or not isinstance(message.get("id"), int):
        raise RemoteProtocolError(f"The store sent {message!r:.200}, which answers nothing.")
    request_id: int = message["id"]
    if "error" not in message:
        return ls.Connected() if request_id == HELLO_ID else ls.Confirmed(request_id=request_id)
    error = MeshError.from_wire(message["error"])
    if request_id == HELLO_ID:
        return ls.ConnectionLost(message=str(error), is_final=isinstance(error, AuthenticationError))
    return ls.Denied(
        request_id=request_id, reason=error.reason, message=str(error), is_final=not error.retryable
    )
