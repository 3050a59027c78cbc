"""Store messages as frames, and back; bytes in, messages out. Sans-io, and light enough for a heartbeat process.

The frames are those of `mesh.wire`: a 4-byte big-endian length, then that many bytes of msgpack. A request is
[op, id, field …], a reply [id, kind, field …] with id > 0, a push [0, kind, field …].

Rules of this file:
1. What is decoded has been checked: the op is known, there are as many fields as it has, each of its type.
2. After an error a stream is not read any more.
3. Done, Number and a short Value are built by one `struct` call: they are what a busy store mostly says.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
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
from mesh.ids import Epoch, RunUid
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.limits import StoreLimits

ID_MAX = 2**31 - 1

_HEADER = struct.Struct(">I")
_HEADER_BYTES = 4
_REQUESTS: tuple[type[Any], ...] = (
    ms.Hello, ms.Ping, ms.Cancel, ms.SetFloor, ms.DropGang, ms.CloseBarrier, ms.Watch, ms.Gangs, ms.Snapshot,
    ms.GrantLease, ms.ReleaseLease, ms.Arrive, ms.Get, ms.Set, ms.Add, ms.Wait, ms.CompareAndSet, ms.Delete,
    ms.Revoke, ms.Admit, ms.Expire,
)  # fmt: skip
_REPLIES: tuple[type[Any], ...] = (
    ms.Done, ms.Number, ms.Value, ms.Compared, ms.Opened, ms.Welcome, ms.GangList, ms.GangSnapshot, ms.Refused,
)  # fmt: skip
_PUSHES: tuple[type[Any], ...] = (
    ms.LeaseLapsed, ms.LeaseReleased, ms.MemberConnectionLost, ms.BarrierOpened,
)  # fmt: skip
"""An op or kind is the place in its tuple: append, never reorder. Replies and pushes count apart."""

OP_OF = {kind: op for op, kind in enumerate(_REQUESTS)}
_REPLY_KIND_OF = {kind: code for code, kind in enumerate(_REPLIES)}
_PUSH_KIND_OF = {kind: code for code, kind in enumerate(_PUSHES)}
_DONE_KIND, _NUMBER_KIND = ms.Done, ms.Number
_DONE = struct.Struct(">IBBIB")
"""The length 7; an array of 2; a 32-bit id; kind 0, which is Done."""
_NUMBER = struct.Struct(">IBBIBBq")
"""The length 16; an array of 3; a 32-bit id; kind 1, which is Number; a signed 64-bit value."""
_VALUE = struct.Struct(">IBBIBBB")
"""The length; an array of 3; a 32-bit id; kind 2, which is Value; the bytes' head with their length, below 256."""
VALUE_AT = _VALUE.size
"""Where the bytes of a short Value begin in its frame."""
assert (_REPLY_KIND_OF[ms.Done], _REPLY_KIND_OF[ms.Number], _REPLY_KIND_OF[ms.Value]) == (0, 1, 2)
_SET = struct.Struct(">IBBBBB")
"""The length; an array of 6; the op; an id below 128; the value's head with its length, below 256."""
_SET_OP = OP_OF[ms.Set]
BIN8 = 0xC4
SHORT = 256
ID_SHORT = 128
_packer = msgpack.Packer(use_bin_type=True, autoreset=True)
_pack = _packer.pack
_unpack = msgpack.unpackb
_new_tuple = tuple.__new__
"""Makes a named tuple of fields that are known to be right, without its constructor's extra call."""

M = TypeVar("M")


# ---- encoding -----------------------------------------------------------------------------------------


def encode_request(request: ms.Request) -> bytes:
    """One request as a frame. Raises LocalProtocolError for a field that cannot be encoded."""
    return encode_fields((OP_OF[type(request)], *request))


def set_tail(gang: RunUid, epoch: Epoch, key: str) -> bytes:
    """What follows the value in the frame of every Set of this key."""
    tail: bytes = encode_fields((gang, epoch, key))[_HEADER_BYTES + 1 :]
    return tail


