"""Connections of members here to overlay addresses: captured, and carried to the machine that the roster names."""

from __future__ import annotations

import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mesh.ids import MachineName, Rank, RunUid
from mesh.net.clock import wall_clock
from mesh.net.dialling import Dialler, DialRefused
from mesh.net.gate import Gate
from mesh.net.identity import Identity, MachineIdentity, RelayIdentity
from mesh.net.preface import MemberTarget, Preface
from mesh.net.refusals import Refusal
from mesh.net.roster import Machines
from mesh.net.sockets import prepare, reset
from mesh.net.streams import Full, Streams

_log = logging.getLogger(__name__)
TargetOf = Callable[[socket.socket], tuple[str, int] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A member on this machine, or the machine itself, as it shows itself to others."""

    identity: Identity
    context: ssl.SSLContext
    deliver_to: tuple[str, ...]
    """Where it is reached on this machine, and so where it may have dialled from; empty for the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """What an overlay address stands for."""

    machine: MachineName
    member: MemberTarget | None


class Departure:
    """The dialling side of a gateway."""

    def __init__(self, *, gate: Gate, streams: Streams, dialler: Dialler, target_of: TargetOf) -> None:
        self._gate = gate
        self._streams = streams
        self._dialler = dialler
        self._target_of = target_of
        self.machine: Speaker | None = None
        self.machines: Machines = {}
        self._members: dict[tuple[RunUid, Rank], Speaker] = {}
        """Who is up here, in the roster's epoch."""
        self._by_address: dict[str, Destination] = {}
        self.refused: Counter[Refusal] = Counter()

    def host(self, run: RunUid, rank: Rank, member: Speaker) -> None:
        self._members[run, rank] = member

    def apply(self) -> None:
        """The gate knows something new: forgets members whose epoch is over, and who is at which address."""
        self._members = {
            key: member for key, member in self._members.items() if self._gate.still_admits(member.identity)
        }
        self._by_address = {
            address: Destination(machine=name, member=None)
            for name, machine in self.machines.items()
            for address in machine.overlay
        }
        for roster in self._gate.rosters.values():
            for place in roster.members:
                target = MemberTarget(run=roster.run, epoch=roster.epoch, rank=place.rank)
                destination = Destination(machine=place.machine, member=target)
                self._by_address.update(dict.fromkeys(place.overlay, destination))

    def addresses_of(self, identity: Identity) -> tuple[str, ...]:
        """The overlay addresses of a machine or a member; none when it is not known here."""
        if isinstance(identity, MachineIdentity):
            machine = self.machines.get(identity.machine)
            return machine.overlay if machine else ()
        if isinstance(identity, RelayIdentity):
            return ()
        roster = self._gate.rosters.get(identity.run)
        places = roster.members if roster else ()
        return next((place.overlay for place in places if place.rank == identity.rank), ())

    async def carry(self, sock: socket.socket) -> None:
        """One captured connection, up to the running stream; refused means reset. Takes the socket over."""
        try:
            prepare(sock)
            target = self._target_of(sock)
            if target is None:
                raise DialRefused(Refusal.NOT_REDIRECTED, "somebody dialled the capture port itself")
            await self._carry_to(sock, *target)
        except DialRefused as refused:
            self.refused[refused.reason] += 1
            _log.info("a connection of a member was refused: %s: %s", refused.reason, refused.message)
            reset(sock)
        except OSError:  # the member is gone already
            sock.close()
        except BaseException:
            sock.close()
            raise

    async def _carry_to(self, sock: socket.socket, host: str, port: int) -> None:
        destination = self._by_address.get(host)
        if destination is None:
            raise DialRefused(Refusal.UNKNOWN_TARGET, f"nobody has the address {host}")
        speaker = self._speaker(destination, sock.getpeername()[0])
        preface = Preface(
            machine=destination.machine,
            member=destination.member,
            port=port,
            clock=wall_clock(),
        )
        try:
            with self._streams.place():
                dialled = await self._dialler.dial(context=speaker.context, preface=preface)
        except Full:
            raise DialRefused(Refusal.STREAM_LIMIT, f"{self._gate.machine} has too many streams") from None
        self._streams.join(
            sock, dialled.channel, (speaker.identity, dialled.peer.identity), relay=dialled.relay
        )

    def _speaker(self, destination: Destination, source: str) -> Speaker:
        """In whose name: of the destination's run the member with that address, or else the first rank here."""
        if destination.member is None:
            if self.machine is None:
                raise DialRefused(Refusal.UNKNOWN_TARGET, "this machine has no certificate yet")
            return self.machine
        wanted = destination.member.run
        here = [(rank, member) for (run, rank), member in self._members.items() if run == wanted]
        if not here:
            raise DialRefused(Refusal.UNKNOWN_TARGET, f"no member of {wanted} is up here")
        return min(here, key=lambda found: (source not in found[1].deliver_to, found[0]))[1]
