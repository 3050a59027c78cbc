"""The accepting side's first steps, the same for gateways and relays: TLS, who it is, one frame."""

from __future__ import annotations

import asyncio
import ssl

from mesh.errors import AuthenticationError
from mesh.net.channel import Channel
from mesh.net.identity import PeerCertificate
from mesh.net.preface import HEADER_BYTES, frame_length
from mesh.net.refusals import Refusal
from mesh.net.tls import peer_certificate, refusal_of

HANDSHAKE_LIMIT_S = 5.0


async def greet(channel: Channel) -> PeerCertificate | Refusal:
    """Who has dialled; or why that is not known. Nobody is told more than TLS does."""
    try:
        async with asyncio.timeout(HANDSHAKE_LIMIT_S):
            await channel.handshake()
        return peer_certificate(channel.tls)
    except TimeoutError:
        return Refusal.HANDSHAKE_TIMEOUT
    except AuthenticationError:
        return Refusal.NOT_OUR_NAME
    except ssl.SSLError as error:
        return refusal_of(error)
    except OSError:
        return Refusal.HANDSHAKE_FAILED


async def read_frame(channel: Channel) -> bytes:
    """The body of one small frame. Raises RemoteProtocolError, OSError (ssl.SSLError is one)."""
    return await channel.read_exactly(frame_length(await channel.read_exactly(HEADER_BYTES)))
