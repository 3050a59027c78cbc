"""The seam between a coordinator and its machines: hold them, bring members to life on them, give them back.

Rules of this file:
1. A reservation is all or nothing, and is named by (run uid, number): asking for it again finds it. Its machines
   are given back one by one, or all together while nobody has taken them.
2. Everything may be done twice; the second time changes nothing.
3. A wait ends when its caller cancels it. Nothing here decides what a failure means.
4. A machine that is given back and not clean goes to nobody before it is swept, or gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agents.chaos import HarmOrder
from coordinator.core.events import Placement
from mesh.errors import PlacementError
from mesh.ids import Incarnation, MachineName, RunUid
from mesh.messages import CheckpointOrder, FenceOrder, JoinOrder
from mesh.net import paths
from mesh.net.paths import NetworkFacts, NoPath
from mesh.netcheck.measurements import Seen
from mesh.states import NetworkScope, TransportPolicy

LOST_TOLD_MAX = 3
"""Of lost machines so many are named to who waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run needs: `nodes` machines, each with so many accelerators of one of the types (any if empty)."""

    nodes: int
    gpus_per_node: int
    gpu_types: tuple[str, ...]
    avoid: tuple[MachineName, ...] = ()
    """Not these."""
    beside: tuple[MachineName, ...] = ()
    """What the run has already: the new ones must have a path to these as well."""
    policy: TransportPolicy = TransportPolicy.DIRECT
    scope: NetworkScope = NetworkScope.COLOCATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why a reservation takes time."""

    why: str
    is_possible: bool
    """False when no machine that there is, busy ones included, could ever be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """One machine, as its provider and Ray describe it now."""

    name: MachineName
    address: str
    labels: dict[str, str]
    gpu_type: str | None
    gpu_count: int
    is_alive: bool
    is_cordoned: bool = False
    """Nobody gets it any more: it is wanted back."""
    network: NetworkFacts | None = None
    """Where it stands; None: nothing is known beyond its address and its labels."""

    @property
    def provider(self) -> str:
        """Empty when it says none."""
        return self.labels.get("provider", "")

    @property
    def standing(self) -> NetworkFacts:
        return self.network or paths.facts_of(self.name, self.address, self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMachine:
    """A machine that a run holds."""

    name: MachineName
    reservation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a look at the network between machines has seen; `absent`: who could not be looked at, and why."""

    seen: Seen
    absent: dict[int, str]


class MemberGoneError(PlacementError):
    """The member's actor is dead, or could not be created."""

    retryable = False


class Fleet(Protocol):
    """The machines of one deployment."""

    async def machines(self) -> list[MachineFacts]:
        """Every machine, the dead ones too while Ray remembers them."""
        ...

    async def reserve(
        self, uid: RunUid, reservation: int, shape: Shape, *, on_waiting: Callable[[Waiting], None]
    ) -> tuple[Placement, ...]:
        """Waits until every machine is held and returns them, as ranks should have them.

        `on_waiting` hears, machine by machine, why it takes time.
        """
        ...

    async def withdraw(self, uid: RunUid, reservation: int) -> None:
        """Gives everything of this reservation back; nobody was ordered there. Returns when that is confirmed."""
        ...

    async def release(self, uid: RunUid, reservation: int, machine: MachineName, *, is_clean: bool) -> None:
        """Gives one machine back; returns when others may have it, or when it is gone.

        Unless `is_clean`, everything of the run that still runs there is killed first, and that is proven.
        """
        ...

    async def held_by(self, uid: RunUid) -> list[HeldMachine]:
        """Every machine of this run, also of reservations that nobody remembers; nobody may be asking for more."""
        ...

    async def holders(self) -> set[RunUid]:
        """Every run that holds a machine, also one that nobody remembers."""
        ...

    async def cordon(self, machine: MachineName) -> None:
        """Nobody gets this machine from now on: it is wanted back. NotFoundError when there is no such machine."""
        ...

    async def why_no_harm(self, order: HarmOrder) -> str | None:
        """Why the machine cannot do this to itself, in a sentence; None when it can. Changes nothing."""
        ...

    async def harm(self, order: HarmOrder) -> None:
        """Does it. Returns when it is done, also when nobody is left there to say so."""
        ...

    async def left_of_harm(self, order: HarmOrder) -> str | None:
        """What is still wrong with the machine once harm for a time should be over, without the subject; None: nothing.

        Mends it where it can. A machine that is lost has nothing left. Raises MeshError when it does not answer.
        """
        ...

    async def look(self, machines: Mapping[int, MachineName], *, fresh: Collection[int]) -> Looked:
        """Measures the network between these, by rank: the ways of `fresh` ones. Ends within its own limits.

        Raises MeshError when the fleet cannot be asked at all.
        """
        ...

    async def order(self, order: JoinOrder, reservation: int) -> None:
        """Brings the member to life (or finds it) and hands it the order. Raises MemberGoneError."""
        ...

    async def tell_about_part(self, order: CheckpointOrder) -> None:
        """Hands it to the member. Raises MemberGoneError."""
        ...

    async def fence(self, order: FenceOrder) -> None:
        """Hands the member the order to stop. Raises MemberGoneError when there is no such member."""
        ...

    async def dismiss(self, incarnation: Incarnation) -> None:
        """Ends the member's actor, gently first. No member is no error."""
        ...

    async def forget_run(self, uid: RunUid) -> None:
        """Removes what the ranks of a deleted run kept on the machines that can be reached now."""
        ...


