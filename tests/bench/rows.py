"""Rows of the table: what was measured in rounds, and its target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def compared(
    name: str, ours: Sequence[float], theirs: Sequence[float], *, at_most: float, unit: str = "s"
) -> dict[str, Any]:
    """Both of the same run, taken in turns; the target is about the ratio of the medians."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    return {
        "name": name, "ours": statistics.median(ours), "theirs": statistics.median(theirs), "ratio": ratio,
        "n": len(ours), "worst": max(ours), "unit": unit, "target": f"≤ {at_most:g} × theirs",
        "ok": ratio <= at_most,
    }  # fmt: skip


def bounded(
    name: str, ours: Sequence[float], *, at_most: float, unit: str = "s", by_median: bool = False
) -> dict[str, Any]:
    """Nothing to compare with: the worst round (or the median) is to stay below a limit."""
    judged = statistics.median(ours) if by_median else max(ours)
    return {
        "name": name, "ours": statistics.median(ours), "theirs": None, "ratio": judged / at_most if at_most else None,
        "n": len(ours), "worst": max(ours), "unit": unit,
        "target": f"≤ {at_most:g} {unit}, {'the median' if by_median else 'the worst'}", "ok": judged <= at_most,
    }  # fmt: skip


def told(name: str, ours: Sequence[float], *, unit: str) -> dict[str, Any]:
    """A figure without a target."""
    return {
        "name": name, "ours": statistics.median(ours), "theirs": None, "ratio": None, "n": len(ours),
        "worst": max(ours), "unit": unit, "target": "–", "ok": None,
    }  # fmt: skip


def counted(name: str, found: int, *, of: int) -> dict[str, Any]:
    """Something that must never be."""
    return {
        "name": name, "ours": found, "theirs": None, "ratio": found, "n": of, "unit": "", "target": "0",
        "ok": found == 0,
    }  # fmt: skip


def beside(name: str, ours: Sequence[float], theirs: Sequence[float], *, unit: str) -> dict[str, Any]:
    """Told, not judged: what it costs is for the reader to see. The ratio is of the medians."""
    row = told(name, ours, unit=unit)
    middle = statistics.median(theirs)
    return {**row, "theirs": middle, "ratio": row["ours"] / middle}
