"""A run's story tells its path, and on which machines the network's layer of the fence is not whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.effects import Announcement, Persist
from coordinator.core.events import Now
from coordinator.core.gang import GangCore
from coordinator.core.gang_record import gang_of, record_of
from coordinator.core.gang_state import Gang, Holding, MemberPhase, MemberRecord
from coordinator.path_view import path_conditions, path_status
from coordinator.view import run_resource
from mesh.cli.describe import describe_run
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.messages import MemberStarted, MemberStartFailed, PathTaken
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import NetworkScope, RunState, Transport

NOW = Now(mono=10.0, wall=1000.0)
LAYER = "gateways admit certificates of epoch 1 only"
DIRECT = PathTaken(transport=Transport.DIRECT, address="198.19.0.1", layer=LAYER)


def incarnation(rank: int) -> Incarnation:
    return Incarnation(
        run_uid=RunUid("ab" * 8), epoch=Epoch(1), rank=Rank(rank), token=IncarnationToken(f"{rank:016x}")
    )


class Story:
    """A gang of two at the moment when its barrier has opened."""

    def __init__(self, *, scope: NetworkScope = NetworkScope.COLOCATED) -> None:
        members = {
            Rank(rank): MemberRecord(
                incarnation=incarnation(rank),
                machine=MachineName(f"m{rank}"),
                address=f"198.19.0.{rank + 1}",
                phase=MemberPhase.ARRIVED,
                ordered_at=0.0,
            )
            for rank in (0, 1)
        }
        self.gang = Gang(
            uid=RunUid("ab" * 8),
            plan=RunPlan(name=RunName("job"), command=("true",), nodes=2, network=scope),
            created_at=0.0,
            epoch=Epoch(1),
            state=RunState.STARTING,
            barrier_open=True,
            members=members,
            holdings=[
                Holding(machine=m.machine, address=m.address, reservation=1, rank=rank, since=0.0)
                for rank, m in members.items()
            ],
        )
        self.core = GangCore(self.gang, new_token=lambda: IncarnationToken("ef" * 8))
        self.told: list[Announcement] = []

    def hear(self, report: MemberStarted | MemberStartFailed) -> None:
        for effect in self.core.handle(report, NOW):
            if isinstance(effect, Persist):
                self.told += effect.announcements

    def start(self, rank: int, path: PathTaken | None) -> None:
        self.hear(MemberStarted(incarnation=incarnation(rank), at=5.0, pid=7, master_port=29500, path=path))

    @property
    def conditions(self) -> list[str]:
        return [condition["type"] for condition in path_conditions(self.gang)]


def test_the_first_to_start_says_the_path_for_all() -> None:
    story = Story()
    assert path_status(story.gang) is None
    story.start(0, DIRECT)
    story.start(1, replace(DIRECT, address="198.19.0.2"))
    assert [(a.kind, a.message) for a in story.told if a.kind == "Path"] == [
        ("Path", "Members reach each other by direct: gateway to gateway, encrypted.")
    ]
    assert path_status(story.gang) == {"transport": "direct", "layer": LAYER, "lacks": []}
    assert story.conditions == []
    assert gang_of(record_of(story.gang)).members == story.gang.members


def test_a_trusted_network_is_no_news() -> None:
    story = Story()
    story.start(0, PathTaken(transport=Transport.PRIVATE, address="127.0.0.2"))
    assert not [a for a in story.told if a.kind in ("Path", "NetworkLayerOff")]
    assert path_status(story.gang) == {"transport": "private", "layer": "", "lacks": []}


def test_the_address_of_the_path_is_the_members_from_then_on() -> None:
    story = Story()
    story.start(1, PathTaken(transport=Transport.PRIVATE, address="10.0.0.2", layer="a firewall"))
    assert story.gang.members[Rank(1)].address == "10.0.0.2"


@pytest.mark.parametrize(
    ("transport", "condition"),
    [
        (Transport.PUBLIC, ["PublicClearText"]),
        (Transport.RELAYED, ["RelayedLowBandwidth"]),
        (Transport.DIRECT, []),
        (Transport.PRIVATE, []),
    ],
)
def test_conditions_say_what_a_path_costs(transport: Transport, condition: list[str]) -> None:
    story = Story(scope=NetworkScope.GLOBAL)
    story.start(0, replace(DIRECT, transport=transport))
    assert story.conditions == ["WANBound", *condition]


def test_a_machine_whose_layer_is_off_says_so_and_the_run_goes_on() -> None:
    story = Story()
    lacking = PathTaken(
        transport=Transport.PRIVATE, address="10.0.0.1", lacks="nft: Operation not permitted."
    )
    story.start(0, lacking)
    story.start(1, replace(lacking, address="10.0.0.2", layer="a firewall", lacks=""))
    [off] = [a for a in story.told if a.kind == "NetworkLayerOff"]
    assert off.rank == 0
    assert off.message == "On m0 the network's layer of the fence is off: nft: Operation not permitted."
    assert story.gang.state is RunState.RUNNING
    assert story.conditions == ["NetworkLayerOff"]
    shown = run_resource(story.gang, {}, now=1000.0)
    lines = describe_run(shown)
    assert "Path:         private" in lines
    assert "Net fence:    a firewall" in lines
    assert "  NetworkLayerOff: m0: nft: Operation not permitted." in lines


def test_a_path_that_cannot_be_opened_is_never_the_commands_fault() -> None:
    story = Story()
    story.hear(
        MemberStartFailed(
            incarnation=incarnation(1), at=5.0, reason=Reason.NETWORK_FAILED, message="No gateway."
        )
    )
    [failure] = story.gang.failures
    assert failure.evidence.by_infrastructure
    story.hear(
        MemberStartFailed(
            incarnation=incarnation(0), at=5.0, reason=Reason.COMMAND_NOT_FOUND, message="No such file."
        )
    )
    assert not story.gang.failures[1].evidence.by_infrastructure
