"""What is wrong with the network of a gang, and what to do about it, from what was seen.

Rules of this file:
1. Pure and total: any subset of the measurements gives a verdict; what was not measured is said to be so.
2. A fault is told once, where it is: a member that nobody reaches is one finding, not one for each of its peers.
3. A slow link is slow in comparison: with the ways of this check that it should be like, never with a figure of ours.
4. Faults cost a machine its place in a gang, warnings do not: what is slow, what a command may bring itself (versions),
   and what the check had no time for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from mesh.net.clock import length_text
from mesh.netcheck.measurements import Dialled, MemberFacts, PortKind, Reach, Seen, Way
from mesh.netcheck.words import rate
from mesh.states import Transport

SLOW_SHARE = 0.6
"""Below this share of the usual throughput a way is slow: a link at half its speed is."""
USUAL_QUANTILE = 0.75
"""What three of four ways do not exceed is usual. Not the median: who is busy makes links seem slower, never faster."""
SLOW_PUSHES_MIN, LOSSY_PUSHES_MIN = 3, 3
"""Of a way that was measured less often nothing bad is said."""
SLOW_WAYS_MIN = 4
"""Fewer ways than this have no "usual" throughput."""
MEMBER_WAYS_MIN = 2
"""A member whose ways are all bad, and at least so many, is told once instead of each way."""
OVERLAY_PATHS = (Transport.DIRECT, Transport.RELAYED)
"""Between gateways: every connection is taken at once, and what becomes of it shows later."""
OFFSET_WARN_S = 5.0
"""Clocks that differ by more spoil the order of merged logs; by much more, certificates."""
VERSIONS_THAT_MUST_AGREE = ("torch", "nccl", "cuda", "image")
"""Ranks with different ones hang or crash in their first collective; NCCL says so only at its own debug level."""


TOLD_MAX = 5
"""Ways that were not measured are told by name up to here."""


class FindingKind(StrEnum):
    UNREACHABLE = "Unreachable"
    ONE_WAY = "OneWay"
    PORT_CLOSED = "PortClosed"
    PACKETS_TOO_LARGE = "PacketsTooLarge"
    SLOW = "Slow"
    CLOCK = "Clock"
    VERSIONS = "Versions"
    NOT_MEASURED = "NotMeasured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong. `ranks`: whom it is about, the one that dials first; `message` and `hint` are prose."""

    kind: FindingKind
    ranks: tuple[int, ...]
    message: str
    hint: str
    is_fault: bool = True


def judge(seen: Seen) -> list[Finding]:
    """Everything that is wrong, faults first."""
    findings = [
        *_closed(seen),
        *_too_large(seen),
        *_slow(seen),
        *_versions(seen),
        *_clocks(seen),
        *_unmeasured(seen),
    ]
    return sorted(findings, key=lambda finding: not finding.is_fault)


def lossy(seen: Seen) -> list[Way]:
    """Ways that much data did not come through."""
    return [way for way, push in seen.push.items() if push.bytes_per_s is None]


def slow(seen: Seen) -> list[Way]:
    """Ways that carry clearly less than is usual for their like."""
    return [way for way, usual in _usual(seen).items() if _rate_of(seen, way) < SLOW_SHARE * usual]


def _at_one_member(
    bad: Collection[Way], measured: Iterable[Way]
) -> tuple[list[tuple[int, int, list[Way]]], list[Way]]:
    """Bad ways that are all those from a member (end 0), or to it (end 1), as (member, end, ways); and the others."""
    members: list[tuple[int, int, list[Way]]] = []
    told: set[Way] = set()
    for end in (1, 0):
        by_member: dict[int, list[Way]] = defaultdict(list)
        for way in measured:
            by_member[way[end]].append(way)
        for rank, ways in sorted(by_member.items()):
            if len(ways) >= MEMBER_WAYS_MIN and told.isdisjoint(ways) and set(ways) <= set(bad):
                told.update(ways)
                members.append((rank, end, ways))
    return members, sorted(set(bad) - told)


# ---- ports ----------------------------------------------------------------------------------------------


