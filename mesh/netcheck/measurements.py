"""What the network check sees: one way of one pair at a time. Plain data, which travels as it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from mesh.states import Transport

Way = tuple[int, int]
"""From one rank to another: who dials, and who is dialled."""


class PortKind(StrEnum):
    """The ports that training needs between members, and that firewalls treat differently."""

    RENDEZVOUS = "rendezvous"
    """MASTER_PORT, 29500 unless it is taken: where every rank meets rank 0."""
    EPHEMERAL = "ephemeral"
    """One that the system chose: gloo, NCCL and torchrun's own workers listen on such ports."""


class Dialled(StrEnum):
    """How an attempt to reach a port ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """The machine, or something in its place, said no."""
    SILENT = "silent"
    """Nobody answered in time, or there is no route: lost on the way, there or back."""
    MUTE = "mute"
    """The connection was made, and nothing came through it."""
    STRANGER = "stranger"
    """Something else than the check's other end answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """One member of the check.

    `place`: provider, and region after a slash; what is measured between two places is compared with ways between the
    same two.
    `mtu_bytes` is that of the interface towards the others, 0 when it is not known. `versions` by name ("torch",
    "nccl", "driver", "gangmesh" …); what is not installed is left out.
    """

    rank: int
    machine: str
    address: str
    rendezvous_port: int
    ephemeral_port: int
    place: str = ""
    path: Transport = Transport.PRIVATE
    """How it is reached."""
    mtu_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def provider(self) -> str:
        return self.place.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One way of a pair: was each port reached? Times are of the ephemeral port; None when it was not.

    `offset_s` is how far the other clock is ahead, by the exchange with the shortest round trip (RFC 5905, section 8);
    it is right to half of `round_trip_s`.
    """

    rendezvous: Dialled
    ephemeral: Dialled
    round_trip_s: float | None = None
    offset_s: float | None = None

    @property
    def is_open(self) -> bool:
        return self.rendezvous is self.ephemeral is Dialled.ANSWERED

    @property
    def is_doubtful(self) -> bool:
        """A machine that is too busy to answer looks like this too; its kernel makes connections for it."""
        return not {self.rendezvous, self.ephemeral}.isdisjoint((Dialled.MUTE, Dialled.STRANGER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One way of a pair: much data at once.

    `bytes_per_s` as the receiver counted; None when it did not come through. Then `segment_bytes_max` is the largest
    TCP segment of those tried that did, None when none did.
    """

    bytes_per_s: float | None = None
    segment_bytes_max: int | None = None


@dataclass(slots=True)
class Seen:
    """Everything that a check has seen so far; what is missing was not measured."""

    has_ranks: bool = True
    """The members are those of a gang; else their numbers mean nothing to anybody."""
    members: dict[int, MemberFacts] = field(default_factory=dict)
    asked: set[Way] = field(default_factory=set)
    """Ways that were to be measured."""
    reach: dict[Way, Reach] = field(default_factory=dict)
    push: dict[Way, Push] = field(default_factory=dict)
    heard: set[Way] = field(default_factory=set)
    """Ways that a datagram came along; a firewall may drop these and let connections be."""

    confirmed: set[Way] = field(default_factory=set)
    """Ways that were dialled with patience, since what had been seen of them was doubtful."""

    pushes: Counter[Way] = field(default_factory=Counter)
    """How often each way was measured."""

    def path_of(self, way: Way) -> Transport:
        """What two members speak over: the slower of how each is reached."""
        return max((self.members[rank].path for rank in way), key=list(Transport).index)

    def add_push(self, way: Way, push: Push) -> None:
        """Keeps the best measurement: a busy moment slows a link down, nothing speeds it up."""
        self.pushes[way] += 1
        before = self.push.get(way)
        if before is None or (push.bytes_per_s or 0.0) > (before.bytes_per_s or 0.0):
            self.push[way] = push
