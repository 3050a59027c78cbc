"""What the API answers with, as types. The one source for the client's types and for the OpenAPI document.

Rules of this file:
1. Every key is always there; a fact that is not known (yet) is null.
2. Times are seconds since 1970 in UTC, as a number, for people: nothing is decided by comparing them.
3. Keys are camelCase, as in a Job resource; the two labels of an attempt keep their documented names.
4. A key may be added, and none is renamed or taken away within `nodus.dev/v1`.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from mesh.network_resources import PathEstimate


class ProcessEnd(TypedDict):
    """How a process ended: exactly one of the two is a number."""

    code: int | None
    signal: int | None


class RankStatus(TypedDict):
    """One rank in the current epoch."""

    rank: int
    machine: str | None
    address: str | None
    state: str
    """Of the member: Ordered, Preparing, AtBarrier, Running, Exited, Fenced or Lost."""
    exit: ProcessEnd | None
    lastOutputAt: float | None
    startedAt: float | None
    finishedAt: float | None
    lives: int
    """How often the rank was begun in this epoch: 1, and one more for each time that it started again alone."""


class BarrierStatus(TypedDict):
    """How far the assembly is."""

    arrived: int
    of: int


class TopologyStatus(TypedDict):
    """The shape, resolved once; it never changes for the life of a run."""

    nodes: int
    gpusPerNode: int
    processesPerNode: int
    worldSize: int


class Condition(TypedDict):
    """Something worth knowing about a run that is no failure."""

    type: str
    message: str


class Cause(TypedDict):
    """The evidence for a failure: of the rank that explains the others."""

    rank: int
    at: float
    reason: str
    message: str
    exit: ProcessEnd | None
    """How the rank's command (torchrun, say) ended."""
    workerExit: ProcessEnd | None
    """How the first failed process behind it ended, where a launcher's report says so."""
    globalRank: int | None
    """That process's global rank."""
    hint: str
    """What to do about it, when the fault is a known one; else empty."""
    lastLines: list[str]


class RestartCounts(TypedDict):
    """Restarts that count now, by what they are charged to. Ten healthy minutes bring all of them back to 0."""

    of: int
    """`recovery.maxAttempts`: how many each kind may come to. Those that are ours to pay for have no limit."""
    failure: int
    """The command failed."""
    loss: int
    """A machine was lost without notice."""
    reclaim: int
    """A machine was wanted back."""
    ours: int
    """This program's own fault."""
    withoutProgress: int
    """In a row, without a newer checkpoint and without ten healthy minutes."""
    total: int
    """Of the whole run; never brought back."""


class EpochStatus(TypedDict):
    """One collective life of the gang."""

    epoch: int
    beganAt: float
    """Members were ordered to their machines."""
    openedAt: float | None
    """Every rank had arrived at the barrier."""
    runningAt: float | None
    """Every rank's command runs."""
    stoppedAt: float | None
    """It was decided that this epoch ends."""
    endedAt: float | None
    """Every member was proven unable to act."""
    kept: list[int]
    """Ranks that had their machine from the epoch before."""
    replaced: list[int]
    """Ranks that got another machine for it, or while it assembled."""
    restored: str | None
    """The checkpoint that it began from."""
    restoredStep: int | None
    network: str | None
    """What the last check of its machines' network came to; null where none was needed."""
    reason: str | None
    """Why it ended, in one word; null while it goes on."""
    cause: Cause | None
    """What it ended of, when it was not meant to end."""
    victims: list[int]
    """Ranks that failed because of the cause."""
    chargedTo: str | None
    """Failure, Loss, Reclaim or Ours: what the restart after it was charged to. Null when it was the last one, or
    its assembly was tried again."""
    ledSomewhere: bool
    """What it ran counts: it runs now, it succeeded, or a checkpoint came of it."""
    lostSeconds: float | None
    """Of its running time, what came after the checkpoint that was gone on from; null when nothing is known of it."""


class CheckpointStatus(TypedDict):
    """A gang checkpoint that is committed: every rank's part of it is in the checkpoint store."""

    id: str
    uri: str
    epoch: int
    step: int | None
    bytes: int
    at: float


