"""How a machine's agent speaks with its head through the mesh port: HTTPS, the authority pinned.

Rules of this file:
1. Before the fingerprint has been compared one question is asked, and nothing that it answers is believed but for that.
2. The head is named by its authority and API_NAME, whatever host the user wrote: certificates do not know addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509

from agents.mesh_heard import AuthorityShown
from mesh.errors import AuthenticationError, RemoteProtocolError, SpecError, TransportError
from mesh.http_transport import HttpTransport, checked_url
from mesh.net.authority import fingerprint
from mesh.net.clock import check_against_head, wall_clock
from mesh.net.tls import API_NAME, authority_context, stranger_context

HEAD_ADDRESSES_MAX = 4
RESOLVE_LIMIT_S = 10.0
JOIN_LIMIT_S = 30.0
"""For the head to take somebody in, and to try to dial back."""
STRANGER_BYTES_MAX = 1024 * 1024
"""Of the answer of who may be anybody. A head's is a few certificates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadUrl:
    """`https://HOST:PORT`."""

    url: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HeadUrl:
        """Raises SpecError."""
        url = checked_url(text if "//" in text else f"https://{text}")
        parts = urlsplit(url)
        if parts.scheme != "https":
            raise SpecError(
                f"{text[:200]!r} is a plain API; machines join through the mesh port of a head.",
                hint="Write https://HOST:PORT, with the port of `mesh up --listen`.",
                field="HEAD",
            )
        if parts.port is None or not parts.hostname:
            raise SpecError(
                f"{text[:200]!r} has no port.",
                hint="Write https://HOST:PORT, with the port of `mesh up --listen`.",
                field="HEAD",
            )
        return cls(url=f"https://{parts.netloc}", host=parts.hostname, port=parts.port)

    async def resolve(self) -> tuple[tuple[str, int], ...]:
        """Where it is now. Raises TransportError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_LIMIT_S):
                found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:  # a time-out is one
            raise cannot_reach(self, error) from error
        addresses = dict.fromkeys((str(entry[4][0]), self.port) for entry in found)
        return tuple(addresses)[:HEAD_ADDRESSES_MAX]


async def own_addresses(head: HeadUrl, *, listen: str) -> list[str]:
    """As which this host reaches its head, or what it listens on when that is one address. Raises TransportError."""
    if listen not in ("0.0.0.0", "::"):
        return [listen]
    found = []
    for address, port in await head.resolve():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # asks the kernel for the route; sends nothing
            found.append(str(probe.getsockname()[0]))
    return found[:2]


async def ask_trust(head: HeadUrl, wanted: str) -> bytes:
    """The authority (PEM) whose certificate has this fingerprint, as the head shows it.

    Raises:
        TransportError: no connection. RemoteProtocolError: this is no mesh port.
        AuthenticationError: another authority answers there; (ClockSkew) the clocks differ.
    """
    async with _transport(head, "", context=stranger_context()) as api:
        words = await api.call("GET", "/v1/authority", repeat_s=0.0, bytes_max=STRANGER_BYTES_MAX)
    try:
        shown = AuthorityShown.read(words)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"What answers at {head.url} is no mesh port: {error.message}") from error
    found = authority_of(shown.bundle_pem, wanted)
    if found is None:
        raise AuthenticationError(
            f"What answers at {head.url} is not the head that made this token: its authority is another one.",
            hint="Is the address right? If it is, somebody may be in between. A new token: `mesh token create`.",
        )
    check_against_head(ours=wall_clock(), theirs=shown.clock)
    return found


def authority_of(bundle_pem: bytes, wanted: str) -> bytes | None:
    """The certificate of a bundle that has this fingerprint. Raises AuthenticationError for what is no bundle."""
    for pem in _certificates(bundle_pem):
        if fingerprint(pem) == wanted:
            return pem
    return None


def _certificates(bundle_pem: bytes) -> list[bytes]:
    from cryptography.hazmat.primitives import serialization

    try:
        found = x509.load_pem_x509_certificates(bundle_pem)
    except ValueError as error:
        raise AuthenticationError(f"The head shows no certificates: {error}.") from error
    return [certificate.public_bytes(serialization.Encoding.PEM) for certificate in found]


@contextlib.asynccontextmanager
async def head_api(head: HeadUrl, *, bundle_pem: bytes, secret: str = "") -> AsyncIterator[HttpTransport]:
    """The head's API, by the authorities that this machine trusts. Raises AuthenticationError."""
    async with _transport(head, secret, context=authority_context(bundle_pem)) as transport:
        yield transport


@contextlib.asynccontextmanager
async def _transport(head: HeadUrl, secret: str, *, context: Any) -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(
        url=head.url,
        token=secret,
        fate=lambda: None,
        tls=context,
        tls_name=API_NAME,
        unreachable=lambda error: cannot_reach(head, error),
    )
    await transport.open()
    try:
        yield transport
    finally:
        await transport.close()


def cannot_reach(head: HeadUrl, error: Exception) -> TransportError:
    """What an owner of this machine can do about a head that this error keeps it from."""
    port = head.port
    check = "Is this an address of the head's host, and the port the one of its `mesh up --listen`?"
    match error:
        case socket.gaierror():
            why, hint = error.strerror, "Is the name right, and does this machine have a resolver?"
        case ssl.SSLCertVerificationError():
            why = f"what answers there has another certificate ({error.strerror})"
            hint = (
                f"{check} If its authority was rotated since this machine was there last, or since the token was "
                "made: join with a new token (`mesh token create`)."
            )
        case ssl.SSLError():
            why, hint = f"what answers there is no mesh port ({error.strerror})", check
        case ConnectionRefusedError():
            why, hint = "nobody listens there (connection refused)", check
        case TimeoutError():
            why = "no answer"
            hint = (
                f"Is the address right? If it is, TCP port {port} is closed between here and there: open it for this "
                "machine in the firewall of the head's host, in its cloud's rules, and on this network's way out."
            )
        case _:
            why, hint = getattr(error, "strerror", None) or str(error) or type(error).__name__, check
    return TransportError(
        f"The head cannot be reached at {head.host} port {port}: {why}.", hint=hint, url=head.url
    )


def has_moved(head: HeadUrl) -> str:
    """What an owner of this machine can do about a head that does not answer any more."""
    return (
        f"If the head has another address now, end this agent, and: mesh join https://NEW-ADDRESS:{head.port}"
    )
