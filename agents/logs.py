"""The log shipper: takes a rank's output from its spool to the head's log sink.

Rules of this file:
1. The disk is the truth: what to send is in the spool, what has arrived is what the sink says at every welcome. So a
   shipper that is started again, in another process too, leaves nothing out and sends nothing twice.
2. The job is never stopped by logs that cannot be delivered, only slowed: the spool holds `spool_unacked_max` bytes
   (32 MiB) that the sink has not acknowledged, then the supervisor stops reading the command's pipes until there is
   room again. A head that is away for minutes is not noticed by a command that prints less than that.
3. Output that the sink will never take (its run was deleted) is acknowledged here, so that the job goes on.
4. Files are read in threads, and at most WINDOW_BYTES_MAX and a chunk are in memory.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from agents.spool import HEADER_BYTES, SEGMENT_BYTES, Record, SpoolReader, encode_record
from mesh.errors import MeshError, MeshTimeoutError, RemoteProtocolError, TransportError
from mesh.ids import Incarnation
from mesh.log_protocol import (
    CHUNK_BYTES_MAX,
    FRAME_BYTES_MAX,
    Ack,
    Data,
    End,
    Ended,
    FromShipper,
    FromSink,
    Hello,
    Refused,
    SendWindow,
    Welcome,
    from_sink,
    to_frame,
)
from mesh.plan import Endpoint
from mesh.wire import FrameParser, encode_frame

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
"""How often the spool is looked at when nobody says that there is something (`wake`)."""
SEND_INTERVAL_S = 0.25
"""Between two frames of a command that prints now and then: each costs the machine and the head half a millisecond, and
what comes after a silence is sent at once."""
POLLS_PER_READ = 10
"""After so many looks it is read whatever they saw."""
CONNECT_TIMEOUT_S = 10.0
WELCOME_TIMEOUT_S = 30.0
"""The sink may first have to close the connection of an earlier shipper."""
BACK_OFF_FIRST_S = 0.1
BACK_OFF_MAX_S = 5.0
FULL_BYTES = CHUNK_BYTES_MAX // 2
"""A frame with as much is followed by the next one at once."""
_READ_BYTES = 64 * 1024
_SOCKET_OPTIONS = (
    # A head that vanishes without a word is noticed after half a minute, with data on the way or without.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class LogShipper:
    """Ships one incarnation's spool. `start` it, `drain` it when the spool has ended, `stop` it.

    Args:
        spool: the spool's folder; it need not be there yet.
        endpoint: the head's log sink.
        incarnation: whose output this is.
        on_acked: called on the loop with an offset before which the spool may let go of everything. It only grows.
    """

    def __init__(
        self,
        spool: str | Path,
        endpoint: Endpoint,
        incarnation: Incarnation,
        *,
        on_acked: Callable[[int], None],
    ) -> None:
        self._spool = str(spool)
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._on_acked = on_acked
        self._acked = 0
        self._awake = asyncio.Event()
        """Set when the spool may have more."""
        self._room = asyncio.Event()
        """Set when the sink has acknowledged something."""
        self._delivered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._back_off_s = BACK_OFF_FIRST_S
        self._warned = False
        """The failure that lasts was told."""
        self.refusal: MeshError | None = None
        """Why the sink will never take this output, when it said so."""

    @property
    def acked(self) -> int:
        """Everything before this offset has arrived, or will never be taken."""
        return self._acked

    def start(self) -> None:
        """Begins. Returns at once; a sink that cannot be reached is tried again for ever."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name=f"log shipper {self._incarnation}")

    def wake(self) -> None:
        """The spool has more, or has ended: look now."""
        self._awake.set()

    async def drain(self, stall_s: float) -> bool:
        """Waits until everything up to the spool's `end` has arrived.

        False when nothing more of it arrived for `stall_s`: however much there is, it may take its time, and the
        sink's own rate is not held against it.
        """
        self.wake()
        while True:
            acked = self.acked
            try:
                async with asyncio.timeout(stall_s):
                    await self._delivered.wait()
            except TimeoutError:
                if self.acked == acked:
                    return False
            else:
                return self.refusal is None

    async def stop(self) -> None:
        """Stops at once; what has not arrived stays in the spool. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while not self._delivered.is_set():
            try:
                await self._ship()
            except _RefusedForGood as refusal:
                self.refusal = refusal.error
                logger.warning(
                    "The log sink will not take the output of %s: %s", self._incarnation, refusal.error
                )
                await self._discard()
            except (MeshError, OSError) as error:
                await self._back_off(error)
            except Exception as error:
                # A fault of this program must not stop the job, which waits for acknowledgements.
                logger.exception("Shipping the output of %s failed.", self._incarnation)
                await self._back_off(error)

    async def _back_off(self, error: Exception) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        logger.log(level, "The output of %s waits in its spool: %s", self._incarnation, error)
        self._warned = True
        await asyncio.sleep(self._back_off_s * random.uniform(0.5, 1.0))
        self._back_off_s = min(self._back_off_s * 2, BACK_OFF_MAX_S)

    async def _ship(self) -> None:
        """One connection, until everything is delivered or something breaks."""
        connection = await _Connection.open(self._endpoint)
        sending: asyncio.Task[None] | None = None
        try:
            await connection.send(Hello(secret=self._endpoint.secret, incarnation=self._incarnation))
            window = SendWindow(offset=await self._welcome(connection))
            self._warned, self._back_off_s = False, BACK_OFF_FIRST_S
            self._acknowledge(window.acked)
            sending = asyncio.create_task(
                self._send_or_close(connection, window), name=f"log sender {self._incarnation}"
            )
            await self._receive(connection, window)
        finally:
            connection.close()
            if sending is not None:
                sending.cancel()
                await asyncio.wait([sending])

    async def _welcome(self, connection: _Connection) -> int:
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                answer = await connection.receive()
        except TimeoutError:
            raise MeshTimeoutError("The log sink did not answer.", timeout_s=WELCOME_TIMEOUT_S) from None
        match answer:
            case Welcome():
                return answer.offset
            case Refused():
                raise _refusal(answer)
            case None:
                raise TransportError("The log sink closed the connection.")
        raise RemoteProtocolError("The log sink did not welcome its shipper first.")

    async def _receive(self, connection: _Connection, window: SendWindow) -> None:
        """Takes acknowledgements until the last one."""
        while (answer := await connection.receive()) is not None:
            match answer:
                case Ack():
                    window.on_ack(answer.offset)
                    self._acknowledge(answer.offset)
                    self._room.set()
                case Ended():
                    self._acknowledge(window.sent)
                    self._delivered.set()
                    return
                case Refused():
                    raise _refusal(answer)
                case Welcome():
                    raise RemoteProtocolError("The log sink welcomed its shipper twice.")
        raise TransportError("The connection to the log sink broke.")

    async def _send_or_close(self, connection: _Connection, window: SendWindow) -> None:
        """Sends what comes. When that fails the connection is closed, which is what the receiving side waits for."""
        try:
            await self._send(connection, window)
        except OSError as error:
            logger.debug("Sending the output of %s stopped: %r", self._incarnation, error)
            connection.close()

    async def _send(self, connection: _Connection, window: SendWindow) -> None:
        spool = SpoolReader(self._spool, offset=window.sent)
        while True:
            before = spool.position
            records = await asyncio.to_thread(spool.read, bytes_max=CHUNK_BYTES_MAX)
            if chunk := chunk_of(records, before=before):
                while window.room < len(chunk.records):
                    self._room.clear()
                    await self._room.wait()
                window.on_sent(spool.position)
                await connection.send(chunk)
                if len(chunk.records) < FULL_BYTES:
                    await self._let_gather(spool)
            elif spool.ended:
                window.on_end(spool.position)
                await connection.send(End(offset=spool.position))
                return
            elif not records:
                await self._wait_for_more(spool)

    async def _let_gather(self, spool: SpoolReader) -> None:
        """Returns when there may be more, and a frame's time has passed or somebody waits for it."""
        try:
            async with asyncio.timeout(SEND_INTERVAL_S):
                await self._awake.wait()
        except TimeoutError:
            if not spool.has_changed():
                await self._wait_for_more(spool)

    async def _discard(self) -> None:
        """Acknowledges everything that the spool will ever have."""
        spool = SpoolReader(self._spool, offset=self._acked)
        while not spool.ended:
            if await asyncio.to_thread(spool.read):
                self._acknowledge(spool.position)
            elif not spool.ended:
                await self._wait_for_more(spool)
        self._delivered.set()

    async def _wait_for_more(self, spool: SpoolReader) -> None:
        """A silent rank costs two calls of `stat` each time, on the loop: reading took a percent of a core."""
        for _ in range(POLLS_PER_READ):
            try:
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self._awake.wait()
            except TimeoutError:
                if spool.has_changed():
                    return
            else:
                self._awake.clear()
                return

    def _acknowledge(self, offset: int) -> None:
        if offset > self._acked:
            self._acked = offset
            self._on_acked(offset)


