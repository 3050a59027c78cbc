"""What tests of the mesh share: a deployment's authority, and gateways on loopback that know each other.

Nothing is redirected here: a captured connection's target is what the test says (`World.dial`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import cast

from mesh.ids import Epoch, MachineName, Rank, RunUid
from mesh.net.authority import Authority, new_authority, new_key_pem, signing_request
from mesh.net.gateway import Gateway, Limits
from mesh.net.identity import Identity, MachineIdentity, MemberIdentity, RelayIdentity
from mesh.net.roster import MachinePlace, MemberPlace, Roster
from mesh.net.tls import Credentials

DEPLOYMENT = "test-deployment"
RUN = RunUid("0123456789abcdef")
WAIT_S = 20.0


def machine(name: str, *, deployment: str = DEPLOYMENT) -> MachineIdentity:
    return MachineIdentity(deployment=deployment, machine=MachineName(name))


def member(
    rank: int, on: str, *, epoch: int = 1, run: str = RUN, deployment: str = DEPLOYMENT
) -> MemberIdentity:
    return MemberIdentity(
        deployment=deployment,
        machine=MachineName(on),
        run=RunUid(run),
        epoch=Epoch(epoch),
        rank=Rank(rank),
    )


def relay_identity(name: str) -> RelayIdentity:
    return RelayIdentity(deployment=DEPLOYMENT, machine=MachineName(name))


def credentials(
    authority: Authority,
    identity: Identity,
    *,
    now: float | None = None,
    ttl_s: float | None = None,
    bundle_pem: bytes | None = None,
) -> Credentials:
    """As a machine gets them: a key of its own, a request, the authority's signature."""
    key = new_key_pem()
    return Credentials(
        certificate_pem=authority.sign(
            signing_request(key), identity, now=time.time() if now is None else now, ttl_s=ttl_s
        ),
        key_pem=key,
        bundle_pem=bundle_pem or authority.certificate_pem,
    )


def overlay(rank: int) -> str:
    return f"198.18.0.{rank + 1}"


def machine_overlay(name: str) -> str:
    return f"198.19.0.{ord(name[0])}"


def at(name: str, *addresses: tuple[str, int]) -> dict[MachineName, MachinePlace]:
    """This machine's gateway is there."""
    return {MachineName(name): MachinePlace(gateway=addresses)}


def roster(epoch: int = 1, *, run: str = RUN, on: tuple[str, ...] = ("a", "b")) -> Roster:
    """Rank 0 on a, rank 1 on b."""
    places = (
        MemberPlace(rank=Rank(rank), machine=MachineName(name), overlay=(overlay(rank),))
        for rank, name in enumerate(on)
    )
    return Roster(run=RunUid(run), epoch=Epoch(epoch), members=tuple(places))


@dataclass
class World:
    """Two machines, a and b, with a member of RUN on each, at epoch 1."""

    authority: Authority
    gateways: dict[str, Gateway] = field(default_factory=dict)
    target: tuple[str, int] | None = None
    streams: list[Stream] = field(default_factory=list)
    """Of the dialling members: ended with the world."""

    def add(self, name: str, *, limits: Limits | None = None) -> Gateway:
        gateway = Gateway(
            deployment=DEPLOYMENT,
            machine=MachineName(name),
            limits=limits,
            target_of=lambda sock: self.target,
        )
        gateway.set_identity(credentials(self.authority, machine(name)))
        gateway.start(listen_on=(("127.0.0.1", 0),), capture_port=0)
        self.gateways[name] = gateway
        machines = {
            MachineName(n): MachinePlace(gateway=tuple(g.addresses), overlay=(machine_overlay(n),))
            for n, g in self.gateways.items()
        }
        for other in self.gateways.values():
            other.set_machines(machines)
        return gateway

    def assemble(self, epoch: int = 1) -> None:
        for gateway in self.gateways.values():
            gateway.set_roster(roster(epoch))
        for rank, name in enumerate(("a", "b")):
            self.host(rank, name, epoch=epoch)

    def host(self, rank: int, name: str, *, epoch: int = 1) -> None:
        self.gateways[name].host(
            credentials(self.authority, member(rank, name, epoch=epoch)), deliver_to=("127.0.0.1",)
        )

    async def dial(self, port: int, *, to: str | None = None, by: str = "a") -> Stream:
        """What a program on machine `by` gets when it dials an overlay address: rank 1's, or this one."""
        self.target = (to or overlay(1), port)
        capture = self.gateways[by].capture_port
        assert capture is not None
        stream = await Stream.open(capture)
        self.streams.append(stream)
        return stream