class Productive(TypedDict):
    """How much of the time since the run was submitted led somewhere."""

    seconds: float
    """In which every rank ran, in epochs that led somewhere, without what was lost."""
    share: float
    """Of all the time until now, or until the end; from 0 to 1."""


class RunMetadata(TypedDict):
    """Who the run is."""

    name: str
    uid: str
    """Names this run for ever; a name can be used again after the run was deleted."""
    labels: dict[str, str]
    createdAt: float


class PathStatus(TypedDict):
    """How the members of the current epoch reach each other."""

    transport: str
    """private, public, direct or relayed: NODUS_GANG_TRANSPORT."""
    layer: str
    """The network's layer of the fence, in words; empty where there is none."""
    lacks: list[str]
    """Machine by machine, what it does not cover there, and why."""


class RunStatus(TypedDict):
    """What became of it."""

    state: str
    reason: str | None
    message: str | None
    epoch: int
    """0 before the first assembly."""
    exitCode: int | None
    """The run's own exit code once it has ended: of the failing rank, 128 + n for signal n, 126 and 127 when its
    command could not be executed or was not found."""
    topology: TopologyStatus
    barrier: BarrierStatus
    startedAt: float | None
    endedAt: float | None
    ranks: list[RankStatus]
    path: PathStatus | None
    """Null until a rank's command runs."""
    conditions: list[Condition]
    cause: Cause | None
    """Of the last epoch's end."""
    restarts: RestartCounts
    epochs: list[EpochStatus]
    """The story, the current epoch last; the oldest of very many are left out."""
    checkpoint: CheckpointStatus | None
    """The newest one that is committed."""
    productive: Productive


class Run(TypedDict):
    """A Job resource: what was asked for and what became of it."""

    apiVersion: str
    kind: str
    metadata: RunMetadata
    spec: dict[str, Any]
    """As it was asked for, defaults filled in. The values of variables that sound like secrets are null."""
    status: RunStatus


class Attempt(TypedDict):
    """One rank's part in one epoch."""

    run: str
    uid: str
    rank: int
    epoch: int
    machine: str | None
    state: str
    labels: dict[str, str]
    createdAt: float
    startedAt: float | None
    endedAt: float | None
    exit: ProcessEnd | None
    reason: str | None
    """Why this life ended, in one word; null while it goes on."""
    message: str
    """The same in a sentence."""
    cause: Cause | None
    """When this rank is what its epoch ended of."""
    registeredAt: float | None
    """It took its lease."""
    arrivedAt: float | None
    """It was prepared, and at the barrier."""
    bootSeconds: float | None
    """From the order to the barrier, what it restored included."""
    restored: str | None
    """The checkpoint that its epoch began from."""
    restoredStep: int | None
    placement: dict[str, Any]
    cost: float | None


class MachineNetwork(TypedDict):
    """How a machine of the mesh can be reached."""

    dialable: bool
    """Others can dial its gateway; else they reach it by a relay."""
    privateNetwork: str | None
    privateAddress: str | None
    """Its address there."""
    publicAddress: str | None
    """Its owner allows clear text there."""


class Machine(TypedDict):
    """A host that members can run on."""

    name: str
    address: str
    labels: dict[str, str]
    gpus: dict[str, Any]
    """`{"type": "H100" | null, "count": 8}`."""
    state: str
    """Ready, InUse, Leaving (it is wanted back: nobody gets it any more) or Lost. One that has left is not listed."""
    run: str | None
    waitsFor: str | None
    """What one that leaves waits for, in words."""
    network: MachineNetwork | None
    """Null for one that is not on the mesh."""


class Event(TypedDict):
    """Something that happened. `seq` grows by at least one from event to event and is never reused."""

    seq: int
    at: float
    run: str | None
    uid: str | None
    epoch: int | None
    rank: int | None
    kind: str
    reason: str | None
    message: str


class LogLine(TypedDict):
    """One line that a rank printed."""

    cursor: str
    """Opaque. Reading on from it leaves nothing out and repeats nothing."""
    at: float
    rank: int
    epoch: int
    stream: str
    """stdout, stderr, or system for a notice that something is missing here."""
    text: str
    partial: bool
    """A preview of a line that has not ended; the whole line still follows."""
    continued: bool
    """A piece of a very long line; the next line of this stream goes on with it."""


