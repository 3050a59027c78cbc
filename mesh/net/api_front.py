"""The REST API behind the mesh port: who asks for it by name needs no certificate, and is joined to its listener.

Rules of this file:
1. Only the name in the ClientHello leads here. Everybody else is a machine or a member, and shows a certificate.
2. What is behind has its own guard (bearer tokens). Strangers are bounded: in the door as everywhere, and here in all
   and for each source.
3. The API sees loopback as its client; `source_of` says who is behind one of its connections.
4. Where there is no room the oldest stream makes it: of the same source, or of the source that has the most. A stranger
   that holds connections open and says nothing shuts nobody out, and who is cut asks again.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from mesh.net.channel import Channel
from mesh.net.client_hello import missing
from mesh.net.dialling import Leg, connect
from mesh.net.doorkeeper import Doorkeeper
from mesh.net.greeting import HANDSHAKE_LIMIT_S
from mesh.net.refusals import Refusal
from mesh.net.sockets import reset
from mesh.net.streams import Full, Streams
from mesh.net.tls import Credentials, api_context, refusal_of

STREAMS_MAX = 1024
STREAMS_PER_SOURCE_MAX = 128
"""Many machines may be behind one address, and each waits for news of its head on one connection."""
TARGET_LIMIT_S = 5.0


async def read_hello(sock: socket.socket) -> bytes:
    """The first TLS record as far as it comes within the limit: what is wrong with it OpenSSL says."""
    loop = asyncio.get_running_loop()
    data = b""
    try:
        async with asyncio.timeout(HANDSHAKE_LIMIT_S):
            while count := missing(data):
                part = await loop.sock_recv(sock, count)
                if not part:
                    break
                data += part
    except OSError:  # a time-out is one
        pass
    return data


@dataclass(slots=True, eq=False)
class _Open:
    """A stream that runs."""

    cut: Callable[[], None] = lambda: None


class ApiFront:
    """One API behind a gateway.

    Args:
        credentials: with a certificate for API_NAME.
        target: where the API listens.
    """

    def __init__(self, *, credentials: Credentials, target: tuple[str, int]) -> None:
        self._context = api_context(credentials)
        self._target = target
        self._open: dict[str, list[_Open]] = {}
        """By source, the oldest first."""
        self._sources: dict[int, str] = {}
        """By the port that our connection to the API comes from."""

    def source_of(self, port: int) -> str | None:
        """Who is behind the connection that the API sees from this port of loopback."""
        return self._sources.get(port)

    async def carry(self, leg: Leg, source: str, *, streams: Streams, door: Doorkeeper) -> Refusal | None:
        """One connection from its place in the door, which it leaves, to the running stream. Takes the socket over."""
        channel = Channel(leg.socket, self._context, server_side=True, early=leg.early)
        refused: Refusal | None = Refusal.HANDSHAKE_FAILED
        try:
            refused = await self._greet(channel)
        except BaseException:
            leg.socket.close()
            raise
        finally:
            door.leave(source, has_failed=refused is not None)
        if refused is None:
            refused = await self._join(channel, source, streams)
        if refused is not None:
            reset(leg.socket)
        return refused

    async def _join(self, channel: Channel, source: str, streams: Streams) -> Refusal | None:
        self._make_room(source)
        try:
            with streams.place():
                async with asyncio.timeout(TARGET_LIMIT_S):
                    target = await connect(*self._target)
        except Full:
            return Refusal.STREAM_LIMIT
        except OSError:  # a time-out is one
            return Refusal.TARGET_UNREACHABLE
        except BaseException:
            channel.socket.close()
            raise
        port = target.getsockname()[1]
        self._sources[port] = _host(channel.socket)
        stream = _Open()

        def on_end() -> None:
            self._sources.pop(port, None)
            mine = self._open.get(source, [])
            if stream in mine:
                mine.remove(stream)
            if not mine:
                self._open.pop(source, None)

        self._open.setdefault(source, []).append(stream)
        stream.cut = streams.join(target, channel, (), on_end=on_end)
        return None

    def _make_room(self, source: str) -> None:
        """Rule 4."""
        if len(self._open.get(source, ())) >= STREAMS_PER_SOURCE_MAX:
            self._open[source][0].cut()
        if sum(map(len, self._open.values())) >= STREAMS_MAX:
            max(self._open.values(), key=len)[0].cut()

    async def _greet(self, channel: Channel) -> Refusal | None:
        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                await channel.handshake()
        except TimeoutError:
            return Refusal.HANDSHAKE_TIMEOUT
        except ssl.SSLError as error:
            return refusal_of(error)
        except OSError:
            return Refusal.HANDSHAKE_FAILED
        return None


def _host(sock: socket.socket) -> str:
    """The address of who has dialled, IPv4 as such; empty when it is gone already."""
    try:
        return str(sock.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return ""
