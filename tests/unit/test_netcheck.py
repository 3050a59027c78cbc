"""Who measures whom, what follows from what was seen, and the check around them, on a network that is written down."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.network_check import check
from mesh.netcheck.measurements import Dialled, MemberFacts, Reach, Seen, Way
from mesh.netcheck.tournament import rounds, rounds_of
from mesh.netcheck.verdict import Finding, FindingKind, is_sure, judge
from mesh.states import Transport

USUAL = 1e9
OPEN = Reach(rendezvous=Dialled.ANSWERED, ephemeral=Dialled.ANSWERED, round_trip_s=0.001, offset_s=0.0)
SILENT = Reach(rendezvous=Dialled.SILENT, ephemeral=Dialled.SILENT)
MUTE = Reach(rendezvous=Dialled.ANSWERED, ephemeral=Dialled.MUTE)
ALL_MUTE = Reach(rendezvous=Dialled.MUTE, ephemeral=Dialled.MUTE)
ONLY_RENDEZVOUS = Reach(rendezvous=Dialled.ANSWERED, ephemeral=Dialled.SILENT)


# ---- the tournament -------------------------------------------------------------------------------------


@given(st.integers(2, 40))
def test_in_a_tournament_everybody_meets_everybody_once_and_nobody_two_at_a_time(members: int) -> None:
    plan = rounds(members)
    assert len(plan) == members - 1 + members % 2
    for meetings in plan:
        busy = [rank for pair in meetings for rank in pair]
        assert len(busy) == len(set(busy))
    met = [pair for meetings in plan for pair in meetings]
    assert sorted(met) == list(itertools.combinations(range(members), 2))


def test_some_pairs_keep_their_rounds() -> None:
    assert rounds_of([(0, 1)], members=8) == [[(0, 1)]]
    assert rounds_of([], members=8) == []


# ---- a network that is written down ---------------------------------------------------------------------


@dataclass
class Network:
    """What each way is like; whatever is not said is well."""

    members: int
    reach: dict[Way, Reach] = field(default_factory=dict)
    rate: dict[Way, float] = field(default_factory=dict)
    segment_bytes_max: dict[Way, int] = field(default_factory=dict)
    busy: dict[Way, int] = field(default_factory=dict)
    """So many measurements of this way come out bad by chance."""
    heard: set[Way] = field(default_factory=set)
    late: set[Way] = field(default_factory=set)
    """Who answers along these ways is busy: nothing comes through but to those with patience."""
    hangs: set[int] = field(default_factory=set)
    limit_s: float | None = None
    has_no_time: bool = False
    """The time is over before anybody can be patient."""
    fresh: set[int] | None = None
    facts: Callable[[MemberFacts], MemberFacts] = lambda facts: facts
    asked: list[Way] = field(default_factory=list)
    at_once: int = 0
    _pushing: set[int] = field(default_factory=set)

    def seen(self) -> Seen:
        members = {rank: (self.facts(_facts(rank)), End(self, rank)) for rank in range(self.members)}
        return asyncio.run(check(members, fresh=self.fresh, limit_s=self.limit_s))

    def findings(self) -> list[Finding]:
        return judge(self.seen())


class End:
    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    async def reach(self, others: Sequence[MemberFacts], *, is_patient: bool = False) -> Mapping[int, Reach]:
        if self.rank in self.network.hangs:
            await asyncio.Event().wait()
        if is_patient and self.network.has_no_time:
            await asyncio.Event().wait()
        late = {receiver for sender, receiver in self.network.late if sender == self.rank and not is_patient}
        return {
            other.rank: MUTE if other.rank in late else self.network.reach.get((self.rank, other.rank), OPEN)
            for other in others
        }

    async def heard(self) -> set[int]:
        return {sender for sender, receiver in self.network.heard if receiver == self.rank}

    async def push(
        self, other: MemberFacts, *, seconds: float, limit_s: float, segment_bytes: int | None = None
    ) -> float | None:
        network, way = self.network, (self.rank, other.rank)
        assert network._pushing.isdisjoint(way), "an end that is busy was measured"
        network._pushing.update(way)
        network.asked.append(way)
        await asyncio.sleep(0)
        network._pushing.difference_update(way)
        if network.busy.get(way, 0):
            network.busy[way] -= 1
            return None
        if way in network.segment_bytes_max and (segment_bytes or 1460) > network.segment_bytes_max[way]:
            return None
        return network.rate.get(way, USUAL)


def _facts(rank: int) -> MemberFacts:
    return MemberFacts(
        rank=rank,
        machine=f"m{rank}",
        address=f"10.0.0.{rank + 1}",
        rendezvous_port=29500,
        ephemeral_port=40000 + rank,
    )


def kinds(findings: Sequence[Finding]) -> list[tuple[FindingKind, tuple[int, ...]]]:
    return [(finding.kind, finding.ranks) for finding in findings]


# ---- what is wrong, and what to do ----------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 8, 16])
def test_of_a_network_that_is_well_nothing_is_said(members: int) -> None:
    network = Network(members)
    assert network.findings() == []
    assert sorted(network.asked) == [(a, b) for a in range(members) for b in range(members) if a != b]


def test_a_one_way_drop_is_found_and_named_in_its_direction() -> None:
    [finding] = Network(8, reach={(3, 5): SILENT}).findings()
    assert (finding.kind, finding.ranks) == (FindingKind.ONE_WAY, (3, 5))
    assert "rank 3 (m3, 10.0.0.4) does not reach rank 5" in finding.message
    assert "the other way works" in finding.message
    assert "10.0.0.4" in finding.hint and "m5" in finding.hint


def test_a_direction_that_loses_packets_is_named_though_no_connection_is_made_either_way() -> None:
    [finding] = Network(8, reach={(3, 5): SILENT, (5, 3): SILENT}, heard={(5, 3)}).findings()
    assert (finding.kind, finding.ranks) == (FindingKind.ONE_WAY, (3, 5))
    assert "What rank 3 (m3, 10.0.0.4) sends to rank 5 (m5, 10.0.0.6) is lost" in finding.message
    assert kinds(Network(8, reach={(3, 5): SILENT, (5, 3): SILENT}).findings()) == [
        (FindingKind.UNREACHABLE, (3, 5)),
        (FindingKind.UNREACHABLE, (5, 3)),
    ]


def test_a_firewall_that_admits_the_rendezvous_port_only_is_found() -> None:
    """Field case 14: 29500 is open, and every collective hangs."""
    [finding] = Network(2, reach={(1, 0): ONLY_RENDEZVOUS}).findings()
    assert finding.kind is FindingKind.PORT_CLOSED
    assert "the rendezvous port 29500 answers, the ephemeral port 40000 does not answer" in finding.message
    assert "admits the rendezvous port only" in finding.hint


def test_a_member_that_nobody_reaches_is_told_once() -> None:
    reach = {(other, 2): SILENT for other in range(8)}
    [finding] = Network(8, reach=reach).findings()
    assert (finding.kind, finding.ranks) == (FindingKind.UNREACHABLE, (2,))
    assert "No other member reaches rank 2" in finding.message


def test_a_member_that_is_cut_off_is_told_in_both_directions_and_its_peers_are_not() -> None:
    reach = {way: SILENT for other in range(8) if other != 2 for way in ((other, 2), (2, other))}
    assert kinds(Network(8, reach=reach).findings()) == [(FindingKind.UNREACHABLE, (2,))] * 2


def test_between_gateways_it_is_they_that_are_looked_at_and_not_ports() -> None:
    def on_the_mesh(facts: MemberFacts) -> MemberFacts:
        return replace(facts, path=Transport.RELAYED if facts.rank == 2 else Transport.DIRECT)

    findings = Network(3, reach={(0, 1): ALL_MUTE, (1, 2): MUTE}, facts=on_the_mesh).findings()
    assert kinds(findings) == [(FindingKind.ONE_WAY, (0, 1)), (FindingKind.PORT_CLOSED, (1, 2))]
    first, second = findings
    assert "the way through their gateways (direct) takes the connection, and nothing comes" in first.message
    assert "the way through their gateways (relayed)" in second.message
    assert (
        "m1's gateway runs. Where it is dialled directly, its mesh port has to admit the host of m0"
        in first.hint
    )
    assert "10.0.0." not in first.hint, "a firewall between hosts sees no overlay address"
    assert "MTU" in first.hint, "a handshake has full-size packets"
    assert "MTU" not in second.hint


def test_another_program_that_answers_is_told_as_one() -> None:
    stranger = Reach(rendezvous=Dialled.STRANGER, ephemeral=Dialled.ANSWERED)
    [finding] = Network(2, reach={(0, 1): stranger}).findings()
    assert "is answered by another program" in finding.message
    assert "a proxy, or a NAT" in finding.hint


def test_packets_that_are_too_large_are_found_with_the_size_that_passes() -> None:
    [finding] = Network(4, segment_bytes_max={(0, 3): 1399}).findings()
    assert (finding.kind, finding.ranks) == (FindingKind.PACKETS_TOO_LARGE, (0, 3))
    assert "segments of 1200 bytes come through" in finding.message
    assert "MTU of their interfaces to 1252" in finding.hint
    [finding] = Network(4, segment_bytes_max={(0, 3): 0}).findings()
    assert "much at once does not" in finding.message


def test_a_tunnel_of_one_member_is_told_once() -> None:
    [finding] = Network(6, segment_bytes_max={(4, other): 1400 for other in range(6)}).findings()
    assert (finding.kind, finding.ranks) == (FindingKind.PACKETS_TOO_LARGE, (4,))


@pytest.mark.parametrize("members", [3, 8])
def test_a_way_of_half_the_speed_is_a_warning(members: int) -> None:
    network = Network(members, rate={(0, 1): USUAL / 2})
    [finding] = network.findings()
    assert (finding.kind, finding.ranks, finding.is_fault) == (FindingKind.SLOW, (0, 1), False)
    assert "4.0 Gbit/s" in finding.message and "8.0 Gbit/s" in finding.message
    assert network.asked.count((0, 1)) == 5, "nothing is said of one bad measurement"


def test_a_member_of_half_the_speed_is_told_once() -> None:
    [finding] = Network(8, rate={(other, 6): USUAL / 2 for other in range(8)}).findings()
    assert (finding.kind, finding.ranks) == (FindingKind.SLOW, (6,))
    assert "receives" in finding.message


@pytest.mark.parametrize("bad_times", [1, 2])
def test_a_busy_moment_is_no_finding(bad_times: int) -> None:
    assert Network(8, busy={(0, 1): bad_times, (5, 2): bad_times}).findings() == []


def test_who_is_busy_and_answers_late_is_looked_at_again_and_is_no_finding() -> None:
    network = Network(8, late={(0, 1), (5, 2)})
    assert network.findings() == []
    assert {(0, 1), (5, 2)} <= set(network.asked), "and then its throughput too"


def test_who_does_not_answer_those_with_patience_is_a_fault() -> None:
    [finding] = Network(8, reach={(0, 1): MUTE}).findings()
    assert (finding.kind, finding.ranks) == (FindingKind.PORT_CLOSED, (0, 1))
    assert "takes the connection, and nothing comes through it" in finding.message


def test_where_there_was_no_time_for_patience_nothing_bad_is_said() -> None:
    [finding] = Network(8, reach={(0, 1): MUTE}, has_no_time=True, limit_s=0.5).findings()
    assert (finding.kind, finding.is_fault) == (FindingKind.NOT_MEASURED, False)
    assert "m0 to m1" in finding.message


def test_two_members_have_no_usual_speed() -> None:
    assert Network(2, rate={(0, 1): USUAL / 10}).findings() == []


def test_ways_between_far_places_are_compared_with_their_like() -> None:
    def placed(facts: MemberFacts) -> MemberFacts:
        return replace(facts, place="east" if facts.rank < 4 else "west")

    far = {(a, b): USUAL / 20 for a in range(8) for b in range(8) if (a < 4) != (b < 4)}
    assert Network(8, facts=placed, rate=far).findings() == []
    [finding] = Network(8, facts=placed, rate=far | {(0, 7): USUAL / 40}).findings()
    assert finding.ranks == (0, 7)


def test_versions_that_differ_are_told_and_what_is_not_installed_is_none() -> None:
    def with_torch(facts: MemberFacts) -> MemberFacts:
        versions = (
            {}
            if facts.rank == 2
            else {"torch": "2.13.0" if facts.rank else "2.14.1", "driver": str(facts.rank)}
        )
        return replace(facts, versions=versions)

    [finding] = Network(4, facts=with_torch).findings()
    assert finding.kind is FindingKind.VERSIONS
    assert "2.14.1 on rank 0 (m0, 10.0.0.1); 2.13.0 on rank 1" in finding.message


@pytest.mark.parametrize("members", [2, 5])
def test_of_machines_that_were_checked_before_only_the_ways_to_a_new_one_are_measured(members: int) -> None:
    network = Network(members, fresh={1}, reach={(0, 2): SILENT})
    assert network.findings() == []
    assert sorted(set(network.asked)) == sorted(
        way for other in range(members) if other != 1 for way in ((1, other), (other, 1))
    )


@pytest.mark.parametrize(
    ("offset_s", "said"), [(3600.0, "60 min"), (5.25, "5.25 s"), (90.0, "90 s"), (7300.0, "2.0 h")]
)
def test_a_clock_that_is_off_is_a_warning(offset_s: float, said: str) -> None:
    ahead = replace(OPEN, offset_s=offset_s)
    [finding] = Network(3, reach={(0, 2): ahead, (2, 0): replace(OPEN, offset_s=-offset_s)}).findings()
    assert (finding.kind, finding.ranks, finding.is_fault) == (FindingKind.CLOCK, (2,), False)
    assert f"{said} ahead" in finding.message


def test_what_hangs_is_said_when_the_time_is_over() -> None:
    [finding] = Network(3, hangs={1}, limit_s=0.05).findings()
    assert finding.kind is FindingKind.NOT_MEASURED
    assert "m1 to m0, m1 to m2" in finding.message


@given(st.data())
def test_any_subset_of_the_measurements_gives_a_verdict(data: st.DataObject) -> None:
    members = data.draw(st.integers(2, 5))
    ways = [(a, b) for a in range(members) for b in range(members) if a != b]
    seen = Network(
        members, reach=dict.fromkeys(data.draw(st.lists(st.sampled_from(ways))), ONLY_RENDEZVOUS)
    ).seen()
    for way in data.draw(st.lists(st.sampled_from(ways), unique=True)):
        seen.reach.pop(way, None)
        seen.push.pop(way, None)
    missing = [way for way in ways if not is_sure(seen, way)]
    findings = judge(seen)
    assert any(finding.kind is FindingKind.NOT_MEASURED for finding in findings) == bool(missing)
    assert [finding.is_fault for finding in findings] == sorted((f.is_fault for f in findings), reverse=True)
