"""Which name a TLS client asks for, read from its first message. Pure.

Whether a client has to show a certificate is decided by the context that it is served with, and OpenSSL wants that
before it has read anything. So the gateway reads the first record itself and gives it to OpenSSL afterwards.

Rules of this file:
1. Nothing is decided here but the name; what is no ClientHello has none, and OpenSSL says what is wrong with it.
2. RFC 8446, section 4.1.2; RFC 6066, section 3. A ClientHello in several records has no name: ours are in one.
"""

from __future__ import annotations

from dataclasses import dataclass

RECORD_HEADER_BYTES = 5
RECORD_BYTES_MAX = 16 * 1024
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


@dataclass(slots=True)
class _Reader:
    data: bytes
    at: int = 0

    def take(self, length: int) -> bytes:
        part = self.data[self.at : self.at + length]
        if len(part) < length:
            raise ValueError("cut short")
        self.at += length
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> _Reader:
        """What a length of so many bytes stands before."""
        return _Reader(self.take(self.number(size)))

    @property
    def is_empty(self) -> bool:
        return self.at == len(self.data)


def missing(data: bytes) -> int:
    """How many bytes are needed at least, beyond these, to have the first record whole; 0 when there is nothing to
    wait for.
    """
    if data and data[0] != _HANDSHAKE:
        return 0
    if len(data) < RECORD_HEADER_BYTES:
        return RECORD_HEADER_BYTES - len(data)
    length = int.from_bytes(data[3:5], "big")
    return 0 if length > RECORD_BYTES_MAX else max(0, RECORD_HEADER_BYTES + length - len(data))


def server_name(data: bytes) -> str | None:
    """The name that the client asks for, in lower case; None when it asks for none or this is no ClientHello."""
    try:
        record = _Reader(data)
        if record.number(1) != _HANDSHAKE:
            return None
        record.take(2)
        message = record.vector(2)
        if message.number(1) != _CLIENT_HELLO:
            return None
        hello = message.vector(3)
        hello.take(2 + 32)  # version, random
        hello.vector(1)  # session
        hello.vector(2)  # ciphers
        hello.vector(1)  # compression
        extensions = hello.vector(2)
        while not extensions.is_empty:
            kind, extension = extensions.number(2), extensions.vector(2)
            if kind == _SERVER_NAME:
                names = extension.vector(2)
                if names.number(1) != _HOST_NAME:
                    return None
                return names.vector(2).data.decode("ascii").lower()
    except ValueError:  # UnicodeDecodeError is one
        return None
    return None
