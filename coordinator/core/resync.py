"""What a coordinator missed while it did not watch the store: the difference between its state and a snapshot.

Rules of this file:
1. A snapshot tells what is; an event that follows from it may have been heard already, which changes nothing.
2. A member that held a lease and holds none any more is lost, or has given it back. One that was never heard of
   may not have taken its lease yet, unless the barrier opened: then every rank held one.
3. Of a store that has not seen the epoch from its start, a lease that is not there tells nothing: its member is to
   be given one, which it renews or which lapses.
4. A lease whose holder has no connection is a suspicion.
5. The gang is as it was when the snapshot was asked for: a lease that was taken since is in neither.
6. A member that was admitted after the opening may not have taken its lease yet, and is left to come.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.core.events import BarrierOpened, GangEvent, LeaseGone, MemberSuspected
from coordinator.core.gang_state import Gang, MemberPhase, MemberRecord
from mesh.ids import Epoch, IncarnationToken, Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """What the store knows of a gang: its floor, who holds a lease, whether the start barrier opened."""

    epoch: Epoch
    holders: frozenset[tuple[Rank, IncarnationToken]]
    has_opened: bool
    tokens: tuple[IncarnationToken, ...] = ()
    """With which incarnations the barrier opened, in rank order."""
    unconnected: frozenset[tuple[Rank, IncarnationToken]] = frozenset()
    """Those of the holders whose connection has closed."""
    from_start: bool = True
    """The store has seen the epoch from its start."""


def missed_events(gang: Gang, view: StoreView) -> list[GangEvent]:
    """Events that bring the gang up to what the store says. None when the store is at another epoch."""
    if view.epoch != gang.epoch or gang.state.is_terminal:
        return []
    events: list[GangEvent] = []
    if view.has_opened and not gang.barrier_open:
        events.append(BarrierOpened(epoch=gang.epoch, tokens=view.tokens))
    if view.from_start:
        events.extend(LeaseGone(incarnation=member.incarnation) for member in _without_lease(gang, view))
    events.extend(
        MemberSuspected(incarnation=member.incarnation)
        for member in gang.members.values()
        if member.settlement is None and (member.rank, member.incarnation.token) in view.unconnected
    )
    return events


def unaccounted(gang: Gang, view: StoreView) -> list[MemberRecord]:
    """Members that the store is to be given a lease for (rule 3)."""
    if view.epoch != gang.epoch or gang.state.is_terminal or view.from_start:
        return []
    return _without_lease(gang, view)


def _without_lease(gang: Gang, view: StoreView) -> list[MemberRecord]:
    """Members that must hold a lease, and hold none there."""
    has_opened = view.has_opened or gang.barrier_open
    return [
        member
        for member in members_with_lease(gang, has_opened=has_opened)
        if (member.rank, member.incarnation.token) not in view.holders
    ]


def members_with_lease(gang: Gang, *, has_opened: bool) -> list[MemberRecord]:
    """Members that must hold a lease, by what is known of them."""
    return [
        member
        for member in gang.members.values()
        if member.settlement is None
        and (has_opened or member.phase is not MemberPhase.ORDERED)
        and not member.may_still_come
    ]
