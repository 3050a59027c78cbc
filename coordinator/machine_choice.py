"""Which waiting reservation gets which free machines. Pure.

Rules of this file:
1. All or nothing: a reservation gets all of its machines in one look, or none.
2. First come, first served among those that fit. A run that holds machines already goes before those that hold
   none: its survivors stand still until the lost rank has a machine.
3. Who fits may overtake who does not, for PATIENCE_S. From then on the free machines that fit the one who waits are
   kept for it, look by look, until there are enough: a big gang is not starved by small ones. One that could never be
   served keeps nothing.
4. Only machines that have an allowed path together, and with what the run holds, are granted together; of the sets
   that have one, one with the best path.
5. Then the machine with the fewest accelerators that will do is taken, then the one with the lowest name.
6. Two providers that are apart (they never reached each other) are not in one set, nor one of them beside what a run
   holds of the other. It is tried from each provider on, and the first set that will do is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from coordinator.core.effects import ReserveMachines
from coordinator.core.gang_state import Gang
from coordinator.fleet import MachineFacts, Shape, companions, matches, pick
from mesh.ids import MachineName, RunUid

PATIENCE_S = 60.0
APART_TOLD_MAX = 3

WhyApart = Callable[[str, str], str | None]
"""Why machines of two providers are not offered to one run; None when they are."""


def together(a: str, b: str) -> str | None:
    """All are."""
    return None


def never_passed(a: str, b: str, fault: str) -> str:
    """Why two providers are apart: what the last check between them found."""
    one, other = sorted((a, b))
    return f"{one or 'machines without a provider'} and {other} never passed a network check. {fault}"


_WORDS = re.compile(r"\d+|\D+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One reservation that waits, since `since` (monotonic seconds)."""

    uid: RunUid
    reservation: int
    shape: Shape
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one of them gets, in the order in which its ranks should have them."""

    asked: Asked
    machines: tuple[MachineFacts, ...]


def choose(
    asked: Sequence[Asked],
    machines: Sequence[MachineFacts],
    taken: Mapping[MachineName, RunUid],
    *,
    shunned: frozenset[MachineName] = frozenset(),
    now: float,
    why_apart: WhyApart = together,
) -> list[Grant]:
    """Who gets what now. `asked` is in the order of their coming; `shunned` are not free for a while."""
    free = [m for m in machines if m.name not in taken and m.name not in shunned]
    holders = set(taken.values())
    grants = []
    for one in sorted(asked, key=lambda a: a.uid not in holders):
        if not free:
            break
        fitting = [m for m in free if matches(m, one.shape) is None]
        fitting.sort(key=lambda m: (m.gpu_count, natural(m.name)))
        own = {m for m, uid in taken.items() if uid == one.uid}
        beside = companions(one.shape, machines, own)
        best = _first_set(one.shape, fitting, beside, why_apart)
        if best is not None:
            grants.append(Grant(asked=one, machines=tuple(sorted(best, key=lambda m: natural(m.name)))))
            kept = {m.name for m in best}
        elif fitting and now - one.since >= PATIENCE_S and is_possible(one.shape, machines, beside):
            kept = {m.name for m in fitting}
        else:
            continue
        free = [m for m in free if m.name not in kept]
    return grants


def _first_set(
    shape: Shape, fitting: Sequence[MachineFacts], beside: Sequence[MachineFacts], why_apart: WhyApart
) -> tuple[MachineFacts, ...] | None:
    """Rules 4 to 6."""
    if why_apart is together:
        return pick(shape, fitting, beside)
    held = {m.provider for m in beside}
    providers = list(dict.fromkeys(m.provider for m in fitting if _fits(m.provider, held, why_apart)))
    for first in providers:
        group: set[str] = set()
        for provider in [first, *providers]:
            if _fits(provider, group, why_apart):
                group.add(provider)
        best = pick(shape, [m for m in fitting if m.provider in group], beside)
        if best is not None:
            return best
    return None


def _fits(provider: str, others: Collection[str], why_apart: WhyApart) -> bool:
    return all(why_apart(provider, other) is None for other in others)


def why_not_together(
    shape: Shape, machines: Sequence[MachineFacts], taken: Container[MachineName], *, why_apart: WhyApart
) -> list[str]:
    """Of the free machines that fit: every reason why two of their providers are apart, once."""
    if why_apart is together:
        return []
    free = sorted({m.provider for m in machines if m.name not in taken and matches(m, shape) is None})
    reasons = (why_apart(a, b) for place, b in enumerate(free) for a in free[:place])
    return [why for why in reasons if why is not None][:APART_TOLD_MAX]


def shape_of(wish: ReserveMachines, gang: Gang) -> Shape:
    """What a gang wants, beside what it has."""
    return Shape(
        nodes=wish.nodes,
        gpus_per_node=wish.gpus_per_node,
        gpu_types=wish.gpu_types,
        avoid=wish.avoid,
        beside=tuple(gang.seats[rank].machine for rank in sorted(gang.seats)),
        policy=gang.plan.transport_policy,
        scope=gang.plan.network,
    )


def is_possible(shape: Shape, machines: Sequence[MachineFacts], beside: Sequence[MachineFacts] = ()) -> bool:
    """Whether there would be enough if nobody else had any."""
    fitting = [m for m in machines if matches(m, shape) is None and m not in beside]
    return pick(shape, fitting, beside) is not None


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A key for sorting names in which numbers count as numbers."""
    return [(w.isdigit(), int(w) if w.isdigit() else 0, w) for w in _WORDS.findall(name)]
