"""The seam between a coordinator and its machines: hold them, bring members to life on them, give them back.

Rules of this file:
1. A reservation is all or nothing, and is named by (run uid, number): asking for it again finds it. Its machines
   are given back one by one, or all together while nobody has taken them.
2. Everything may be done twice; the second time changes nothing.
3. A wait ends when its caller cancels it. Nothing here decides what a failure means.
4. A machine that is given back and not clean goes to nobody before it is swept, or gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agents.chaos import HarmOrder
from coordinator.core.events import Placement
from mesh.errors import PlacementError
from mesh.ids import Incarnation, MachineName, RunUid
from mesh.messages import CheckpointOrder, FenceOrder, JoinOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run needs: `nodes` machines, each with so many accelerators of one of the types (any if empty)."""

    nodes: int
    gpus_per_node: int
    gpu_types: tuple[str, ...]
    avoid: tuple[MachineName, ...] = ()
    """Not these."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMachine:
    """A machine that a run holds."""

    name: MachineName
    reservation: int


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


def why_waiting(
    shape: Shape, machines: list[MachineFacts], used_by: Mapping[str, str], *, coming: Sequence[str] = ()
) -> Waiting:
    """One sentence: what is wanted, and machine by machine why it is not there. `coming` are being acquired."""
    wanted = f"{shape.nodes} machine{'s' if shape.nodes > 1 else ''}"
    if shape.gpus_per_node:
        kinds = "/".join(shape.gpu_types) or "accelerators"
        wanted += f" with {shape.gpus_per_node} {kinds}"
    parts = []
    fitting = 0
    for facts in sorted(machines, key=lambda m: m.name):
        lack = matches(facts, shape)
        fitting += lack is None
        owner = used_by.get(facts.name)
        parts.append(f"{facts.name} {f'in use by {owner}' if owner and facts.is_alive else lack or 'free'}")
    still_coming = sorted(set(coming) - {m.name for m in machines if m.is_alive})
    parts += [f"{name} is coming" for name in still_coming]
    there = "; ".join(parts) if parts else "the deployment has no machines"
    return Waiting(
        why=f"Waiting for {wanted}, all at once: {there}.",
        is_possible=fitting + len(still_coming) >= shape.nodes,
    )
