"""Carries bytes between a member's plain socket and a TLS stream, both ways, until both are at their end.

Rules of this file:
1. One chunk at most is held for each direction, and while a part of it waits for the receiver nothing more is read: a
   slow reader slows its writer down, through both gateways, and costs nobody memory.
2. An end is an end and a reset is a reset. The end of one direction (FIN) becomes a close_notify and a FIN, and the
   other direction goes on. A connection that breaks, also TLS that ends without close_notify, is a reset on the other.
3. A turn of the loop carries one chunk of one stream: streams take turns.
4. All pumps of a process share the scratch buffers: between two turns nothing is in them. An idle stream owns no
   buffer but OpenSSL's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from enum import StrEnum
from typing import cast

from mesh.net.channel import Channel
from mesh.net.sockets import is_dead, reset

CHUNK_BYTES = 256 * 1024
"""For one stream the CPU that a byte costs is the same from 128 KiB to 512 KiB. For eight, on cores that others have
work for too, it is 0.92 of what it is with 128 KiB, and with 64 KiB 1.1 of that.

OpenSSL on the socket itself, without the two copies of the memory BIOs, costs as much to send and a sixth more to
receive: it makes system calls for each record of 16 KiB."""
_RECORD_BYTES_MAX = 17 * 1024

_cipher = memoryview(bytearray(CHUNK_BYTES))
_plain = memoryview(bytearray(CHUNK_BYTES + _RECORD_BYTES_MAX))
"""Larger than a chunk by the rest of a record that came before: always room for all that can be decrypted."""


class PumpEnd(StrEnum):
    """How a stream ended."""

    FINISHED = "finished"
    """Both directions came to their end."""
    MEMBER_RESET = "member reset"
    PEER_RESET = "peer reset"
    CUT = "cut"
    """By us: the epoch is over, or the gateway stops."""


class Pump:
    """Owns both sockets from `start` on, and closes them. `on_end` is called once."""

    def __init__(self, *, plain: socket.socket, channel: Channel, on_end: Callable[[PumpEnd], None]) -> None:
        self._plain = plain
        self._channel = channel
        self._tls = channel.tls
        self._wire = channel.socket
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._to_wire: memoryview | None = None
        """Ciphertext that the kernel did not take yet; while there is some, the member is not read."""
        self._to_plain: memoryview | None = None
        """Plain bytes that the kernel did not take yet; while there are some, the wire is not read."""
        self._plain_ended = False
        """The member has sent its last byte, and TLS has been told."""
        self._wire_ended = False
        """The peer has sent its last byte."""
        self._wire_shut = False
        self._plain_shut = False
        """Our FIN is out on that side: nothing of that direction is left."""
        self.ended: PumpEnd | None = None

    def start(self) -> None:
        """From here on the loop drives it. What the channel has read already goes first."""
        self._loop.add_reader(self._plain, self._on_plain_readable)
        self._loop.add_reader(self._wire, self._on_wire_readable)
        self._guard(self._decrypt)

    def cut(self) -> None:
        """Resets both sides now."""
        self._end(PumpEnd.CUT)

    def look(self) -> None:
        """Ends the stream if one side was reset while it is not read (the kernel tells only who reads)."""
        if self.ended is not None:
            return
        plain_unread = self._to_wire is not None or self._plain_ended
        wire_unread = self._to_plain is not None or self._wire_ended
        # A side that we have shut as well may be closed in order: what is left is the other side's.
        if plain_unread and not self._plain_shut and is_dead(self._plain):
            self._end(PumpEnd.MEMBER_RESET)
        elif wire_unread and not self._wire_shut and is_dead(self._wire):
            self._end(PumpEnd.PEER_RESET)

    # ---- member → wire --------------------------------------------------------------------------------

    def _on_plain_readable(self) -> None:
        self._guard(self._read_plain)

    def _read_plain(self) -> None:
        if self._to_wire is not None or self._plain_ended:
            return
        try:
            count = self._plain.recv_into(_plain, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._end(PumpEnd.MEMBER_RESET)
            return
        if count:
            self._tls.write(_plain[:count])
            self._again_if_dead(self._plain, self._on_plain_readable)
        else:
            self._loop.remove_reader(self._plain)
            self._plain_ended = True
            # The second half of a shutdown would wait for the peer's end: that one is for `_decrypt` to see.
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.unwrap()
        self._send_cipher()

    def _send_cipher(self) -> None:
        """Gives the kernel what TLS has made; waits for room when it does not take all."""
        if self._to_wire is not None:  # what came in between (the answer to a key update) goes behind it
            return
        data = self._channel.outgoing.read()
        sent = self._send(self._wire, data)
        if sent < len(data):
            self._to_wire = memoryview(data)[sent:]
            if not self._plain_ended:
                self._loop.remove_reader(self._plain)
            self._loop.add_writer(self._wire, self._on_wire_writable)
        else:
            self._after_wire_write()

    def _on_wire_writable(self) -> None:
        self._guard(self._resume_wire)

    def _resume_wire(self) -> None:
        assert self._to_wire is not None
        sent = self._send(self._wire, self._to_wire)
        if sent < len(self._to_wire):
            self._to_wire = self._to_wire[sent:]
            return
        self._to_wire = None
        self._loop.remove_writer(self._wire)
        if not self._plain_ended:
            self._loop.add_reader(self._plain, self._on_plain_readable)
        self._send_cipher()

    def _after_wire_write(self) -> None:
        if self._plain_ended and not self._wire_shut and not self._channel.outgoing.pending:
            self._wire_shut = True
            self._shut(self._wire)
            self._end_if_finished()

    # ---- wire → member --------------------------------------------------------------------------------

    def _on_wire_readable(self) -> None:
        self._guard(self._read_wire)

    def _read_wire(self) -> None:
        if self._to_plain is not None or self._wire_ended:
            return
        try:
            count = self._wire.recv_into(_cipher)
        except BlockingIOError:
            return
        if count == 0:  # without close_notify: cut off, by whomever
            self._end(PumpEnd.PEER_RESET)
            return
        self._channel.incoming.write(_cipher[:count])
        self._again_if_dead(self._wire, self._on_wire_readable)
        self._decrypt()

    def _decrypt(self) -> None:
        filled = 0
        try:
            while filled < len(_plain):
                # With a buffer it gives a count; typeshed has that as bytes.
                count = cast(int, self._tls.read(len(_plain) - filled, _plain[filled:]))
                if count == 0:
                    self._wire_ended = True
                    break
                filled += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._wire_ended = True
        if self._wire_ended:
            self._loop.remove_reader(self._wire)
        sent = self._send(self._plain, _plain[:filled]) if filled else 0
        if sent < filled:
            self._to_plain = memoryview(bytes(_plain[sent:filled]))
            self._loop.remove_reader(self._wire)
            self._loop.add_writer(self._plain, self._on_plain_writable)
        else:
            self._after_plain_write()
        if self.ended is None and self._channel.outgoing.pending:
            self._send_cipher()

    def _on_plain_writable(self) -> None:
        self._guard(self._resume_plain)

    def _resume_plain(self) -> None:
        assert self._to_plain is not None
        sent = self._send(self._plain, self._to_plain)
        if sent < len(self._to_plain):
            self._to_plain = self._to_plain[sent:]
            return
        self._to_plain = None
        self._loop.remove_writer(self._plain)
        if not self._wire_ended:
            self._loop.add_reader(self._wire, self._on_wire_readable)
        self._after_plain_write()

    def _after_plain_write(self) -> None:
        if self._wire_ended and not self._plain_shut:
            self._plain_shut = True
            self._shut(self._plain)
            self._end_if_finished()

    # ---- both -----------------------------------------------------------------------------------------

    def _again_if_dead(self, sock: socket.socket, read: Callable[[], None]) -> None:
        """After a reset what came before it can still be read, but libuv reports a socket with an error only once."""
        if is_dead(sock):
            self._loop.call_soon(read)

    def _send(self, sock: socket.socket, data: bytes | memoryview) -> int:
        """How much the kernel took. Raises OSError when the connection is gone."""
        if not data:
            return 0
        try:
            return sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _Broken(PumpEnd.MEMBER_RESET if sock is self._plain else PumpEnd.PEER_RESET) from error

    def _shut(self, sock: socket.socket) -> None:
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise _Broken(PumpEnd.MEMBER_RESET if sock is self._plain else PumpEnd.PEER_RESET) from error

    def _guard(self, step: Callable[[], None]) -> None:
        """Runs a step; what breaks in it breaks this stream and no other."""
        if self.ended is not None:
            return
        try:
            step()
        except _Broken as broken:
            self._end(broken.end)
        except (ssl.SSLError, OSError):
            self._end(PumpEnd.PEER_RESET)

    def _end_if_finished(self) -> None:
        if self._wire_shut and self._plain_shut:
            self._end(PumpEnd.FINISHED)

    def _end(self, end: PumpEnd) -> None:
        if self.ended is not None:
            return
        self.ended = end
        for sock in (self._plain, self._wire):
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            if end is PumpEnd.FINISHED:
                sock.close()
            else:
                reset(sock)
        self._on_end(end)


class _Broken(Exception):
    """A connection of this pump is gone."""

    def __init__(self, end: PumpEnd) -> None:
        super().__init__(end)
        self.end = end
