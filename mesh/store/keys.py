"""Small keys under one (gang, epoch): get, set, add, wait, compare-and-set, delete.

Rules of this file:
1. Every function here runs behind the gate: the gang is known and the request is of its epoch.
2. Counters are kept as numbers and read as decimal digits, as torch's TCPStore shows them.
3. A limit that is reached refuses the request and changes nothing.
4. A waiter waits for each key once: one that was there and is deleted again counts as seen.
"""

from __future__ import annotations

from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.books import Books, ConnectionId, Gang, Output, StoredValue, Waiter

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_DIGITS_MAX = 20
_DONE, _NUMBER = ms.Done, ms.Number
_new_tuple = tuple.__new__
"""Makes a reply without its constructor's extra call, where a busy store spends its time."""


def get(_books: Books, gang: Gang, request: ms.Get, connection: ConnectionId, _now: float) -> list[Output]:
    value = gang.keys.get(request.key)
    if value is None:
        return [(connection, _key_not_found(request))]
    return [
        (connection, _new_tuple(ms.Value, (request.id, value if type(value) is bytes else _as_bytes(value))))
    ]


def set_value(
    books: Books, gang: Gang, request: ms.Set, connection: ConnectionId, _now: float
) -> list[Output]:
    value = request.value
    previous = gang.keys.get(request.key)
    if type(previous) is bytes and len(value) <= len(previous):
        # The common case: nothing grows, so no limit can be reached, and nobody can wait for a key that is there.
        if len(value) < len(previous):
            gang.bytes_held += len(value) - len(previous)
        gang.keys[request.key] = value
        return [(connection, _new_tuple(_DONE, (request.id,)))]
    refused = _put(books, gang, request, value)
    if refused is not None:
        return [(connection, refused)]
    outputs: list[Output] = [(connection, ms.Done(request.id))]
    return outputs + _wake(books, gang, request.key)


def add(books: Books, gang: Gang, request: ms.Add, connection: ConnectionId, _now: float) -> list[Output]:
    value = gang.keys.get(request.key)
    if type(value) is int:
        count = value + request.amount
        if INT64_MIN <= count <= INT64_MAX:  # the common case: nobody can wait for a key that is there
            gang.keys[request.key] = count
            return [(connection, _new_tuple(_NUMBER, (request.id, count)))]
        return [(connection, _out_of_range(request))]
    count = request.amount
    if value is not None:
        present = _as_number(_as_bytes(value))
        if present is None:
            return [(connection, _conflict(request, "holds something that is not a number"))]
        count += present
    if not INT64_MIN <= count <= INT64_MAX:
        return [(connection, _out_of_range(request))]
    refused = _put(books, gang, request, count)
    if refused is not None:
        return [(connection, refused)]
    outputs: list[Output] = [(connection, ms.Number(request.id, count))]
    return outputs + _wake(books, gang, request.key)


def compare_and_set(
    books: Books, gang: Gang, request: ms.CompareAndSet, connection: ConnectionId, _now: float
) -> list[Output]:
    stored = gang.keys.get(request.key)
    present = None if stored is None else _as_bytes(stored)
    if present != request.expected:
        return [(connection, ms.Compared(request.id, False, present))]
    refused = _put(books, gang, request, request.value)
    if refused is not None:
        return [(connection, refused)]
    outputs: list[Output] = [(connection, ms.Compared(request.id, True, request.value))]
    return outputs + _wake(books, gang, request.key)


def delete(
    _books: Books, gang: Gang, request: ms.Delete, connection: ConnectionId, _now: float
) -> list[Output]:
    value = gang.keys.pop(request.key, None)
    gang.bytes_held -= _size(value)
    return [(connection, ms.Number(request.id, 0 if value is None else 1))]


def wait(books: Books, gang: Gang, request: ms.Wait, connection: ConnectionId, _now: float) -> list[Output]:
    missing = {key for key in request.keys if key not in gang.keys}
    if not missing:
        return [(connection, ms.Done(request.id))]
    if books.waiter(connection, request.id) is not None:
        return [(connection, _conflict_of_id(request.id))]
    limits = books.limits
    if len(request.keys) > limits.keys_per_wait_max:
        return [(connection, over_limit(request.id, "keys in one wait", limits.keys_per_wait_max))]
    if books.waiters_count >= limits.waiters_max:
        return [(connection, over_limit(request.id, "waiting requests", limits.waiters_max))]
    waiter = Waiter(connection=connection, id=request.id, gang=gang.uid, missing=missing)
    for key in missing:
        gang.key_waiters.setdefault(key, []).append(waiter)
    books.add_waiter(waiter)
    return []


def over_limit(request_id: int, what: str, limit: int) -> ms.Refused:
    """A visible refusal: which limit, and how much it is."""
    return ms.Refused(
        request_id, Reason.LIMIT_EXCEEDED, f"The rendezvous store's limit on {what} is reached: {limit}."
    )


def _put(
    books: Books, gang: Gang, request: ms.Set | ms.Add | ms.CompareAndSet, value: StoredValue
) -> ms.Refused | None:
    """Stores it; or says which limit forbids it, and stores nothing."""
    limits = books.limits
    size = _size(value)
    if size > limits.value_bytes_max:
        return over_limit(request.id, "bytes in one value", limits.value_bytes_max)
    previous = gang.keys.get(request.key)
    if previous is None:
        if len(gang.keys) >= limits.keys_per_gang_max:
            return over_limit(request.id, "keys of one gang", limits.keys_per_gang_max)
        if len(request.key) > limits.name_chars_max:
            return over_limit(request.id, "characters in a key", limits.name_chars_max)
    held = gang.bytes_held + size - _size(previous)
    if held > limits.gang_bytes_max:
        return over_limit(request.id, "bytes in all values of one gang", limits.gang_bytes_max)
    gang.bytes_held = held
    gang.keys[request.key] = value
    return None


def _wake(books: Books, gang: Gang, key: str) -> list[Output]:
    outputs: list[Output] = []
    for waiter in gang.key_waiters.pop(key, []):
        waiter.missing.discard(key)
        if not waiter.missing:
            books.strike(waiter)
            outputs.append((waiter.connection, ms.Done(waiter.id)))
    return outputs


def _size(value: StoredValue | None) -> int:
    return len(value) if isinstance(value, bytes) else 0


def _as_bytes(value: StoredValue) -> bytes:
    return value if isinstance(value, bytes) else b"%d" % value


def _as_number(value: bytes) -> int | None:
    digits = value[1:] if value[:1] == b"-" else value
    if len(digits) > _DIGITS_MAX or not digits.isdigit():
        return None
    return int(value)


def _key_not_found(request: ms.Get) -> ms.Refused:
    return ms.Refused(
        request.id,
        Reason.KEY_NOT_FOUND,
        f"There is no key {request.key[:80]!r} in epoch {request.epoch} of gang {request.gang}.",
    )


def _conflict(request: ms.Add, why: str) -> ms.Refused:
    return ms.Refused(request.id, Reason.CONFLICT, f"Key {request.key[:80]!r} {why}.")


def _out_of_range(request: ms.Add) -> ms.Refused:
    return _conflict(request, "would leave the range of a signed 64-bit number")


def _conflict_of_id(request_id: int) -> ms.Refused:
    return ms.Refused(
        request_id, Reason.CONFLICT, f"Request {request_id} of this connection still waits for its answer."
    )
