"""TLS on a socket until the preface is answered; then the pump takes over. Also for the outer leg of a relay.

Rules of this file:
1. OpenSSL never sees the socket: bytes go through two memory BIOs. So reading takes exactly what is asked for, and what
   lies behind it stays for whoever is next.
2. No wait here has a limit of its own: the caller puts `asyncio.timeout` around the whole of it.
3. The socket is non-blocking; one task reads and one writes, at the most.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

READ_BYTES = 16 * 1024


class ChannelClosed(ConnectionError):
    """The peer ended the stream where something of it was expected."""


class Channel:
    """One TLS stream over a connected socket.

    Args:
        early: bytes of it that somebody has read already.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, early: bytes = b""
    ) -> None:
        self.socket = sock
        self.incoming = ssl.MemoryBIO()
        self.incoming.write(early)
        self.outgoing = ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=server_side)
        self._loop = asyncio.get_running_loop()

    async def handshake(self) -> None:
        """Raises ssl.SSLError, OSError. An alert is sent before it raises."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self.flush()
                await self._receive()
            except ssl.SSLError:
                await self._flush_quietly()
                raise
            else:
                return await self.flush()

    async def read_exactly(self, length: int) -> bytes:
        """So many bytes. Raises ssl.SSLError, OSError, ChannelClosed at an end before them."""
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self.tls.read(length - len(parts))
            except ssl.SSLWantReadError:
                await self.flush()
                await self._receive()
                continue
            except ssl.SSLZeroReturnError:
                part = b""
            except ssl.SSLError:
                await self._flush_quietly()  # the alert
                raise
            if not part:
                raise ChannelClosed("the peer closed the stream")
            parts += part
        return bytes(parts)

    async def write(self, data: bytes) -> None:
        """Raises ssl.SSLError, OSError."""
        self.tls.write(data)
        await self.flush()

    async def leave_tls(self) -> bytes:
        """Ends TLS in both directions, in order; what the peer sent behind its end, as it came. Raises as above.

        The socket goes on as it is. Only for who has another protection inside.
        """
        await self.say_end()
        return await self.wait_for_end()

    async def say_end(self) -> None:
        """The first half of `leave_tls`."""
        try:
            self.tls.unwrap()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            await self._flush_quietly()
            raise
        await self.flush()

    async def wait_for_end(self) -> bytes:
        """The second half."""
        while True:
            try:
                part = self.tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                await self._receive()
                continue
            except ssl.SSLZeroReturnError:
                part = b""
            if part:
                raise ChannelClosed("the peer said more than was agreed")
            return self.incoming.read()

    async def flush(self) -> None:
        """Everything that TLS wants to send is in the kernel."""
        if self.outgoing.pending:
            await self._loop.sock_sendall(self.socket, self.outgoing.read())

    async def _flush_quietly(self) -> None:
        try:
            await self.flush()
        except OSError:
            self.outgoing.read()  # the peer is gone: nobody to tell

    async def _receive(self) -> None:
        data = await self._loop.sock_recv(self.socket, READ_BYTES)
        if not data:
            raise ChannelClosed("the peer closed the connection")
        self.incoming.write(data)
