"""A fault that is done on purpose: from what a user asks to what a machine is told. Pure.

The harm itself is `agents.chaos`; what comes of it is recovered from as from any other fault.
"""

from __future__ import annotations

from collections.abc import Iterable

from agents.chaos import HarmOrder
from coordinator.core.gang_state import Gang, MemberRecord, Settlement
from mesh.resources import Harm
from mesh.states import HarmKind

_PROVEN_GONE = (Settlement.CONFIRMED, Settlement.NEVER_STARTED, Settlement.REVOKED)


def harm_order(
    *,
    kind: HarmKind,
    member: MemberRecord,
    seconds: float | None,
    is_one_way: bool,
    gangs: Iterable[Gang],
) -> HarmOrder:
    """What the member's machine is told. `gangs` are all there are: others' lives on that machine fall with it."""
    lives = [
        m.incarnation
        for gang in gangs
        for m in gang.all_members
        if m.machine == member.machine and m.settlement not in _PROVEN_GONE
    ]
    return HarmOrder(
        kind=kind,
        machine=member.machine,
        address=member.address,
        incarnation=member.incarnation,
        lives=tuple(lives),
        seconds=seconds,
        is_one_way=is_one_way,
    )


def harm_resource(gang: Gang, order: HarmOrder, *, at: float) -> Harm:
    """As the API tells it."""
    return {
        "run": gang.plan.name,
        "kind": str(order.kind),
        "rank": order.incarnation.rank,
        "epoch": order.incarnation.epoch,
        "machine": order.machine,
        "at": at,
        "seconds": order.seconds,
        "oneWay": order.is_one_way,
        "message": f"A rehearsed fault: {_what(order)}.",
    }


def _what(order: HarmOrder) -> str:
    rank, machine = order.incarnation.rank, order.machine
    for_a_time = "" if order.seconds is None else f" for {order.seconds:g} s"
    match order.kind:
        case HarmKind.LOSE_MACHINE:
            return f"everything on {machine} (rank {rank}) is killed"
        case HarmKind.KILL_RANK:
            return f"the command of rank {rank} on {machine} is killed"
        case HarmKind.FREEZE:
            return f"everything on {machine} (rank {rank}) stands still{for_a_time}"
        case HarmKind.CUT:
            way = "what leaves it is lost" if order.is_one_way else "nothing reaches or leaves it"
            return f"{machine} (rank {rank}) is cut off{for_a_time}: {way}"
