"""What to tell a store that may have been restarted, and what to believe of it.

Rules of this file:
1. A store that was restarted knows nothing. It is told every epoch that is under way, with the incarnations that were
   given up, in one request: nobody can take a lease of it before. Then every member that must hold a lease is given
   one: a living member renews it within a heartbeat, a dead one's lapses and says so.
2. "It has not been" is believed only of a store that has seen the epoch from its first moment (`from_start`). It has
   that from whoever told it as the first of all: once, in the life of the coordinator that began the epoch, and before
   anything else was tried. So a coordinator that comes back may believe it as well.
3. Of any other store, what it has not seen may have been: a barrier that it has not opened may have opened, an
   incarnation may have passed it, and a lease that is not there is no proof that a member has ended.
4. An incarnation counts as given up when a store that is believed has said that it did not pass the barrier, and as
   over when a store has said that its lease is, or that its barrier never opens. These are proofs that nothing of it
   can act, so a store that is told again never gives it another lease. The gang hears of them a moment later, and
   takes a lease that is gone for a proof after seconds: until then they are remembered here.
5. Nothing is told of an epoch before the gang itself has asked for it: it may not be durable yet.

Theory of operation. `coordinator.store_link` and the simulation own one of these for the life of a coordinator,
ask it what to do, and tell it what a store (`instance`) said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from coordinator.core.events import GangEvent, LeaseGone, LeaseLapsed
from coordinator.core.gang_state import Gang, MemberPhase, MemberRecord, Settlement
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunUid

EpochKey = tuple[RunUid, Epoch]
Floors = Mapping[EpochKey, bool]
"""Which epochs a store serves, and whether it has seen each from its start."""


class CatchUp(Enum):
    """What a gang needs after the line to a store was made again."""

    COMPARE = auto()
    """The store knows the epoch: the difference tells what was missed (`coordinator.core.resync`)."""
    TELL = auto()
    """It has forgotten the epoch: tell it, and give every member that must hold a lease one."""
    LEAVE = auto()
    """The gang has not asked for the epoch yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """What a store that does not know an epoch is told."""

    is_first: bool
    revoked: tuple[tuple[Rank, IncarnationToken], ...]
    """Incarnations that were given up, or whose lease is over."""
    has_opened: bool
    """The barrier has opened in an earlier life of the store. It is to be closed: nobody else gets through."""


class StoreTrust:
    """One coordinator's knowledge of the stores that it has met."""

    def __init__(self) -> None:
        self._asked: set[EpochKey] = set()
        """Epochs that the gang has asked to open."""
        self._seen_all: dict[EpochKey, str] = {}
        """Which instance says that it has seen the epoch from its start. At most one ever can."""
        self._over: dict[EpochKey, set[tuple[Rank, IncarnationToken]]] = {}
        """Incarnations of which a store has said that they never passed, or that their lease is over. Of each gang's
        latest epoch only."""
        self._closed: set[EpochKey] = set()
        """Epochs of which a store that is believed has said that their barrier never opens."""

    # ---- opening an epoch -------------------------------------------------------------------------

    def ask(self, key: EpochKey, *, is_new: bool) -> bool:
        """The gang wants the epoch open, and a store is about to be told. Returns whether it is the first to be."""
        is_first = is_new and key not in self._asked
        self._asked.add(key)
        for older in [known for known in self._over if known[0] == key[0] and known[1] < key[1]]:
            del self._over[older]
        return is_first

    def telling(self, key: EpochKey, gang: Gang | None, *, is_first: bool) -> Telling:
        """For a store that does not know the epoch."""
        over = set(self._over.get(key, ()))
        if gang is not None:
            retired = [life for life in gang.attempts if life.incarnation.epoch == key[1]]
            present = [life for life in gang.members.values() if life.incarnation.epoch == key[1]]
            over |= {_named(life) for life in retired}
            is_closed = key in self._closed
            over |= {_named(life) for life in present if is_closed or life.settlement in _PROOFS_BY_THE_STORE}
            over -= {_named(life) for life in (*retired, *present) if _has_ended_everything(life)}
            alone = {life.rank: life.incarnation.token for life in present if life.instead_of is not None}
            over = {(rank, token) for rank, token in over if alone.get(rank, token) == token}
        return Telling(
            is_first=is_first,
            revoked=tuple(sorted(over)),
            has_opened=gang is not None and gang.epoch == key[1] and gang.barrier_open,
        )

    def learn(self, key: EpochKey, instance: str, *, from_start: bool) -> None:
        """What the store said of itself."""
        if from_start:
            self._seen_all[key] = instance

    # ---- after a gap ------------------------------------------------------------------------------

    def catch_up(self, gang: Gang, instance: str, floors: Floors) -> CatchUp:
        """What this gang needs of the store that the line has just been made to."""
        key = (gang.uid, gang.epoch)
        if key in floors:
            self.learn(key, instance, from_start=floors[key])
            return CatchUp.COMPARE
        return CatchUp.TELL if key in self._asked else CatchUp.LEAVE

    # ---- believing --------------------------------------------------------------------------------

    def is_believed(self, key: EpochKey, instance: str) -> bool:
        """True when what this store has not seen of the epoch has not been."""
        return self._seen_all.get(key) == instance

    def may_have_opened(self, key: EpochKey, instance: str, *, was_open: bool) -> bool:
        """What to make of the answer to closing a barrier."""
        return was_open or not self.is_believed(key, instance)

    def gave_up(self, incarnation: Incarnation) -> None:
        """A store that is believed has said that it did not pass, and never will."""
        self._note_over(incarnation)

    def never_opens(self, key: EpochKey) -> None:
        """A store that is believed has closed the barrier before it had opened: nobody of the epoch passes it."""
        self._closed.add(key)

    def heard(self, event: GangEvent) -> None:
        """What the gang is about to hear of a store."""
        if isinstance(event, LeaseLapsed | LeaseGone):
            self._note_over(event.incarnation)

    def _note_over(self, incarnation: Incarnation) -> None:
        key = (incarnation.run_uid, incarnation.epoch)
        self._over.setdefault(key, set()).add((incarnation.rank, incarnation.token))

    # ---- the end ----------------------------------------------------------------------------------

    def forget(self, uid: RunUid, epoch: Epoch) -> None:
        """The gang is over, or rests, with every epoch until this one. It may have begun the next one meanwhile."""
        for known in (self._seen_all, self._over):
            for key in [key for key in known if key[0] == uid and key[1] <= epoch]:
                del known[key]
        for keys in (self._asked, self._closed):
            keys.difference_update([key for key in keys if key[0] == uid and key[1] <= epoch])


_PROOFS_BY_THE_STORE = (Settlement.LEASE_LAPSED, Settlement.NEVER_STARTED, Settlement.REVOKED)


def _has_ended_everything(life: MemberRecord) -> bool:
    """Its own word is the proof, whatever lease it has. Of a rank that begins again alone there may be very many such
    lives, the oldest not even in the history: whoever follows them (`instead_of`) says that they have all ended."""
    return life.settlement is Settlement.CONFIRMED and life.phase.has_reached(MemberPhase.STARTED)


def _named(life: MemberRecord) -> tuple[Rank, IncarnationToken]:
    return life.rank, life.incarnation.token
