"""The store's shortest way, bytes to bytes: what its members ask again and again, and what changes nothing for others.

Rules of this file:
1. The answer is the same, byte for byte, as by the long way (decode, `StoreState.handle`, encode), and so is what it
   changes; or it is None and nothing was changed. A property test holds it to that.
2. A frame is known when it came by the long way before, which checked it: whole (get, add, a lease's renewal), or,
   of a set, everything but its value and a small id. What is known is bounded, and is forgotten as a whole.
3. Nobody else is told anything on this way: no key that is missing gets a value, no lease begins, moves or ends.
"""

from __future__ import annotations

import struct
from typing import Any

from mesh.ids import Epoch, RunUid
from mesh.store import messages as ms
from mesh.store.books import Books, ConnectionId
from mesh.store.keys import INT64_MAX, INT64_MIN
from mesh.store.protocol import BIN8, ID_SHORT, OP_OF, SHORT, done_frame, number_head, value_frame

KNOWN_MAX = 16_384
FRAME_BYTES_MAX = 256
SET_AT = 9
"""Where the value begins in a short Set: a length, an array of 6, the op, an id, the value's head with its length."""
_SET_OP = OP_OF[ms.Set]
_LENGTHS = [struct.pack(">I", max(0, size - 4)) for size in range(FRAME_BYTES_MAX + 1)]
"""By the size of a whole frame: what it begins with."""
_DONE = {number: done_frame(number) for number in range(1, ID_SHORT)}
_pack_number = struct.Struct(">q").pack
_ADD, _GET = ms.Add, ms.Get


class Shortcuts:
    """Of one server. `answer` a whole frame; one that took the long way is to be remembered."""

    def __init__(self, books: Books) -> None:
        self._gangs = books.gangs
        self._frames: dict[bytes, tuple[type, RunUid, Epoch, Any, Any, Any]] = {}
        """By the frame: kind, gang, epoch, key (or rank), what it adds (or its token), what its answer needs."""
        self._places: dict[bytes, tuple[RunUid, Epoch, str]] = {}
        """By what follows the value in a Set: gang, epoch, key."""

    def answer(self, frame: bytes, connection: ConnectionId, now: float) -> bytes | None:
        """What a connection that has said hello is to be answered; None: only the long way knows."""
        known = self._frames.get(frame)
        if known is None:
            return self._set(frame, len(frame))
        kind, uid, epoch, key, given, begins = known
        gang = self._gangs.get(uid)
        if gang is None or gang.epoch != epoch:
            return None
        if kind is _ADD:
            value = gang.keys.get(key)
            if type(value) is not int or not INT64_MIN <= (count := value + given) <= INT64_MAX:
                return None
            gang.keys[key] = count
            return begins + _pack_number(count)  # type: ignore[no-any-return]
        if kind is _GET:
            value = gang.keys.get(key)
            return value_frame(begins, value) if type(value) is bytes and len(value) < SHORT else None
        lease = gang.leases.get(key)
        if lease is None or lease.token != given or lease.connection != connection or now >= lease.deadline:
            return None
        answer, request_id = begins
        if lease.is_expiring or lease.answered_id != request_id:
            return None
        lease.alive_at, lease.answered_at = lease.answered_at, now
        lease.deadline = now + lease.ttl_s + lease.guard_s
        return answer  # type: ignore[no-any-return]

    def _set(self, frame: bytes, size: int) -> bytes | None:
        if not SET_AT < size <= FRAME_BYTES_MAX or frame[5] != _SET_OP:
            return None
        value_end = SET_AT + frame[8]
        place = self._places.get(frame[value_end:])
        # As `_is_short_set`, without the call.
        if place is None or frame[7] != BIN8 or frame[4] != 0x96 or frame[:4] != _LENGTHS[size]:
            return None
        answer = _DONE.get(frame[6])
        if answer is None:
            return None
        uid, epoch, key = place
        gang = self._gangs.get(uid)
        if gang is None or gang.epoch != epoch:
            return None
        previous = gang.keys.get(key)
        growth = value_end - SET_AT - len(previous) if type(previous) is bytes else 1
        if growth > 0:
            return None  # a limit may be reached, or somebody may wait for this key
        gang.bytes_held += growth
        gang.keys[key] = frame[SET_AT:value_end]
        return answer

    def remember(self, frame: bytes, request: ms.Request) -> None:
        """A frame that the long way has found to be this request, and nothing else."""
        size = len(frame)
        if not SET_AT < size <= FRAME_BYTES_MAX:
            return
        if isinstance(request, ms.Set):
            if _is_short_set(frame, size) and frame[8] == len(request.value):
                _make_room(self._places)
                self._places[frame[SET_AT + frame[8] :]] = (request.gang, request.epoch, request.key)
        elif isinstance(request, ms.Add):
            self._keep(frame, request, request.key, request.amount, number_head(request.id))
        elif isinstance(request, ms.Get):
            self._keep(frame, request, request.key, None, request.id)
        elif isinstance(request, ms.GrantLease):
            self._keep(frame, request, request.rank, request.token, (done_frame(request.id), request.id))

    def _keep(
        self, frame: bytes, request: ms.Add | ms.Get | ms.GrantLease, key: Any, given: Any, begins: Any
    ) -> None:
        _make_room(self._frames)
        self._frames[frame] = (type(request), request.gang, request.epoch, key, given, begins)


def _is_short_set(frame: bytes, size: int) -> bool:
    """The frame has the lengths, the id and the value's head where a short Set has them."""
    return (
        frame[4] == 0x96
        and frame[7] == BIN8
        and frame[:4] == _LENGTHS[size]
        and frame[5] == _SET_OP
        and 0 < frame[6] < ID_SHORT
    )


def _make_room(known: dict[bytes, Any]) -> None:
    if len(known) >= KNOWN_MAX:
        known.clear()
