"""A network check that nobody made, in the shape of a real one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coordinator.fleet import Looked
from coordinator.network_view import report
from mesh.ids import MachineName
from mesh.netcheck.measurements import Dialled, MemberFacts, Push, Reach, Seen
from mesh.netcheck.verdict import judge
from mesh.network_resources import NetworkReport

OPEN = Reach(rendezvous=Dialled.ANSWERED, ephemeral=Dialled.ANSWERED, round_trip_s=0.0003, offset_s=0.0)
HALF_OPEN = Reach(rendezvous=Dialled.ANSWERED, ephemeral=Dialled.SILENT)


def fake_report(names: Sequence[str], *, apart: Collection[str]) -> NetworkReport:
    """Nobody reaches the ephemeral ports of those that are apart."""
    ways = {(a, b) for a in range(len(names)) for b in range(len(names)) if a != b}
    shut = {(a, b) for a, b in ways if names[b] in apart}
    seen = Seen(
        has_ranks=False,
        members={
            place: MemberFacts(
                rank=place, machine=name, address=f"10.0.0.{place + 1}", rendezvous_port=29500,
                ephemeral_port=40000 + place,
            )
            for place, name in enumerate(names)
        },
        asked=ways,
        reach={way: HALF_OPEN if way in shut else OPEN for way in ways},
        push={way: Push(bytes_per_s=1.25e9) for way in ways - shut},
    )  # fmt: skip
    looked = Looked(seen=seen, absent={})
    machines = [MachineName(name) for name in names]
    return report(looked, judge(seen), machines, at=1.7e9, seconds=1.5)
