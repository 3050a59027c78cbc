"""Store messages as frames, and back; bytes in, messages out. Sans-io, and light enough for a heartbeat process.

The frames are those of `mesh.wire`: a 4-byte big-endian length, then that many bytes of msgpack. A request is
[op, id, field …], a reply [id, kind, field …] with id > 0, a push [0, kind, field …].

Rules of this file:
1. What is decoded has been checked: the op is known, there are as many fields as it has, each of its type.
2. After an error a stream is not read any more.
3. Frames that come again and again are remembered whole (`RequestMemo`): a member that renews its lease, or counts
   a key up, sends the same bytes each time when it uses the same id. A secret is never remembered.
4. Numbers and Dones are built by one `struct` call: they are what a busy store mostly says.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack

from mesh.errors import (
    AuthenticationError,
    ConflictError,
    FencedError,
    InternalError,
    LeaseLostError,
    LocalProtocolError,
    MeshError,
    RemoteProtocolError,
    RendezvousError,
)
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.limits import StoreLimits

ID_MAX = 2**31 - 1
MEMO_FRAMES_MAX = 16_384
MEMO_FRAME_BYTES_MAX = 256

_HEADER = struct.Struct(">I")
_HEADER_BYTES = 4
_REQUESTS: tuple[type[Any], ...] = (
    ms.Hello, ms.Ping, ms.Cancel, ms.SetFloor, ms.DropGang, ms.CloseBarrier, ms.Watch, ms.Gangs, ms.Snapshot,
    ms.GrantLease, ms.ReleaseLease, ms.Arrive, ms.Get, ms.Set, ms.Add, ms.Wait, ms.CompareAndSet, ms.Delete,
)  # fmt: skip
_REPLIES: tuple[type[Any], ...] = (
    ms.Done, ms.Number, ms.Value, ms.Compared, ms.Opened, ms.Welcome, ms.GangList, ms.GangSnapshot, ms.Refused,
)  # fmt: skip
_PUSHES: tuple[type[Any], ...] = (
    ms.LeaseLapsed, ms.LeaseReleased, ms.MemberConnectionLost, ms.BarrierOpened,
)  # fmt: skip
"""An op or kind is the place in its tuple: append, never reorder. Replies and pushes count apart."""

_OP_OF = {kind: op for op, kind in enumerate(_REQUESTS)}
_REPLY_KIND_OF = {kind: code for code, kind in enumerate(_REPLIES)}
_PUSH_KIND_OF = {kind: code for code, kind in enumerate(_PUSHES)}
_DONE = struct.Struct(">IBBIB")
_DONE_FIELDS = (7, 0x92, 0xCE)
_NUMBER = struct.Struct(">IBBIBBq")
_NUMBER_FIELDS = (16, 0x93, 0xCE)
_NUMBER_CODE = _REPLY_KIND_OF[ms.Number]
_NUMBER_FRAME_BYTES = _NUMBER.size
_packer = msgpack.Packer(use_bin_type=True, autoreset=True)

M = TypeVar("M")


# ---- encoding -----------------------------------------------------------------------------------------


def encode_request(request: ms.Request) -> bytes:
    """One request as a frame. Raises LocalProtocolError for a field that cannot be encoded."""
    return _frame((_OP_OF[type(request)], *request))


class ReplyEncoder:
    """Replies and pushes as frames. One per server: it keeps the last barrier's answer for all its ranks."""

    def __init__(self) -> None:
        self._payloads: tuple[bytes, ...] | None = None
        self._payloads_tail = b""

    def encode(self, message: ms.Message) -> bytes:
        kind = type(message)
        if kind is ms.Number:
            return _NUMBER.pack(*_NUMBER_FIELDS, message[0], _NUMBER_CODE, 0xD3, message[1])  # type: ignore[misc]
        if kind is ms.Done:
            return _DONE.pack(*_DONE_FIELDS, message[0], 0)
        code = _REPLY_KIND_OF.get(kind)
        if code is None:
            return _frame((0, _PUSH_KIND_OF[kind], *message))
        if kind is ms.Opened:
            return self._encode_opened(message)  # type: ignore[arg-type]
        return _frame((message[0], code, *message[1:]))

    def _encode_opened(self, message: ms.Opened) -> bytes:
        """The answer is the same for every rank but for the id, so its long part is packed once."""
        if self._payloads is not message.payloads:
            self._payloads = message.payloads
            self._payloads_tail = _packer.pack(message.payloads)
        head = struct.pack(">BBIB", 0x93, 0xCE, message.id, _REPLY_KIND_OF[ms.Opened])
        return _HEADER.pack(len(head) + len(self._payloads_tail)) + head + self._payloads_tail


def _frame(fields: tuple[Any, ...]) -> bytes:
    try:
        body: bytes = _packer.pack(fields)
    except (TypeError, ValueError, OverflowError) as error:
        _packer.reset()
        raise LocalProtocolError(f"This message cannot be encoded: {error}.") from error
    return _HEADER.pack(len(body)) + body


