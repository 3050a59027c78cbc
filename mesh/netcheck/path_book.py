"""What is known of the ways between providers, from all checks so far. Pure; the coordinator keeps it.

Rules of this file:
1. One line for each pair of providers and path; the two may be the same one. What was measured last counts, and how
   often it passed and failed.
2. A check passes for two providers when any two of their machines work with each other in both directions: one machine
   with a fault of its own says nothing of a provider.
3. Two different providers that never passed, and failed `NEVER_PASSED_MIN` times, are not offered together, until a
   check of the two passes (`mesh check`). Within one provider machines are left out one by one, by the gangs' checks.
4. Bounded: the line that was measured longest ago gives way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from mesh.netcheck.measurements import Seen, Way
from mesh.netcheck.verdict import Finding, is_sure

LINES_MAX = 256
NEVER_PASSED_MIN = 2
"""One failure may be a passing one."""
FAULT_LENGTH_MAX = 500

Providers = tuple[str, str]
"""Two of them in the order of their names; "" where machines say none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLine:
    """One pair of providers over one path. Times are wall-clock seconds, for people."""

    providers: Providers
    path: str
    passed: int = 0
    failed: int = 0
    passed_at: float | None = None
    failed_at: float | None = None
    fault: str = ""
    """Of the last check that failed: what was wrong, and what to do."""
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    """Both as the middle one of the ways between the two that were measured last."""

    @property
    def is_offered(self) -> bool:
        """Rule 3."""
        a, b = self.providers
        return a == b or self.passed > 0 or self.failed < NEVER_PASSED_MIN

    @property
    def measured_at(self) -> float:
        return max(self.passed_at or 0.0, self.failed_at or 0.0)


class PathBook:
    """All lines."""

    def __init__(self, lines: Iterable[PathLine] = ()) -> None:
        self._lines = {(line.providers, line.path): line for line in lines}
        self._unoffered: dict[frozenset[str], PathLine] | None = None
        """None while nobody has asked since something was noted."""

    def lines(self) -> list[PathLine]:
        """By the names of their providers."""
        return [self._lines[key] for key in sorted(self._lines)]

    def unoffered(self) -> dict[frozenset[str], PathLine]:
        """Pairs of providers that have no path which is offered, with the line that says why."""
        if self._unoffered is None:
            by_pair: dict[frozenset[str], list[PathLine]] = defaultdict(list)
            for line in self._lines.values():
                by_pair[frozenset(line.providers)].append(line)
            self._unoffered = {
                pair: max(lines, key=lambda line: line.measured_at)
                for pair, lines in by_pair.items()
                if not any(line.is_offered for line in lines)
            }
        return self._unoffered

    def note(self, seen: Seen, findings: Sequence[Finding], *, at: float) -> None:
        """Adds what one check has seen."""
        self._unoffered = None
        for (providers, path), ways in _by_path(seen).items():
            before = self._lines.get((providers, path)) or PathLine(providers=providers, path=path)
            self._lines[providers, path] = _line(before, seen, findings, ways, at)
        while len(self._lines) > LINES_MAX:
            del self._lines[min(self._lines, key=lambda key: self._lines[key].measured_at)]

    def to_record(self) -> list[dict[str, Any]]:
        """Plain JSON-able data; `from_record` is the inverse."""
        return [asdict(line) for line in self.lines()]

    @classmethod
    def from_record(cls, record: Iterable[Mapping[str, Any]]) -> PathBook:
        return cls(PathLine(**{**line, "providers": tuple(line["providers"])}) for line in record)


def _by_path(seen: Seen) -> dict[tuple[Providers, str], set[Way]]:
    """Ways that were measured, by the providers of their ends and how they are reached."""
    found: dict[tuple[Providers, str], set[Way]] = defaultdict(set)
    for way in seen.reach:
        a, b = sorted(seen.members[rank].provider for rank in way)
        found[(a, b), str(seen.path_of(way))].add(way)
    return found


def _line(before: PathLine, seen: Seen, findings: Sequence[Finding], ways: set[Way], at: float) -> PathLine:
    round_trips = [s for way in ways if (s := seen.reach[way].round_trip_s) is not None]
    rates = [
        push.bytes_per_s for way in ways if (push := seen.push.get(way)) and push.bytes_per_s is not None
    ]
    line = replace(
        before,
        round_trip_s=median(round_trips) if round_trips else before.round_trip_s,
        bytes_per_s=median(rates) if rates else before.bytes_per_s,
    )
    if any(_works(seen, (a, b)) and _works(seen, (b, a)) for a, b in ways):
        return replace(line, passed=line.passed + 1, passed_at=at)
    if not all(is_sure(seen, way) for way in ways):
        return before  # the check was over before it could be said
    return replace(line, failed=line.failed + 1, failed_at=at, fault=_fault(findings, ways))


def _is_open(seen: Seen, way: Way) -> bool:
    return way in seen.reach and seen.reach[way].is_open


def _works(seen: Seen, way: Way) -> bool:
    push = seen.push.get(way)
    return _is_open(seen, way) and push is not None and push.bytes_per_s is not None


def _fault(findings: Sequence[Finding], ways: set[Way]) -> str:
    ends = {rank for way in ways for rank in way}
    about = [f for f in findings if f.is_fault and ends.issuperset(f.ranks)]
    return f"{about[0].message} {about[0].hint}"[:FAULT_LENGTH_MAX] if about else ""
