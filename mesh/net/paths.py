"""Which path members of a gang reach each other by, or why there is none, in words. Pure.

Asked twice: when machines are granted, so that a set without an allowed path is never granted, and by each member of
what all of them brought to the barrier, so that all come to the same answer.

Rules of this file:
1. A gang has one path: the best that every one of its machines is fit for. Best first: private, public, direct,
   relayed.
2. private: all in one private network that its owners named; also all machines that joined by `--address`, which stand
   on one trusted network by definition. public: every owner gave a public address, and by that allows clear text.
   direct: every machine's gateway can be dialled by the others. relayed: both gateways dial a relay.
3. Each condition is something that the machines share. So the machines that are fit for a path together form clubs,
   and any of a club can be taken: that is why looking for a set needs no search.
4. A label that is missing is a place like another one: who labels no machine has all of them in one place.
5. One machine alone needs nobody to dial it, and is not chosen for its paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from mesh.ids import MachineName
from mesh.states import NetworkScope, Transport, TransportPolicy

TRANSPORT_LABEL = "gangmesh.transport"
ON_MESH = "mesh"
DIALABLE_LABEL = "gangmesh.dialable"
PRIVATE_NETWORK_LABEL = "gangmesh.network"
PRIVATE_ADDRESS_LABEL = "gangmesh.private-address"
PUBLIC_ADDRESS_LABEL = "gangmesh.public-address"
PROVIDER_LABEL, REGION_LABEL = "provider", "region"
UNNAMED_PROVIDER = "joined"
"""Of a machine that joined without that label."""
RELAYED_MEMBERS_MAX = 2
"""First document, "Beta caveats"; the relay refuses a third one."""
BEST_FIRST = (Transport.PRIVATE, Transport.PUBLIC, Transport.DIRECT, Transport.RELAYED)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """Where one machine stands, as its owner and the head say."""

    machine: MachineName
    address: str
    """Where peers reach a member on it; on the mesh an overlay address."""
    is_on_mesh: bool = False
    is_dialable: bool = False
    """Other machines can dial its gateway."""
    private_network: str | None = None
    private_address: str | None = None
    public_address: str | None = None
    provider: str | None = None
    region: str | None = None

    def to_payload(self) -> dict[str, Any]:
        """Plain data; `from_payload` is the inverse."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> NetworkFacts:
        """Raises KeyError, TypeError, ValueError."""
        for name in cls.__slots__:
            kinds = (
                bool
                if name.startswith("is_")
                else str
                if name in ("machine", "address")
                else (str, type(None))
            )
            if not isinstance(payload[name], kinds):
                raise TypeError(f"{name} is {payload[name]!r:.80}")
        facts = cls(**{name: payload[name] for name in cls.__slots__})
        for address in (facts.address, facts.private_address, facts.public_address):
            if address is not None:
                ip_address(address)
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """How the members of a gang reach each other."""

    transport: Transport
    addresses: tuple[str, ...]
    """By which, in the order of the machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPath:
    """There is none that the run allows."""

    why: str
    """Parts of a sentence with semicolons between, without an end."""


def facts_of(machine: MachineName, address: str, labels: Mapping[str, str]) -> NetworkFacts:
    """A machine as the labels of its Ray node describe it."""
    return NetworkFacts(
        machine=machine,
        address=address,
        is_on_mesh=labels.get(TRANSPORT_LABEL) == ON_MESH,
        is_dialable=labels.get(DIALABLE_LABEL) == "1",
        private_network=labels.get(PRIVATE_NETWORK_LABEL),
        private_address=labels.get(PRIVATE_ADDRESS_LABEL),
        public_address=labels.get(PUBLIC_ADDRESS_LABEL),
        provider=labels.get(PROVIDER_LABEL),
        region=labels.get(REGION_LABEL),
    )


# ---- a set of machines --------------------------------------------------------------------------------


def choose_path(
    machines: Sequence[NetworkFacts], *, policy: TransportPolicy, scope: NetworkScope
) -> Path | NoPath:
    """The path of these machines, in rank order. The same machines always give the same path."""
    problems = []
    if (elsewhere := _out_of_scope(machines, scope)) is not None:
        return NoPath(why=elsewhere)
    for transport in BEST_FIRST:
        keys = {_club(facts, transport, of=len(machines)) for facts in machines}
        admitted = _admits(policy, transport, of=len(machines))
        if admitted is None and len(keys) == 1 and None not in keys:
            addresses = tuple(_address_on(facts, transport) for facts in machines)
            return Path(transport=transport, addresses=addresses)
        problems.append(admitted or _lack(machines, transport))
    return NoPath(why="; ".join(dict.fromkeys(problem for problem in problems if problem)))


def best_set(
    candidates: Sequence[NetworkFacts],
    *,
    nodes: int,
    beside: Sequence[NetworkFacts] = (),
    policy: TransportPolicy,
    scope: NetworkScope,
) -> tuple[NetworkFacts, ...] | None:
    """`nodes` of the candidates that have an allowed path with each other and with those `beside`; None: no such set.

    The best path decides, then the order of the candidates.
    """
    total = nodes + len(beside)
    if total == 1:
        return (candidates[0],) if candidates else None
    order = {facts.machine: place for place, facts in enumerate(candidates)}
    for transport in BEST_FIRST:
        if _admits(policy, transport, of=total) is not None:
            continue
        clubs: dict[object, list[NetworkFacts]] = {}
        for facts in candidates:
            club = _club(facts, transport, of=total)
            if club is not None:
                clubs.setdefault((club, _place(facts, scope)), []).append(facts)
        must = {(_club(facts, transport, of=total), _place(facts, scope)) for facts in beside}
        fit = [c[:nodes] for key, c in clubs.items() if len(c) >= nodes and must <= {key}]
        if fit:
            return tuple(min(fit, key=lambda club: [order[facts.machine] for facts in club]))
    return None


# ---- conditions ---------------------------------------------------------------------------------------


def _club(facts: NetworkFacts, transport: Transport, *, of: int) -> object | None:
    """What machines of a gang of so many must have in common for this path; None: this one is not fit for it."""
    if not facts.is_on_mesh:
        return "trusted" if transport is Transport.PRIVATE else None
    match transport:
        case Transport.PRIVATE:
            if facts.private_network is None or facts.private_address is None:
                return None
            return facts.private_network, _family(facts.private_address)
        case Transport.PUBLIC:
            return None if facts.public_address is None else _family(facts.public_address)
        case Transport.DIRECT:
            return "mesh" if facts.is_dialable or of == 1 else None
        case Transport.RELAYED:
            return "mesh"


def _family(address: str) -> int:
    """An address of one family reaches nobody of the other."""
    return ip_address(address).version


def _admits(policy: TransportPolicy, transport: Transport, *, of: int) -> str | None:
    """None when a gang of so many may use this path, else why not."""
    if transport is not Transport.RELAYED:
        return None
    if of > RELAYED_MEMBERS_MAX:
        return f"a relayed gang has at most {RELAYED_MEMBERS_MAX} members"
    if policy is TransportPolicy.DIRECT:
        return "transport Direct admits no relay, Auto does"
    return None


def _place(facts: NetworkFacts, scope: NetworkScope) -> object:
    """What machines of one gang have in common, wherever they are allowed to be."""
    match scope:
        case NetworkScope.COLOCATED:
            return facts.provider, facts.region
        case NetworkScope.REGIONAL:
            return facts.region
        case NetworkScope.GLOBAL:
            return None


def _address_on(facts: NetworkFacts, transport: Transport) -> str:
    address = facts.address
    if facts.is_on_mesh and transport is Transport.PRIVATE:
        address = facts.private_address or address
    elif facts.is_on_mesh and transport is Transport.PUBLIC:
        address = facts.public_address or address
    return address


# ---- words --------------------------------------------------------------------------------------------


def _out_of_scope(machines: Sequence[NetworkFacts], scope: NetworkScope) -> str | None:
    if len({_place(facts, scope) for facts in machines}) <= 1:
        return None
    wants = "one provider and region" if scope is NetworkScope.COLOCATED else "one region"
    where = ", ".join(f"{facts.machine} is {_where(facts, scope)}" for facts in machines)
    ways = "--network global takes them together"
    if "without a label" in where:
        ways += "; `mesh join --label region=…` says where a machine is, `--label provider=…` with whom"
    return f"network {scope} wants {wants}, and {where} ({ways})"


def _where(facts: NetworkFacts, scope: NetworkScope) -> str:
    provider = "" if facts.provider == UNNAMED_PROVIDER else facts.provider
    places = {"region": ("in", facts.region)}
    if scope is not NetworkScope.REGIONAL:
        places = {"provider": ("with", provider), **places}
    named = [f"{word} {place}" for word, place in places.values() if place]
    lacking = [label for label, (_, place) in places.items() if not place]
    if not lacking:
        return " ".join(named)
    return " and ".join([*named, f"without a label for its {' and '.join(lacking)}"])


def _lack(machines: Sequence[NetworkFacts], transport: Transport) -> str:
    """Why these are not fit for the path together; empty where another path's sentence says it already."""
    strangers = [facts.machine for facts in machines if not facts.is_on_mesh]
    if strangers:
        return f"{_names(strangers)} joined by --address and not by the mesh, the others by the mesh"
    unfit = [facts.machine for facts in machines if _club(facts, transport, of=len(machines)) is None]
    match transport:
        case Transport.PRIVATE:
            return "they share no private network that is named"
        case Transport.PUBLIC if unfit:
            return f"{_names(unfit)} joined without a public address"
        case Transport.PUBLIC:
            return "their public addresses are of both families"
        case Transport.DIRECT:
            return f"{_names(unfit)} cannot be dialled by the others"
        case Transport.RELAYED:
            return ""


def _names(machines: Sequence[MachineName]) -> str:
    *most, last = machines
    return f"{', '.join(most)} and {last}" if most else last