def _closed(seen: Seen) -> Iterator[Finding]:
    closed = {way: reach for way, reach in seen.reach.items() if not reach.is_open and is_sure(seen, way)}
    for way in sorted(closed):
        back = way[1], way[0]
        if (
            way in closed
            and closed.get(back) == closed[way] == SILENT
            and back in seen.heard
            and way not in seen.heard
        ):
            del closed[way], closed[back]
            yield _lost_one_way(seen, way)
    by_sort: dict[tuple[Dialled, Dialled], list[Way]] = defaultdict(list)
    for way, reach in closed.items():
        by_sort[_sort_of(reach)].append(way)
    for ways in by_sort.values():
        members, others = _at_one_member(ways, list(seen.reach))
        for rank, end, its_ways in members:
            yield _member_closed(seen, rank, end, its_ways)
        for way in others:
            yield _way_closed(seen, way, closed[way], back=seen.reach.get((way[1], way[0])))


SILENT = Reach(rendezvous=Dialled.SILENT, ephemeral=Dialled.SILENT)


def _lost_one_way(seen: Seen, way: Way) -> Finding:
    sender, receiver = way
    return Finding(
        kind=FindingKind.ONE_WAY,
        ranks=way,
        message=f"What {_name(seen, sender)} sends to {_name(seen, receiver)} is lost; the other direction works. So "
        "neither can open a connection.",
        hint=f"Admit {seen.members[sender].address} in the firewall (security group) of "
        f"{seen.members[receiver].machine}, and look at the route from there.",
    )


def _sort_of(reach: Reach) -> tuple[Dialled, Dialled]:
    return reach.rendezvous, reach.ephemeral


def _member_closed(seen: Seen, rank: int, end: int, ways: Sequence[Way]) -> Finding:
    reach = seen.reach[ways[0]]
    kind = FindingKind.UNREACHABLE if _is_shut(reach) else FindingKind.PORT_CLOSED
    if end == 0:
        return Finding(
            kind=kind,
            ranks=(rank,),
            message=f"{_name(seen, rank)} reaches no other member: {_ports_words(seen, ways[0][1], reach)}.",
            hint=f"Look at the routes of {seen.members[rank].machine} and at what its firewall lets out.",
        )
    return Finding(
        kind=kind,
        ranks=(rank,),
        message=f"No other member reaches {_name(seen, rank)}: {_ports_words(seen, rank, reach)}.",
        hint=_port_hint(seen, rank, reach, sender=None),
    )


def _way_closed(seen: Seen, way: Way, reach: Reach, back: Reach | None) -> Finding:
    sender, receiver = way
    if not _is_shut(reach):
        kind = FindingKind.PORT_CLOSED
    else:
        kind = FindingKind.ONE_WAY if back is not None and back.is_open else FindingKind.UNREACHABLE
    opposite = "; the other way works" if kind is FindingKind.ONE_WAY else ""
    return Finding(
        kind=kind,
        ranks=way,
        message=f"{_name(seen, sender)} does not reach {_name(seen, receiver)}: "
        f"{_ports_words(seen, receiver, reach)}{opposite}.",
        hint=_port_hint(seen, receiver, reach, sender=sender),
    )


def _is_shut(reach: Reach) -> bool:
    return Dialled.ANSWERED not in _sort_of(reach)


def _ports_words(seen: Seen, rank: int, reach: Reach) -> str:
    facts = seen.members[rank]
    if facts.path in OVERLAY_PATHS:
        worst = reach.ephemeral if reach.rendezvous is Dialled.ANSWERED else reach.rendezvous
        return f"the way through their gateways ({facts.path}) {_DIALLED_WORDS[worst]}"
    parts = []
    for kind, port, dialled in (
        (PortKind.RENDEZVOUS, facts.rendezvous_port, reach.rendezvous),
        (PortKind.EPHEMERAL, facts.ephemeral_port, reach.ephemeral),
    ):
        parts.append(f"the {kind} port {port} {_DIALLED_WORDS[dialled]}")
    return ", ".join(parts)


_DIALLED_WORDS = {
    Dialled.ANSWERED: "answers",
    Dialled.REFUSED: "refuses the connection",
    Dialled.SILENT: "does not answer",
    Dialled.MUTE: "takes the connection, and nothing comes through it",
    Dialled.STRANGER: "is answered by another program",
}


