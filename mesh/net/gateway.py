"""The gateway of a machine: one port for all streams of its members, in and out. Shell; gate.py decides.

Rules of this file:
1. What the coordinator says comes in by the methods below, each of which is done when it returns: after `fence` no byte
   of an older epoch passes.
2. Strangers are bounded by the door, streams by `streams_max`, early ones by `waiting_max`, every wait by a limit.
3. What is refused is counted by reason: what others asked for here, and what members here asked for.
4. Identities are replaced while it runs: streams that run keep theirs, new ones use the new.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesh.errors import AuthenticationError
from mesh.ids import Epoch, MachineName, RunUid
from mesh.net.accepting import Acceptor
from mesh.net.api_front import ApiFront, read_hello
from mesh.net.authority import read_certificate
from mesh.net.client_hello import server_name
from mesh.net.clock import wall_clock
from mesh.net.departure import Departure, Speaker
from mesh.net.dialling import Dialler, Leg, connect_to_any
from mesh.net.door import Door
from mesh.net.doorkeeper import Doorkeeper
from mesh.net.gate import Gate, Refused
from mesh.net.guarded_tasks import GuardedTasks
from mesh.net.identity import Identity, MachineIdentity, MemberIdentity, PeerCertificate
from mesh.net.probe import probe, probe_relay
from mesh.net.reception import Reception
from mesh.net.refusals import Refusal
from mesh.net.relay import Relay
from mesh.net.relay_book import RelayLimits
from mesh.net.relay_client import RelayPlace
from mesh.net.relay_ways import RelayWays
from mesh.net.roster import Machines, Roster
from mesh.net.shim import addresses as shim_addresses
from mesh.net.shim.table import ShimTable
from mesh.net.sockets import has_ipv6, listen, original_target, prepare, reset
from mesh.net.streams import Streams
from mesh.net.tls import API_NAME, Credentials, client_context, server_context

STOP_LIMIT_S = 2.0
RELAYED = "through the relay"
"""One source at the door: the address of who has dialled is the relay's to know."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one gateway."""

    streams_max: int = 4096
    """In and out together, those that are being made too. A stream has two descriptors."""
    waiting_max: int = 512
    """Streams that are early: their epoch is not here yet."""
    captures_max: int = 1024
    """Captured connections that are no streams yet."""
    door_places: int = 1024
    door_places_per_source: int = 64
    """Several machines may stand behind one address; each dials with 16 at a time."""


