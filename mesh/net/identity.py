"""Who speaks: a machine, a member of a gang in one epoch, or a relay. As names in certificates; pure.

Rules of this file:
1. A name is a URI (the certificate's only subject alternative name), and `parse` takes exactly what `uri` makes: one
   spelling per identity, so that comparing is enough.
2. Nothing of a name comes from who asks for the certificate; the authority writes it from its own records.

    gangmesh://<deployment>/machine/<machine>
    gangmesh://<deployment>/machine/<machine>/run/<run uid>/epoch/<epoch>/rank/<rank>
    gangmesh://<deployment>/relay/<name>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mesh.ids import Epoch, MachineName, Rank, RunUid

SCHEME = "gangmesh"
NUMBER_MAX = 2**53 - 1
"""Epochs beyond this are no epochs; the limit keeps every reader, JSON ones too, exact."""
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"
_NUMBER = r"0|[1-9][0-9]{0,15}"
_URI = re.compile(
    rf"{SCHEME}://(?P<deployment>{_WORD})/(?:relay/(?P<relay>{_WORD})|machine/(?P<machine>{_WORD})"
    rf"(?:/run/(?P<run>{_WORD})/epoch/(?P<epoch>{_NUMBER})/rank/(?P<rank>{_NUMBER}))?)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineIdentity:
    """A machine of a deployment."""

    deployment: str
    machine: MachineName

    @property
    def uri(self) -> str:
        return f"{SCHEME}://{self.deployment}/machine/{self.machine}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberIdentity:
    """One rank of a run in one epoch, on the machine that it has in that epoch."""

    deployment: str
    machine: MachineName
    run: RunUid
    epoch: Epoch
    rank: Rank

    @property
    def uri(self) -> str:
        return (
            f"{SCHEME}://{self.deployment}/machine/{self.machine}"
            f"/run/{self.run}/epoch/{self.epoch}/rank/{self.rank}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayIdentity:
    """A relay that is no machine: it joins streams, and may not dial anybody."""

    deployment: str
    machine: MachineName
    """Its name, of the same series as machines' names: one list says who is not believed any more."""

    @property
    def uri(self) -> str:
        return f"{SCHEME}://{self.deployment}/relay/{self.machine}"


Identity = MachineIdentity | MemberIdentity | RelayIdentity


def parse_identity(uri: str) -> Identity:
    """The inverse of `uri`. Raises ValueError for anything else."""
    match = _URI.fullmatch(uri, 0, 1024)
    if match is None or len(uri) > 1024:
        raise ValueError(f"{uri[:200]!r} is no name of a machine, a member or a relay")
    if match["relay"] is not None:
        return RelayIdentity(deployment=match["deployment"], machine=MachineName(match["relay"]))
    deployment, machine = match["deployment"], MachineName(match["machine"])
    if match["run"] is None:
        return MachineIdentity(deployment=deployment, machine=machine)
    epoch, rank = int(match["epoch"]), int(match["rank"])
    if epoch > NUMBER_MAX or rank > NUMBER_MAX:
        raise ValueError(f"{uri[:200]!r} has a number that is too large")
    return MemberIdentity(
        deployment=deployment,
        machine=machine,
        run=RunUid(match["run"]),
        epoch=Epoch(epoch),
        rank=Rank(rank),
    )


def checked(identity: Identity) -> Identity:
    """The identity itself when its name can be read back. Raises ValueError: its parts are not fit for a name."""
    if parse_identity(identity.uri) != identity:
        raise ValueError(f"{identity.uri[:200]!r} is no name of a machine, a member or a relay")
    return identity


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCertificate:
    """What a certificate that our authority signed says. Times are seconds since 1970."""

    identity: Identity
    not_before: float
    not_after: float
