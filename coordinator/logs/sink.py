"""The log sink: takes the output of every member over one listener and keeps it.

Rules of this file:
1. Nothing is read from a peer beyond a small hello before it has proven the secret, and then at most a frame at a time:
   memory is bounded by the connections, whatever they send.
2. A frame is acknowledged when it is written (`coordinator.logs.writer` says what that means), or given up because the
   disk refuses: a job never waits for the head's disk to have room.
3. A rank over its rate is not read for a while. Its spool fills, then its pipes: it slows itself, nobody else.
4. The newest connection of an incarnation replaces the one before, which may be the half of a broken one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections import deque
from contextlib import suppress

from coordinator.logs.rate import BURST_BYTES, RATE_BYTES_PER_S, TokenBucket
from coordinator.logs.store import LogStore
from coordinator.logs.writer import AttemptWriter
from mesh.errors import (
    AuthenticationError,
    DeploymentError,
    InternalError,
    MeshError,
    NotFoundError,
    ProtocolError,
    RemoteProtocolError,
)
from mesh.ids import Incarnation
from mesh.log_protocol import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    Ack,
    Data,
    End,
    Ended,
    FromShipper,
    FromSink,
    Hello,
    Refused,
    Welcome,
    from_shipper,
    to_frame,
)
from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.wire import FrameParser, encode_frame

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 4096
HELLO_TIMEOUT_S = 10.0
REPLACE_TIMEOUT_S = 10.0
"""How long a new connection waits for the one it replaces to let go of its file."""
_READ_BYTES = 64 * 1024
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class LogSink:
    """One listener for all shippers. Runs on the loop that the store's readers run on.

    Args:
        store: where the output goes.
        secret: what a shipper's first frame must carry; a new one for each life of the head, so that no shipper of an
            earlier life, whose runs may have been deleted, gets in.
        host: address to listen on.
        port: 0 takes a free one.
        rate_bytes_per_s: how fast one rank may print for long.
        burst_bytes: how much it may print at once.
    """

    def __init__(
        self,
        store: LogStore,
        *,
        secret: str,
        host: str,
        port: int = 0,
        rate_bytes_per_s: float = RATE_BYTES_PER_S,
        burst_bytes: float = BURST_BYTES,
    ) -> None:
        self._store = store
        self._secret = secret
        self._host = host
        self._port = port
        self._rate_bytes_per_s = rate_bytes_per_s
        self._burst_bytes = burst_bytes
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._current: dict[Incarnation, asyncio.Task[None]] = {}
        """The connection that counts, for each incarnation that has one."""
        self._buckets: dict[Incarnation, TokenBucket] = {}
        """Kept over reconnects, so that reconnecting is no way around the rate; dropped at the end of the output."""

    async def start(self) -> Endpoint:
        """Listens; returns where. Raises DeploymentError when the address cannot be had."""
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port, limit=_READ_BYTES)
        except OSError as error:
            raise DeploymentError(
                f"The log sink cannot listen on {self._host}:{self._port}: {error.strerror}.",
                reason=Reason.PORT_TAKEN,
            ) from error
        host, port = self._server.sockets[0].getsockname()[:2]
        return Endpoint(host=host, port=port, secret=self._secret)

    async def stop(self) -> None:
        """Closes every connection; what was acknowledged is written. Idempotent. The store stays open."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._guard(_Connection(reader, writer)), name="log sink connection")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _guard(self, connection: _Connection) -> None:
        """Serves one connection; whatever goes wrong with it ends with it."""
        try:
            await self._serve(connection)
        except ProtocolError as error:
            logger.warning("The log sink closes a connection: %s", error)
            await connection.refuse(error, final=False)
        except MeshError as error:
            await connection.refuse(error, final=isinstance(error, NotFoundError))
        except OSError as error:
            logger.debug("A log shipper's connection broke: %r", error)
        except Exception:
            logger.exception("The log sink failed over one connection.")
            await connection.refuse(InternalError("The log sink failed."), final=False)
        finally:
            connection.close()

    async def _serve(self, connection: _Connection) -> None:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = await connection.hello()
        if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            raise AuthenticationError("The log shipper does not know this deployment's secret.")
        if len(self._connections) > CONNECTIONS_MAX:
            raise DeploymentError(
                f"More than {CONNECTIONS_MAX} log shippers are connected.", reason=Reason.LIMIT_EXCEEDED
            )
        incarnation = hello.incarnation
        task = await self._replace(incarnation)
        try:
            async with self._store.writing(incarnation) as writer:
                await self._receive(connection, incarnation, writer)
        finally:
            if self._current.get(incarnation) is task:
                del self._current[incarnation]

    async def _replace(self, incarnation: Incarnation) -> asyncio.Task[None]:
        """Makes the current task the one that counts, when the one before has let go."""
        task = asyncio.current_task()
        assert task is not None
        before = self._current.get(incarnation)
        self._current[incarnation] = task
        if before is not None:
            before.cancel()
            await asyncio.wait([before], timeout=REPLACE_TIMEOUT_S)
        return task

    async def _receive(
        self, connection: _Connection, incarnation: Incarnation, writer: AttemptWriter
    ) -> None:
        uid = incarnation.run_uid
        bucket = self._bucket(incarnation)
        await connection.send(Welcome(offset=writer.end))
        while (message := await connection.receive()) is not None:
            if self._store.is_forgotten(uid):
                raise NotFoundError("The run was deleted; its output is not kept.")
            match message:
                case Data():
                    await self._store.run(writer.append, message.offset, message.records)
                    self._store.notify(uid)
                    await connection.send(Ack(offset=writer.end))
                    wait_s = bucket.take(len(message.records), now=time.monotonic())
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                case End():
                    await self._store.run(writer.finish, message.offset)
                    self._store.notify(uid)
                    self._buckets.pop(incarnation, None)
                    await connection.send(Ended())
                    return
                case Hello():
                    raise RemoteProtocolError("The log shipper said hello twice.")

    def _bucket(self, incarnation: Incarnation) -> TokenBucket:
        while len(self._buckets) > CONNECTIONS_MAX:  # of members that were lost before their output ended
            del self._buckets[next(iter(self._buckets))]
        fresh = TokenBucket(rate_per_s=self._rate_bytes_per_s, burst=self._burst_bytes)
        return self._buckets.setdefault(incarnation, fresh)