def set_frame(request_id: int, value: bytes, tail: bytes) -> bytes:
    """The frame of a Set, by its tail. The same bytes as `encode_request` makes."""
    size = len(value)
    if size < SHORT and request_id < ID_SHORT:
        return _SET.pack(5 + size + len(tail), 0x96, _SET_OP, request_id, BIN8, size) + value + tail
    body = b"".join((b"\x96", _pack(_SET_OP), _pack(request_id), _pack(value), tail))
    return _HEADER.pack(len(body)) + body


class ReplyEncoder:
    """Replies and pushes as frames. One per server: it keeps the last barrier's answer for all its ranks."""

    def __init__(self) -> None:
        self._payloads: tuple[bytes, ...] | None = None
        self._payloads_tail = b""

    def encode(self, message: ms.Message) -> bytes:
        kind = type(message)
        if kind is _NUMBER_KIND:
            return _NUMBER.pack(16, 0x93, 0xCE, message[0], 1, 0xD3, message[1])  # type: ignore[misc]
        if kind is _DONE_KIND:
            return _DONE.pack(7, 0x92, 0xCE, message[0], 0)
        if kind is ms.Value and len(message[1]) < SHORT:  # type: ignore[misc, arg-type]
            return value_frame(message[0], message[1])  # type: ignore[misc, arg-type]
        code = _REPLY_KIND_OF.get(kind)
        if code is None:
            return encode_fields((0, _PUSH_KIND_OF[kind], *message))
        if kind is ms.Opened:
            return self._encode_opened(message)  # type: ignore[arg-type]
        return encode_fields((message[0], code, *message[1:]))

    def _encode_opened(self, message: ms.Opened) -> bytes:
        return b"".join(self.opened(message))

    def opened(self, message: ms.Opened) -> tuple[bytes, bytes]:
        """The frame in two pieces. It is the same for every rank but for the id, so the long one is packed once."""
        if self._payloads is not message.payloads:
            self._payloads = message.payloads
            self._payloads_tail = _packer.pack(message.payloads)
        head = struct.pack(">BBIB", 0x93, 0xCE, message.id, _REPLY_KIND_OF[ms.Opened])
        return _HEADER.pack(len(head) + len(self._payloads_tail)) + head, self._payloads_tail


def encode_fields(fields: tuple[Any, ...]) -> bytes:
    """A frame of anything. Raises LocalProtocolError for a field that cannot be encoded."""
    try:
        body: bytes = _pack(fields)
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
        self.is_plain = True
        """Nothing waits, and nothing went wrong: the next piece begins with a frame."""

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
        self.is_plain = False
        self._buffer.clear()
        return RemoteProtocolError(message)

    def _unpacked(self, body: bytes) -> tuple[Any, ...]:
        """The fields of a message: two whole numbers at least."""
        try:
            fields = _unpack(body, use_list=False)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise self._broken(f"The peer sent a frame that is not msgpack: {error}.") from error
        if (
            type(fields) is not tuple
            or len(fields) < 2
            or type(fields[0]) is not int
            or type(fields[1]) is not int
        ):
            raise self._broken("The peer sent a frame that is no message.")
        return fields


