"""Whatever a gate hears, in whatever order: only the newest epoch passes, from its place, not revoked."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given

from mesh.errors import FencedError
from mesh.ids import Epoch, MachineName, Rank
from mesh.net.gate import Admitted, Gate
from mesh.net.identity import PeerCertificate
from mesh.net.preface import MemberTarget, Preface
from tests.net_world import DEPLOYMENT, RUN, member, roster

NOW = 1_800_000_000.0
HERE = "b"
names = st.sampled_from("abc")
epochs = st.integers(1, 4)
ranks = st.integers(0, 1)
said = st.one_of(
    st.tuples(st.just("roster"), epochs, st.tuples(names, names)),
    st.tuples(st.just("host"), epochs, ranks),
    st.tuples(st.just("fence"), epochs),
    st.tuples(st.just("revoke"), st.sets(names)),
)


@dataclass
class Truth:
    """What a person with a list would know."""

    floor: int = 0
    on: tuple[str, ...] = ()
    epoch: int = 0
    up: set[int] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)

    def roster(self, epoch: int, on: tuple[str, ...]) -> bool:
        if epoch < self.floor:
            return False
        kept = {rank for rank in self.up if epoch == self.epoch and on[rank] == HERE}
        self.floor, self.epoch, self.on, self.up = epoch, epoch, on, kept
        return True

    def host(self, epoch: int, rank: int) -> bool:
        if epoch != self.epoch or self.on[rank] != HERE:
            return False
        self.up.add(rank)
        return True

    def fence(self, floor: int) -> bool:
        if floor < self.floor:
            return False
        self.floor = floor
        if floor > self.epoch:
            self.epoch, self.on, self.up = 0, (), set()
        return True

    def may_pass(self, name: str, rank: int, epoch: int, target: int) -> bool:
        return (
            epoch == self.epoch and self.on[rank] == name and name not in self.revoked and target in self.up
        )


def tell(gate: Gate, truth: Truth, words: tuple[object, ...]) -> None:
    """Both hear it, and agree on whether it is allowed."""
    allowed = True
    with contextlib.suppress(FencedError):
        match words:
            case ("roster", int(epoch), tuple(on)):
                allowed = truth.roster(epoch, on)
                gate.set_roster(roster(epoch, on=on))
            case ("host", int(epoch), int(rank)):
                allowed = truth.host(epoch, rank)
                gate.host(RUN, Epoch(epoch), Rank(rank), deliver_to=("127.0.0.1",))
            case ("fence", int(floor)):
                allowed = truth.fence(floor)
                gate.raise_floor(RUN, Epoch(floor))
            case ("revoke", set(machines)):
                truth.revoked = set(machines)
                gate.revoke(frozenset(map(MachineName, machines)))
        assert allowed, f"{words} was allowed"
        return
    assert not allowed, f"{words} was refused"


@given(st.lists(said, max_size=12))
def test_who_passes_is_who_may(story: list[tuple[object, ...]]) -> None:
    gate, truth = Gate(deployment=DEPLOYMENT, machine=MachineName(HERE)), Truth()
    for words in story:
        tell(gate, truth, words)
    for name in "abc":
        for rank in (0, 1):
            for epoch in range(1, 5):
                peer = PeerCertificate(
                    identity=member(rank, name, epoch=epoch), not_before=NOW, not_after=NOW
                )
                for target in (0, 1):
                    for meant in {epoch, 2}:
                        preface = Preface(
                            machine=MachineName(HERE),
                            member=MemberTarget(run=RUN, epoch=Epoch(meant), rank=Rank(target)),
                            port=29500,
                            clock=NOW,
                        )
                        passes = isinstance(gate.admit(peer, preface, now=NOW), Admitted)
                        may = meant == epoch and truth.may_pass(name, rank, epoch, target)
                        assert passes == may, (story, name, rank, epoch, target, meant)
                        if passes:
                            assert gate.still_admits(peer.identity)
