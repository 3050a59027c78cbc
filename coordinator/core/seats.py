"""The machines of a gang: which rank has which, which are asked for, which are being given back.

Rules of this file:
1. A rank's seat is its machine for the whole run: only its loss, its refusal, its reclaim, a suspension or an
   assembly that is tried again takes it away.
2. What is asked for is all or nothing per reservation, and every reservation is granted, or withdrawn, once.
3. A replacement never lands on the machine that it replaces, unless there is no other one and it was lost, not refused:
   then it may come back once it has been swept.
4. A machine on which something of the gang may still run is given back as not clean: nobody gets it before it is
   proven that nothing does.
5. The ledger (`Gang.holdings`) has a machine's whole time, once: from the grant to the confirmed release.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from coordinator.core.effects import ReleaseMachine, ReserveMachines, WithdrawReservation
from coordinator.core.events import (
    MachineReleased,
    MachinesReserved,
    ReservationWaiting,
    ReservationWithdrawn,
)
from coordinator.core.gang_state import Holding, Want
from coordinator.core.saving import Saving
from mesh.ids import MachineName, Rank
from mesh.reasons import Reason
from mesh.states import RunState

LEDGER_KEPT_MAX = 1_024


class Seats(Saving):
    """Machines wanted, held and given back."""

    # ---- getting ----------------------------------------------------------------------------------

    def _want(
        self,
        ranks: Iterable[Rank],
        *,
        avoid: Iterable[MachineName] = (),
        is_for_refusal: bool = False,
        refusal: str = "",
    ) -> None:
        """Asks for a machine for each of the ranks; for none that the gang has already."""
        gang = self.gang
        avoid = (*avoid, *(seat.machine for seat in gang.seats.values()))
        gang.reservation += 1
        want = Want(
            reservation=gang.reservation,
            ranks=tuple(ranks),
            avoid=avoid,
            is_for_refusal=is_for_refusal,
            refusal=refusal,
        )
        gang.wanted[want.reservation] = want
        self._dirty = True
        self._effects.append(self._reserve_effect(want))

    def _reserve_effect(self, want: Want) -> ReserveMachines:
        plan = self.gang.plan
        return ReserveMachines(
            reservation=want.reservation,
            nodes=len(want.ranks),
            gpus_per_node=plan.gpus_per_node,
            gpu_types=plan.gpu_types,
            avoid=want.avoid,
        )

    def _unasked_vacant(self) -> tuple[Rank, ...]:
        """Ranks that have no machine and for which none is asked."""
        asked = {rank for want in self.gang.wanted.values() for rank in want.ranks}
        return tuple(rank for rank in self.gang.vacant if rank not in asked)

    def _take_seats(self, event: MachinesReserved) -> tuple[Rank, ...]:
        """Seats the ranks that the machines were asked for; returns them, none when nobody wants them any more."""
        gang = self.gang
        want = gang.wanted.pop(event.reservation, None)
        if want is None:
            is_held = any(h.reservation == event.reservation and h.until is None for h in gang.holdings)
            if not is_held and event.reservation not in gang.withdrawing:
                self._effects.append(WithdrawReservation(reservation=event.reservation))
            return ()
        self._dirty = True
        for placement in event.placements:
            self._close_line(placement.machine)
        gang.holdings.extend(
            Holding(
                machine=placement.machine,
                address=placement.address,
                reservation=event.reservation,
                rank=rank,
                since=self._now.wall,
                is_checked=not self._checks_network or gang.plan.nodes == 1,
            )
            for rank, placement in zip(want.ranks, event.placements, strict=True)
        )
        return want.ranks

    def _close_line(self, machine: MachineName) -> None:
        """A machine that is granted again has been given back before, whether that was heard or not."""
        for place, holding in enumerate(self.gang.holdings):
            if holding.machine == machine and holding.until is None:
                self.gang.holdings[place] = replace(holding, until=self._now.wall)

    def _note_waiting(self, event: ReservationWaiting) -> Want | None:
        """Tells why it takes time. Returns what is waited for."""
        gang = self.gang
        want = gang.wanted.get(event.reservation)
        if want is None:
            return None
        if gang.state is RunState.PENDING and self._due.backoff is None:
            is_first = gang.reason is not Reason.NO_CAPACITY
            gang.reason = Reason.NO_CAPACITY
            gang.message = event.why
        else:
            is_first = gang.waiting_for != event.reservation
        gang.waiting_for = event.reservation
        if is_first:  # later wordings are for whoever looks; a hundred waiting runs must not write each one
            self._announce("Waiting", event.why, reason=Reason.NO_CAPACITY)
        return want

    def _admit_swept(self, want: Want) -> bool:
        """Asks again, lost machines included that were given back since: found clean, or gone for good (rule 3)."""
        gang = self.gang
        own = {seat.machine for seat in gang.seats.values()}
        held = {h.machine for h in gang.holdings if h.until is None}
        swept = [m for m in want.avoid if m not in own]
        if want.is_for_refusal or not swept or held & set(swept):
            return False
        del gang.wanted[want.reservation]
        gang.withdrawing = (*gang.withdrawing, want.reservation)
        self._effects.append(WithdrawReservation(reservation=want.reservation))
        self._announce(
            "NoOtherMachine",
            f"There is no other machine: {', '.join(swept)} may be used again, if it comes back and is found clean.",
        )
        self._want(want.ranks)
        return True

    # ---- giving back ------------------------------------------------------------------------------

    def _vacate(self, rank: Rank, *, is_clean: bool) -> MachineName | None:
        """Takes the rank's machine from it and gives it back."""
        gang = self.gang
        for place, holding in enumerate(gang.holdings):
            if holding.is_seat and holding.rank == rank:
                gang.holdings[place] = leaving = replace(holding, is_leaving=True, is_clean=is_clean)
                gang.reclaimed = tuple(m for m in gang.reclaimed if m != holding.machine)
                gang.suspects = tuple(r for r in gang.suspects if r != rank)
                self._dirty = True
                self._effects.append(_release_effect(leaving))
                return holding.machine
        return None

    def _vacate_all(self, *, unclean: frozenset[Rank] = frozenset()) -> None:
        """Gives everything back, and wants nothing any more."""
        for rank in list(self.gang.seats):
            self._vacate(rank, is_clean=rank not in unclean)
        self._withdraw_all()

    def _withdraw_all(self) -> None:
        gang = self.gang
        if not gang.wanted:
            return
        gang.withdrawing = (*gang.withdrawing, *gang.wanted)
        gang.wanted.clear()
        self._dirty = True
        self._effects.extend(WithdrawReservation(reservation=r) for r in gang.withdrawing)

    def _on_machine_released(self, event: MachineReleased) -> None:
        gang = self.gang
        for place, holding in enumerate(gang.holdings):
            is_it = holding.machine == event.machine and holding.reservation == event.reservation
            if is_it and holding.is_leaving and holding.until is None:
                gang.holdings[place] = replace(holding, until=self._now.wall)
                self._dirty = True
        closed = [h for h in gang.holdings if h.until is not None]
        if len(closed) > LEDGER_KEPT_MAX:
            gang.holdings.remove(closed[0])

    def _on_reservation_withdrawn(self, event: ReservationWithdrawn) -> None:
        gang = self.gang
        if event.reservation in gang.withdrawing:
            gang.withdrawing = tuple(r for r in gang.withdrawing if r != event.reservation)
            self._dirty = True

    def _ask_again_for_machines(self) -> None:
        """After a crash: what was asked for may never have been heard."""
        gang = self.gang
        self._effects.extend(WithdrawReservation(reservation=r) for r in gang.withdrawing)
        self._effects.extend(_release_effect(h) for h in gang.holdings if h.is_leaving and h.until is None)
        self._effects.extend(self._reserve_effect(want) for want in gang.wanted.values())


def _release_effect(holding: Holding) -> ReleaseMachine:
    return ReleaseMachine(reservation=holding.reservation, machine=holding.machine, is_clean=holding.is_clean)
