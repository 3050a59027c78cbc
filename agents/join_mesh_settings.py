"""What an agent is told that joins through a mesh port."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from agents.gateway import address_and_port
from agents.head_line import HeadUrl
from mesh.errors import SpecError
from mesh.net.tokens import JoinToken


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshJoinSettings:
    """What an agent is told that joins through a mesh port."""

    head: HeadUrl
    token: JoinToken | None
    listen: tuple[str, int]
    labels: Mapping[str, str]
    name_hint: str = ""
    private_network: str = ""
    private_address: str = ""
    public_address: str = ""


def read_settings(
    *,
    head: str,
    token: str | None,
    listen: str,
    labels: Mapping[str, str],
    name_hint: str,
    private_network: str,
    private_address: str,
    public_address: str,
) -> MeshJoinSettings:
    """From the command line. Raises SpecError."""
    for option, address in (("--private-address", private_address), ("--public-address", public_address)):
        check_address(option, address)
    if bool(private_network) != bool(private_address):
        raise SpecError(
            "--private-network and --private-address belong together: which network, and this machine's address in it.",
            field="--private-network",
        )
    where = listen_address(listen)
    return MeshJoinSettings(
        head=HeadUrl.parse(head),
        token=JoinToken.parse(token) if token else None,
        listen=where,
        labels=labels,
        name_hint=name_hint,
        private_network=private_network,
        private_address=private_address,
        public_address=public_address,
    )


def listen_address(listen: str) -> tuple[str, int]:
    """Of a machine or a relay that others are told of. Raises SpecError."""
    where = address_and_port(listen)
    if where[1] == 0:
        raise SpecError("--listen takes a port of its own choice.", field="--listen", got=listen)
    return where


def check_address(option: str, address: str) -> None:
    """One that others can be told, or none. Raises SpecError."""
    try:
        usable = not address or not ipaddress.ip_address(address).is_unspecified
    except ValueError:
        usable = False
    if not usable:
        raise SpecError(
            f"{option} takes an IP address, not {address[:80]!r}.", field=option, got=address[:80]
        )