class RequestStream(_FrameStream):
    """The server's side of one connection's bytes. `bytes_max`, the largest body accepted, may be raised later."""

    def feed(self, data: bytes) -> Sequence[ms.Request]:
        """Every request that is whole by now. Raises RemoteProtocolError on anything else."""
        size = len(data)
        if (
            self.is_plain
            and size > _HEADER_BYTES
            and size - _HEADER_BYTES == _HEADER.unpack_from(data)[0] <= self.bytes_max
        ):
            return (self._request(data[_HEADER_BYTES:]),)  # nearly every piece is one frame
        requests = [self._request(body) for body in self._bodies(data)]
        self.is_plain = not self._buffer
        return requests

    def _request(self, body: bytes) -> ms.Request:
        try:
            fields = _unpack(body, use_list=False)
            kind, types, check = _SIGNATURES[fields[0]]
            is_right = tuple(map(type, fields)) in types and 0 < fields[1] <= ID_MAX
        except (ValueError, TypeError, LookupError, msgpack.exceptions.UnpackException, RecursionError):
            raise self._wrong(body) from None
        if not is_right or (check is not None and not check(fields)):
            raise self._wrong(body)
        request: ms.Request = _new_tuple(kind, fields[1:])
        return request

    def _wrong(self, body: bytes) -> RemoteProtocolError:
        """What is wrong with a body that is no request."""
        fields = self._unpacked(body)
        if fields[0] not in _SIGNATURES:
            return self._broken(f"The peer asked for operation {fields[0]}, which does not exist.")
        if not 0 < fields[1] <= ID_MAX:
            return self._broken("The peer numbered a request outside 1 to 2^31 - 1.")
        kind = _SIGNATURES[fields[0]][0]
        return self._broken(f"The peer sent a {kind.__name__} whose fields are not what it takes.")


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


def number_head(request_id: int) -> bytes:
    """What a Number reply to that request begins with; after it come 8 bytes, the value (big-endian, signed)."""
    return _NUMBER.pack(16, 0x93, 0xCE, request_id, 1, 0xD3, 0)[:-8]


def value_head(request_id: int) -> bytes:
    """What a short Value reply to that request has between its length and its size."""
    return _VALUE.pack(0, 0x93, 0xCE, request_id, 2, BIN8, 0)[4:-1]


def value_frame(request_id: int, value: bytes) -> bytes:
    """What the store sends for a Value shorter than `SHORT`."""
    return _VALUE.pack(9 + len(value), 0x93, 0xCE, request_id, 2, BIN8, len(value)) + value


def done_frame(request_id: int) -> bytes:
    """What the store sends for Done."""
    return _DONE.pack(7, 0x92, 0xCE, request_id, 0)


def _reply(kind: type[Any], identifier: int, fields: tuple[Any, ...]) -> ms.Reply:
    reply: ms.Reply
    if kind is ms.Opened:
        (payloads,) = fields
        if type(payloads) is not tuple:
            raise TypeError("no list of payloads")
        reply = ms.Opened(identifier, payloads)
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
            tuple(ms.BarrierView._make(barrier) for barrier in barriers),
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


def _are_durations(fields: tuple[Any, ...]) -> bool:
    return all(math.isfinite(value) for value in fields[6:8])


def _are_texts(fields: tuple[Any, ...]) -> bool:
    return all(type(key) is str for key in fields[4])


def _are_incarnations(fields: tuple[Any, ...]) -> bool:
    return all(type(each) is tuple and tuple(map(type, each)) == (int, str) for each in fields[6])


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "Epoch": (int,), "Rank": (int,), "str": (str,), "RunUid": (str,), "IncarnationToken": (str,),
    "bytes": (bytes,), "bytes | None": (bytes, type(None)), "float": (float, int), "tuple[str, ...]": (tuple,),
    "bool": (bool,), "Revocations": (tuple,),
}  # fmt: skip
"""What msgpack makes of each field's type. How large a number may be is for the state to say; only what is
counted with must fit 64 bits, which msgpack sees to."""
_CHECKS: dict[type[Any], Callable[[tuple[Any, ...]], bool]] = {
    ms.GrantLease: _are_durations,
    ms.Expire: _are_durations,
    ms.Wait: _are_texts,
    ms.SetFloor: _are_incarnations,
}
_SIGNATURES = {
    op: (
        kind,
        frozenset(
            (int, *types)
            for types in itertools.product(
                *(_TYPES[a.__forward_arg__] for a in kind.__annotations__.values())
            )
        ),
        _CHECKS.get(kind),
    )
    for kind, op in OP_OF.items()
}
"""By op: the kind, the types that its fields may have (op and id included), and what else is asked of them."""
