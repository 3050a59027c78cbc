"""The rendezvous store's server: a msgpack/TCP listener on the loop it is started on, around the pure state.

Rules of this file:
1. `StoreState` decides; this file reads, writes, and tells the time. Nothing is awaited between a request and
   what it changes, and no task is made per request.
2. Until a connection has said hello with the right secret it may send one small frame, within a limit.
3. Nobody else waits for a slow peer: who does not read what it asked for is not read either, and is cut when that
   lasts, or at once when too much is unsent. A watcher that is cut resyncs by snapshots.
4. Garbage, half frames that never end, and floods cost their own connection, and are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import logging
import os
import resource
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from mesh.errors import DeploymentError, RemoteProtocolError
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.books import ConnectionId, Output
from mesh.store.limits import StoreLimits
from mesh.store.local import local_name
from mesh.store.protocol import ReplyEncoder, RequestStream
from mesh.store.shortcut import Shortcuts
from mesh.store.state import StoreState

SWEEP_S_MAX = 1.0
"""The longest time between two looks for peers that stand still."""
PAUSE_BYTES = 256 * 1024
"""Unsent bytes above which a connection is not read."""
CLOSE_LIMIT_S = 1.0
LISTEN_BACKLOG = 4096
OPEN_FILES_WANTED = 65_536
GC_THRESHOLD = 20_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where a store listens; `instance` is another one after each start."""

    host: str
    port: int
    instance: str


