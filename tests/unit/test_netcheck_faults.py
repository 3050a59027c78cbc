"""The tournament with faults put in: everything that is wrong is found, and of what is well nothing is ever said.

The network is made of numbers: each push sees its way's true throughput less what a busy moment takes, and sometimes a
bad moment. Everything is drawn from a seed, so a failure repeats itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from coordinator.network_check import check
from mesh.netcheck.measurements import Dialled, MemberFacts, Reach, Seen, Way
from mesh.netcheck.refusals import refusals
from mesh.netcheck.verdict import Finding, FindingKind, judge

HOSTS = 16
USUAL = 1.25e9
"""Bytes a second: 10 Gbit/s."""
FULL_SEGMENT = 1448
OPEN = Reach(rendezvous=Dialled.ANSWERED, ephemeral=Dialled.ANSWERED, round_trip_s=0.0004, offset_s=0.0)
SILENT = Reach(rendezvous=Dialled.SILENT, ephemeral=Dialled.SILENT)
ONLY_RENDEZVOUS = Reach(rendezvous=Dialled.ANSWERED, ephemeral=Dialled.SILENT)


@dataclass
class Wire:
    """A network of so many hosts. `dropped`: what is sent along these ways is lost."""

    seed: int
    hosts: int = HOSTS
    dropped: set[Way] = field(default_factory=set)
    shut: set[Way] = field(default_factory=set)
    """Only the rendezvous port is reached."""
    halved: set[Way] = field(default_factory=set)
    holes: dict[Way, int] = field(default_factory=dict)
    """The largest segment that passes."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def reach(self, way: Way) -> Reach:
        """A connection needs both directions."""
        if way in self.dropped or way[::-1] in self.dropped:
            return SILENT
        return ONLY_RENDEZVOUS if way in self.shut else OPEN

    def rate(self, way: Way) -> float:
        share = self.random.uniform(0.72, 1.0)
        if self.random.random() < 0.03:
            share = self.random.uniform(0.1, 0.6)
        return USUAL * share * (0.5 if way in self.halved else 1.0)

    def seen(self) -> Seen:
        members = {
            rank: (
                MemberFacts(
                    rank=rank, machine=f"m{rank}", address=f"10.0.0.{rank + 1}", rendezvous_port=29500,
                    ephemeral_port=40000 + rank,
                ),
                End(self, rank),
            )
            for rank in range(self.hosts)
        }  # fmt: skip
        return asyncio.run(check(members))


class End:
    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank

    async def reach(self, others: Sequence[MemberFacts], *, is_patient: bool = False) -> Mapping[int, Reach]:
        return {other.rank: self._wire.reach((self._rank, other.rank)) for other in others}

    async def heard(self) -> set[int]:
        """Datagrams need one direction only."""
        return {
            sender
            for sender in range(self._wire.hosts)
            if sender != self._rank and (sender, self._rank) not in self._wire.dropped
        }

    async def push(
        self, other: MemberFacts, *, seconds: float, limit_s: float, segment_bytes: int | None = None
    ) -> float | None:
        way = (self._rank, other.rank)
        if (segment_bytes or FULL_SEGMENT) > self._wire.holes.get(way, FULL_SEGMENT):
            return None
        return self._wire.rate(way)


def found(wire: Wire) -> list[Finding]:
    return judge(wire.seen())


def about(findings: list[Finding], kind: FindingKind) -> set[tuple[int, ...]]:
    return {finding.ranks for finding in findings if finding.kind is kind}


def test_of_a_hundred_clean_checks_of_sixteen_hosts_nothing_is_said() -> None:
    for seed in range(100):
        assert found(Wire(seed)) == [], f"seed {seed}"


@pytest.mark.parametrize("hosts", [3, 8, HOSTS])
def test_every_fault_is_found_where_it_is_and_nothing_else_is_said(hosts: int) -> None:
    for seed in range(60):
        draw = random.Random(f"faults {seed}")
        ways = [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
        pairs = [(a, b) for a, b in ways if a < b]
        some = draw.sample(pairs, k=min(len(pairs), 4))
        dropped, shut, halved, hole = (
            draw.choice([pair, pair[::-1]]) if pair else None for pair in (*some, None, None, None)[:4]
        )
        wire = Wire(
            seed,
            hosts=hosts,
            dropped=set() if dropped is None else {dropped},
            shut=set() if shut is None else {shut},
            halved=set() if halved is None else {halved},
            holes={} if hole is None else {hole: draw.choice([1400, 1200, 536])},
        )
        findings = found(wire)
        assert about(findings, FindingKind.ONE_WAY) == wire.dropped, f"seed {seed}"
        assert about(findings, FindingKind.PORT_CLOSED) == wire.shut, f"seed {seed}"
        assert about(findings, FindingKind.PACKETS_TOO_LARGE) == set(wire.holes), f"seed {seed}"
        if hosts > 3:  # of three hosts with as many faults nothing is usual
            assert about(findings, FindingKind.SLOW) == wire.halved, f"seed {seed}"
        faults = [finding for finding in findings if finding.is_fault]
        assert len(faults) == len(wire.dropped) + len(wire.shut) + len(wire.holes), f"seed {seed}"
        gone = {refusal.rank for refusal in refusals(findings, fresh=range(hosts))}
        assert all(gone & set(way) for way in (*wire.dropped, *wire.shut, *wire.holes)), f"seed {seed}"


def test_every_single_one_way_drop_is_found_in_its_direction() -> None:
    for way in ((a, b) for a in range(8) for b in range(8) if a != b):
        [finding] = found(Wire(0, hosts=8, dropped={way}))
        assert (finding.kind, finding.ranks) == (FindingKind.ONE_WAY, way)


def test_a_host_whose_link_is_halved_is_told_once() -> None:
    for seed in range(20):
        halved = {(5, other) for other in range(HOSTS) if other != 5}
        assert [(f.kind, f.ranks) for f in found(Wire(seed, halved=halved))] == [(FindingKind.SLOW, (5,))]
