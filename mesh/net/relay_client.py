"""A machine's side of a relay: its line, the legs that it accepts, and those that it dials.

Rules of this file:
1. Only outbound connections. The line is opened again when it breaks, with a growing pause.
2. A leg is a socket with the first bytes of the inner stream; whoever gets it speaks TLS on it as on any other socket.
3. The relay has to show that it is the machine that was meant, by a certificate that is valid now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from mesh.errors import AuthenticationError, MeshError, RemoteProtocolError
from mesh.ids import MachineName
from mesh.net.channel import Channel, ChannelClosed
from mesh.net.dialling import (
    HANDSHAKE_LIMIT_S,
    DialRefused,
    Leg,
    check_answer,
    connect_to_any,
)
from mesh.net.gate import Refused
from mesh.net.greeting import read_frame
from mesh.net.guarded_tasks import GuardedTasks, as_errors
from mesh.net.identity import Identity, MachineIdentity, PeerCertificate, RelayIdentity
from mesh.net.preface import decode_answer
from mesh.net.refusals import Refusal
from mesh.net.relay_words import Accept, Dial, Listen, decode_incoming, encode_words
from mesh.net.tls import peer_certificate

ANSWER_LIMIT_S = 15.0
"""The other machine has to come to the relay meanwhile."""
FIRST_PAUSE_S = 0.5
PAUSE_MAX_S = 15.0
LEGS_MAX = 256
"""That are being accepted at a time; what is called for beyond is not come for, and its dialler told so."""
STOP_LIMIT_S = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlace:
    """A relay of the deployment."""

    machine: MachineName
    """Its name."""
    addresses: tuple[tuple[str, int], ...]
    is_gateway: bool = False
    """It is behind a gateway's port, whose certificate it shows: the head's own."""


class RelayDown(DialRefused):
    """Nothing was asked of the relay: it cannot be reached, or is not to be believed."""


class RelayClient:
    """One machine's use of one relay.

    Args:
        check: whether the relay's certificate is to be believed (the gate's `check_peer`).
    """

    def __init__(
        self, *, deployment: str, place: RelayPlace, check: Callable[[PeerCertificate], Refused | None]
    ) -> None:
        self.place = place
        kind = MachineIdentity if place.is_gateway else RelayIdentity
        self._relay: Identity = kind(deployment=deployment, machine=place.machine)
        self._check = check

    async def dial(self, machine: MachineName, context: ssl.SSLContext) -> Leg:
        """A leg that ends at this machine. Raises DialRefused."""
        return await self._leg(Dial(machine), context)

    async def accept(self, ticket: str, context: ssl.SSLContext) -> Leg:
        """A leg that begins at whoever has dialled. Raises DialRefused."""
        return await self._leg(Accept(ticket), context)

    async def listen(
        self, context: ssl.SSLContext, on_ticket: Callable[[str], None], *, on_open: Callable[[], None]
    ) -> None:
        """Keeps a line until it breaks. Raises DialRefused, ConnectionError."""
        channel = await self._ask(Listen(), context)
        on_open()
        try:
            while True:
                on_ticket(decode_incoming(await read_frame(channel)).ticket)
        except (RemoteProtocolError, OSError) as error:
            raise ConnectionResetError(f"the line to {self.place.machine} broke: {error}") from error
        finally:
            channel.socket.close()

    async def _leg(self, words: Dial | Accept, context: ssl.SSLContext) -> Leg:
        channel = await self._ask(words, context)
        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                early = await channel.leave_tls()
                return Leg(socket=channel.socket, early=early, relay=self.place.machine)
        except OSError as error:  # a time-out is one
            channel.socket.close()
            raise DialRefused(Refusal.PEER_UNREACHABLE, f"{self.place.machine}: {error}") from error
        except BaseException:
            channel.socket.close()
            raise

    async def _ask(self, words: Listen | Dial | Accept, context: ssl.SSLContext) -> Channel:
        name = self.place.machine
        channel = await self._reach(context)
        sock = channel.socket
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await channel.write(encode_words(words))
                check_answer(name, decode_answer(await read_frame(channel)))
        except ssl.SSLError as error:  # it does not take our certificate: TLS 1.3 says so after the handshake
            sock.close()
            raise DialRefused(Refusal.PEER_NOT_TRUSTED, f"{name}: {error}") from error
        except (ChannelClosed, RemoteProtocolError, OSError) as error:
            sock.close()
            raise DialRefused(Refusal.PEER_UNREACHABLE, f"{name}: {error or type(error).__name__}") from error
        except BaseException:
            sock.close()
            raise
        return channel

    async def _reach(self, context: ssl.SSLContext) -> Channel:
        """In TLS with the relay that was meant. Raises RelayDown."""
        name = self.place.machine
        try:
            sock = await connect_to_any(name, self.place.addresses)
        except DialRefused as refused:
            raise RelayDown(refused.reason, refused.message) from refused
        try:
            channel = Channel(sock, context, server_side=False)
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                await channel.handshake()
            self._check_relay(peer_certificate(channel.tls))
        except (ssl.SSLError, AuthenticationError) as error:
            sock.close()
            raise RelayDown(Refusal.PEER_NOT_TRUSTED, f"{name}: {error}") from error
        except (ChannelClosed, OSError) as error:
            sock.close()
            raise RelayDown(Refusal.PEER_UNREACHABLE, f"{name}: {error or type(error).__name__}") from error
        except BaseException:
            sock.close()
            raise
        return channel

    def _check_relay(self, peer: PeerCertificate) -> None:
        if peer.identity != self._relay:
            raise RelayDown(
                Refusal.PEER_NOT_TRUSTED, f"{self._relay.machine} was dialled, {peer.identity.uri} answered."
            )
        refused = self._check(peer)
        if refused is not None:
            raise RelayDown(refused.reason, refused.message)


class RelayLine:
    """Keeps a machine reachable through a relay. `start`, `stop`.

    Args:
        context: the machine's own, the newest.
        on_leg: gets every leg that somebody has dialled, and takes it over.
    """

    def __init__(
        self,
        *,
        client: RelayClient,
        context: Callable[[], ssl.SSLContext],
        on_leg: Callable[[Leg], None],
    ) -> None:
        self._client = client
        self._context = context
        self._on_leg = on_leg
        self._tasks = GuardedTasks()
        self.is_open = False
        """Whether this machine can be reached through the relay now."""
        self.opened_at = 0.0
        """When it was opened last, by the loop's clock."""
        self.breaks = 0
        """How often the line broke, or could not be opened."""
        self.broke_at = -math.inf
        """When it broke last while it was open, by the loop's clock."""

    def start(self) -> None:
        self._tasks.spawn(self._keep(), name=f"line to the relay {self._client.place.machine}")

    async def stop(self) -> None:
        """May be called again."""
        await self._tasks.stop(limit_s=STOP_LIMIT_S)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            began = loop.time()
            try:
                with as_errors(f"line to the relay {self._client.place.machine}"):
                    await self._listen()
            except (MeshError, OSError) as error:
                self.breaks += 1
                _log.info("no line to the relay %s: %s", self._client.place.machine, error)
            finally:
                if self.is_open:
                    self.broke_at = loop.time()
                self.is_open = False
            if loop.time() - began > PAUSE_MAX_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    async def _listen(self) -> None:
        """Until the line breaks. Raises OSError."""
        try:
            await self._client.listen(self._context(), self._on_ticket, on_open=self._on_open)
        except DialRefused as error:
            raise ConnectionRefusedError(str(error)) from error

    def _on_open(self) -> None:
        self.is_open = True
        self.opened_at = asyncio.get_running_loop().time()

    def _on_ticket(self, ticket: str) -> None:
        if len(self._tasks) <= LEGS_MAX:
            self._tasks.spawn(self._accept(ticket), name=f"leg of the relay {self._client.place.machine}")

    async def _accept(self, ticket: str) -> None:
        with contextlib.suppress(DialRefused):  # who has dialled is told by the relay
            self._on_leg(await self._client.accept(ticket, self._context()))
