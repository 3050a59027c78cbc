"""What a head answers to machines and relays, read: what is no answer of a head's is a RemoteProtocolError."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mesh.errors import RemoteProtocolError
from mesh.ids import HEAD, MachineName
from mesh.net.relay_client import RelayPlace
from mesh.net.roster import MachinePlace

WORDS_MAX = 200
"""Of what was wrong with an answer, in characters: it may hold the answer."""


@contextlib.contextmanager
def answer_errors() -> Iterator[None]:
    """Raises RemoteProtocolError for what reading an answer raises that lacks something, or has something else."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        raise RemoteProtocolError(f"The head's answer is none: {repr(error)[:WORDS_MAX]}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityShown:
    """What a head says to who has never heard of it. Anybody may say that: it is to be compared with a fingerprint."""

    bundle_pem: bytes
    clock: float
    """Seconds since 1970."""

    @classmethod
    def read(cls, words: Any) -> AuthorityShown:
        """Raises RemoteProtocolError."""
        with answer_errors():
            clock = float(words["clock"])
            if not math.isfinite(clock):
                raise ValueError("its clock shows no time")
            return cls(bundle_pem=str(words["bundle"]).encode(), clock=clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshNewsHeard:
    """See `coordinator.api.mesh_service.MeshNews`."""

    version: str
    cluster: str
    bundle_pem: bytes
    machines: Mapping[MachineName, MachinePlace]
    """The head is among them."""
    relays: tuple[RelayPlace, ...]
    revoked: frozenset[MachineName]

    @classmethod
    def read(cls, words: Any) -> MeshNewsHeard:
        """Raises RemoteProtocolError."""
        with answer_errors():
            machines = {
                MachineName(str(name)): MachinePlace(
                    gateway=_addresses(place["gateway"]),
                    overlay=tuple(str(address) for address in place["overlay"]),
                )
                for name, place in words["machines"].items()
            }
            if HEAD not in machines:
                raise ValueError("the head is not among the machines")
            return cls(
                version=str(words["version"]),
                cluster=str(words["cluster"]),
                bundle_pem=str(words["bundle"]).encode(),
                machines=machines,
                relays=tuple(
                    RelayPlace(machine=MachineName(str(name)), addresses=_addresses(addresses))
                    for name, addresses in words["relays"].items()
                ),
                revoked=frozenset(MachineName(str(name)) for name in words["revoked"]),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayNewsHeard:
    """See `coordinator.api.relay_service.RelayNews`."""

    version: str
    bundle: str
    revoked: list[str]

    @classmethod
    def read(cls, words: Any) -> RelayNewsHeard:
        """Raises RemoteProtocolError."""
        with answer_errors():
            return cls(
                version=str(words["version"]),
                bundle=str(words["bundle"]),
                revoked=[str(name) for name in words["revoked"]],
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """See `coordinator.api.mesh_service.JoinedTerms`."""

    name: MachineName
    number: int
    secret: str = field(repr=False)
    node_id: str
    deployment: str
    certificate_pem: bytes
    session: str
    cluster_address: str
    cluster_id: str
    cluster_token: str = field(repr=False)
    news: MeshNewsHeard

    @classmethod
    def read(cls, words: Any) -> JoinAnswer:
        """Raises RemoteProtocolError."""
        with answer_errors():
            cluster = words["cluster"]
            return cls(
                name=MachineName(str(words["name"])),
                number=int(words["number"]),
                secret=str(words["secret"]),
                node_id=str(words["nodeId"]),
                deployment=str(words["deployment"]),
                certificate_pem=str(words["certificate"]).encode(),
                session=str(cluster["session"]),
                cluster_address=str(cluster["address"]),
                cluster_id=str(cluster["id"]),
                cluster_token=str(words["clusterToken"]),
                news=MeshNewsHeard.read(words["news"]),
            )


def _addresses(pairs: Any) -> tuple[tuple[str, int], ...]:
    return tuple((str(host), int(port)) for host, port in pairs)
