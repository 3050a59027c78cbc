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
4. An incarnation counts as given up when a store that is believed has said that it did not pass the barrier. The gang
   hears of that a moment later: until then it is remembered here.
5. Nothing is told of an epoch before the gang itself has asked for it: it may not be durable yet.

Theory of operation. `coordinator.store_link` and the simulation own one of these for the life of a coordinator,
ask it what to do, and tell it what a store (`instance`) said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from coordinator.core.gang_state import Gang, MemberPhase
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
    has_opened: bool
    """The barrier has opened in an earlier life of the store. It is to be closed: nobody else gets through."""


class StoreTrust:
    """One coordinator's knowledge of the stores that it has met."""

    def __init__(self) -> None:
        self._asked: set[EpochKey] = set()
        """Epochs that the gang has asked to open."""
        self._seen_all: dict[EpochKey, str] = {}
        """Which instance says that it has seen the epoch from its start. At most one ever can."""
        self._revoked: dict[EpochKey, set[tuple[Rank, IncarnationToken]]] = {}

    # ---- opening an epoch -------------------------------------------------------------------------

    def ask(self, key: EpochKey, *, is_new: bool) -> bool:
        """The gang wants the epoch open, and a store is about to be told. Returns whether it is the first to be."""
        is_first = is_new and key not in self._asked
        self._asked.add(key)
        return is_first

    def telling(self, key: EpochKey, gang: Gang | None, *, is_first: bool) -> Telling:
        """For a store that does not know the epoch."""
        revoked = set(self._revoked.get(key, ()))
        if gang is not None:
            revoked |= {
                (attempt.rank, attempt.incarnation.token)
                for attempt in gang.attempts
                if attempt.incarnation.epoch == key[1] and not attempt.phase.has_reached(MemberPhase.STARTED)
            }
        return Telling(
            is_first=is_first,
            revoked=tuple(sorted(revoked)),
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
        key = (incarnation.run_uid, incarnation.epoch)
        self._revoked.setdefault(key, set()).add((incarnation.rank, incarnation.token))

    # ---- the end ----------------------------------------------------------------------------------

    def forget(self, uid: RunUid) -> None:
        """The gang is over, with every epoch of it."""
        for known in (self._seen_all, self._revoked):
            for key in [key for key in known if key[0] == uid]:
                del known[key]
        self._asked = {key for key in self._asked if key[0] != uid}
