"""Reaches a machine's gateway: a connection, TLS, the proof that it is that machine, the preface and its answer.

Rules of this file:
1. Everything that can go wrong is one `DialRefused` with a reason; the socket is closed then.
2. At most DIALS_PER_MACHINE at a time to one machine: below what its door grants one source, so that a burst of streams
   of ours is never taken for a flood.
3. Every wait has its limit. That for a turn is longer than the others: a program whose connection is captured believes
   to be connected already, and many may be captured at once.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from mesh.errors import AuthenticationError, RemoteProtocolError
from mesh.ids import MachineName
from mesh.net.channel import Channel, ChannelClosed
from mesh.net.clock import is_skewed, skew_text, wall_clock
from mesh.net.gate import WAIT_MAX_S, Refused
from mesh.net.greeting import read_frame
from mesh.net.identity import MachineIdentity, PeerCertificate
from mesh.net.preface import Answer, Preface, decode_answer, encode_preface
from mesh.net.refusals import Refusal
from mesh.net.sockets import bind_source, pace_if_far, prepare_to_connect
from mesh.net.tls import peer_certificate

CONNECT_LIMIT_S = 5.0
"""For one address of a machine."""
HANDSHAKE_LIMIT_S = 5.0
ANSWER_LIMIT_S = WAIT_MAX_S + 10.0
"""The gate's wait and the connection to the member are on the other machine's side of it."""
DIAL_LIMIT_S = 30.0
"""For all of it, once it is this dial's turn."""
TURN_LIMIT_S = 120.0
DIALS_PER_MACHINE = 16


class DialRefused(Exception):
    """No stream came of it."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A connection to a machine, direct or through a relay, on which nothing has been said yet."""

    socket: socket.socket
    early: bytes = b""
    """What the other side has said already, read with the relay's last words."""
    relay: MachineName | None = None
    """Through which it goes; None when it is direct."""


class Route(Protocol):
    """How a machine is reached, with whose certificate. Raises DialRefused."""

    async def __call__(self, machine: MachineName, context: ssl.SSLContext) -> Leg: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """A stream that the other side has admitted; nothing of the member's has been sent yet."""

    channel: Channel
    peer: PeerCertificate
    relay: MachineName | None
    """As of its leg."""


class Dialler:
    """Dials for one gateway.

    Args:
        route: the way to a machine.
        check: whether a peer's certificate is to be believed (the gate's `check_peer`).
    """

    def __init__(
        self, *, deployment: str, route: Route, check: Callable[[PeerCertificate], Refused | None]
    ) -> None:
        self._deployment = deployment
        self._route = route
        self._check = check
        self._turns: WeakValueDictionary[MachineName, asyncio.Semaphore] = WeakValueDictionary()
        """Weak: only while somebody dials, so that machines that are no more leave nothing behind."""

    async def dial(self, *, context: ssl.SSLContext, preface: Preface) -> Dialled:
        """Raises DialRefused."""
        turns = self._turns.get(preface.machine)
        if turns is None:
            turns = self._turns[preface.machine] = asyncio.Semaphore(DIALS_PER_MACHINE)
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                await turns.acquire()
        except TimeoutError:
            raise DialRefused(
                Refusal.PEER_UNREACHABLE, f"Too many others wait for {preface.machine}."
            ) from None
        try:
            async with asyncio.timeout(DIAL_LIMIT_S):
                leg = await self._route(preface.machine, context)
                try:
                    return await self._introduce(leg, context, preface)
                except BaseException:
                    leg.socket.close()
                    raise
        except TimeoutError:
            raise DialRefused(
                Refusal.PEER_UNREACHABLE, f"{preface.machine} gave no answer in {DIAL_LIMIT_S:g} s."
            ) from None
        finally:
            turns.release()

    async def _introduce(self, leg: Leg, context: ssl.SSLContext, preface: Preface) -> Dialled:
        name = preface.machine
        channel = Channel(leg.socket, context, server_side=False, early=leg.early)
        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                await channel.handshake()
            peer = peer_certificate(channel.tls)
            await self._check_peer(channel, peer, name)
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await channel.write(encode_preface(preface))
                answer = decode_answer(await read_frame(channel))
        except (ssl.SSLError, AuthenticationError) as error:
            raise DialRefused(Refusal.PEER_NOT_TRUSTED, f"{name}: {error}") from error
        except (ChannelClosed, RemoteProtocolError, OSError) as error:
            raise DialRefused(Refusal.PEER_UNREACHABLE, f"{name}: {error or type(error).__name__}") from error
        check_answer(name, answer)
        return Dialled(channel=channel, peer=peer, relay=leg.relay)

    async def _check_peer(self, channel: Channel, peer: PeerCertificate, name: MachineName) -> None:
        if peer.identity != MachineIdentity(deployment=self._deployment, machine=name):
            raise DialRefused(Refusal.PEER_NOT_TRUSTED, f"{name} was dialled, {peer.identity.uri} answered.")
        refused = self._check(peer)
        if refused is None:
            return
        if refused.reason in (Refusal.EXPIRED, Refusal.NOT_YET_VALID):
            async with asyncio.timeout(ANSWER_LIMIT_S):
                theirs = await _ask_time(channel, name)
            ours = wall_clock()
            if is_skewed(ours=ours, theirs=theirs):
                clock = skew_text(ours=ours, theirs=theirs, them=name)
                raise DialRefused(Refusal.CLOCK_SKEW, f"{refused.message} {clock}")
        raise DialRefused(refused.reason, refused.message)


async def _ask_time(channel: Channel, name: MachineName) -> float:
    """What time it is at a gateway: asks for a service that none offers. Raises as `Channel` and the preface do."""
    nothing = Preface(machine=name, member=None, port=1, clock=wall_clock())
    await channel.write(encode_preface(nothing))
    return decode_answer(await read_frame(channel)).clock


def check_answer(name: MachineName, answer: Answer) -> None:
    """Raises DialRefused when that machine refused."""
    if answer.refusal is not None:
        raise DialRefused(answer.refusal, f"{name} refused: {answer.message}")


async def connect_to_any(name: MachineName, addresses: Sequence[tuple[str, int]]) -> socket.socket:
    """The first of these addresses that answers. Raises DialRefused."""
    said = "no address of it is known"
    for host, port in addresses:
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                return await connect(host, port)
        except TimeoutError:
            said = f"{host} port {port}: no answer in {CONNECT_LIMIT_S:g} s"
        except OSError as error:
            said = f"{host} port {port}: {error.strerror or error}"
    raise DialRefused(Refusal.PEER_UNREACHABLE, f"{name} cannot be reached: {said}.")


async def connect(host: str, port: int, *, source: str | None = None) -> socket.socket:
    """A connected, prepared socket. Addresses only, no names: nothing here asks a resolver. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare_to_connect(sock)
        if source is not None:
            bind_source(sock, source)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        pace_if_far(sock)
    except BaseException:
        sock.close()
        raise
    return sock
