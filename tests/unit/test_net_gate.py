"""The gate and the door, without a socket."""

from __future__ import annotations

import pytest

from mesh.errors import FencedError
from mesh.ids import Epoch, MachineName, Rank, RunUid
from mesh.net.door import Door, source_of
from mesh.net.gate import ENDED_RUNS_MAX, Admitted, Decision, Gate, NotYet, Refused
from mesh.net.identity import Identity, PeerCertificate
from mesh.net.preface import MemberTarget, Preface
from mesh.net.refusals import Refusal
from mesh.net.roster import MemberPlace
from tests.net_world import DEPLOYMENT, RUN, machine, member, roster

NOW = 1_800_000_000.0


def gate(epoch: int = 2) -> Gate:
    """Of machine b, which has rank 1 of RUN."""
    made = Gate(deployment=DEPLOYMENT, machine=MachineName("b"))
    made.set_roster(roster(epoch))
    made.host(RUN, Epoch(epoch), Rank(1), deliver_to=("127.0.0.9",))
    return made


def certificate(identity: Identity) -> PeerCertificate:
    return PeerCertificate(identity=identity, not_before=NOW - 100, not_after=NOW + 100)


def meant(
    *, epoch: int = 2, rank: int = 1, port: int = 29500, on: str = "b", run: str = RUN, service: bool = False
) -> Preface:
    target = MemberTarget(run=RunUid(run), epoch=Epoch(epoch), rank=Rank(rank))
    return Preface(machine=MachineName(on), member=None if service else target, port=port, clock=NOW)


def admit(at: Gate, who: Identity, what: Preface, *, now: float = NOW) -> Decision:
    return at.admit(certificate(who), what, now=now)


def reason(decision: Decision) -> Refusal:
    if isinstance(decision, NotYet):
        return decision.otherwise.reason
    assert isinstance(decision, Refused)
    return decision.reason


def test_the_right_member_of_the_right_epoch_is_admitted() -> None:
    assert admit(gate(), member(0, "a", epoch=2), meant()) == Admitted(deliver_to=("127.0.0.9",))


def test_what_is_early_may_come() -> None:
    at = gate()
    assert isinstance(admit(at, member(0, "a", epoch=3), meant(epoch=3)), NotYet)
    at.set_roster(roster(3))
    assert isinstance(admit(at, member(0, "a", epoch=3), meant(epoch=3)), NotYet), "the rank is not up"
    at.host(RUN, Epoch(3), Rank(1), deliver_to=("127.0.0.9",))
    assert isinstance(admit(at, member(0, "a", epoch=3), meant(epoch=3)), Admitted)
    assert reason(admit(at, member(0, "a", epoch=2), meant())) is Refusal.STALE_EPOCH


def test_a_floor_fences_also_a_run_that_is_not_here_any_more() -> None:
    at = gate()
    at.raise_floor(RUN, Epoch(3))
    assert RUN not in at.rosters
    assert reason(admit(at, member(0, "a", epoch=2), meant())) is Refusal.STALE_EPOCH
    assert not at.still_admits(member(0, "a", epoch=2))
    with pytest.raises(FencedError):
        at.set_roster(roster(2))
    with pytest.raises(FencedError):
        at.raise_floor(RUN, Epoch(2))
    with pytest.raises(FencedError):
        at.host(RUN, Epoch(2), Rank(1), deliver_to=("127.0.0.9",))
    at.raise_floor(RUN, Epoch(3))  # said twice: no harm


def test_only_ranks_of_this_machine_can_be_up_here() -> None:
    at = gate()
    for rank in (0, 2):
        with pytest.raises(FencedError, match="has no place on b"):
            at.host(RUN, Epoch(2), Rank(rank), deliver_to=("127.0.0.9",))


def test_a_member_that_was_replaced_within_the_epoch_loses_its_streams() -> None:
    at = gate()
    assert at.still_admits(member(0, "a", epoch=2))
    at.set_roster(roster(2, on=("c", "b")))
    assert not at.still_admits(member(0, "a", epoch=2))
    assert at.still_admits(member(0, "c", epoch=2))
    at.set_roster(roster(2, on=("c", "d")))
    assert isinstance(admit(at, member(0, "c", epoch=2), meant()), NotYet), "rank 1 is not here any more"
    at.set_roster(roster(2, on=("c", "b")))
    assert reason(admit(at, member(0, "a", epoch=2), meant())) is Refusal.UNKNOWN_MACHINE


