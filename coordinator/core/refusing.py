"""Machines that will not do: by a check of the network, or because they are wanted back before anybody is there.

The rank gets another one, as `assembling` (rule 2) says of members that are refused.
"""

from __future__ import annotations

from coordinator.core.assembling import Assembling
from coordinator.core.checking import unanswered
from coordinator.core.events import NetworkChecked
from coordinator.core.gang_state import REPLACEMENTS_MAX
from mesh.ids import Rank
from mesh.reasons import Reason


class Refusing(Assembling):
    """Machines that are given back while the gang assembles."""

    def _on_network_checked(self, event: NetworkChecked) -> None:
        if not self._note_verdict(event):
            return
        for refusal in event.refusals:
            seat = self.gang.seats.get(refusal.rank)
            if self.gang.outcome is None and seat is not None and seat.machine == refusal.machine:
                self._refuse_machine(refusal.rank, Reason.NETWORK_CHECK_FAILED, refusal.message)
        if self.gang.outcome is None:
            self._seat_members()
            self._tell_arrivals()

    def _pass_overdue_check(self) -> None:
        check = self.gang.check
        if check is not None and self._due.check is not None and self._now.mono >= self._due.check:
            self._on_network_checked(unanswered(check))

    def _refuse_machine(self, rank: Rank, reason: Reason, message: str) -> None:
        """The rank's machine will not do, whether a member has been ordered there or not."""
        gang = self.gang
        if (member := gang.members.get(rank)) is not None:
            self._give_up(member, reason, message)
        elif gang.replacements >= REPLACEMENTS_MAX:
            self._too_many_replaced(reason, message)
        else:
            gang.replacements += 1
            self._announce("Refused", message, reason=reason, rank=rank)
            machine = self._vacate(rank, is_clean=True)
            is_refused = reason is not Reason.MACHINE_RECLAIMED
            self._want(
                (rank,),
                avoid=() if machine is None else (machine,),
                is_for_refusal=is_refused,
                refusal=message if is_refused else "",
            )
