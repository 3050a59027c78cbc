"""A network check as the API shows it: pure functions from what was seen to resources."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.fleet import Looked
from mesh.ids import MachineName
from mesh.netcheck.estimate import all_reduce_s
from mesh.netcheck.measurements import Seen, Way
from mesh.netcheck.path_book import PathLine
from mesh.netcheck.verdict import Finding, FindingKind
from mesh.network_resources import NetworkFinding, NetworkReport, NetworkWay, ProviderPath


def report(
    looked: Looked,
    findings: Sequence[Finding],
    machines: Sequence[MachineName],
    *,
    at: float,
    seconds: float,
) -> NetworkReport:
    """One check of these machines, by their places in it."""
    seen = looked.seen
    is_complete = not looked.absent and not any(f.kind is FindingKind.NOT_MEASURED for f in findings)
    return {
        "passed": is_complete and not any(finding.is_fault for finding in findings),
        "at": at,
        "seconds": round(seconds, 3),
        "machines": [
            {
                "name": facts.machine,
                "address": facts.address,
                "rendezvousPort": facts.rendezvous_port,
                "ephemeralPort": facts.ephemeral_port,
                "mtuBytes": facts.mtu_bytes,
                "versions": dict(facts.versions),
            }
            for _, facts in sorted(seen.members.items())
        ],
        "ways": [_way(seen, way) for way in sorted(seen.asked)],
        "findings": [_finding(seen, finding) for finding in findings],
        "notChecked": {str(machines[place]): why for place, why in sorted(looked.absent.items())},
    }


def _way(seen: Seen, way: Way) -> NetworkWay:
    reach, push = seen.reach.get(way), seen.push.get(way)
    return {
        "sender": seen.members[way[0]].machine,
        "receiver": seen.members[way[1]].machine,
        "path": str(seen.path_of(way)),
        "rendezvous": None if reach is None else str(reach.rendezvous),
        "ephemeral": None if reach is None else str(reach.ephemeral),
        "roundTripSeconds": None if reach is None else reach.round_trip_s,
        "clockOffsetSeconds": None if reach is None else reach.offset_s,
        "bytesPerSecond": None if push is None else push.bytes_per_s,
        "segmentBytesMax": None if push is None else push.segment_bytes_max,
    }


def _finding(seen: Seen, finding: Finding) -> NetworkFinding:
    return {
        "kind": str(finding.kind),
        "machines": [seen.members[rank].machine for rank in finding.ranks],
        "message": finding.message,
        "hint": finding.hint,
        "isFault": finding.is_fault,
    }


def path_resource(line: PathLine, *, parameters: float | None, members: int) -> ProviderPath:
    """One line; with a model's size, how long an all-reduce of it takes there."""
    takes_s = None
    if parameters is not None and line.bytes_per_s and line.round_trip_s is not None:
        takes_s = all_reduce_s(
            parameters, members=members, bytes_per_s=line.bytes_per_s, round_trip_s=line.round_trip_s
        )
    return {
        "providers": list(line.providers),
        "path": line.path,
        "passed": line.passed,
        "failed": line.failed,
        "passedAt": line.passed_at,
        "failedAt": line.failed_at,
        "fault": line.fault or None,
        "roundTripSeconds": line.round_trip_s,
        "bytesPerSecond": line.bytes_per_s,
        "offered": line.is_offered,
        "allReduceSeconds": takes_s,
    }
