"""Who is where in an epoch; pure data. The coordinator says it, gateways only compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from mesh.ids import Epoch, MachineName, Rank, RunUid


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlace:
    """One rank's place in an epoch."""

    rank: Rank
    machine: MachineName
    overlay: tuple[str, ...]
    """Its overlay addresses (IPv4, IPv6 or both): what the other members dial."""

    def __post_init__(self) -> None:
        _check_spelling(self.overlay)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """A run's members in one epoch, by rank."""

    run: RunUid
    epoch: Epoch
    members: tuple[MemberPlace, ...]

    def __post_init__(self) -> None:
        if len({member.rank for member in self.members}) != len(self.members):
            raise ValueError(f"a rank of {self.run} is in the roster twice")

    def place_of(self, rank: Rank) -> MemberPlace | None:
        return next((member for member in self.members if member.rank == rank), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlace:
    """Where a machine is."""

    gateway: tuple[tuple[str, int], ...]
    """Where its gateway listens, as (address, port), best first."""
    overlay: tuple[str, ...] = ()
    """The machine's own overlay addresses: what other machines dial to reach its services."""

    def __post_init__(self) -> None:
        _check_spelling(self.overlay)


Machines = Mapping[MachineName, MachinePlace]


def _check_spelling(addresses: tuple[str, ...]) -> None:
    """Addresses are compared as text. Raises ValueError."""
    for address in addresses:
        if str(ip_address(address)) != address:
            raise ValueError(f"{address} is not how this address is written: {ip_address(address)}")