def test_revocation_is_by_machine_of_itself_and_of_its_members() -> None:
    at = gate()
    who = member(0, "a", epoch=2)
    at.revoke(frozenset({MachineName("a")}))
    assert reason(admit(at, who, meant())) is Refusal.REVOKED
    assert not at.still_admits(who)
    assert not at.still_admits(machine("a"))
    at.revoke(frozenset())
    assert at.still_admits(who)


def test_times_are_checked_with_a_minute_to_spare() -> None:
    at, who = gate(), member(0, "a", epoch=2)
    assert isinstance(admit(at, who, meant(), now=NOW + 159), Admitted)
    assert reason(admit(at, who, meant(), now=NOW + 161)) is Refusal.CLOCK_SKEW
    assert isinstance(admit(at, who, meant(), now=NOW - 159), Admitted)
    refused = at.check_peer(certificate(who), now=NOW - 161, peer_clock=NOW - 161)
    assert refused is not None
    assert refused.reason is Refusal.NOT_YET_VALID


@pytest.mark.parametrize(
    ("who", "what", "why"),
    [
        (member(0, "a", epoch=2, deployment="other"), meant(), Refusal.OTHER_DEPLOYMENT),
        (member(0, "a", epoch=2), meant(on="c"), Refusal.WRONG_MACHINE),
        (member(0, "a", epoch=1), meant(epoch=1), Refusal.STALE_EPOCH),
        (member(0, "a", epoch=1), meant(epoch=2), Refusal.STALE_EPOCH),
        (member(0, "a", epoch=2), meant(epoch=1), Refusal.STALE_EPOCH),
        (member(0, "a", epoch=2, run="other"), meant(), Refusal.OTHER_RUN),
        (member(0, "a", epoch=2, run="other"), meant(run="other"), Refusal.NOT_HERE),
        (member(0, "a", epoch=2), meant(rank=0), Refusal.NOT_HERE),
        (member(0, "c", epoch=2), meant(), Refusal.UNKNOWN_MACHINE),
        (member(2, "a", epoch=2), meant(), Refusal.UNKNOWN_MACHINE),
        (member(0, "a", epoch=2), meant(port=1023), Refusal.PORT_NOT_OFFERED),
        (machine("a"), meant(), Refusal.OTHER_RUN),
        (machine("a"), meant(service=True), Refusal.PORT_NOT_OFFERED),
        (member(0, "a", epoch=2), meant(service=True), Refusal.OTHER_RUN),
    ],
    ids=str,
)
def test_everybody_else_is_refused_by_name_and_nothing_changes(
    who: Identity, what: Preface, why: Refusal
) -> None:
    at = gate()
    assert reason(admit(at, who, what)) is why
    assert isinstance(admit(at, member(0, "a", epoch=2), meant()), Admitted)


def test_machines_reach_the_services_that_a_machine_offers() -> None:
    at = gate()
    at.offer({6379}, deliver_to=("127.0.0.2",))
    assert admit(at, machine("a"), meant(service=True, port=6379)) == Admitted(deliver_to=("127.0.0.2",))
    assert reason(admit(at, machine("a"), meant(service=True))) is Refusal.PORT_NOT_OFFERED


def test_floors_of_ended_runs_are_bounded_and_those_of_hosted_ones_are_kept() -> None:
    at = gate()
    for number in range(ENDED_RUNS_MAX + 50):
        at.raise_floor(RunUid(f"run{number}"), Epoch(1))
    assert len(at.floors) == ENDED_RUNS_MAX + 1
    assert at.floors[RUN] == 2
    assert RunUid("run0") not in at.floors


def test_a_roster_that_contradicts_itself_cannot_be_made() -> None:
    place = roster().members[0]
    with pytest.raises(ValueError, match="twice"):
        type(roster())(run=RUN, epoch=Epoch(1), members=(place, place))
    for text in ("198.18.000.1", "FD00::1", "fd00:0::1", "no address"):
        with pytest.raises(ValueError, match=r"address|IP"):
            MemberPlace(rank=Rank(0), machine=MachineName("a"), overlay=(text,))


# ---- the door -----------------------------------------------------------------------------------------


def test_one_source_has_its_share_and_the_door_is_full_when_it_is_full() -> None:
    door = Door(places=5, places_per_source=3)
    assert [door.enter("x") for _ in range(4)] == [True, True, True, False]
    assert [door.enter("y") for _ in range(3)] == [True, True, False]
    assert door.is_full
    door.leave("x")
    assert not door.is_full
    assert door.enter("z")
    assert door.taken == 5


def test_what_counts_as_one_source() -> None:
    assert source_of("10.0.0.1") == source_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert source_of("fd00::1") == source_of("fd00::ffff:1:2:3") != source_of("fd00:0:0:1::1")
    assert source_of("fe80::1%eth0") == "fe80::"
