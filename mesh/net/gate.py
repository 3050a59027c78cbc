"""The gate of a machine: which stream may reach which member. Pure; the shell is gateway.py.

Rules of this file:
1. A stream is admitted when certificate, preface and roster agree: same deployment, not revoked, valid now; the same
   run; the epoch that this machine hosts, to the number; the rank on the machine that the roster has it on.
2. Floors only rise. What is below the floor is refused for ever, whether its run is hosted or not.
3. What may be early (an epoch or rank that is not here yet) is `NotYet`, not refused: the coordinator tells machines
   one after the other. The shell asks again when something has changed, for WAIT_MAX_S at most.
4. A member reaches members of its own run; a machine reaches services of machines. Never crosswise.
5. Every refusal has a reason and is counted. Refusing changes nothing else.
6. The time is an argument: seconds since 1970.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mesh.errors import FencedError
from mesh.ids import NO_EPOCH, Epoch, MachineName, Rank, RunUid
from mesh.net.clock import SKEW_MAX_S, is_skewed, skew_text
from mesh.net.identity import Identity, MachineIdentity, MemberIdentity, PeerCertificate, RelayIdentity
from mesh.net.preface import MemberTarget, Preface
from mesh.net.refusals import Refusal
from mesh.net.roster import Roster

WAIT_MAX_S = 5.0
"""How long a stream may be early."""
MEMBER_PORT_MIN = 1024
"""Below are the machine's own services, never a member's."""
ENDED_RUNS_MAX = 4096
"""Of so many runs that are not hosted any more the floor is remembered, for the sake of the right reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Connect to the first of these addresses of the machine that takes it."""

    deliver_to: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: Refusal
    message: str
    """For a person, at the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """What is meant may come; the refusal is for when the wait is over."""

    otherwise: Refused


Decision = Admitted | Refused | NotYet


