"""A rendezvous store of a hundred lines, for the tests of keeper and member: leases, one barrier, faults on demand.

It keeps no clock: a lease is held until a test says otherwise.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.protocol import ReplyEncoder, RequestStream


@dataclass
class FakeStore:
    """Listens on loopback. `floor` is the lowest epoch that is served; None: it knows no gang."""

    size: int = 1
    floor: int | None = 1
    secret: str = "s3cret"
    port: int = 0
    is_silent: bool = False
    """Takes requests and answers nothing."""
    ops: list[str] = field(default_factory=list)
    leases: set[int] = field(default_factory=set)
    arrived: dict[int, bytes] = field(default_factory=dict)
    waiting: list[tuple[asyncio.StreamWriter, int]] = field(default_factory=list)
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _encoder: ReplyEncoder = field(default_factory=ReplyEncoder)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(host="127.0.0.1", port=self.port, secret=self.secret)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a crash: every connection breaks, and everything it knew is gone."""
        assert self._server is not None
        self._server.close()
        for writer in list(self.connections):
            writer.close()
        await self._server.wait_closed()
        self.leases.clear()
        self.arrived.clear()
        self.waiting.clear()

    def count(self, op: str) -> int:
        return self.ops.count(op)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        stream = RequestStream(bytes_max=65536)
        try:
            while data := await reader.read(65536):
                for message in stream.feed(data):
                    self.ops.append(type(message).__name__)
                    if not self.is_silent:
                        self._answer(message, writer)
        except ConnectionError:
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    def _answer(self, message: ms.Request, writer: asyncio.StreamWriter) -> None:
        refused = self._refusal(message)
        if refused is not None:
            self._send(writer, ms.Refused(message.id, *refused))
            return
        match message:
            case ms.Hello():
                self._send(writer, ms.Welcome(message.id, "fake", ms.Role.MEMBER))
            case ms.Ping():
                self._send(writer, ms.Done(message.id))
            case ms.GrantLease():
                self.leases.add(message.rank)
                self._send(writer, ms.Done(message.id))
            case ms.ReleaseLease():
                self.leases.discard(message.rank)
                self._send(writer, ms.Done(message.id))
            case ms.Arrive():
                self._arrive(message, writer)
            case _:
                raise AssertionError(f"no member asks for {message}")

    def _refusal(self, message: ms.Request) -> tuple[Reason, str] | None:
        match message:
            case ms.Hello() if message.secret != self.secret:
                return Reason.UNAUTHENTICATED, "The secret is wrong."
            case ms.Hello():
                return None
            case _ if self.floor is None:
                return Reason.UNKNOWN_GANG, "This store does not know the gang yet."
            case ms.GrantLease() | ms.ReleaseLease() | ms.Arrive() if message.epoch < self.floor:
                return Reason.STALE_EPOCH, f"Epoch {message.epoch} is over; the gang is at {self.floor}."
            case ms.Arrive() if message.rank not in self.leases:
                return Reason.LEASE_LOST, "No lease."
        return None

    def _arrive(self, message: ms.Arrive, writer: asyncio.StreamWriter) -> None:
        self.arrived[message.rank] = message.payload
        self.waiting.append((writer, message.id))
        if len(self.arrived) == self.size:
            payloads = tuple(self.arrived[rank] for rank in sorted(self.arrived))
            for waiter, request_id in self.waiting:
                self._send(waiter, ms.Opened(request_id, payloads))
            self.waiting.clear()

    def _send(self, writer: asyncio.StreamWriter, message: ms.Reply) -> None:
        writer.write(self._encoder.encode(message))