class _Connection:
    """Frames over one TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = FrameParser(bytes_max=FRAME_BYTES_MAX)
        self._frames: deque[FromShipper] = deque()
        """Received and not taken yet: what one read of the socket completes."""
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            raw.setsockopt(socket.IPPROTO_TCP, option, value)

    async def hello(self) -> Hello:
        """The first frame. Raises RemoteProtocolError for anything else, ConnectionError when none comes."""
        size = int.from_bytes(await self._exactly(4), "big")
        if size > HELLO_BYTES_MAX:
            raise RemoteProtocolError("What connected to the log sink is no log shipper.")
        frame = size.to_bytes(4, "big") + await self._exactly(size)
        for message in FrameParser(bytes_max=HELLO_BYTES_MAX).feed(frame):
            hello = from_shipper(message)
            if isinstance(hello, Hello):
                return hello
        raise RemoteProtocolError("The log shipper did not say hello first.")

    async def _exactly(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("closed before the hello") from error

    async def receive(self) -> FromShipper | None:
        """The next frame after the hello; None when the peer has closed."""
        while not self._frames:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                return None
            self._frames.extend(from_shipper(frame) for frame in self._parser.feed(data))
        return self._frames.popleft()

    async def send(self, message: FromSink) -> None:
        self._writer.write(encode_frame(to_frame(message)))
        await self._writer.drain()

    async def refuse(self, error: MeshError, *, final: bool) -> None:
        """Says why, if the peer still listens."""
        with suppress(OSError):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self.send(Refused(error=error, final=final))

    def close(self) -> None:
        self._writer.close()
