"""One member's end of the network check: two listening ports that answer, and the dialling of others.

Rules of this file:
1. Only who knows the check's key is answered; everybody else is cut off after the few bytes that the key takes.
2. Nothing is unbounded: connections, their life, what is read. Both ends know how much comes.
3. Every try has a limit, and how it ended is data. Only a fault of this machine raises.
4. Not the streams of asyncio: a copy of every byte through Python lists would measure Python.

On the wire: MAGIC, the key (16 bytes), one byte that says what comes. ECHO: 8 bytes each way, and again; the answer
has the wall clock's time (float64, seconds since 1970) behind it. PUSH: for how many seconds (float64), and bytes until
the receiver has counted so long and says how many came in how many seconds (uint64, float64); it throws away what is
still under way. So a slow path does not have to be emptied first. Over UDP, to the ephemeral port's number: MAGIC, the
key, the sender's rank (one byte). It is not answered: what arrives tells which direction of a pair is to blame when no
connection can be made.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from agents import machine
from mesh import __version__
from mesh.errors import PlacementError
from mesh.netcheck.measurements import Dialled, MemberFacts, PortKind, Reach

MAGIC = b"GMNC"
KEY_BYTES = 16
ECHO, PUSH = b"E", b"P"
_HELLO_BYTES = len(MAGIC) + KEY_BYTES + 1
_ECHO_BYTES = 8
_CLOCK = struct.Struct("!8sd")
_SECONDS = struct.Struct("!d")
_RECEIVED = struct.Struct("!Qd")
_RECEIVED_AT = 128
"""Of `struct tcp_info`, in bytes."""

PACKAGES = {
    "torch": ("torch",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
}
"""Where torch's wheels bring them: CUDA 13's runtime has no number in its name."""
IMAGE_VARIABLE = "GANGMESH_IMAGE"
"""In an agent's environment: which image it runs in, as whoever builds it says."""

CONNECT_LIMIT_S = 1.5
"""One lost SYN is sent again after a second (RFC 6298, section 2)."""
ECHO_LIMIT_S = 1.0
ECHOES = 8
PIECE_BYTES = 256 << 10
PUSH_S_MAX = 2.0
DATAGRAMS = 3
CONNECTIONS_MAX = 256
PATIENT_LIMIT_S = 3.0
"""Of each, where a busy machine is given time."""
HELLO_LIMIT_S = 5.0
SERVED_LIMIT_S = 6.0

_log = logging.getLogger(__name__)