class Gateway:
    """One machine's gateway. Make it on the loop, `start` it, tell it what the coordinator says, `stop` it.

    Args:
        target_of: what a captured connection was dialled to; None when it was not captured.
        shim: what programs here share with it, where they have the shim and nothing is redirected.
    """

    def __init__(
        self,
        *,
        deployment: str,
        machine: MachineName,
        limits: Limits | None = None,
        target_of: Callable[[socket.socket], tuple[str, int] | None] = original_target,
        shim: ShimTable | None = None,
    ) -> None:
        self.identity = MachineIdentity(deployment=deployment, machine=machine)
        self.gate = Gate(deployment=deployment, machine=machine)
        self.limits = limits or Limits()
        self._shim = shim
        self._server: ssl.SSLContext | None = None
        self._streams = Streams(self.gate, streams_max=self.limits.streams_max)
        self._doorkeeper = Doorkeeper(
            Door(places=self.limits.door_places, places_per_source=self.limits.door_places_per_source),
            count=self.gate.count,
            let_in=self._on_connection,
        )
        self._reception = Reception(
            gate=self.gate,
            streams=self._streams,
            doorkeeper=self._doorkeeper,
            waiting_max=self.limits.waiting_max,
            source_of=self._source_of,
        )
        dialler = Dialler(deployment=deployment, route=self._route, check=self._check)
        self._departure = Departure(
            gate=self.gate,
            streams=self._streams,
            dialler=dialler,
            target_of=shim.target_of if shim else target_of,
        )
        self._departing = 0
        self._api: ApiFront | None = None
        self._carried: Relay | None = None
        """The relay behind this port, for others."""
        self._relays = RelayWays(
            deployment=deployment,
            machine=machine,
            check=self._check,
            context=self._machine_context,
            on_leg=self._on_relayed,
        )
        """Those that this machine uses."""
        self._captures: list[Acceptor] = []
        self._tasks = GuardedTasks()

    # ---- life -----------------------------------------------------------------------------------------

    def start(self, *, listen_on: tuple[tuple[str, int], ...], capture_port: int | None) -> None:
        """Listens. `capture_port` is where redirected connections arrive, on loopback; 0 takes a free one.

        Raises OSError; then nothing listens.
        """
        captures: list[socket.socket] = []
        try:
            if capture_port is not None:
                captures.append(listen(self._capture_host, capture_port))
                if has_ipv6() and self._shim is None:
                    captures.append(listen("::1", captures[0].getsockname()[1]))
            self._doorkeeper.open(listen_on)
        except OSError:
            for sock in captures:
                sock.close()
            raise
        self._captures = [
            Acceptor(
                sock,
                on_connection=self._on_captured,
                is_full=lambda: self._departing >= self.limits.captures_max,
            )
            for sock in captures
        ]
        self._streams.start()
        if self._shim is not None and captures:
            self._shim.serve(captures[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops listening, cuts every stream. May be called again."""
        self._doorkeeper.close()
        for acceptor in self._captures:
            acceptor.close()
        await self._relays.stop()
        if self._carried is not None:
            await self._carried.stop()
        await self._tasks.stop(limit_s=STOP_LIMIT_S)
        self._streams.close()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where other machines dial."""
        return self._doorkeeper.addresses

    @property
    def capture_port(self) -> int | None:
        return self._captures[0].address[1] if self._captures else None

    @property
    def _capture_host(self) -> str:
        return "127.0.0.1" if self._shim is None else shim_addresses.GATEWAY

    def counters(self) -> dict[str, Any]:
        """What happened here so far, and how much is open."""
        return {
            "addresses": [list(address) for address in self.addresses],
            "runs": {
                str(run): {"epoch": int(roster.epoch), "up": sorted(self.gate.hosted[run])}
                for run, roster in self.gate.rosters.items()
            },
            "streams": len(self._streams),
            "waiting": self._reception.waiting,
            "in_the_door": self._doorkeeper.inside,
            "relay_lines": [str(name) for name in self._relays.lines_open],
            "relay_line_breaks": self._relays.breaks,
            "cut_by_relays": {
                str(run): self._cut_by_relays(run, roster.epoch) for run, roster in self.gate.rosters.items()
            },
            "refused_in": {str(reason): count for reason, count in sorted(self.gate.counts.items())},
            "refused_out": {str(reason): count for reason, count in sorted(self._departure.refused.items())},
            "ended": {str(end): count for end, count in sorted(self._streams.ends.items())},
        }

    def _cut_by_relays(self, run: RunUid, epoch: Epoch) -> dict[str, float]:
        """The relays that ended, and streams of this epoch with them: for how many seconds they have been over."""
        now = asyncio.get_running_loop().time()
        return {
            str(relay): now - broke_at
            for relay, broke_at in self._streams.broken(run, epoch).items()
            if self._relays.was_lost(relay, broke_at)
        }

    # ---- what the coordinator says --------------------------------------------------------------------

    def set_identity(self, credentials: Credentials) -> None:
        """This machine's certificate: the first, or a newer one. Raises AuthenticationError."""
        shown = read_certificate(credentials.certificate_pem)
        if shown.identity != self.identity:
            raise AuthenticationError(
                f"{self.identity.uri} cannot use a certificate of {shown.identity.uri}."
            )
        server, client = server_context(credentials), client_context(credentials)
        self._server = server
        self._departure.machine = Speaker(identity=self.identity, context=client, deliver_to=())

    def set_machines(self, machines: Machines) -> None:
        """Where the machines of the deployment are."""
        self._departure.machines = dict(machines)
        self._apply()

    async def set_relays(self, places: Sequence[RelayPlace]) -> None:
        """The relays that machines without an address are reached by, and that this one is reachable through.

        Raises AuthenticationError when this machine has no certificate yet.
        """
        self._machine_context()
        await self._relays.set_places(places)

    def carry_relay(self, limits: RelayLimits) -> Relay:
        """From now on this port is also a relay's. The same one when it is already."""
        if self._carried is None:
            self._carried = Relay(
                identity=self.identity,
                limits=limits,
                gate=self.gate,
            )
            self._carried.start(listen_on=())
            self._reception.relay = self._carried
        return self._carried

    def set_api(self, api: ApiFront) -> None:
        """From now on who asks for the API by name is led there."""
        self._api = api

    def source_of(self, port: int) -> str | None:
        """See `ApiFront.source_of`."""
        return None if self._api is None else self._api.source_of(port)

    async def probe(
        self, machine: MachineName, addresses: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """At which of these addresses this machine's gateway answers, in their order. Raises AuthenticationError."""
        return await probe(
            self.identity.deployment, machine, addresses, context=self._machine_context(), check=self._check
        )

    async def probe_relay(
        self, relay: MachineName, addresses: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """At which of these addresses this relay answers, in their order. Raises AuthenticationError."""
        return await probe_relay(
            self.identity.deployment, relay, addresses, context=self._machine_context(), check=self._check
        )

    def offer(self, ports: Iterable[int], *, deliver_to: tuple[str, ...]) -> None:
        """Services of this machine that other machines may reach; replaces those before."""
        self.gate.offer(ports, deliver_to=self._here(deliver_to))

    def set_roster(self, roster: Roster) -> None:
        """A run's new epoch; streams of its older ones are cut. Raises FencedError for an older one."""
        self.gate.set_roster(roster)
        self._apply()

    def host(self, credentials: Credentials, *, deliver_to: tuple[str, ...]) -> None:
        """A member is up here, at the first of these addresses that takes a connection; or it has a newer certificate.

        Raises FencedError when the roster does not have it here, AuthenticationError when it is no certificate of ours.
        """
        shown = read_certificate(credentials.certificate_pem)
        member = shown.identity
        if not isinstance(member, MemberIdentity):
            raise AuthenticationError(f"{member.uri} is not the name of a member.")
        if (member.deployment, member.machine) != (self.identity.deployment, self.identity.machine):
            raise AuthenticationError(f"{member.uri} is not a member on {self.identity.machine}.")
        context = client_context(credentials)
        deliver_to = self._here(deliver_to)
        self.gate.host(member.run, member.epoch, member.rank, deliver_to=deliver_to)
        speaker = Speaker(identity=member, context=context, deliver_to=deliver_to)
        self._departure.host(member.run, member.rank, speaker)
        self._apply()

    def fence(self, run: RunUid, floor: Epoch) -> None:
        """Cuts the streams of every epoch below and refuses them from now on. Raises FencedError when it was higher."""
        self.gate.raise_floor(run, floor)
        self._apply()

    def forget(self, run: RunUid) -> None:
        """The run has no members here any more: its streams are cut, its addresses stand for nobody."""
        self.gate.forget(run)
        self._apply()

    def revoke(self, names: frozenset[MachineName]) -> None:
        """Nobody believes these, and no others: their streams are cut."""
        self.gate.revoke(names)
        if self._carried is not None:
            self._carried.revoke(names)
        self._apply()

    def _apply(self) -> None:
        self._departure.apply()
        self._streams.apply()

    # ---- connections ----------------------------------------------------------------------------------

    def _on_connection(self, sock: socket.socket, source: str) -> None:
        self._receive(Leg(socket=sock), source)

    def _on_relayed(self, leg: Leg) -> None:
        """Somebody has dialled this machine through the relay."""
        if self._doorkeeper.enter(leg.socket, RELAYED):
            self._receive(leg, RELAYED)

    def _receive(self, leg: Leg, source: str) -> None:
        if self._server is None:
            self.gate.count(Refusal.HANDSHAKE_FAILED)
            self._doorkeeper.leave(source, has_failed=True)
            reset(leg.socket)
            return
        self._tasks.spawn(self._let_in(leg, self._server, source), name=f"stream from {source}")

    async def _let_in(self, leg: Leg, server: ssl.SSLContext, source: str) -> None:
        api = self._api
        if api is not None and not leg.early:
            try:
                prepare(leg.socket)
                leg = replace(leg, early=await read_hello(leg.socket))
            except BaseException:
                self._doorkeeper.leave(source, has_failed=True)
                leg.socket.close()
                raise
            if server_name(leg.early) == API_NAME:
                refused = await api.carry(leg, source, streams=self._streams, door=self._doorkeeper)
                if refused is not None:
                    self.gate.count(refused)
                return
        await self._reception.serve(leg, server, source)

    def _on_captured(self, sock: socket.socket, address: Any) -> None:
        self._departing += 1
        self._tasks.spawn(self._depart(sock), name=f"captured from {address[0]}")

    async def _depart(self, sock: socket.socket) -> None:
        try:
            await self._departure.carry(sock)
        finally:
            self._departing -= 1
            for acceptor in self._captures:
                acceptor.resume()

    async def _route(self, machine: MachineName, context: ssl.SSLContext) -> Leg:
        """Direct when the machine has an address, through the relay when it has none."""
        place = self._departure.machines.get(machine)
        if place is not None and not place.gateway and self._relays:
            return await self._relays.dial(machine, context)
        return Leg(socket=await connect_to_any(machine, place.gateway if place else ()))

    def _here(self, deliver_to: tuple[str, ...]) -> tuple[str, ...]:
        """Where these addresses are on this machine."""
        return deliver_to if self._shim is None else shim_addresses.loopbacks_of(deliver_to)

    def _source_of(self, peer: Identity, target: str) -> str | None:
        if self._shim is None:
            return None
        return shim_addresses.source_like(target, self._departure.addresses_of(peer))

    def _machine_context(self) -> ssl.SSLContext:
        if self._departure.machine is None:
            raise AuthenticationError(f"{self.identity.machine} has no certificate yet.")
        return self._departure.machine.context

    def _check(self, peer: PeerCertificate) -> Refused | None:
        return self.gate.check_peer(peer, now=wall_clock(), peer_clock=None)