def _port_hint(seen: Seen, rank: int, reach: Reach, *, sender: int | None) -> str:
    """`sender`: who does not reach this rank; None for nobody does."""
    facts = seen.members[rank]
    if facts.path in OVERLAY_PATHS:
        return _gateway_hint(facts, None if sender is None else seen.members[sender])
    sender_address = "every other member" if sender is None else seen.members[sender].address
    if Dialled.STRANGER in _sort_of(reach):
        return (
            f"Something before {facts.machine} takes its connections: a proxy, or a NAT in front of several."
        )
    if reach.rendezvous is Dialled.ANSWERED:
        return (
            f"The firewall of {facts.machine} admits the rendezvous port only. gloo and NCCL listen on ports that the "
            f"system chooses: admit all TCP ports from {sender_address}."
        )
    if _is_shut(reach) and reach.ephemeral is Dialled.SILENT:
        return (
            f"Admit all TCP ports from {sender_address} in the firewall (security group) of {facts.machine}; see its "
            "routes."
        )
    return f"Admit all TCP ports from {sender_address} on {facts.machine}, the rendezvous port included."


def _gateway_hint(facts: MemberFacts, sender: MemberFacts | None) -> str:
    """Members' addresses are the overlay's here, which no firewall between the hosts ever sees."""
    hint = f"See that both reach the head's mesh port and that {facts.machine}'s gateway runs."
    if facts.path is not Transport.DIRECT:
        return hint
    host = "the hosts of all others" if sender is None else f"the host of {sender.machine}"
    return (
        f"{hint} Where it is dialled directly, its mesh port has to admit {host}, and full-size packets have to pass: "
        "a handshake has some. If small ones pass alone, set a smaller MTU (1280) on both hosts' interfaces."
    )


# ---- full-size packets, throughput ----------------------------------------------------------------------


HEADERS_BYTES = 52
"""IPv4, TCP and its timestamps: what a packet has beyond its segment."""


def _too_large(seen: Seen) -> Iterator[Finding]:
    members, others = _at_one_member(_often_enough(seen, lossy(seen), LOSSY_PUSHES_MIN), list(seen.push))
    for rank, end, ways in members:
        peers = "to any other member" if end == 0 else "from any other member"
        yield _packets_lost(
            seen, (rank,), f"{peers} {'from' if end == 0 else 'to'} {_name(seen, rank)}", ways
        )
    for way in others:
        yield _packets_lost(seen, way, f"from {_name(seen, way[0])} to {_name(seen, way[1])}", [way])


def _packets_lost(seen: Seen, ranks: tuple[int, ...], where: str, ways: Sequence[Way]) -> Finding:
    through = max((seen.push[way].segment_bytes_max or 0 for way in ways), default=0)
    if through:
        message = f"Full-size packets {where} are lost; segments of {through} bytes come through."
        hint = (
            f"Set the MTU of their interfaces to {through + HEADERS_BYTES}, or let ICMP `packet too big` pass: it "
            "tells the senders."
        )
    else:
        message = f"A few bytes come through {where}; much at once does not."
        hint = "Look for a filter, a shaper or a tunnel on that way, and for its MTU."
    return Finding(kind=FindingKind.PACKETS_TOO_LARGE, ranks=ranks, message=message, hint=hint)


def _usual(seen: Seen) -> dict[Way, float]:
    """The usual throughput of each way, by its ends' places and its path; without those of which too few are known."""
    rates: dict[tuple[str, ...], dict[Way, float]] = defaultdict(dict)
    for way, push in seen.push.items():
        if push.bytes_per_s is not None:
            places = sorted(seen.members[rank].place for rank in way)
            rates[*places, seen.path_of(way)][way] = push.bytes_per_s
    known = [alike for alike in rates.values() if len(alike) >= SLOW_WAYS_MIN]
    return {way: _quantile(alike.values()) for alike in known for way in alike}


def _quantile(rates: Collection[float]) -> float:
    return sorted(rates)[int(USUAL_QUANTILE * (len(rates) - 1))]


def _often_enough(seen: Seen, ways: Iterable[Way], pushes_min: int) -> list[Way]:
    return [way for way in ways if seen.pushes[way] >= pushes_min]


def _rate_of(seen: Seen, way: Way) -> float:
    return seen.push[way].bytes_per_s or 0.0