class Prober:
    """One member of a check.

    Args:
        rank, name, address: which member; `address` is where the others reach it, and where it dials from.
        key: the check's secret, 16 bytes.
        place: provider and region.
        ports: to listen on exactly these, the rendezvous port first: where nothing else comes through.
        rendezvous_port: asked for on every member, as training will ask for it on rank 0.
    """

    def __init__(
        self,
        *,
        rank: int,
        name: str,
        address: str,
        key: bytes,
        place: str = "",
        rendezvous_port: int = machine.MASTER_PORT_FIRST,
        ports: tuple[int, int] | None = None,
    ) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        self._rank, self._name, self._address, self._place = rank, name, address, place
        self._bound = address if machine.interface_for(address) else _wildcard(address)
        """Behind a NAT the address is not this machine's own."""
        self._key = key
        self._wanted_port, self._fixed_ports = rendezvous_port, ports
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reservation: machine.PortReservation | None = None
        self._datagrams: asyncio.DatagramTransport | None = None
        self._heard: set[int] = set()

    @property
    def heard(self) -> frozenset[int]:
        """The ranks of which a datagram has arrived."""
        return frozenset(self._heard)

    async def start(self) -> MemberFacts:
        """Listens. Raises PlacementError when it cannot; nothing is open then, nor when it is given up."""
        try:
            return await self._start()
        except BaseException as error:
            await self.stop()
            if isinstance(error, OSError):
                raise PlacementError(
                    f"The network check cannot listen at {self._address}: {error.strerror}.",
                    hint="Another check may be under way on this machine.",
                ) from error
            raise

    async def _start(self) -> MemberFacts:
        rendezvous, ephemeral = self._fixed_ports or (0, 0)
        if self._fixed_ports is None:
            reservation = self._reservation = await _reserve(self._wanted_port)
            rendezvous = reservation.port
        ports = [self._listen(rendezvous), self._listen(ephemeral)]
        self._datagrams, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Listening(self._on_datagram), local_addr=(self._bound, ports[1])
        )
        return MemberFacts(
            rank=self._rank,
            machine=self._name,
            address=self._address,
            rendezvous_port=ports[0],
            ephemeral_port=ports[1],
            place=self._place,
            mtu_bytes=_mtu_of(self._address),
            versions=await asyncio.to_thread(versions),
        )

    async def stop(self) -> None:
        """Closes everything. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._datagrams is not None:
            self._datagrams.close()
        if self._reservation is not None:
            self._reservation.release()

    # ---- answering ----------------------------------------------------------------------------------

    def _listen(self, port: int) -> int:
        family = _family(self._address)
        listener = socket.socket(family, socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._bound, port))
        listener.listen(CONNECTIONS_MAX)
        self._spawn(self._accept(listener), f"accept {self._address}")
        return int(listener.getsockname()[1])

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # the peer has gone again, or no descriptor is free
                _log.info("a connection of the network check could not be taken: %s", error)
                await asyncio.sleep(0.05)
                continue
            if len(self._tasks) >= CONNECTIONS_MAX:
                connection.close()
                continue
            connection.setblocking(False)
            self._spawn(self._serve(connection), "serve")

    async def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(TimeoutError, OSError, EOFError):
            async with asyncio.timeout(HELLO_LIMIT_S):
                hello = await _receive(connection, _HELLO_BYTES)
            if hello[:-1] != MAGIC + self._key:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(SERVED_LIMIT_S):
                if hello[-1:] == ECHO:
                    await _answer_echoes(connection)
                elif hello[-1:] == PUSH:
                    await _answer_push(connection)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_datagram(self, said: bytes) -> None:
        if said[:-1] == MAGIC + self._key:
            self._heard.add(said[-1])

    # ---- dialling -----------------------------------------------------------------------------------

    async def reach(self, others: Sequence[MemberFacts], *, is_patient: bool = False) -> dict[int, Reach]:
        """Both ports of each of these, all at once. By rank."""
        for _ in range(DATAGRAMS):
            for other in others:
                self._tell(other)
        limit_s = PATIENT_LIMIT_S if is_patient else ECHO_LIMIT_S
        found = await asyncio.gather(*(self._reach(other, limit_s) for other in others))
        return {other.rank: reach for other, reach in zip(others, found, strict=True)}

    def _tell(self, other: MemberFacts) -> None:
        if self._datagrams is not None:
            said = MAGIC + self._key + bytes([self._rank])
            self._datagrams.sendto(said, (other.address, other.ephemeral_port))

    async def _reach(self, other: MemberFacts, limit_s: float) -> Reach:
        [(rendezvous, _), (ephemeral, echoes)] = await asyncio.gather(
            self._echo(other, PortKind.RENDEZVOUS, limit_s), self._echo(other, PortKind.EPHEMERAL, limit_s)
        )
        best = min(echoes, default=None)
        return Reach(
            rendezvous=rendezvous,
            ephemeral=ephemeral,
            round_trip_s=None if best is None else best[0],
            offset_s=None if best is None else best[1],
        )

    async def _echo(
        self, other: MemberFacts, port: PortKind, limit_s: float
    ) -> tuple[Dialled, list[tuple[float, float]]]:
        """How it ended, and (round trip, offset of the other clock) in seconds of each echo."""
        dialled, connection = await self._dial(other, port)
        if connection is None:
            return dialled, []
        echoes: list[tuple[float, float]] = []
        with connection:
            try:
                async with asyncio.timeout(limit_s):
                    await self._hello(connection, ECHO)
                    for number in range(ECHOES):
                        echoes.append(await _echo_once(connection, number.to_bytes(_ECHO_BYTES)))
            except (EOFError, ValueError):
                return Dialled.STRANGER, []
            except (TimeoutError, OSError):
                if not echoes:
                    return Dialled.MUTE, []
        return Dialled.ANSWERED, echoes

    async def push(
        self, other: MemberFacts, *, seconds: float, limit_s: float, segment_bytes: int | None = None
    ) -> float | None:
        """Sends as much as goes through in so many seconds, in TCP segments of at most this size.

        Returns:
            Bytes a second as the other end counted; None when the answer did not come within the limit.
        """
        with contextlib.suppress(TimeoutError, OSError, EOFError):
            async with asyncio.timeout(limit_s):
                _, connection = await self._dial(other, PortKind.EPHEMERAL, segment_bytes=segment_bytes)
                if connection is None:
                    return None
                with connection:
                    await self._hello(connection, PUSH + _SECONDS.pack(seconds))
                    count, took_s = await _send_until_answered(connection)
                    return count / took_s if took_s > 0 else None
        return None

    async def _dial(
        self, other: MemberFacts, port: PortKind, *, segment_bytes: int | None = None
    ) -> tuple[Dialled, socket.socket | None]:
        number = other.rendezvous_port if port is PortKind.RENDEZVOUS else other.ephemeral_port
        connection = socket.socket(_family(other.address), socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if segment_bytes is not None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
            with contextlib.suppress(OSError):  # behind a NAT the address is not this machine's own
                connection.bind((self._address, 0))
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await asyncio.get_running_loop().sock_connect(connection, (other.address, number))
        except OSError as error:  # a timeout is one
            connection.close()
            was_refused = isinstance(error, ConnectionError)
            return Dialled.REFUSED if was_refused else Dialled.SILENT, None
        except BaseException:
            connection.close()
            raise
        return Dialled.ANSWERED, connection

    async def _hello(self, connection: socket.socket, what: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, MAGIC + self._key + what)


async def _reserve(wanted: int) -> machine.PortReservation:
    """A thread that has begun goes on: what it still reserves when nobody waits any more is let go."""
    reserving = asyncio.ensure_future(asyncio.to_thread(machine.reserve_port, wanted=wanted))
    try:
        return await asyncio.shield(reserving)
    except asyncio.CancelledError:
        with contextlib.suppress(PlacementError):
            (await reserving).release()
        raise


class _Listening(asyncio.DatagramProtocol):
    def __init__(self, on_datagram: Callable[[bytes], None]) -> None:
        self._on_datagram = on_datagram

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._on_datagram(data)


def _wildcard(address: str) -> str:
    return "::" if ipaddress.ip_address(address).version == 6 else "0.0.0.0"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


async def _receive(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes. Raises EOFError when the other end has closed before."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < count:
        some = await loop.sock_recv(connection, count - len(received))
        if not some:
            raise EOFError
        received += some
    return bytes(received)


async def _answer_echoes(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(ECHOES):
        asked = await _receive(connection, _ECHO_BYTES)
        await loop.sock_sendall(connection, _CLOCK.pack(asked, time.time()))


async def _echo_once(connection: socket.socket, asked: bytes) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    sent_wall, sent = time.time(), time.perf_counter()
    await loop.sock_sendall(connection, asked)
    answered, clock = _CLOCK.unpack(await _receive(connection, _CLOCK.size))
    round_trip_s = time.perf_counter() - sent
    if answered != asked:
        raise ValueError("the answer is to another question")
    return round_trip_s, clock - (sent_wall + round_trip_s / 2)


async def _answer_push(connection: socket.socket) -> None:
    """By the kernel's own count: data that lay in the socket while this process had to wait is not fast."""
    loop = asyncio.get_running_loop()
    room = memoryview(bytearray(PIECE_BYTES))
    [seconds] = _SECONDS.unpack(await _receive(connection, _SECONDS.size))
    await loop.sock_recv_into(connection, room)
    began, before = loop.time(), _bytes_received(connection)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(began + min(seconds, PUSH_S_MAX)):
            while await loop.sock_recv_into(connection, room):
                pass
    now, count = loop.time(), _bytes_received(connection)
    await loop.sock_sendall(connection, _RECEIVED.pack(count - before, now - began))
    while await loop.sock_recv_into(connection, room):
        pass