def matches(facts: MachineFacts, shape: Shape) -> str | None:
    """None when the machine has what a member of this shape needs, else what it lacks."""
    if not facts.is_alive:
        return "lost"
    if facts.is_cordoned:
        return "wanted back"
    if facts.name in shape.avoid:
        return "not for this rank"
    if facts.gpu_count < shape.gpus_per_node:
        return f"has {facts.gpu_count} of {shape.gpus_per_node} accelerators"
    if shape.gpus_per_node and shape.gpu_types and facts.gpu_type not in shape.gpu_types:
        return f"has {facts.gpu_type or 'no typed'} accelerators, not {' or '.join(shape.gpu_types)}"
    return None


def pick(
    shape: Shape, candidates: Sequence[MachineFacts], beside: Sequence[MachineFacts] = ()
) -> tuple[MachineFacts, ...] | None:
    """So many of the candidates, which all fit, as have an allowed path together; the first ones where several do."""
    by_name = {facts.name: facts for facts in candidates}
    found = paths.best_set(
        [facts.standing for facts in candidates],
        nodes=shape.nodes,
        beside=[facts.standing for facts in beside],
        policy=shape.policy,
        scope=shape.scope,
    )
    return None if found is None else tuple(by_name[standing.machine] for standing in found)


def companions(shape: Shape, machines: Sequence[MachineFacts], held: Container[str]) -> list[MachineFacts]:
    """Of `beside` those that are still held: one that is lost or given back binds nobody."""
    return [m for m in machines if m.name in shape.beside and m.is_alive and m.name in held]


def why_waiting(
    shape: Shape,
    machines: list[MachineFacts],
    used_by: Mapping[str, str],
    *,
    coming: Sequence[str] = (),
    apart: Sequence[str] = (),
) -> Waiting:
    """What is wanted, and machine by machine why it is not there. `coming` are being acquired.

    `apart`: why machines that are there are not offered together. One that was wanted back and is gone is not told of.
    """
    wanted = f"{shape.nodes} machine{'s' if shape.nodes > 1 else ''}"
    if shape.gpus_per_node:
        kinds = "/".join(shape.gpu_types) or "accelerators"
        wanted += f" with {shape.gpus_per_node} {kinds}"
    parts = []
    there_still = [m for m in machines if m.is_alive or not m.is_cordoned or m.name in used_by]
    ordered = sorted(there_still, key=lambda m: m.name)
    lost = [m for m in ordered if not m.is_alive]
    untold = {m.name for m in lost[LOST_TOLD_MAX:]}
    for facts in ordered:
        if facts.name in untold:
            continue
        lack = matches(facts, shape)
        owner = used_by.get(facts.name)
        parts.append(f"{facts.name} {f'in use by {owner}' if owner and facts.is_alive else lack or 'free'}")
    if untold:
        parts.append(f"{len(untold)} more lost")
    still_coming = sorted(set(coming) - {m.name for m in machines if m.is_alive})
    parts += [f"{name} is coming" for name in still_coming]
    there = "; ".join(parts) if parts else "the deployment has no machines"
    beside = companions(shape, machines, used_by)
    fitting = [m for m in ordered if matches(m, shape) is None and m not in beside]
    free = [m for m in fitting if m.name not in used_by]
    is_enough = len(fitting) + len(still_coming) >= shape.nodes
    not_together = "".join(f" Not offered together: {why}" for why in apart)
    no_path = _no_path_sentence(shape, free, beside)
    return Waiting(
        why=f"Waiting for {wanted}, all at once: {there}.{no_path}{not_together}",
        is_possible=is_enough and (bool(still_coming) or pick(shape, fitting, beside) is not None),
    )


def _no_path_sentence(shape: Shape, free: list[MachineFacts], beside: list[MachineFacts]) -> str:
    """Where there are enough machines, and no path between any so many of them."""
    if len(free) < shape.nodes or pick(shape, free, beside) is not None:
        return ""
    example = [facts.standing for facts in (*beside, *free[: shape.nodes])]
    path = paths.choose_path(example, policy=shape.policy, scope=shape.scope)
    why = path.why if isinstance(path, NoPath) else "each is fit for another path"
    names = ", ".join(facts.machine for facts in example)
    return f" No allowed path joins so many of those that are free; {names}: {why}."
