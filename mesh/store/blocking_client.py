"""The store's client for a process without a loop: one request at a time, on a blocking socket.

Rules of this file:
1. At most one request is under way, so all have the same id, and the same request is the same bytes every time:
   it is encoded once, and the store knows it again.
2. The kernel keeps the limits (SO_RCVTIMEO, SO_SNDTIMEO), not an extra poll per call.
3. After a limit or an error the connection is closed: an answer that comes late must not be taken for another one.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Iterable
from typing import TypeVar

from mesh.errors import (
    AuthenticationError,
    MeshError,
    MeshTimeoutError,
    RemoteProtocolError,
    TransportError,
)
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.plan import Endpoint
from mesh.store import messages as ms
from mesh.store.local import connect_locally
from mesh.store.protocol import (
    VALUE_AT,
    ReplyStream,
    done_frame,
    encode_request,
    error_of,
    number_head,
    set_frame,
    set_tail,
    value_head,
)

REQUEST_LIMIT_S = 5.0
FRAMES_KEPT_MAX = 1024
RECEIVE_BYTES_FIRST = 480
"""Nearly every answer is smaller, and a buffer of this size is the interpreter's cheapest."""
RECEIVE_BYTES = 256 * 1024
_ID = 1
_DONE = done_frame(_ID)
_NUMBER_HEAD = number_head(_ID)
_NUMBER = struct.Struct(f">{len(_NUMBER_HEAD)}sq")
_NUMBER_BYTES = _NUMBER.size
_VALUE_HEAD = value_head(_ID)

_read, _write = os.read, os.write

R = TypeVar("R")


