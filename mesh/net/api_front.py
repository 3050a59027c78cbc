"""The REST API behind the mesh port: who asks for it by name needs no certificate, and is joined to its listener.

Rules of this file:
1. Only the name in the ClientHello leads here. Everybody else is a machine or a member, and shows a certificate.
2. What is behind has its own guard (bearer tokens). Strangers are bounded: in the door as everywhere, and here in all
   and for each source.
3. The API sees loopback as its client; `source_of` says who is behind one of its connections.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter

from mesh.net.channel import Channel
from mesh.net.client_hello import missing
from mesh.net.dialling import Leg, connect
from mesh.net.doorkeeper import Doorkeeper
from mesh.net.greeting import HANDSHAKE_LIMIT_S
from mesh.net.refusals import Refusal
from mesh.net.sockets import reset
from mesh.net.streams import Full, Streams
from mesh.net.tls import Credentials, api_context, refusal_of

API_NAME = "api.gangmesh"
"""Of the API in TLS: as server name, and in its certificate. Resolved nowhere."""
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


class ApiFront:
    """One API behind a gateway.

    Args:
        credentials: with a certificate for API_NAME.
        target: where the API listens.
    """

    def __init__(self, *, credentials: Credentials, target: tuple[str, int]) -> None:
        self._context = api_context(credentials)
        self._target = target
        self._open: Counter[str] = Counter()
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
        if self._open.total() >= STREAMS_MAX or self._open[source] >= STREAMS_PER_SOURCE_MAX:
            return Refusal.STREAM_LIMIT
        self._open[source] += 1
        try:
            with streams.place():
                async with asyncio.timeout(TARGET_LIMIT_S):
                    target = await connect(*self._target)
        except Full:
            self._leave(source)
            return Refusal.STREAM_LIMIT
        except OSError:  # a time-out is one
            self._leave(source)
            return Refusal.TARGET_UNREACHABLE
        except BaseException:
            self._leave(source)
            channel.socket.close()
            raise
        port = target.getsockname()[1]
        self._sources[port] = _host(channel.socket)

        def on_end() -> None:
            self._leave(source)
            self._sources.pop(port, None)

        streams.join(target, channel, (), on_end=on_end)
        return None

    def _leave(self, source: str) -> None:
        self._open[source] -= 1
        if not self._open[source]:
            del self._open[source]

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