class StoreServer:
    """The store, listening.

    Args:
        host: the address to bind; no name is ever looked up.
        port: 0 takes a free one; `address` says which.
        admin_secret, member_secret: what a hello must carry, and which of the two roles it opens.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        admin_secret: str,
        member_secret: str,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or StoreLimits()
        self.state = StoreState(instance=secrets.token_hex(8), limits=self.limits)
        self.counts: Counter[str] = Counter()
        """Connections that were cut or refused, by why."""
        self.connections: dict[ConnectionId, StoreConnection] = {}
        self.encoder = ReplyEncoder()
        self.shortcuts = Shortcuts(self.state.books)
        self.clock = clock
        self._host = host
        self._port = port
        self._secrets = {ms.Role.ADMIN: admin_secret.encode(), ms.Role.MEMBER: member_secret.encode()}
        self._listener: asyncio.Server | None = None
        self._local_listener: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._open: set[StoreConnection] = set()
        """Every connection, those that have not said hello as well."""
        self._next_number = 1
        self._next_sweep_at = 0.0
        self._sweep_s = min(SWEEP_S_MAX, self.limits.hello_limit_s / 2, self.limits.stalled_limit_s / 2)
        self._is_stopping = False
        self._all_closed = asyncio.Event()

    # ---- life -------------------------------------------------------------------------------------

    async def start(self) -> StoreAddress:
        """Returns when it listens. Raises DeploymentError when the port is taken or the address is not ours."""
        allow_open_files()
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: StoreConnection(self), self._host, self._port, backlog=LISTEN_BACKLOG
            )
        except OSError as error:
            raise DeploymentError(
                f"The rendezvous store cannot listen on {self._host} port {self._port}: {error.strerror or error}.",
                hint="Free the port, or choose another one.",
                reason=Reason.PORT_TAKEN,
            ) from error
        await self._listen_locally()
        self._tick()
        _log.info("the rendezvous store %s listens on %s", self.state.instance, self.address)
        return self.address

    async def _listen_locally(self) -> None:
        """The short way for clients on this machine; without it they take the TCP port."""
        name = local_name(self.address.host, self.address.port)
        try:
            self._local_listener = await asyncio.get_running_loop().create_unix_server(
                lambda: StoreConnection(self), name, backlog=LISTEN_BACKLOG
            )
        except OSError as error:
            _log.warning("no short way for clients on this machine: %s", error)

    async def stop(self, reason: str) -> None:
        """Stops listening, lets what was answered be sent, closes. Idempotent."""
        if self._is_stopping:
            return
        self._is_stopping = True
        _log.info("the rendezvous store stops: %s", reason)
        if self._timer is not None:
            self._timer.cancel()
        for listener in (self._listener, self._local_listener):
            if listener is not None:
                listener.close()
        for connection in list(self._open):
            connection.close()
        if not self._open:
            return
        self._all_closed.clear()
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._all_closed.wait()
        except TimeoutError:
            for connection in list(self._open):
                connection.abort()

    @property
    def address(self) -> StoreAddress:
        assert self._listener is not None, "started"
        host, port = self._listener.sockets[0].getsockname()[:2]
        return StoreAddress(host=host, port=port, instance=self.state.instance)

    def health(self) -> dict[str, Any]:
        """Counts for a person: connections, gangs, waiting requests, and what was refused or cut."""
        return {
            "instance": self.state.instance,
            "connections": len(self._open),
            "gangs": len(self.state.books.gangs),
            "waiters": self.state.books.waiters_count,
            "watchers": len(self.state.books.watchers),
            "cut": dict(self.counts),
        }

    # ---- connections ------------------------------------------------------------------------------

    def opened(self, connection: StoreConnection) -> bool:
        """A new connection; False when there are too many."""
        self._open.add(connection)
        return len(self._open) <= self.limits.connections_max

    def closed(self, connection: StoreConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()
        if connection.number is not None:
            del self.connections[connection.number]
            self.deliver(self.state.disconnected(connection.number))

    def greet(self, connection: StoreConnection, hello: ms.Hello) -> ms.Refused | None:
        """Takes the connection in; or says why not."""
        if hello.version != ms.PROTOCOL_VERSION:
            message = f"This store speaks protocol {ms.PROTOCOL_VERSION}, the caller {hello.version}."
            return ms.Refused(hello.id, Reason.PROTOCOL, message)
        role = self._role_of(hello.secret)
        if role is None:
            return ms.Refused(hello.id, Reason.UNAUTHENTICATED, "The rendezvous store refused the secret.")
        number = ConnectionId(self._next_number)
        self._next_number += 1
        connection.number = number
        self.connections[number] = connection
        self.deliver(self.state.connected(number, role, hello_id=hello.id))
        return None

    def _role_of(self, secret: str) -> ms.Role | None:
        """Both are compared, in constant time, whichever it is."""
        given = secret.encode("utf-8", "surrogatepass")
        found = [role for role, known in self._secrets.items() if hmac.compare_digest(given, known)]
        return found[0] if found else None

    def deliver(self, outputs: list[Output]) -> None:
        """Sends each output to its connection; one that has closed meanwhile gets nothing."""
        encode = self.encoder.encode
        previous: ms.Message | None = None
        frame = b""
        for number, message in outputs:
            connection = self.connections.get(number)
            if connection is None:
                continue
            if type(message) is ms.Opened:
                connection.send_pieces(*self.encoder.opened(message))
                continue
            if message is not previous:  # a push goes to every watcher as the same bytes
                previous, frame = message, encode(message)
            connection.send(frame)

    # ---- time -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self.clock()
        try:
            self.deliver(self.state.tick(now))
            if now >= self._next_sweep_at:
                self._next_sweep_at = now + self._sweep_s
                for connection in list(self._open):
                    connection.check(now)
            deadline = self.state.next_deadline()
            assert deadline is not None, "there has been a tick"
            delay_s = max(0.001, min(deadline, self._next_sweep_at) - now)
        except Exception:  # noqa: BLE001 - the guard: without a next tick no lease would ever lapse
            _log.exception("a tick of the rendezvous store failed")
            delay_s = self._sweep_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)


class StoreConnection(asyncio.Protocol):
    """One peer. `number` is set once it has said hello."""

    def __init__(self, server: StoreServer) -> None:
        self.number: ConnectionId | None = None
        self._server = server
        self._clock = server.clock
        self._handle = server.state.handle
        self._encode = server.encoder.encode
        self._stream = RequestStream(bytes_max=server.limits.hello_bytes_max)
        self._feed = self._stream.feed
        self._shortcut = server.shortcuts.answer
        self._file = -1
        self._may_be_unsent = True
        """The transport may still have something to send, after which only it may go on."""
        self._made_at = server.clock()
        self._paused_at: float | None = None
        """Since when the peer has not read what was sent to it."""
        self._half_frame: int | None = None
        self._half_frame_at = 0.0
        self._is_cut = False

    # ---- called by the loop -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        self._file = connection.fileno() if connection is not None else -1
        self._transport.set_write_buffer_limits(high=PAUSE_BYTES)
        if not self._server.opened(self):
            limit = self._server.limits.connections_max
            message = f"The rendezvous store's limit on connections is reached: {limit}."
            self._refuse(ms.Refused(0, Reason.LIMIT_EXCEEDED, message), "too many connections")

    def data_received(self, data: bytes) -> None:
        number = self.number
        was_plain = self._stream.is_plain
        if was_plain and number is not None:
            # What nearly always happens, in as few steps as possible.
            answer = self._shortcut(data, number, self._clock())
            if answer is not None:
                self.send(answer)
                return
        try:
            requests = self._feed(data)
        except RemoteProtocolError as error:
            self._cut("garbage", str(error))
            return
        if number is None:
            self._on_first(requests)
            return
        if len(requests) == 1 and was_plain and self._stream.is_plain:
            self._server.shortcuts.remember(data, requests[0])
        self._on_many(requests)

    def pause_writing(self) -> None:
        self._paused_at = self._clock()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused_at = None
        if not self._is_cut:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_cut, self._file = True, -1
        self._server.closed(self)

    # ---- called by the server ---------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        """One frame, straight to the kernel where nothing is before it: half as many steps as by the transport.

        Too much unsent cuts the connection.
        """
        if self._is_cut:
            return
        if self._may_be_unsent:
            if self._transport.get_write_buffer_size():
                self._queue(frame)
                return
            self._may_be_unsent = False
        try:
            sent = os.write(self._file, frame)
        except OSError:  # full, or broken: the transport knows what to do
            sent = 0
        if sent < len(frame):
            self._queue(frame[sent:])

    def send_pieces(self, head: bytes, tail: bytes) -> None:
        """One frame whose tail goes to many: it is not copied for each."""
        if self._is_cut:
            return
        sent = 0
        if not self._transport.get_write_buffer_size():
            with contextlib.suppress(OSError):
                sent = os.writev(self._file, [head, tail])
        if sent < len(head):
            self._queue(head[sent:])
            sent = len(head)
        if sent < len(head) + len(tail):
            self._queue(memoryview(tail)[sent - len(head) :])

    def check(self, now: float) -> None:
        """Looks for what should not take this long."""
        limits = self._server.limits
        if self.number is None and now - self._made_at > limits.hello_limit_s:
            self._cut("no hello", f"nothing valid within {limits.hello_limit_s:g} s")
        if self._paused_at is not None and now - self._paused_at > limits.stalled_limit_s:
            self._cut("slow reader", f"read nothing for {limits.stalled_limit_s:g} s")
        half_frame = self._stream.partials_count if self._stream.is_partial else None
        if half_frame != self._half_frame:
            self._half_frame, self._half_frame_at = half_frame, now
        elif half_frame is not None and now - self._half_frame_at > limits.stalled_limit_s:
            self._cut("half frame", f"half a frame for {limits.stalled_limit_s:g} s")

    def close(self) -> None:
        """After what is unsent has been sent."""
        self._is_cut, self._file = True, -1
        self._transport.close()

    def abort(self) -> None:
        self._is_cut, self._file = True, -1
        self._transport.abort()

    # ---- inside -----------------------------------------------------------------------------------

    def _on_first(self, requests: Any) -> None:
        if self._is_cut or not requests:
            return
        hello, *rest = requests
        if not isinstance(hello, ms.Hello):
            self._refuse(ms.Refused(hello.id, Reason.UNAUTHENTICATED, "Say hello first."), "no hello")
            return
        refused = self._server.greet(self, hello)
        if refused is not None:
            self._refuse(refused, "wrong secret" if refused.reason is Reason.UNAUTHENTICATED else "version")
            return
        self._stream.bytes_max = self._server.limits.frame_bytes_max
        self._on_many(rest)

    def _on_many(self, requests: Any) -> None:
        """Pipelined requests; the answers to this connection leave in one write where possible."""
        number, now = self.number, self._clock()
        assert number is not None, "has said hello"
        frames: list[bytes] = []
        size = 0
        for request in requests:
            for target, message in self._handle(request, number, now):
                if target != number:
                    self._server.deliver([(target, message)])
                    continue
                frames.append(self._encode(message))
                size += len(frames[-1])
            if size > PAUSE_BYTES:
                self.send(b"".join(frames))
                frames, size = [], 0
            if self._is_cut:
                return
        if frames:
            self.send(b"".join(frames))

    def _queue(self, data: bytes | memoryview) -> None:
        """What the kernel does not take now."""
        if self._is_cut:
            return
        self._may_be_unsent = True
        self._transport.write(data)
        if self._paused_at is not None:
            self._check_unsent()

    def _check_unsent(self) -> None:
        server = self._server
        is_watcher = self.number in server.state.books.watchers
        limit = server.limits.watcher_buffer_bytes_max if is_watcher else server.limits.write_buffer_bytes_max
        if self._transport.get_write_buffer_size() > limit:
            self._cut("slow reader", f"more than {limit} bytes unsent")

    def _refuse(self, refused: ms.Refused, why: str) -> None:
        """A last word, then the end."""
        self._server.counts[why] += 1
        self._queue(self._encode(refused))
        self.close()

    def _cut(self, why: str, story: str) -> None:
        if self._is_cut:
            return
        self._server.counts[why] += 1
        _log.warning("connection %s is cut: %s (%s)", self.number or "without a hello", why, story)
        self.abort()


class RendezvousStore:
    """The Ray actor around `StoreServer`: named "store", detached, restarted for ever, on the head.

    Args: see `StoreServer`. After a restart it is another instance, which knows nothing.
    """

    def __init__(self, host: str, port: int, admin_secret: str, member_secret: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._server = StoreServer(
            host=host, port=port, admin_secret=admin_secret, member_secret=member_secret
        )
        settle_memory()
        self._started = asyncio.ensure_future(self._server.start())

    async def endpoint(self) -> dict[str, Any]:
        """Host, port and instance, once it listens. Raises DeploymentError when it cannot."""
        address = await asyncio.shield(self._started)
        return {"host": address.host, "port": address.port, "instance": address.instance}

    async def health(self) -> dict[str, Any]:
        """See `StoreServer.health`."""
        await asyncio.shield(self._started)
        return self._server.health()

    async def stop(self, reason: str) -> None:
        """Stops listening; the actor itself is ended by whoever made it."""
        await self._server.stop(reason)


def allow_open_files(wanted: int = OPEN_FILES_WANTED) -> None:
    """Raises this process's soft limit on open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def settle_memory() -> None:
    """For a process that is a store and nothing else: the collector looks at what was imported no more, and rarely at
    the books, which have no cycles but hold tens of thousands of small objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
