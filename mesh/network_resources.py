"""What the API answers with about the network between machines. See `mesh.resources`, whose rules hold here."""

from __future__ import annotations

from typing_extensions import TypedDict


class NetworkMachine(TypedDict):
    """One machine of a network check."""

    name: str
    address: str
    rendezvousPort: int
    ephemeralPort: int
    mtuBytes: int
    """Of the interface towards the others; 0 when it is not known."""
    versions: dict[str, str]
    """What is installed beside the agent: torch, nccl, cuda, driver, image; what is not is left out."""


class NetworkWay(TypedDict):
    """From one machine to another one; what was not measured is null."""

    sender: str
    """Who dials, and sends."""
    receiver: str
    path: str
    """private, public, direct or relayed."""
    rendezvous: str | None
    """How it went at the rendezvous port: answered, refused, silent, mute (nothing came through) or stranger."""
    ephemeral: str | None
    """The same at a port that the system chose."""
    roundTripSeconds: float | None
    clockOffsetSeconds: float | None
    """How far the receiver's clock is ahead."""
    bytesPerSecond: float | None
    """Null, with both ports answered: full-size packets did not come through."""
    segmentBytesMax: int | None
    """Then: the largest TCP segment of those tried that did."""


class NetworkFinding(TypedDict):
    """Something that is wrong with the network."""

    kind: str
    machines: list[str]
    """Whom it is about, the one that dials first."""
    message: str
    hint: str
    """What to do."""
    isFault: bool
    """Machines with a fault cannot be in one gang; everything else is a warning."""


class NetworkReport(TypedDict):
    """The answer to a check of the network."""

    passed: bool
    """Everything was measured, and nothing is at fault."""
    at: float
    seconds: float
    """How long it took."""
    machines: list[NetworkMachine]
    ways: list[NetworkWay]
    findings: list[NetworkFinding]
    notChecked: dict[str, str]
    """Machines that could not be looked at, and why."""


class PathEstimate(TypedDict):
    """How a run's members would reach each other between two providers, before anything is created."""

    providers: list[str]
    """Two names, which may be the same; empty where machines say none."""
    path: str
    """The best that the run admits: private, public, direct or relayed."""
    measuredOver: str | None
    """The path that a check measured: this one, or direct for public. Null: none was, and nothing is guessed."""
    roundTripSeconds: float | None
    bytesPerSecond: float | None
    allReduceSeconds: float | None
    """Of one all-reduce between the run's members; null without `modelSize`."""


class ProviderPath(TypedDict):
    """What is known of the ways between two providers over one path."""

    providers: list[str]
    """Two names, which may be the same; empty where machines say none."""
    path: str
    """private, public, direct or relayed."""
    passed: int
    """How many checks passed, of a gang's assembly or of `mesh check`."""
    failed: int
    passedAt: float | None
    failedAt: float | None
    fault: str | None
    """Of the last check that failed, with what to do."""
    roundTripSeconds: float | None
    """Measured last; the middle one of all ways between the two."""
    bytesPerSecond: float | None
    offered: bool
    """False: no gang gets machines of both, until a check passes."""
    allReduceSeconds: float | None
    """Of a model of the size that was asked for, between as many members; null when none was."""
