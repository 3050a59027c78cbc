"""The seam between a coordinator and its machines: hold them, bring members to life on them, give them back.

Rules of this file:
1. A reservation is all or nothing, and is named by (run uid, number): asking for it again finds it.
2. Everything may be done twice; the second time changes nothing.
3. A wait ends when its caller cancels it. Nothing here decides what a failure means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.events import Placement
from mesh.errors import PlacementError
from mesh.ids import Incarnation, MachineName, RunUid
from mesh.messages import FenceOrder, JoinOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run needs: `nodes` machines, each with so many accelerators of one of the types (any if empty)."""

    nodes: int
    gpus_per_node: int
    gpu_types: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """One machine, as its provider and Ray describe it now."""

    name: MachineName
    address: str
    labels: dict[str, str]
    gpu_type: str | None
    gpu_count: int
    is_alive: bool


class MemberGoneError(PlacementError):
    """The member's actor is dead, or could not be created."""

    retryable = False


class Fleet(Protocol):
    """The machines of one deployment."""

    async def machines(self) -> list[MachineFacts]:
        """Every machine, the dead ones too while Ray remembers them."""
        ...

    async def reserve(
        self, uid: RunUid, reservation: int, shape: Shape, *, on_waiting: Callable[[str], None]
    ) -> tuple[Placement, ...]:
        """Waits until every machine is held and returns them in rank order.

        `on_waiting` hears, machine by machine, why it takes time.
        """
        ...

    async def release(self, uid: RunUid, reservation: int) -> None:
        """Gives everything of this reservation back; returns when that is confirmed."""
        ...

    async def order(self, order: JoinOrder, reservation: int) -> None:
        """Brings the member to life (or finds it) and hands it the order. Raises MemberGoneError."""
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
    if facts.gpu_count < shape.gpus_per_node:
        return f"has {facts.gpu_count} of {shape.gpus_per_node} accelerators"
    if shape.gpus_per_node and shape.gpu_types and facts.gpu_type not in shape.gpu_types:
        return f"has {facts.gpu_type or 'no typed'} accelerators, not {' or '.join(shape.gpu_types)}"
    return None


def why_waiting(shape: Shape, machines: list[MachineFacts], used_by: dict[str, str]) -> str:
    """One sentence: what is wanted, and machine by machine why it is not there."""
    wanted = f"{shape.nodes} machine{'s' if shape.nodes > 1 else ''}"
    if shape.gpus_per_node:
        kinds = "/".join(shape.gpu_types) or "accelerators"
        wanted += f" with {shape.gpus_per_node} {kinds}"
    parts = []
    for facts in sorted(machines, key=lambda m: m.name):
        lack = matches(facts, shape)
        if lack is None:
            owner = used_by.get(facts.name)
            lack = f"in use by {owner}" if owner else "free"
        parts.append(f"{facts.name} {lack}")
    there = "; ".join(parts) if parts else "the deployment has no machines"
    return f"Waiting for {wanted}, all at once: {there}."