# ---- decoding -----------------------------------------------------------------------------------------


class _FrameStream:
    """Splits a byte stream into bodies. After an error it refuses everything."""

    def __init__(self, *, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.partials_count = 0
        """How many frames have come in more than one piece so far: tells one half frame from the next."""
        self._buffer = bytearray()
        self._is_broken = False

    @property
    def is_partial(self) -> bool:
        """True when half a frame waits for the rest."""
        return bool(self._buffer)

    def _bodies(self, data: bytes) -> list[bytes]:
        """Every body that is whole by now."""
        if self._is_broken:
            raise RemoteProtocolError("This stream sent garbage before and is not read any more.")
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted():
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        bodies: list[bytes] = []
        position, size = 0, len(data)
        while size - position >= _HEADER_BYTES:
            end = position + _HEADER_BYTES + self._length(data, position)
            if end > size:
                break
            bodies.append(data[position + _HEADER_BYTES : end])
            position = end
        if position < size:
            self._buffer += data[position:]
            self.partials_count += 1
        return bodies

    def _wanted(self) -> int:
        """How many bytes make the first frame in the buffer; only then is it worth copying."""
        if len(self._buffer) < _HEADER_BYTES:
            return _HEADER_BYTES
        return _HEADER_BYTES + self._length(self._buffer, 0)

    def _length(self, data: bytes | bytearray, position: int) -> int:
        length: int = _HEADER.unpack_from(data, position)[0]
        if length > self.bytes_max:
            raise self._broken(
                f"The peer announced a frame of {length} bytes; the limit is {self.bytes_max}."
            )
        return length

    def _broken(self, message: str) -> RemoteProtocolError:
        self._is_broken = True
        self._buffer.clear()
        return RemoteProtocolError(message)

    def _unpacked(self, body: bytes) -> list[Any]:
        try:
            fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise self._broken(f"The peer sent a frame that is not msgpack: {error}.") from error
        if (
            not isinstance(fields, list)
            or len(fields) < 2
            or not _is_whole(fields[0])
            or not _is_whole(fields[1])
        ):
            raise self._broken("The peer sent a frame that is no message.")
        return fields


_REMEMBERED = (ms.GrantLease, ms.Get, ms.Add, ms.Ping)


class RequestMemo:
    """Whole frames seen before, and the requests that they are. Bounded; shared by a server's connections."""

    def __init__(self) -> None:
        self.frames: dict[bytes, tuple[ms.Request]] = {}

    def remember(self, frame: bytes, request: ms.Request) -> None:
        if len(self.frames) >= MEMO_FRAMES_MAX:
            self.frames.clear()
        self.frames[frame] = (request,)


class RequestStream(_FrameStream):
    """The server's side of one connection's bytes.

    Args:
        memo: of the server; None on a connection that has not said hello.
        bytes_max: the largest body accepted; may be raised later.
    """

    def __init__(self, *, bytes_max: int, memo: RequestMemo | None = None) -> None:
        super().__init__(bytes_max=bytes_max)
        self.memo = memo

    def feed(self, data: bytes) -> Sequence[ms.Request]:
        """Every request that is whole by now. Raises RemoteProtocolError on anything else."""
        memo = self.memo
        if memo is None or self._buffer or len(data) > MEMO_FRAME_BYTES_MAX:
            return [self._request(body) for body in self._bodies(data)]
        known = memo.frames.get(data)
        if known is not None:
            return known
        requests = [self._request(body) for body in self._bodies(data)]
        if len(requests) == 1 and not self._buffer and isinstance(requests[0], _REMEMBERED):
            memo.remember(data, requests[0])
        return requests

    def _request(self, body: bytes) -> ms.Request:
        fields = self._unpacked(body)
        op = fields[0]
        if not 0 <= op < len(_REQUESTS):
            raise self._broken(f"The peer asked for operation {op}, which does not exist.")
        kind = _REQUESTS[op]
        if not 0 < fields[1] <= ID_MAX:
            raise self._broken("The peer numbered a request outside 1 to 2^31 - 1.")
        request: ms.Request = self._built(kind, fields[1:])
        return request

    def _built(self, kind: type[Any], fields: list[Any]) -> Any:
        for index, change in _COERCED.get(kind, ()):
            if index < len(fields):
                fields[index] = change(fields[index])
        if not _fits(kind, fields):
            raise self._broken(f"The peer sent a {kind.__name__} whose fields are not what it takes.")
        return kind._make(fields)


class ReplyStream(_FrameStream):
    """The client's side: replies and pushes."""

    def __init__(self, *, bytes_max: int = StoreLimits().frame_bytes_max) -> None:
        super().__init__(bytes_max=bytes_max)

    def feed(self, data: bytes) -> list[ms.Message]:
        """Every reply and push that is whole by now. Raises RemoteProtocolError on anything else."""
        return [self._message(body) for body in self._bodies(data)]

    def _message(self, body: bytes) -> ms.Message:
        fields = self._unpacked(body)
        identifier, code = fields[0], fields[1]
        if identifier < 0 or code < 0:
            raise self._broken(f"The store sent a reply of kind {code} to request {identifier}.")
        try:
            if identifier == 0 and code != REFUSED_CODE:
                message: ms.Message = _PUSHES[code]._make(fields[2:])
                return message
            return _reply(_REPLIES[code], identifier, fields[2:])
        except (IndexError, TypeError, ValueError) as error:
            raise self._broken(
                f"The store sent a reply of kind {code} that cannot be read: {error}."
            ) from error


REFUSED_CODE = _REPLY_KIND_OF[ms.Refused]
"""Above every push's code, so that id 0 with this code is a refusal of the whole connection."""
assert len(_PUSHES) <= REFUSED_CODE


def number_of(frame: bytes, request_id: int) -> int | None:
    """The value, when this is exactly one Number reply to that request; for a client in a hurry."""
    if len(frame) != _NUMBER_FRAME_BYTES:
        return None
    length, array, _, identifier, code, _, value = _NUMBER.unpack(frame)
    if length != _NUMBER_FIELDS[0] or array != 0x93 or identifier != request_id or code != _NUMBER_CODE:
        return None
    return int(value)


def done_frame(request_id: int) -> bytes:
    """What the store sends for Done."""
    return _DONE.pack(*_DONE_FIELDS, request_id, 0)


def _reply(kind: type[Any], identifier: int, fields: list[Any]) -> ms.Reply:
    reply: ms.Reply
    if kind is ms.Opened:
        (payloads,) = fields
        reply = ms.Opened(identifier, tuple(payloads))
    elif kind is ms.GangList:
        (gangs,) = fields
        reply = ms.GangList(identifier, tuple(ms.GangFloor._make(gang) for gang in gangs))
    elif kind is ms.GangSnapshot:
        gang, epoch, size, leases, barriers = fields
        reply = ms.GangSnapshot(
            identifier,
            gang,
            epoch,
            size,
            tuple(ms.LeaseView._make(lease) for lease in leases),
            tuple(ms.BarrierView(name, tuple(arrived), *rest) for name, arrived, *rest in barriers),
        )
    elif kind is ms.Refused:
        reason, message, epoch = fields
        reply = ms.Refused(identifier, Reason(reason), message, epoch)
    elif kind is ms.Welcome:
        instance, role = fields
        reply = ms.Welcome(identifier, instance, ms.Role(role))
    else:
        reply = kind._make([identifier, *fields])
    return reply


def error_of(refused: ms.Refused) -> MeshError:
    """The error that a caller gets for a refusal."""
    reason = refused.reason
    if reason is Reason.STALE_EPOCH:
        return FencedError(refused.message, reason=reason, floor=refused.epoch)
    return _ERRORS.get(reason, InternalError)(refused.message, reason=reason)


_ERRORS: dict[Reason, type[MeshError]] = {
    Reason.UNKNOWN_GANG: RendezvousError,
    Reason.KEY_NOT_FOUND: RendezvousError,
    Reason.LIMIT_EXCEEDED: RendezvousError,
    Reason.LEASE_LOST: LeaseLostError,
    Reason.CONFLICT: ConflictError,
    Reason.CANCELLED: ConflictError,
    Reason.UNAUTHENTICATED: AuthenticationError,
    Reason.FORBIDDEN: AuthenticationError,
    Reason.PROTOCOL: RemoteProtocolError,
}


# ---- what a field may be ------------------------------------------------------------------------------


def _is_whole(value: object) -> bool:
    return type(value) is int


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_bytes(value: object) -> bool:
    return type(value) is bytes


def _is_bytes_or_nothing(value: object) -> bool:
    return value is None or type(value) is bytes


def _is_texts(value: object) -> bool:
    return type(value) is tuple and all(type(item) is str for item in value)


def _is_signed_64(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_duration(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


_CHECKS = {
    "int": _is_size, "str": _is_text, "RunUid": _is_text, "Epoch": _is_size, "Rank": _is_size,
    "IncarnationToken": _is_text, "bytes": _is_bytes, "bytes | None": _is_bytes_or_nothing,
    "tuple[str, ...]": _is_texts, "float": _is_duration,
}  # fmt: skip
_FIELD_CHECKS = {
    kind: tuple(
        _is_signed_64 if name == "amount" else _CHECKS[annotation.__forward_arg__]
        for name, annotation in kind.__annotations__.items()
    )
    for kind in _REQUESTS
}
_COERCED: dict[type[Any], tuple[tuple[int, Any], ...]] = {
    ms.Wait: ((3, lambda value: tuple(value) if isinstance(value, list) else value),),
    ms.GrantLease: tuple((i, lambda value: float(value) if type(value) is int else value) for i in (5, 6)),
}
"""Where msgpack's types are not ours: a list is a tuple, and a whole number of seconds is a duration as well."""


def _fits(kind: type[Any], fields: list[Any]) -> bool:
    checks = _FIELD_CHECKS[kind]
    return len(fields) == len(checks) and all(
        check(value) for check, value in zip(checks, fields, strict=True)
    )
