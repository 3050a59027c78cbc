"""A relay: joins two streams that both were dialled to it, and sees only ciphertext. Shell; relay_book.py decides.

Rules of this file:
1. Who wants something of it shows a certificate of the deployment, as at a gateway. Then TLS ends, in order, and what
   is inside is the TLS of the two machines: their certificates, their preface, their gate.
2. Strangers are bounded by the door, streams by the book's limits, every wait by a limit.
3. A line is written to only while its machine takes it: one that does not is cut, and its machine opens another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from dataclasses import dataclass, field
from typing import Any

from mesh.errors import AuthenticationError, RemoteProtocolError
from mesh.ids import MachineName
from mesh.net.authority import read_certificate
from mesh.net.channel import Channel
from mesh.net.clock import wall_clock
from mesh.net.door import Door
from mesh.net.doorkeeper import Doorkeeper
from mesh.net.gate import Gate
from mesh.net.greeting import greet, read_frame
from mesh.net.guarded_tasks import GuardedTasks
from mesh.net.identity import Identity, MachineIdentity, PeerCertificate, RelayIdentity
from mesh.net.preface import Answer, VersionError, encode_answer
from mesh.net.refusals import Refusal
from mesh.net.relay_book import Pair, RelayBook, RelayLimits
from mesh.net.relay_words import TICKET_DIGITS, Accept, Dial, Incoming, Listen, decode_request, encode_words
from mesh.net.sockets import hang_up, prepare, reset
from mesh.net.splice import Joint, Pipes
from mesh.net.tls import Credentials, server_context

REQUEST_LIMIT_S = 5.0
ACCEPT_LIMIT_S = 10.0
"""How long the machine that was dialled may take to come for a ticket."""
LEAVE_LIMIT_S = 5.0
LINE_WRITE_LIMIT_S = 5.0
STOP_LIMIT_S = 2.0
LOOK_EVERY_S = 2.0
_JOINED = encode_answer(Answer(refusal=None, message="", clock=0.0))
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Line:
    """The line of a machine."""

    channel: Channel
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Who writes: two at a time would mix their records."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A leg that has dialled."""

    accepted: asyncio.Future[Channel] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Relay:
    """Make it on the loop, `set_identity`, `start`, `stop`. Behind a gateway's port it has no identity of its own."""

    def __init__(
        self,
        *,
        identity: RelayIdentity | MachineIdentity,
        limits: RelayLimits | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.identity = identity
        """A machine's where the relay is behind its gateway's port."""
        self.gate = gate or Gate(deployment=identity.deployment, machine=identity.machine)
        """For who may be believed, and for the counts. A gateway's own where the relay is behind its port."""
        self.book = RelayBook(limits=limits or RelayLimits())
        limits = self.book.limits
        self._doorkeeper = Doorkeeper(
            Door(places=limits.door_places, places_per_source=limits.door_places_per_source),
            count=self.gate.count,
            let_in=self._on_connection,
        )
        self._server: ssl.SSLContext | None = None
        self._lines: dict[MachineName, _Line] = {}
        self._waiting: dict[str, _Waiting] = {}
        """By ticket."""
        self._joints: dict[Joint, Pair] = {}
        self._pipes = Pipes()
        self._tasks = GuardedTasks()
        self._timer: asyncio.TimerHandle | None = None

    # ---- life -----------------------------------------------------------------------------------------

    def start(self, *, listen_on: tuple[tuple[str, int], ...]) -> None:
        """Raises OSError; then nothing listens."""
        self._doorkeeper.open(listen_on)
        self._look()

    async def stop(self) -> None:
        """Cuts every stream. May be called again."""
        self._doorkeeper.close()
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.stop(limit_s=STOP_LIMIT_S)
        for joint in list(self._joints):
            joint.cut()
        self._pipes.close()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return self._doorkeeper.addresses

    def set_identity(self, credentials: Credentials) -> None:
        """The first, or a newer one. Raises AuthenticationError."""
        shown = read_certificate(credentials.certificate_pem)
        if shown.identity != self.identity:
            raise AuthenticationError(
                f"{self.identity.uri} cannot use a certificate of {shown.identity.uri}."
            )
        self._server = server_context(credentials)

    def revoke(self, names: frozenset[MachineName]) -> None:
        """Their streams and their lines are cut."""
        self.gate.revoke(names)
        for joint, pair in list(self._joints.items()):
            if {pair.dialler, pair.target} & names:
                joint.cut()
        for machine, line in list(self._lines.items()):
            if machine in names:
                hang_up(line.channel.socket)

    def counters(self) -> dict[str, Any]:
        """What happened here so far, and how much is open. `book.take_usage()` has the bytes."""
        return {
            "lines": len(self._lines),
            "streams": len(self._joints),
            "waiting": len(self._waiting),
            "in_the_door": self._doorkeeper.inside,
            "refused": {str(reason): count for reason, count in sorted(self.gate.counts.items())},
        }

    # ---- connections ----------------------------------------------------------------------------------

    def _on_connection(self, sock: socket.socket, source: str) -> None:
        if self._server is None:
            self.gate.count(Refusal.HANDSHAKE_FAILED)
            self._doorkeeper.leave(source, has_failed=True)
            reset(sock)
            return
        self._tasks.spawn(self._serve(sock, self._server, source), name=f"relay for {source}")

    async def _serve(self, sock: socket.socket, server: ssl.SSLContext, source: str) -> None:
        try:
            prepare(sock)
            channel = Channel(sock, server, server_side=True)
            has_failed = True
            try:
                asked = await self._ask(channel)
                has_failed = isinstance(asked, Refusal)
            finally:
                self._doorkeeper.leave(source, has_failed=has_failed)
            if isinstance(asked, Refusal):
                self.gate.count(asked)
                reset(sock)
                return
            peer, words = asked
            await self.perform(channel, peer, words)
        except BaseException:
            sock.close()
            raise

    async def _ask(self, channel: Channel) -> tuple[PeerCertificate, Listen | Dial | Accept] | Refusal:
        peer = await greet(channel)
        if isinstance(peer, Refusal):
            return peer
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                return peer, decode_request(await read_frame(channel))
        except TimeoutError:
            return Refusal.PREFACE_TIMEOUT
        except VersionError:
            return Refusal.WRONG_VERSION
        except (RemoteProtocolError, OSError):
            return Refusal.BAD_PREFACE

    async def perform(self, channel: Channel, peer: PeerCertificate, words: Listen | Dial | Accept) -> None:
        """What somebody wants, up to its end (of a line: when it breaks). Takes the channel over."""
        refused = self.gate.check_peer(peer, now=wall_clock(), peer_clock=None)
        if refused is not None:
            await self._refuse(channel, refused.reason, refused.message)
            return
        match words:
            case Listen():
                await self._keep_line(channel, peer)
            case Dial():
                await self._join(channel, peer, words.machine)
            case Accept():
                await self._hand_over(channel, peer.identity, words.ticket)

    async def _keep_line(self, channel: Channel, peer: PeerCertificate) -> None:
        refusal = self.book.open_line(peer.identity)
        if refusal is not None:
            await self._refuse(channel, refusal, f"{peer.identity.uri} cannot have a line here.")
            return
        machine = peer.identity.machine
        before = self._lines.get(machine)
        if before is not None:
            hang_up(before.channel.socket)
        line = self._lines[machine] = _Line(channel)
        try:
            if await self._answer(channel, None, ""):
                await channel.read_exactly(1)  # nothing is ever said: this is its end
        except OSError:
            return
        finally:
            channel.socket.close()
            if self._lines.get(machine) is line:
                del self._lines[machine]
                self.book.close_line(machine)

    async def _join(self, channel: Channel, peer: PeerCertificate, target: MachineName) -> None:
        ticket = secrets.token_hex(TICKET_DIGITS // 2)
        pair = self.book.dial(peer.identity, target, ticket)
        if isinstance(pair, Refusal):
            await self._refuse(channel, pair, f"{peer.identity.uri} cannot be joined with {target}.")
            return
        other: Channel | None = None
        waiting = self._waiting[ticket] = _Waiting()
        try:
            await self._call(target, ticket)
            async with asyncio.timeout(ACCEPT_LIMIT_S):
                other = await waiting.accepted
        except (TimeoutError, OSError):
            self.book.end(pair, ticket)
            await self._refuse(channel, Refusal.PEER_UNREACHABLE, f"{target} did not come.")
            return
        except BaseException:
            self.book.end(pair, ticket)
            raise
        finally:
            del self._waiting[ticket]
            if other is None and waiting.accepted.done() and not waiting.accepted.cancelled():
                reset(waiting.accepted.result().socket)  # it came in the same moment as the time-out
        await self._splice(channel, other, pair, ticket)

    async def _splice(self, channel: Channel, other: Channel, pair: Pair, ticket: str) -> None:
        try:
            async with asyncio.timeout(LEAVE_LIMIT_S):
                for leg in (channel, other):
                    await leg.write(_JOINED)
                    await leg.say_end()
                early = [await leg.wait_for_end() for leg in (channel, other)]
        except OSError:  # a time-out is one
            self.book.end(pair, ticket)
            reset(channel.socket)
            reset(other.socket)
            return
        except BaseException:
            self.book.end(pair, ticket)
            other.socket.close()
            raise

        def on_end() -> None:
            del self._joints[joint]
            self.book.end(pair, ticket)

        joint = Joint(
            (channel.socket, early[0]),
            (other.socket, early[1]),
            pipes=self._pipes,
            on_bytes=lambda amount: self.book.count(pair, amount),
            on_end=on_end,
        )
        self._joints[joint] = pair
        joint.start()

    async def _call(self, target: MachineName, ticket: str) -> None:
        """Tells the machine on its line. Raises OSError."""
        line = self._lines.get(target)
        if line is None:
            raise ConnectionResetError("the line is gone")
        try:
            async with asyncio.timeout(LINE_WRITE_LIMIT_S), line.turn:
                await line.channel.write(encode_words(Incoming(ticket)))
        except OSError:
            hang_up(line.channel.socket)
            raise

    async def _hand_over(self, channel: Channel, identity: Identity, ticket: str) -> None:
        refusal = self.book.accept(identity, ticket)
        waiting = self._waiting.get(ticket)
        if refusal is not None or waiting is None or waiting.accepted.done():
            await self._refuse(channel, Refusal.UNKNOWN_TICKET, "Nobody waits with this ticket.")
            return
        waiting.accepted.set_result(channel)

    async def _refuse(self, channel: Channel, reason: Refusal, message: str) -> None:
        self.gate.count(reason)
        await self._answer(channel, reason, message)
        channel.socket.close()

    async def _answer(self, channel: Channel, reason: Refusal | None, message: str) -> bool:
        with contextlib.suppress(OSError):  # a time-out is one; nobody is there to tell
            async with asyncio.timeout(LINE_WRITE_LIMIT_S):
                await channel.write(
                    encode_answer(Answer(refusal=reason, message=message, clock=wall_clock()))
                )
                return True
        return False

    def _look(self) -> None:
        for joint in list(self._joints):
            joint.look()
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)
