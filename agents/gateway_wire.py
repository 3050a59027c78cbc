"""What a machine's gateway process is told over its control socket. Frames of mesh/wire.py, one answer for each. Pure.

Rules of this file:
1. A request is a map with `do`; an answer is {"ok": …} or {"error": what MeshError.to_wire gives}. Both have an `id`:
   who has given a request up takes its answer for no other one's.
2. Whoever speaks here is this machine's agent, so what is wrong is a fault of this program.
3. Serials are hex text: they have 160 bits, msgpack's numbers 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh.errors import RemoteProtocolError
from mesh.ids import Epoch, MachineName, Rank, RunUid
from mesh.net.relay_client import RelayPlace
from mesh.net.roster import MachinePlace, Machines, MemberPlace, Roster
from mesh.net.tls import Credentials

CONTROL_NAME = "gateway.sock"
"""Of the control socket, in the folder of a gateway's process."""
FRAME_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SetIdentity:
    credentials: Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMachines:
    machines: Machines


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRoster:
    roster: Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    credentials: Credentials
    deliver_to: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    run: RunUid
    floor: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """The run has no members here; its floor stays. Nothing of it here is no error."""

    run: RunUid


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """Whom nobody believes any more: these, and no others."""

    machines: frozenset[MachineName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    ports: frozenset[int]
    deliver_to: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRelays:
    """All that there are; lines to those that were there before stay."""

    places: tuple[RelayPlace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLocal:
    """Overlay addresses that this machine has whatever rosters say: its member's."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetApi:
    """The API is led to from this port, with this certificate."""

    credentials: Credentials
    target: tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryRelay:
    """This port is a relay's too."""

    streams_max: int
    streams_per_machine_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Answered with those of these addresses at which that machine's gateway answers."""

    machine: MachineName
    addresses: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRelay:
    """Answered with those of these addresses at which that relay answers."""

    relay: MachineName
    addresses: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeReport:
    """Of the relay behind this port: answered with `report` (relay_outbox.py), `lines` and `streams`."""

    life: str
    delivered: int
    """Life and number of the last report that has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOf:
    """Answered with who is behind the connection that the API sees from this port; nil when nobody is."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Answered with `Gateway.counters()`."""


Request = (
    SetIdentity
    | SetMachines
    | SetRoster
    | Host
    | Fence
    | Forget
    | Revoke
    | Offer
    | SetRelays
    | SetLocal
    | SetApi
    | CarryRelay
    | Probe
    | ProbeRelay
    | TakeReport
    | SourceOf
    | Counters
)


def to_wire(request: Request) -> dict[str, Any]:
    words: dict[str, Any] = {"do": type(request).__name__}
    match request:
        case SetIdentity():
            return words | _credentials_out(request.credentials)
        case SetMachines():
            return words | {
                "machines": {
                    name: [[list(at) for at in place.gateway], list(place.overlay)]
                    for name, place in request.machines.items()
                }
            }
        case SetRoster():
            members = [[m.rank, m.machine, list(m.overlay)] for m in request.roster.members]
            return words | {"run": request.roster.run, "epoch": request.roster.epoch, "members": members}
        case Host():
            return words | _credentials_out(request.credentials) | {"deliver_to": list(request.deliver_to)}
        case Fence():
            return words | {"run": request.run, "floor": request.floor}
        case Forget():
            return words | {"run": request.run}
        case Revoke():
            return words | {"machines": sorted(request.machines)}
        case Offer():
            return words | {"ports": sorted(request.ports), "deliver_to": list(request.deliver_to)}
        case SetRelays():
            places = [[p.machine, _places_out(p.addresses), p.is_gateway] for p in request.places]
            return words | {"relays": places}
        case SetLocal():
            return words | {"addresses": list(request.addresses)}
        case SetApi():
            return words | _credentials_out(request.credentials) | {"target": list(request.target)}
        case CarryRelay():
            return words | {
                "streams": request.streams_max,
                "streams_per_machine": request.streams_per_machine_max,
            }
        case Probe():
            return words | {"machine": request.machine, "addresses": _places_out(request.addresses)}
        case ProbeRelay():
            return words | {"relay": request.relay, "addresses": _places_out(request.addresses)}
        case TakeReport():
            return words | {"life": request.life, "delivered": request.delivered}
        case SourceOf():
            return words | {"port": request.port}
        case Counters():
            return words


def from_wire(words: Any) -> Request:
    """Raises RemoteProtocolError."""
    try:
        request: Request = _READERS[words["do"]](words)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise RemoteProtocolError(f"This is no request to a gateway: {error!r}.") from error
    return request


def _credentials_out(credentials: Credentials) -> dict[str, Any]:
    return {
        "certificate": credentials.certificate_pem,
        "key": credentials.key_pem,
        "bundle": credentials.bundle_pem,
    }


def _credentials(words: Mapping[str, Any]) -> Credentials:
    return Credentials(
        certificate_pem=bytes(words["certificate"]),
        key_pem=bytes(words["key"]),
        bundle_pem=bytes(words["bundle"]),
    )


def _machines(words: Mapping[str, Any]) -> SetMachines:
    return SetMachines(
        machines={
            MachineName(name): MachinePlace(
                gateway=tuple((str(host), int(port)) for host, port in gateway), overlay=tuple(overlay)
            )
            for name, (gateway, overlay) in words["machines"].items()
        }
    )


def _roster(words: Mapping[str, Any]) -> SetRoster:
    members = tuple(
        MemberPlace(rank=Rank(int(rank)), machine=MachineName(machine), overlay=tuple(overlay))
        for rank, machine, overlay in words["members"]
    )
    return SetRoster(
        roster=Roster(run=RunUid(words["run"]), epoch=Epoch(int(words["epoch"])), members=members)
    )


def _revocations(words: Mapping[str, Any]) -> Revoke:
    return Revoke(machines=frozenset(MachineName(name) for name in words["machines"]))


def _relays(words: Mapping[str, Any]) -> SetRelays:
    return SetRelays(
        places=tuple(
            RelayPlace(machine=MachineName(name), addresses=_places(addresses), is_gateway=bool(is_gateway))
            for name, addresses, is_gateway in words["relays"]
        )
    )


def _api(words: Mapping[str, Any]) -> SetApi:
    host, port = words["target"]
    return SetApi(credentials=_credentials(words), target=(str(host), int(port)))


def _places_out(places: tuple[tuple[str, int], ...]) -> list[list[str | int]]:
    return [list(place) for place in places]


def _places(words: Any) -> tuple[tuple[str, int], ...]:
    return tuple((str(host), int(port)) for host, port in words)


_READERS: Mapping[str, Any] = {
    "SetIdentity": lambda words: SetIdentity(credentials=_credentials(words)),
    "SetMachines": _machines,
    "SetRoster": _roster,
    "Host": lambda words: Host(credentials=_credentials(words), deliver_to=tuple(words["deliver_to"])),
    "Fence": lambda words: Fence(run=RunUid(words["run"]), floor=Epoch(int(words["floor"]))),
    "Forget": lambda words: Forget(run=RunUid(words["run"])),
    "Revoke": _revocations,
    "Offer": lambda words: Offer(
        ports=frozenset(int(port) for port in words["ports"]), deliver_to=tuple(words["deliver_to"])
    ),
    "SetRelays": _relays,
    "SetLocal": lambda words: SetLocal(addresses=tuple(str(text) for text in words["addresses"])),
    "SetApi": _api,
    "CarryRelay": lambda words: CarryRelay(
        streams_max=int(words["streams"]), streams_per_machine_max=int(words["streams_per_machine"])
    ),
    "Probe": lambda words: Probe(
        machine=MachineName(words["machine"]), addresses=_places(words["addresses"])
    ),
    "ProbeRelay": lambda words: ProbeRelay(
        relay=MachineName(words["relay"]), addresses=_places(words["addresses"])
    ),
    "TakeReport": lambda words: TakeReport(life=str(words["life"]), delivered=int(words["delivered"])),
    "SourceOf": lambda words: SourceOf(port=int(words["port"])),
    "Counters": lambda words: Counters(),
}