class Gate:
    """What one machine knows of runs, epochs and whom not to believe."""

    def __init__(self, *, deployment: str, machine: MachineName) -> None:
        self.deployment = deployment
        self.machine = machine
        self.rosters: dict[RunUid, Roster] = {}
        """The newest epoch of each run that has members here; never below the run's floor."""
        self.hosted: dict[RunUid, dict[Rank, tuple[str, ...]]] = {}
        """Ranks of the roster's epoch that are up on this machine, and the addresses that they are reached at."""
        self.floors: dict[RunUid, Epoch] = {}
        """The lowest epoch of a run that is not refused."""
        self.revoked: frozenset[MachineName] = frozenset()
        """Machines and relays that nobody believes any more, whatever their certificates say."""
        self.services: frozenset[int] = frozenset()
        """Ports of this machine itself that other machines may reach."""
        self._services_at: tuple[str, ...] = ()
        self.counts: Counter[Refusal] = Counter()

    # ---- what the agent says --------------------------------------------------------------------------

    def set_roster(self, roster: Roster) -> None:
        """A new epoch, or the same one with a replaced member. Raises FencedError for an older one."""
        self.raise_floor(roster.run, roster.epoch)
        self.rosters[roster.run] = roster
        here = {place.rank for place in roster.members if place.machine == self.machine}
        before = self.hosted.get(roster.run, {})
        self.hosted[roster.run] = {rank: where for rank, where in before.items() if rank in here}

    def host(self, run: RunUid, epoch: Epoch, rank: Rank, *, deliver_to: tuple[str, ...]) -> None:
        """This rank is up here. Raises FencedError when its epoch is not the roster's or its place another machine."""
        roster = self.rosters.get(run)
        place = roster.place_of(rank) if roster is not None else None
        if roster is None or roster.epoch != epoch or place is None or place.machine != self.machine:
            raise FencedError(
                f"Rank {rank} of {run} has no place on {self.machine} in epoch {epoch}.",
                epoch=epoch,
                floor=self.floors.get(run, NO_EPOCH),
            )
        self.hosted[run][rank] = deliver_to

    def raise_floor(self, run: RunUid, floor: Epoch) -> None:
        """Every epoch below is over on this machine. Raises FencedError for a floor below the present one."""
        present = self.floors.get(run, NO_EPOCH)
        if floor < present:
            raise FencedError(
                f"Epoch {floor} of {run} is over; the floor is {present}.", epoch=floor, floor=present
            )
        self.floors.pop(run, None)  # to the end of the order: forgotten last
        self.floors[run] = floor
        roster = self.rosters.get(run)
        if roster is not None and roster.epoch < floor:
            self.forget(run)
        self._forget_old_floors()

    def forget(self, run: RunUid) -> None:
        """The run has no members here any more; its floor stays."""
        self.rosters.pop(run, None)
        self.hosted.pop(run, None)

    def revoke(self, names: frozenset[MachineName]) -> None:
        """These, and no others."""
        self.revoked = names

    def offer(self, ports: Iterable[int], *, deliver_to: tuple[str, ...]) -> None:
        """These ports of the machine itself, at these addresses of it, are open to other machines; no others."""
        self.services, self._services_at = frozenset(ports), deliver_to

    # ---- what peers ask -------------------------------------------------------------------------------

    def admit(self, peer: PeerCertificate, preface: Preface, *, now: float) -> Decision:
        """Whether this stream may pass. Counts nothing: see `count`."""
        refused = self.check_peer(peer, now=now, peer_clock=preface.clock)
        if refused is not None:
            return refused
        if preface.machine != self.machine:
            return _no(Refusal.WRONG_MACHINE, f"This is {self.machine}, not {preface.machine}.")
        identity, target = peer.identity, preface.member
        if isinstance(identity, MemberIdentity) and target is not None:
            return self._admit_member(identity, target, preface.port)
        if isinstance(identity, MachineIdentity) and target is None:
            if preface.port in self.services:
                return Admitted(deliver_to=self._services_at)
            return _no(
                Refusal.PORT_NOT_OFFERED, f"{self.machine} offers no port {preface.port} to other machines."
            )
        return _no(Refusal.OTHER_RUN, "Members reach members of their run, machines reach machines.")

    def check_peer(self, peer: PeerCertificate, *, now: float, peer_clock: float | None) -> Refused | None:
        """Whether the certificate may be believed at all, whichever side dialled."""
        identity = peer.identity
        if identity.deployment != self.deployment:
            return _no(
                Refusal.OTHER_DEPLOYMENT,
                f"This is the deployment {self.deployment}, not {identity.deployment}.",
            )
        if identity.machine in self.revoked:
            return _no(Refusal.REVOKED, f"The certificate of {identity.uri} has been revoked.")
        if now > peer.not_after + SKEW_MAX_S:
            return self._wrong_time(Refusal.EXPIRED, peer, now=now, peer_clock=peer_clock)
        if now < peer.not_before - SKEW_MAX_S:
            return self._wrong_time(Refusal.NOT_YET_VALID, peer, now=now, peer_clock=peer_clock)
        return None

    def still_admits(self, identity: Identity) -> bool:
        """Whether a stream of this identity may go on. Times are not asked: a running stream outlives a certificate."""
        if identity.machine in self.revoked:
            return False
        if isinstance(identity, RelayIdentity):  # it has none of its own
            return False
        if isinstance(identity, MachineIdentity):
            return True
        roster = self.rosters.get(identity.run)
        return roster is not None and self._place_problem(identity, roster) is None

    def count(self, reason: Refusal) -> None:
        self.counts[reason] += 1

    def _admit_member(self, peer: MemberIdentity, target: MemberTarget, port: int) -> Decision:
        if peer.run != target.run:
            return _no(Refusal.OTHER_RUN, f"A member of {peer.run} has no business with {target.run}.")
        if peer.epoch != target.epoch:
            return _no(
                Refusal.STALE_EPOCH,
                f"A member of epoch {peer.epoch} meant one of epoch {target.epoch} of {peer.run}.",
            )
        floor = self.floors.get(peer.run, NO_EPOCH)
        if peer.epoch < floor:
            return _no(
                Refusal.STALE_EPOCH,
                f"Epoch {peer.epoch} of {peer.run} is over; {self.machine} is at epoch {floor}.",
            )
        if port < MEMBER_PORT_MIN:
            return _no(Refusal.PORT_NOT_OFFERED, f"Members have no ports below {MEMBER_PORT_MIN}.")
        here = f"rank {target.rank} of {target.run} in epoch {target.epoch}"
        roster = self.rosters.get(peer.run)
        if roster is None or roster.epoch < target.epoch:
            return NotYet(otherwise=_no(Refusal.NOT_HERE, f"{self.machine} has not been told of {here}."))
        problem = self._place_problem(peer, roster)
        if problem is not None:
            return problem
        deliver_to = self.hosted[peer.run].get(target.rank)
        if deliver_to is None:
            return NotYet(otherwise=_no(Refusal.NOT_HERE, f"{here} is not up on {self.machine}."))
        return Admitted(deliver_to=deliver_to)

    def _place_problem(self, peer: MemberIdentity, roster: Roster) -> Refused | None:
        if peer.epoch != roster.epoch:
            return _no(Refusal.STALE_EPOCH, f"{peer.run} is at epoch {roster.epoch} here, not {peer.epoch}.")
        place = roster.place_of(peer.rank)
        if place is None or place.machine != peer.machine:
            where = "not in the epoch" if place is None else f"on {place.machine}"
            return _no(
                Refusal.UNKNOWN_MACHINE,
                f"Rank {peer.rank} of {peer.run} is {where} in epoch {peer.epoch}, not on {peer.machine}.",
            )
        return None

    def _wrong_time(
        self, reason: Refusal, peer: PeerCertificate, *, now: float, peer_clock: float | None
    ) -> Refused:
        what = "has expired" if reason is Refusal.EXPIRED else "is not valid yet"
        message = f"The certificate of {peer.identity.uri} {what}."
        if peer_clock is None or not is_skewed(ours=now, theirs=peer_clock):
            return _no(reason, message)
        # From the peer's point of view: it is who reads it.
        clock = skew_text(ours=peer_clock, theirs=now, them=self.machine)
        return _no(Refusal.CLOCK_SKEW, f"{message} {clock}")

    def _forget_old_floors(self) -> None:
        if len(self.floors) <= ENDED_RUNS_MAX + len(self.rosters):
            return
        oldest = next(run for run in self.floors if run not in self.rosters)
        del self.floors[oldest]


def _no(reason: Refusal, message: str) -> Refused:
    return Refused(reason=reason, message=message)
