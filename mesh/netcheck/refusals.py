"""Which machines have to go so that the others can work with each other. Pure.

Rules of this file:
1. Only faults cost a machine (`verdict`, rule 4).
2. A machine that is bad towards everybody is told as one, and goes.
3. Of a bad pair it cannot be seen which end is bad. Who is in the most bad pairs goes; then who was suspected before;
   then who is new, since the others have been checked; then who has the highest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mesh.netcheck.verdict import Finding

TOLD_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One member whose machine goes. `peers`: the other ends of its bad pairs, when one of these may as well be bad."""

    rank: int
    message: str
    peers: tuple[int, ...] = ()


def refusals(
    findings: Sequence[Finding], *, fresh: Collection[int], suspects: Collection[int] = ()
) -> list[Refusal]:
    """By rank."""
    faults = [finding for finding in findings if finding.is_fault and finding.ranks]
    gone = {finding.ranks[0] for finding in faults if len(finding.ranks) == 1}
    while pairs := [f for f in faults if gone.isdisjoint(f.ranks)]:
        counts = Counter(rank for finding in pairs for rank in set(finding.ranks))
        gone.add(max(counts, key=lambda r: (counts[r], r in suspects, r in fresh, r)))
    return [_refusal(rank, faults) for rank in sorted(gone)]


def _refusal(rank: int, faults: Sequence[Finding]) -> Refusal:
    own = [finding for finding in faults if rank in finding.ranks]
    sentences = [f"{finding.message} {finding.hint}" for finding in own[:TOLD_MAX]]
    if len(own) > TOLD_MAX:
        sentences.append(f"And {len(own) - TOLD_MAX} more faults of this machine.")
    is_sure = any(len(finding.ranks) == 1 for finding in own)
    peers = {other for finding in own for other in finding.ranks} - {rank}
    return Refusal(rank=rank, message=" ".join(sentences), peers=() if is_sure else tuple(sorted(peers)))