def chunk_of(records: list[Record], *, before: int) -> Data | None:
    """What one read of the spool gave, as a frame.

    None when there is nothing to send: no records, or only the reader's own mark of a hole (it stands at no record's
    place). The next frame's offset then tells the sink about the hole.

    Args:
        records: they lie together in the spool.
        before: where the reader stood.
    """
    if not records:
        return None
    start = records[0].offset - HEADER_BYTES - len(records[0].data)
    if start != before and start % SEGMENT_BYTES != 0:
        return None
    encoded = (encode_record(at=r.at, stream=r.stream, data=r.data) for r in records)
    return Data(offset=start, records=b"".join(encoded))


class _RefusedForGood(Exception):
    def __init__(self, error: MeshError) -> None:
        super().__init__(str(error))
        self.error = error


def _refusal(answer: Refused) -> Exception:
    return _RefusedForGood(answer.error) if answer.final else answer.error


class _Connection:
    """Frames over one TCP connection to the sink."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = FrameParser(bytes_max=FRAME_BYTES_MAX)
        self._frames: deque[FromSink] = deque()
        """Received and not taken yet: what one read of the socket can hold."""
        raw = writer.get_extra_info("socket")
        for level, option, value in _SOCKET_OPTIONS:
            raw.setsockopt(level, option, value)

    @classmethod
    async def open(cls, endpoint: Endpoint) -> _Connection:
        """Raises OSError or MeshTimeoutError."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                source = None if endpoint.source is None else (endpoint.source, 0)
                reader, writer = await asyncio.open_connection(
                    endpoint.host, endpoint.port, limit=_READ_BYTES, local_addr=source
                )
        except TimeoutError:
            raise MeshTimeoutError("The log sink did not answer.", timeout_s=CONNECT_TIMEOUT_S) from None
        return cls(reader, writer)

    async def send(self, message: FromShipper) -> None:
        self._writer.write(encode_frame(to_frame(message)))
        await self._writer.drain()

    async def receive(self) -> FromSink | None:
        """The sink's next frame; None when it has closed."""
        while not self._frames:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                return None
            self._frames.extend(from_sink(frame) for frame in self._parser.feed(data))
        return self._frames.popleft()

    def close(self) -> None:
        self._writer.close()
