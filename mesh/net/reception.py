"""Streams that other machines dial: who it is, what is meant, the gate's word, the member's port.

Rules of this file:
1. A connection is in the door until its preface is read; what goes wrong before is counted, and nobody is told.
2. From the preface on the peer is told why it is refused.
3. A byte reaches the member only after the gate's word: the connection to it is made then, and carries nothing before
   `Streams.join`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sequence

from mesh.errors import RemoteProtocolError
from mesh.ids import MachineName
from mesh.net.channel import Channel
from mesh.net.clock import wall_clock
from mesh.net.dialling import Leg, connect
from mesh.net.doorkeeper import Doorkeeper
from mesh.net.gate import WAIT_MAX_S, Admitted, Gate, NotYet, Refused
from mesh.net.greeting import greet, read_frame
from mesh.net.identity import Identity, MachineIdentity, MemberIdentity, PeerCertificate
from mesh.net.preface import (
    Answer,
    Preface,
    VersionError,
    decode_preface,
    encode_answer,
)
from mesh.net.refusals import Refusal
from mesh.net.relay import Relay
from mesh.net.relay_words import Accept, Dial, Listen, decode_request, is_request
from mesh.net.sockets import prepare, reset
from mesh.net.streams import Full, Streams

PREFACE_LIMIT_S = 5.0
TARGET_LIMIT_S = 5.0
ANSWER_LIMIT_S = 5.0


class Reception:
    """The accepting side of a gateway.

    Args:
        waiting_max: how many streams may wait for what is not here yet.
        source_of: where the connection to a target is to come from, for who asks; None when it is all the same.
    """

    def __init__(
        self,
        *,
        gate: Gate,
        streams: Streams,
        doorkeeper: Doorkeeper,
        waiting_max: int,
        source_of: Callable[[Identity, str], str | None],
    ) -> None:
        self.relay: Relay | None = None
        """Behind the same port: what the first frame says tells its words from a preface."""
        self._gate = gate
        self._streams = streams
        self._doorkeeper = doorkeeper
        self._waiting_max = waiting_max
        self._source_of = source_of
        self.waiting = 0

    async def serve(self, leg: Leg, context: ssl.SSLContext, source: str) -> None:
        """One connection, from its place in the door, which it leaves, to the running stream. Takes the socket over."""
        sock = leg.socket
        try:
            prepare(sock)
            channel = Channel(sock, context, server_side=True, early=leg.early)
            has_failed = True
            try:
                asked = await self._ask(channel)
                has_failed = isinstance(asked, Refusal)
            finally:
                self._doorkeeper.leave(source, has_failed=has_failed)
            if isinstance(asked, Refusal):
                self._gate.count(asked)
                reset(sock)
                return
            peer, wanted = asked
            if not isinstance(wanted, Preface):
                assert self.relay is not None
                await self.relay.perform(channel, peer, wanted)
                return
            refused = await self._admit(channel, peer, wanted, leg.relay)
            if refused is not None:
                self._gate.count(refused.reason)
                await self._answer(channel, refused)
                sock.close()
        except BaseException:
            sock.close()
            raise

    async def _ask(
        self, channel: Channel
    ) -> tuple[PeerCertificate, Preface | Listen | Dial | Accept] | Refusal:
        """Who it is and what is meant; or why that is not known."""
        peer = await greet(channel)
        if isinstance(peer, Refusal):
            return peer
        try:
            async with asyncio.timeout(PREFACE_LIMIT_S):
                frame = await read_frame(channel)
            if self.relay is not None and is_request(frame):
                return peer, decode_request(frame)
            return peer, decode_preface(frame)
        except TimeoutError:
            return Refusal.PREFACE_TIMEOUT
        except VersionError as error:
            await self._answer(channel, Refused(reason=Refusal.WRONG_VERSION, message=error.message))
            return Refusal.WRONG_VERSION
        except (RemoteProtocolError, OSError):  # ssl.SSLError is an OSError
            return Refusal.BAD_PREFACE

    async def _admit(
        self, channel: Channel, peer: PeerCertificate, preface: Preface, relay: MachineName | None
    ) -> Refused | None:
        """Joins the stream to its member; or says why not."""
        try:
            with self._streams.place():
                decision = await self._decide(peer, preface)
                if isinstance(decision, Refused):
                    return decision
                ways = [(host, self._source_of(peer.identity, host)) for host in decision.deliver_to]
                target = await _connect(ways, preface.port)
                if isinstance(target, Refused):
                    return target
                try:
                    is_told = await self._answer(channel, None)
                except BaseException:
                    target.close()
                    raise
        except Full:
            return Refused(reason=Refusal.STREAM_LIMIT, message=f"{self._gate.machine} has too many streams.")
        if is_told:
            owners = (peer.identity, self._meant(preface))
            self._streams.join(target, channel, owners, relay=relay)
        else:
            reset(target)
            channel.socket.close()
        return None

    def _meant(self, preface: Preface) -> Identity:
        """Whose right to the stream can end on this side."""
        deployment, machine, member = self._gate.deployment, self._gate.machine, preface.member
        if member is None:
            return MachineIdentity(deployment=deployment, machine=machine)
        return MemberIdentity(
            deployment=deployment, machine=machine, run=member.run, epoch=member.epoch, rank=member.rank
        )

    async def _decide(self, peer: PeerCertificate, preface: Preface) -> Admitted | Refused:
        """The gate's word, after a wait when the stream is early."""
        decision = self._gate.admit(peer, preface, now=wall_clock())
        if not isinstance(decision, NotYet):
            return decision
        if self.waiting >= self._waiting_max:
            return Refused(reason=Refusal.WAITING_LIMIT, message=decision.otherwise.message)
        self.waiting += 1
        try:
            async with asyncio.timeout(WAIT_MAX_S):
                while isinstance(decision, NotYet):
                    await self._streams.changed.wait()
                    decision = self._gate.admit(peer, preface, now=wall_clock())
        except TimeoutError:
            return decision.otherwise if isinstance(decision, NotYet) else decision
        finally:
            self.waiting -= 1
        return decision

    async def _answer(self, channel: Channel, refused: Refused | None) -> bool:
        """Tells the peer; False when it is gone."""
        answer = Answer(
            refusal=refused.reason if refused else None,
            message=refused.message if refused else "",
            clock=wall_clock(),
        )
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await channel.write(encode_answer(answer))
        except OSError:  # a time-out is one too
            return False
        return True


async def _connect(ways: Sequence[tuple[str, str | None]], port: int) -> socket.socket | Refused:
    """To the first that takes it: a program may listen on one family only, whichever its peer has dialled."""
    found: socket.socket | Refused = Refused(reason=Refusal.TARGET_UNREACHABLE, message="It has no address.")
    for host, source in ways:
        found = await _connect_to(host, port, source)
        if not isinstance(found, Refused):
            break
    return found


async def _connect_to(host: str, port: int, source: str | None) -> socket.socket | Refused:
    where = f"{host} port {port}"
    try:
        async with asyncio.timeout(TARGET_LIMIT_S):
            return await connect(host, port, source=source)
    except TimeoutError:
        return Refused(reason=Refusal.TARGET_UNREACHABLE, message=f"{where} does not answer.")
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            return Refused(reason=Refusal.TARGET_REFUSED, message=f"Nobody listens on {where}.")
        return Refused(reason=Refusal.TARGET_UNREACHABLE, message=f"{where}: {error.strerror or error}.")