class Stream(asyncio.Protocol):
    """A connection whose ends can be told apart: an end of the other side, and a reset."""

    def __init__(self, on_made: Callable[[Stream], None] = lambda stream: None) -> None:
        self._on_made = on_made
        self.received = bytearray()
        self.ended = asyncio.Event()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._arrived = asyncio.Event()

    @classmethod
    async def open(cls, port: int) -> Stream:
        _, stream = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none of asyncio's
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._arrived.set()

    def eof_received(self) -> bool:
        self.ended.set()
        self._arrived.set()
        return True  # our half stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self._arrived.set()
        if not self.lost.done():
            self.lost.set_result(exc)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    async def read(self, length: int) -> bytes:
        await self.until(lambda: len(self.received) >= length or self.ended.is_set())
        assert len(self.received) >= length, f"ended after {len(self.received)} bytes of {length}"
        return bytes(self.received[:length])

    async def reset_seen(self) -> bool:
        """Waits for the end of the connection; whether it was a reset."""
        async with asyncio.timeout(WAIT_S):
            return isinstance(await asyncio.shield(self.lost), ConnectionError)

    def reset(self) -> None:
        """Ends the connection with a reset."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


@dataclass
class MemberServer:
    """A member that listens; every connection to it is a `Stream`."""

    port: int
    streams: list[Stream]
    arrived: asyncio.Event

    async def next(self, index: int = 0) -> Stream:
        async with asyncio.timeout(WAIT_S):
            while len(self.streams) <= index:
                self.arrived.clear()
                await self.arrived.wait()
        return self.streams[index]


@contextlib.asynccontextmanager
async def member_server() -> AsyncIterator[MemberServer]:
    loop = asyncio.get_running_loop()
    found = MemberServer(port=0, streams=[], arrived=asyncio.Event())

    def accept(stream: Stream) -> None:
        found.streams.append(stream)
        found.arrived.set()

    server = await loop.create_server(lambda: Stream(accept), "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        for stream in found.streams:
            stream.transport.abort()


@contextlib.asynccontextmanager
async def world(*, limits: Limits | None = None) -> AsyncIterator[World]:
    made = World(authority=new_authority(DEPLOYMENT, now=time.time()))
    try:
        for name in ("a", "b"):
            made.add(name, limits=limits)
        made.assemble()
        yield made
    finally:
        for stream in made.streams:
            stream.transport.abort()
        for gateway in made.gateways.values():
            await gateway.stop()


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for it, with a deadline."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {WAIT_S:g} s: {what}"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def recorder_at(address: tuple[str, int]) -> AsyncIterator[tuple[tuple[str, int], bytearray]]:
    """Stands in front of a listener: where, and what passed in either direction."""
    passed = bytearray()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            passed.extend(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*address)
        try:
            await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
            far_writer.transport.abort()

    server = await asyncio.start_server(between, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2], passed
    finally:
        server.close()


@contextlib.asynccontextmanager
async def recorder(mesh: World, name: str) -> AsyncIterator[bytearray]:
    """Stands between the others and this machine's gateway; what passed in either direction."""
    async with recorder_at(mesh.gateways[name].addresses[0]) as (address, passed):
        for other in mesh.gateways.values():
            other.set_machines(at(name, address))
        yield passed
