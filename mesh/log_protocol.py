"""What a log shipper and the log sink say to each other, frame by frame. Sans-io.

    shipper                                 sink
       hello(secret, incarnation) ─▶
                                   ◀─ welcome(offset)        or refused(error, final)
       data(offset, records) …     ─▶
                                   ◀─ ack(offset) …
       end(offset)                 ─▶
                                   ◀─ ended                  and the sink closes

Rules of this file:
1. An offset is a place in the incarnation's spool (`agents.spool`). Data goes on from the offset of the
   welcome and only ever forward. Where it jumps ahead, the spool has a hole: those bytes are lost, and the
   sink says so.
2. Data is whole records. What `ack(offset)` covers need never be sent again: the shipper may forget it.
3. At most WINDOW_BYTES_MAX of data are not acknowledged, so both sides know how much memory a stream takes.
4. A refusal that is `final` is about this incarnation's output as such: sending it again never helps. After
   any other one, and after a connection that breaks, the shipper comes back and says hello again.
5. The newest connection of an incarnation is the one that counts; the sink closes the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mesh.errors import MeshError, RemoteProtocolError
from mesh.ids import Incarnation

PROTOCOL_VERSION = 1
CHUNK_BYTES_MAX = 256 * 1024
"""Records in one data frame."""
WINDOW_BYTES_MAX = 2 * 1024 * 1024
"""Data that is sent and not yet acknowledged: enough for 16 MiB/s over 100 ms."""
HELLO_BYTES_MAX = 4096
"""The largest frame that a sink reads from a peer it does not know yet."""
FRAME_BYTES_MAX = CHUNK_BYTES_MAX + 4096
OFFSET_MAX = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame of a connection."""

    secret: str = field(repr=False)
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Go on from `offset`: the sink has what comes before it, or has given it up."""

    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Whole records that lie together in the spool, the first one at `offset`."""

    offset: int
    records: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Everything before `offset` is the sink's business now."""

    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The output ends at `offset`: everything before it was sent, nothing will follow."""

    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The whole output has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The sink does not take this; it closes."""

    error: MeshError
    final: bool


FromShipper = Hello | Data | End
FromSink = Welcome | Ack | Ended | Refused


def to_frame(message: FromShipper | FromSink) -> list[Any]:
    """The message as what `mesh.wire.encode_frame` takes."""
    match message:
        case Hello():
            return ["hello", PROTOCOL_VERSION, message.secret, str(message.incarnation)]
        case Welcome():
            return ["welcome", message.offset]
        case Data():
            return ["data", message.offset, message.records]
        case Ack():
            return ["ack", message.offset]
        case End():
            return ["end", message.offset]
        case Ended():
            return ["ended"]
        case Refused():
            return ["refused", message.error.to_wire(), message.final]


def from_shipper(frame: Any) -> FromShipper:
    """What a shipper said. Raises RemoteProtocolError for anything that it cannot say."""
    match frame:
        case ["data", int(offset), bytes(records)] if _is_offset(offset) and len(records) > 0:
            if len(records) > CHUNK_BYTES_MAX:
                raise RemoteProtocolError(f"The log shipper sent {len(records)} bytes in one frame.")
            return Data(offset=offset, records=records)
        case ["end", int(offset)] if _is_offset(offset):
            return End(offset=offset)
        case ["hello", version, str(secret), str(incarnation)]:
            if version != PROTOCOL_VERSION:
                raise RemoteProtocolError(
                    f"The log shipper speaks version {version!r}; this is {PROTOCOL_VERSION}."
                )
            try:
                return Hello(secret=secret, incarnation=Incarnation.parse(incarnation))
            except ValueError:
                raise RemoteProtocolError("The log shipper named no incarnation.") from None
    raise RemoteProtocolError("The log shipper sent a frame that is not part of the protocol.")


def from_sink(frame: Any) -> FromSink:
    """What a sink said. Raises RemoteProtocolError for anything that it cannot say."""
    match frame:
        case ["ack", int(offset)] if _is_offset(offset):
            return Ack(offset=offset)
        case ["welcome", int(offset)] if _is_offset(offset):
            return Welcome(offset=offset)
        case ["ended"]:
            return Ended()
        case ["refused", dict(error), bool(final)]:
            return Refused(error=MeshError.from_wire(error), final=final)
    raise RemoteProtocolError("The log sink sent a frame that is not part of the protocol.")


def _is_offset(number: int) -> bool:
    return not isinstance(number, bool) and 0 <= number <= OFFSET_MAX


class SendWindow:
    """What a shipper has sent on one connection and what of it is acknowledged.

    Invariant: acked <= sent. A hole in the spool counts as if it were in flight, which only makes the sender
    wait for an acknowledgement once.
    """

    def __init__(self, *, offset: int) -> None:
        self.acked = offset
        self.sent = offset

    @property
    def room(self) -> int:
        """Bytes of data that may be sent now; none while it is negative."""
        return WINDOW_BYTES_MAX - (self.sent - self.acked)

    def on_sent(self, offset: int) -> None:
        """Data up to `offset` was sent."""
        assert self.sent < offset, "data goes forward only"
        self.sent = offset

    def on_end(self, offset: int) -> None:
        """The end was announced; it lies behind what was sent when the spool ends with a hole."""
        self.sent = max(self.sent, offset)

    def on_ack(self, offset: int) -> None:
        """Raises RemoteProtocolError for an acknowledgement of what was not sent, or that goes back."""
        if not self.acked <= offset <= self.sent:
            raise RemoteProtocolError(
                f"The log sink acknowledged {offset}; between {self.acked} and {self.sent} was expected."
            )
        self.acked = offset
