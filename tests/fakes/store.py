"""A rendezvous store of a hundred lines, for the tests of keeper and member: leases, one barrier, faults on demand.

It keeps no clock: a lease is held until a test says otherwise.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from mesh.errors import AuthenticationError, FencedError, MeshError, RendezvousError
from mesh.plan import Endpoint
from mesh.reasons import Reason
from mesh.wire import FrameParser, encode_frame


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
    arrived: dict[int, Any] = field(default_factory=dict)
    waiting: list[tuple[asyncio.StreamWriter, int]] = field(default_factory=list)
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None

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
        parser = FrameParser()
        try:
            while data := await reader.read(65536):
                for message in parser.feed(data):
                    self.ops.append(message["op"])
                    if not self.is_silent:
                        self._answer(message, writer)
        except ConnectionError:
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    def _answer(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            if message["op"] != "hello":
                self._gate(message)
            result = getattr(self, f"_on_{message['op']}")(message, writer)
        except MeshError as error:
            writer.write(encode_frame({"id": message["id"], "error": error.to_wire()}))
            return
        if result is not None:
            writer.write(encode_frame({"id": message["id"], "result": result}))

    def _gate(self, message: dict[str, Any]) -> None:
        if self.floor is None:
            raise RendezvousError("This store does not know the gang yet.", reason=Reason.UNKNOWN_GANG)
        if message["epoch"] < self.floor:
            raise FencedError(f"Epoch {message['epoch']} is over; the gang is at {self.floor}.")

    def _on_hello(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Any:
        if message["secret"] != self.secret:
            raise AuthenticationError("The secret is wrong.")
        return {}

    def _on_lease_grant(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Any:
        self.leases.add(message["rank"])
        return {}

    def _on_lease_renew(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Any:
        self.leases.add(message["rank"])
        return {}

    def _on_lease_release(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Any:
        self.leases.discard(message["rank"])
        return {}

    def _on_barrier_arrive(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Any:
        self.arrived[message["rank"]] = message["payload"]
        self.waiting.append((writer, message["id"]))
        if len(self.arrived) == self.size:
            payloads = [self.arrived[rank] for rank in sorted(self.arrived)]
            for waiter, request_id in self.waiting:
                waiter.write(encode_frame({"id": request_id, "result": payloads}))
            self.waiting.clear()