class Estimate(TypedDict):
    """What a run can cost and how long it can wait, before anything is created."""

    ratePerHourUSD: float
    gangHoldUSD: float
    assemblyBoundUSD: float
    assemblyBoundSeconds: float
    assemblyTries: int
    note: str
    """Why the figures are what they are."""


class Submission(TypedDict):
    """The answer to a submit."""

    run: Run
    warnings: list[str]


class DryRun(TypedDict):
    """The answer to a dry run: nothing was created."""

    dryRun: bool
    job: dict[str, Any]
    topology: TopologyStatus
    estimate: Estimate
    paths: list[PathEstimate]
    """Ways between its members that leave a trusted network."""
    warnings: list[str]


class DeploymentStatus(TypedDict):
    """The deployment as a whole."""

    state: str
    """Ready, Starting or Stopping."""
    version: str
    local: bool
    machines: dict[str, int]
    """How many machines are in which state: `{"Ready": 2, "InUse": 0, "Leaving": 0, "Lost": 0}`."""
    runs: dict[str, int]
    """How many runs are in which state; states without a run are left out."""
    details: dict[str, Any]
    """What else the deployment says about itself."""


class Harm(TypedDict):
    """A fault that was done to one rank on purpose (`mesh chaos`)."""

    run: str
    kind: str
    """LoseMachine, KillRank, Freeze or Cut."""
    rank: int
    epoch: int
    """In which it was done."""
    machine: str
    at: float
    seconds: float | None
    """After which it is undone; null for what is not undone."""
    oneWay: bool
    message: str
    """What was done, in a sentence; the same is among the run's events."""


class JoinTokenFacts(TypedDict):
    """A join token as lists show it. Times are seconds since 1970."""

    id: str
    state: str
    """Open, Used, Expired or Revoked."""
    purpose: str
    """Machine or Relay: who may use it."""
    expiresAt: float
    usedAt: float | None


class NewJoinToken(TypedDict):
    """A new token. It is shown once."""

    token: str
    facts: JoinTokenFacts


class AuthorityFacts(TypedDict):
    """A certificate authority of a deployment. Times are seconds since 1970."""

    fingerprint: str
    """SHA-256 of its certificate, hexadecimal: what join tokens carry."""
    endsAt: float


class RotationFacts(TypedDict):
    """Whom the machines of a deployment trust. Times are seconds since 1970."""

    signing: AuthorityFacts
    next: AuthorityFacts | None
    """Trusted already; signs from signsAt on, when waitsFor is empty."""
    old: AuthorityFacts | None
    """Signs no more; trusted until forgottenAt."""
    signsAt: float | None
    forgottenAt: float | None
    waitsFor: list[str]
    """Machines and relays that do not trust the next one yet."""


class RelayFacts(TypedDict):
    """A relay of the deployment. Times are seconds since 1970."""

    name: str
    addresses: list[str]
    """Where machines dial it, best first; of the head's own none: it is at the head's mesh port."""
    state: str
    """Up; Unreachable: the head cannot dial it; Away: it has not been heard of."""
    since: float | None
    """When it joined first; null for the head's own."""
    lines: int
    """Machines that can be reached through it."""
    streams: int
    bytes: int
    """All that it ever carried, both directions together."""


class RelayedBytes(TypedDict):
    """Bytes that a relay carried between two machines, both directions together."""

    relay: str
    run: str | None
    """Its uid; null for what machines do among themselves (Ray)."""
    dialler: str
    target: str
    bytes: int


class VersionInfo(TypedDict):
    """Of the server."""

    version: str
    api: str


class ErrorBody(TypedDict):
    """A `MeshError` as data: class, reason, what happened, what to do."""

    error: str
    reason: str
    message: str
    hint: str
    details: dict[str, Any]


class ErrorReply(TypedDict):
    """Every answer with a status of 400 or more."""

    error: ErrorBody
    requestId: str
