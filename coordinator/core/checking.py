"""The network between a gang's machines: nobody is ordered to one before the others are known to reach it.

Rules of this file:
1. A machine is checked once, when it is granted, against all others that the gang has then. So any two seats that are
   checked have been measured against each other.
2. One check at a time. What is granted meanwhile is checked by the next one.
3. Only what the network is to blame for costs a machine. A check that could not be done, or does not answer in time, is
   told, and passed.
4. Where it does not make sense (`checks_network` is False: all machines are on one host; or there is one machine only)
   seats are checked when they come, and none of this happens.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.core.effects import CheckNetwork
from coordinator.core.events import NetworkChecked
from coordinator.core.gang_state import NetworkCheck
from coordinator.core.seats import Seats
from mesh.ids import MachineName, Rank
from mesh.netcheck.limits import START_LIMIT_S, check_limit_s
from mesh.reasons import Reason

ANSWER_SLACK_S = 10.0
"""Over what the check takes at most by itself: its way to the machines and back."""
WARNINGS_TOLD_MAX = 8


class Checking(Seats):
    """Machines that have been granted, and not been checked yet."""

    def _check_seats(self) -> None:
        """Has all those checked that were not, unless a check is under way (rule 2)."""
        gang = self.gang
        fresh = [seat for _, seat in sorted(gang.seats.items()) if not seat.is_checked]
        if not fresh or gang.check is not None:
            return
        if len(gang.seats) == 1:
            self._mark_checked({(seat.rank, seat.machine) for seat in fresh})
            return
        gang.checks += 1
        gang.check = NetworkCheck(
            number=gang.checks, fresh=tuple((seat.rank, seat.machine) for seat in fresh)
        )
        names = ", ".join(seat.machine for seat in fresh)
        whom = f"between {names}" if len(fresh) == len(gang.seats) else f"from {names} to the others"
        self._announce("Checking", f"The network {whom} is being checked.")
        self._due.check = self._now.mono + START_LIMIT_S + check_limit_s(len(gang.seats)) + ANSWER_SLACK_S
        self._effects.append(
            CheckNetwork(
                number=gang.checks,
                machines=tuple((rank, seat.machine) for rank, seat in sorted(gang.seats.items())),
                fresh=tuple(seat.rank for seat in fresh),
                suspects=gang.suspects,
            )
        )

    def _note_verdict(self, event: NetworkChecked) -> bool:
        """Ends the check that this is about. False when nobody waits for it any more."""
        gang = self.gang
        if gang.check is None or gang.check.number != event.number:
            return False
        refused = {(refusal.rank, refusal.machine) for refusal in event.refusals}
        self._mark_checked(set(gang.check.fresh) - refused)
        kept = {rank for refusal in event.refusals for rank in refusal.peers} - {rank for rank, _ in refused}
        gang.suspects = tuple(sorted(kept.union(gang.suspects)))
        gang.check = self._due.check = None
        self._dirty = True
        if not event.is_performed:
            self._announce("NetworkUnchecked", event.message)
        else:
            reason = Reason.NETWORK_CHECK_FAILED if refused else None
            self._announce("NetworkChecked", event.message, reason=reason)
        for warning in event.warnings[:WARNINGS_TOLD_MAX]:
            self._announce("NetworkWarning", warning)
        self._tell_chapter(network=event.message)
        return True

    def _mark_checked(self, checked: set[tuple[Rank, MachineName]]) -> None:
        for place, holding in enumerate(self.gang.holdings):
            if holding.is_seat and (holding.rank, holding.machine) in checked:
                self.gang.holdings[place] = replace(holding, is_checked=True)
                self._dirty = True


def unanswered(check: NetworkCheck) -> NetworkChecked:
    """What is made of a check that said nothing in its time."""
    return NetworkChecked(
        number=check.number,
        message="The network was not checked: nothing was heard of the check in its time.",
        is_performed=False,
    )