def _bytes_received(connection: socket.socket) -> int:
    """tcpi_bytes_received of include/uapi/linux/tcp.h (since Linux 4.1)."""
    facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    return int.from_bytes(facts[_RECEIVED_AT : _RECEIVED_AT + 8], sys.byteorder)


async def _send_until_answered(connection: socket.socket) -> tuple[int, float]:
    """The other end's count, and its seconds."""
    loop = asyncio.get_running_loop()

    async def send() -> None:
        piece = bytes(PIECE_BYTES)
        while True:
            await loop.sock_sendall(connection, piece)

    sending = asyncio.create_task(send(), name="push")
    try:
        count, seconds = _RECEIVED.unpack(await _receive(connection, _RECEIVED.size))
    finally:
        sending.cancel()
        await asyncio.wait([sending])
    return count, seconds


def _mtu_of(address: str) -> int:
    interface = machine.interface_for(address)
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    except (OSError, ValueError):
        return 0


def versions() -> dict[str, str]:
    """Of what has to be alike on all members, without starting anything: as installed beside us, and the driver's."""
    found = {"gangmesh": __version__}
    for name, packages in PACKAGES.items():
        for package in packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found.setdefault(name, metadata.version(package))
    if image := os.environ.get(IMAGE_VARIABLE):
        found["image"] = image
    with contextlib.suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        found["driver"] = next((word for word in words if word[0].isdigit() and "." in word), "unknown")
    return found