class BlockingStoreClient:
    """One connection, connected and greeted when the constructor returns. Not for several threads at once.

    Args:
        timeout_s: for connecting, and for every request that the store answers at once.
        prefers_local: take the short way to a store on this machine.

    Raises TransportError, AuthenticationError or MeshTimeoutError when there is no such connection to be had.
    """

    def __init__(
        self, endpoint: Endpoint, *, timeout_s: float = REQUEST_LIMIT_S, prefers_local: bool = True
    ) -> None:
        self._where = f"{endpoint.host} port {endpoint.port}"
        self._timeout_s = timeout_s
        self._kernel_limit_s = 0.0
        self._file = -1
        """The socket's descriptor; -1, which the kernel refuses, when there is none."""
        self._frames: dict[tuple[object, ...], bytes] = {}
        self._stream = ReplyStream()
        self._sets: dict[tuple[object, ...], tuple[int, bytes, bytes]] = {}
        """By gang, epoch, key: how long the last value was, and what comes before and after one of that length."""
        self._socket: socket.socket | None = None
        if prefers_local:
            self._socket = connect_locally(endpoint.host, endpoint.port)
        if self._socket is None:
            self._socket = self._connect(endpoint, timeout_s)
        self._socket.settimeout(None)
        self._file = self._socket.fileno()
        self._limit(timeout_s)
        try:
            welcome = self._ask(ms.Hello(_ID, endpoint.secret, ms.PROTOCOL_VERSION), ms.Welcome)
        except AuthenticationError:
            self.close()
            raise
        self.instance, self.role = welcome.instance, welcome.role

    def _connect(self, endpoint: Endpoint, timeout_s: float) -> socket.socket:
        try:
            connection = socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s)
        except TimeoutError:
            raise self._timed_out("Connect", timeout_s) from None
        except OSError as error:
            raise TransportError(
                f"The rendezvous store at {self._where} cannot be reached: {error.strerror or error}."
            ) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def close(self) -> None:
        """Idempotent."""
        connection, self._socket = self._socket, None
        self._file = -1
        if connection is not None:
            connection.close()

    # ---- keys -------------------------------------------------------------------------------------

    def get(self, gang: RunUid, epoch: Epoch, key: str) -> bytes:
        """RendezvousError (KeyNotFound) when it is not there."""
        fields = (ms.Get, gang, epoch, key)
        answer = self._exchange(self._frames.get(fields) or self._keep(fields))
        if answer[4 : VALUE_AT - 1] == _VALUE_HEAD and len(answer) == VALUE_AT + answer[VALUE_AT - 1]:
            return answer[VALUE_AT:]
        return self._read(answer, ms.Value).value

    def set(self, gang: RunUid, epoch: Epoch, key: str, value: bytes) -> None:
        """Returns when it is set."""
        known = self._sets.get((gang, epoch, key))
        if known is None or known[0] != len(value):
            known = self._keep_set((gang, epoch, key), value)
        answer = self._exchange(known[1] + value + known[2])
        if answer != _DONE:
            self._read(answer, ms.Done)

    def add(self, gang: RunUid, epoch: Epoch, key: str, amount: int = 1) -> int:
        """The new count."""
        fields = (ms.Add, gang, epoch, key, amount)
        answer = self._exchange(self._frames.get(fields) or self._keep(fields))
        if len(answer) == _NUMBER_BYTES:
            head, count = _NUMBER.unpack(answer)
            if head == _NUMBER_HEAD:
                return count  # type: ignore[no-any-return]
        return self._read(answer, ms.Number).value

    def wait(self, gang: RunUid, epoch: Epoch, keys: Iterable[str], *, timeout_s: float) -> None:
        """Until all keys are there. MeshTimeoutError, and the connection is closed, when they are not in time."""
        self._ask(ms.Wait(_ID, gang, epoch, tuple(keys)), ms.Done, timeout_s=timeout_s)

    def compare_and_set(
        self, gang: RunUid, epoch: Epoch, key: str, *, expected: bytes | None, value: bytes
    ) -> ms.Compared:
        """Sets when the present value is `expected` (None: when there is none)."""
        return self._ask(ms.CompareAndSet(_ID, gang, epoch, key, expected, value), ms.Compared)

    def delete(self, gang: RunUid, epoch: Epoch, key: str) -> bool:
        """Whether it was there."""
        return bool(self._ask(ms.Delete(_ID, gang, epoch, key), ms.Number).value)

    def ping(self) -> None:
        self._ask(ms.Ping(_ID), ms.Done)

    # ---- leases and barriers ----------------------------------------------------------------------

    def grant_lease(
        self,
        gang: RunUid,
        epoch: Epoch,
        rank: Rank,
        token: IncarnationToken,
        *,
        ttl_s: float,
        guard_s: float,
    ) -> None:
        """Takes or renews the lease. The caller counts its ttl from before this call."""
        fields = (ms.GrantLease, gang, epoch, rank, token, ttl_s, guard_s)
        answer = self._exchange(self._frames.get(fields) or self._keep(fields))
        if answer != _DONE:
            self._read(answer, ms.Done)

    def release_lease(self, gang: RunUid, epoch: Epoch, rank: Rank, token: IncarnationToken) -> None:
        """Nothing of the incarnation runs any more."""
        self._ask(ms.ReleaseLease(_ID, gang, epoch, rank, token), ms.Done)

    def arrive(
        self,
        gang: RunUid,
        epoch: Epoch,
        rank: Rank,
        token: IncarnationToken,
        *,
        payload: bytes,
        timeout_s: float,
        name: str = ms.START_BARRIER,
    ) -> tuple[bytes, ...]:
        """Waits until every rank has arrived; returns all payloads in rank order."""
        request = ms.Arrive(_ID, gang, epoch, rank, token, name, payload)
        return self._ask(request, ms.Opened, timeout_s=timeout_s).payloads

    # ---- inside -----------------------------------------------------------------------------------

    def _ask(self, request: ms.Request, kind: type[R], *, timeout_s: float | None = None) -> R:
        if timeout_s is None:
            return self._read(self._exchange(encode_request(request)), kind)
        self._limit(timeout_s)
        try:
            return self._read(self._exchange(encode_request(request)), kind)
        finally:
            if self._socket is not None:
                self._limit(self._timeout_s)

    def _keep(self, fields: tuple[object, ...]) -> bytes:
        if len(self._frames) >= FRAMES_KEPT_MAX:
            self._frames.clear()
        kind, *rest = fields
        frame = self._frames[fields] = encode_request(kind(_ID, *rest))  # type: ignore[operator]
        return frame

    def _keep_set(self, place: tuple[RunUid, Epoch, str], value: bytes) -> tuple[int, bytes, bytes]:
        if len(self._sets) >= FRAMES_KEPT_MAX:
            self._sets.clear()
        tail = set_tail(*place)
        head = set_frame(_ID, value, tail)[: -len(tail) - len(value)]
        known = self._sets[place] = (len(value), head, tail)
        return known

    def _exchange(self, frame: bytes) -> bytes:
        """Sends one frame and returns the first piece of its answer, nearly always all of it."""
        try:
            # The descriptor itself: a socket object's own calls take a few more steps, and there are two per request.
            sent = _write(self._file, frame)
            while sent < len(frame):
                sent += _write(self._file, frame[sent:])
            answer = _read(self._file, RECEIVE_BYTES_FIRST)
        except OSError as error:
            raise self._broken(error) from error
        if answer:
            return answer
        raise self._broken(None)

    def _read(self, answer: bytes, kind: type[R]) -> R:
        """The reply that begins with these bytes. A refusal is raised."""
        deadline = time.monotonic() + self._kernel_limit_s
        try:
            messages = self._stream.feed(answer)
            while not messages:
                messages = self._stream.feed(self._more(deadline))
        except RemoteProtocolError:
            self.close()
            raise
        (reply,) = messages
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, ms.Refused):
            if reply.id == 0:
                self.close()
            raise error_of(reply)
        self.close()
        raise RemoteProtocolError(f"The store answered with {type(reply).__name__}, not {kind.__name__}.")

    def _more(self, deadline: float) -> bytes:
        if time.monotonic() > deadline:
            raise self._broken(BlockingIOError())
        try:
            piece = os.read(self._file, RECEIVE_BYTES)
        except OSError as error:
            raise self._broken(error) from error
        if not piece:
            raise self._broken(None)
        return piece

    def _limit(self, timeout_s: float) -> None:
        """Has the kernel end every wait after this time."""
        if self._socket is None or timeout_s == self._kernel_limit_s:
            return
        fraction, seconds = math.modf(max(timeout_s, 0.001))
        limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._kernel_limit_s = timeout_s

    def _broken(self, error: OSError | None) -> MeshError:
        if self._socket is None:
            return TransportError(f"The connection to the rendezvous store at {self._where} is closed.")
        self.close()
        if isinstance(error, BlockingIOError):
            return self._timed_out("A request", self._kernel_limit_s)
        why = "it was closed" if error is None else error.strerror or str(error)
        return TransportError(f"The connection to the rendezvous store at {self._where} was lost: {why}.")

    def _timed_out(self, what: str, timeout_s: float) -> MeshTimeoutError:
        return MeshTimeoutError(
            f"{what}: the rendezvous store at {self._where} did not answer within {timeout_s:g} s.",
            timeout_s=timeout_s,
        )
