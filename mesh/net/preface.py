"""The first words on a stream: what is meant, and the answer. Pure.

    dialler → gateway   {v, machine, run, epoch, rank, port, clock}   run, epoch, rank are nil for the machine itself
    gateway → dialler   {v, refusal, message, clock}                  refusal is nil: the member's bytes follow

Rules of this file:
1. Each is one frame of mesh/wire.py, of at most PREFACE_BYTES_MAX. Who reads takes the header, then exactly the body:
   what comes behind belongs to the member.
2. Who is speaking is not in it: the certificate says that.
3. A newer version may add keys; they are ignored. What changes the meaning of a key is another version.
4. Nothing that a peer sends raises anything but RemoteProtocolError.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import msgpack

from mesh.errors import RemoteProtocolError
from mesh.ids import Epoch, MachineName, Rank, RunUid
from mesh.net.identity import NUMBER_MAX
from mesh.net.refusals import Refusal
from mesh.wire import encode_frame

VERSION = 1
HEADER_BYTES = 4
PREFACE_BYTES_MAX = 1024
NAME_CHARACTERS_MAX = 128
MESSAGE_CHARACTERS_MAX = 400
_UNPACK_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTarget:
    """A member of a run, in one epoch."""

    run: RunUid
    epoch: Epoch
    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Preface:
    """What is meant. `member` is None when it is a service of the machine itself."""

    machine: MachineName
    member: MemberTarget | None
    port: int
    clock: float
    """The dialler's, in seconds since 1970: only to say whose clock is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Whether the member's bytes follow."""

    refusal: Refusal | None
    message: str
    clock: float
    """The gateway's."""


class VersionError(RemoteProtocolError):
    """The peer speaks another version of the preface."""


def encode_preface(preface: Preface) -> bytes:
    """As a frame. Raises LocalProtocolError when it is too large."""
    member = preface.member
    words = {
        "v": VERSION,
        "machine": preface.machine,
        "run": member.run if member else None,
        "epoch": member.epoch if member else None,
        "rank": member.rank if member else None,
        "port": preface.port,
        "clock": preface.clock,
    }
    return encode_frame(words, bytes_max=PREFACE_BYTES_MAX)


def encode_answer(answer: Answer) -> bytes:
    """As a frame; a long message is cut."""
    words = {
        "v": VERSION,
        "refusal": None if answer.refusal is None else str(answer.refusal),
        # In characters of at most four bytes: always below the frame's limit after the cut by bytes.
        "message": _cut(answer.message),
        "clock": answer.clock,
    }
    return encode_frame(words, bytes_max=PREFACE_BYTES_MAX)


def frame_length(header: bytes) -> int:
    """How long the body is whose header this is. Raises RemoteProtocolError for one above the limit."""
    (length,) = struct.unpack(">I", header)
    if not 0 < length <= PREFACE_BYTES_MAX:
        raise RemoteProtocolError(
            f"The peer announced a preface of {length} bytes; the limit is {PREFACE_BYTES_MAX}."
        )
    return int(length)


def decode_preface(body: bytes) -> Preface:
    """Raises RemoteProtocolError, VersionError among them."""
    words = read_words(body)
    named = [words.get(key) for key in ("run", "epoch", "rank")]
    member = None
    if named != [None, None, None]:
        member = MemberTarget(
            run=RunUid(read_name(words, "run")),
            epoch=Epoch(_number(words, "epoch", NUMBER_MAX)),
            rank=Rank(_number(words, "rank", NUMBER_MAX)),
        )
    port = _number(words, "port", 65535)
    if port == 0:
        raise RemoteProtocolError("The peer's preface names port 0.")
    return Preface(
        machine=MachineName(read_name(words, "machine")), member=member, port=port, clock=_clock(words)
    )


def decode_answer(body: bytes) -> Answer:
    """Raises RemoteProtocolError, VersionError among them."""
    words = read_words(body)
    refusal = words.get("refusal")
    try:
        known = None if refusal is None else Refusal(refusal)
    except ValueError as error:
        raise RemoteProtocolError(
            f"The peer refused with an unknown reason: {str(refusal)[:100]!r}."
        ) from error
    message = words.get("message")
    if not isinstance(message, str):
        raise RemoteProtocolError("The peer's answer has no message.")
    return Answer(refusal=known, message=message[:MESSAGE_CHARACTERS_MAX], clock=_clock(words))


def read_words(body: bytes) -> dict[Any, Any]:
    """What is in a frame: a map of this version. Raises RemoteProtocolError, VersionError among them."""
    try:
        words = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except _UNPACK_ERRORS as error:
        raise RemoteProtocolError(f"The peer's preface is not msgpack: {error}.") from error
    if not isinstance(words, dict):
        raise RemoteProtocolError("The peer's preface is no map.")
    version = words.get("v")
    if version != VERSION or isinstance(version, bool):
        raise VersionError(
            f"The peer speaks version {str(version)[:20]} of the preface, this side {VERSION}."
        )
    return words


def read_name(words: dict[Any, Any], key: str) -> str:
    """A name of such a map. Raises RemoteProtocolError."""
    value = words.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARACTERS_MAX:
        raise RemoteProtocolError(f"The peer's preface has no {key}.")
    return value


def _number(words: dict[Any, Any], key: str, largest: int) -> int:
    value = words.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise RemoteProtocolError(f"The peer's preface has no {key}.")
    return value


def _clock(words: dict[Any, Any]) -> float:
    value = words.get("clock")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RemoteProtocolError("The peer's preface has no clock.")
    return float(value)


def _cut(message: str) -> str:
    data = message.encode("utf-8", "replace")[: MESSAGE_CHARACTERS_MAX * 2]
    return data.decode("utf-8", "ignore")[:MESSAGE_CHARACTERS_MAX]