def _slow(seen: Seen) -> Iterator[Finding]:
    usual = _usual(seen)
    members, others = _at_one_member(_often_enough(seen, slow(seen), SLOW_PUSHES_MIN), list(usual))
    for rank, end, ways in members:
        verb = "receives" if end else "sends"
        yield Finding(
            kind=FindingKind.SLOW,
            ranks=(rank,),
            message=f"{_name(seen, rank)} {verb} {rate(median(_rate_of(seen, way) for way in ways))}, where "
            f"{rate(median(usual[way] for way in ways))} are usual here.",
            hint="Every collective waits for its slowest member: take another one, or see who shares its link.",
            is_fault=False,
        )
    for way in others:
        yield Finding(
            kind=FindingKind.SLOW,
            ranks=way,
            message=f"From {_name(seen, way[0])} to {_name(seen, way[1])} {rate(_rate_of(seen, way))} come through, "
            f"where {rate(usual[way])} are usual here.",
            hint="Every collective waits for its slowest link: look at what lies between these two.",
            is_fault=False,
        )


# ---- versions, clocks, what is missing ------------------------------------------------------------------


def _versions(seen: Seen) -> Iterator[Finding]:
    for name in VERSIONS_THAT_MUST_AGREE:
        ranks_by_version: dict[str, list[int]] = defaultdict(list)
        for rank, facts in sorted(seen.members.items()):
            if name in facts.versions:
                ranks_by_version[facts.versions[name]].append(rank)
        if len(ranks_by_version) < 2:
            continue
        groups = [
            f"{version} on {', '.join(_name(seen, rank) for rank in ranks)}"
            for version, ranks in ranks_by_version.items()
        ]
        yield Finding(
            kind=FindingKind.VERSIONS,
            ranks=tuple(sorted(rank for ranks in ranks_by_version.values() for rank in ranks)),
            message=f"The members have different versions of {name}: {'; '.join(groups)}.",
            hint="Install the same on all, or run one image. Only what is installed beside the agents is seen.",
            is_fault=False,
        )


def _clocks(seen: Seen) -> Iterator[Finding]:
    """Against rank 0, by the ways from and to it."""
    for rank in sorted(seen.members):
        ahead = [
            sign * reach.offset_s
            for way, sign in (((0, rank), 1), ((rank, 0), -1))
            if (reach := seen.reach.get(way)) is not None and reach.offset_s is not None
        ]
        if rank == 0 or not ahead or abs(median(ahead)) <= OFFSET_WARN_S:
            continue
        offset_s = median(ahead)
        yield Finding(
            kind=FindingKind.CLOCK,
            ranks=(rank,),
            message=f"The clock of {_name(seen, rank)} is {length_text(abs(offset_s))} "
            f"{'ahead of' if offset_s > 0 else 'behind'} that of {_name(seen, 0)}.",
            hint="Let both follow a time server (chrony, systemd-timesyncd).",
            is_fault=False,
        )


def is_sure(seen: Seen, way: Way) -> bool:
    """What was seen of it is enough to say something."""
    reach, push = seen.reach.get(way), seen.push.get(way)
    if reach is None:
        return False
    if not reach.is_open:
        return not reach.is_doubtful or way in seen.confirmed
    return push is not None and (push.bytes_per_s is not None or seen.pushes[way] >= LOSSY_PUSHES_MIN)


def _unmeasured(seen: Seen) -> Iterator[Finding]:
    missing = sorted(way for way in seen.asked if not is_sure(seen, way))
    if missing:
        names = ", ".join(
            f"{seen.members[a].machine} to {seen.members[b].machine}" for a, b in missing[:TOLD_MAX]
        )
        more = f" and {len(missing) - TOLD_MAX} more" if len(missing) > TOLD_MAX else ""
        yield Finding(
            kind=FindingKind.NOT_MEASURED,
            ranks=tuple(sorted({rank for way in missing for rank in way})),
            message=f"Not measured in the time that the check has: {names}{more}.",
            hint="Run `mesh check` again; if it stays so, a member answers too slowly.",
            is_fault=False,
        )


def _name(seen: Seen, rank: int) -> str:
    facts = seen.members[rank]
    if not seen.has_ranks:
        return f"{facts.machine} ({facts.address})"
    return f"rank {rank} ({facts.machine}, {facts.address})"
