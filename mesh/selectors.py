"""Label selectors: `key=value,key==value,key!=value`, all of which must hold.

Some facts can be selected by as if they were labels: a run's name and a rank as `nodus.dev/job` and
`nodus.dev/rank` on runs, attempts, machines and events alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh.errors import SpecError

JOB_LABEL = "nodus.dev/job"
RANK_LABEL = "nodus.dev/rank"
SELECTOR_TERMS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One condition. `equal` is False for `!=`, which also holds where the label is missing."""

    key: str
    value: str
    equal: bool

    def holds(self, labels: Mapping[str, str]) -> bool:
        return (labels.get(self.key) == self.value) is self.equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """All of its terms must hold; without terms it selects everything."""

    terms: tuple[Term, ...] = ()

    def selects(self, labels: Mapping[str, str]) -> bool:
        return all(term.holds(labels) for term in self.terms)

    @property
    def equalities(self) -> dict[str, str]:
        """The `=` terms, as the labels that something must have. Contradicting terms select nothing anyway."""
        return {term.key: term.value for term in self.terms if term.equal}

    def __str__(self) -> str:
        return ",".join(f"{t.key}{'=' if t.equal else '!='}{t.value}" for t in self.terms)


def parse_selector(text: str) -> Selector:
    """What the text says. Raises SpecError, which names the part that is no condition."""
    if not text.strip():
        return Selector()
    parts = text.split(",")
    if len(parts) > SELECTOR_TERMS_MAX:
        raise SpecError(
            f"A label selector has at most {SELECTOR_TERMS_MAX} conditions; this one has {len(parts)}."
        )
    return Selector(terms=tuple(_parse_term(part.strip(), text) for part in parts))


def _parse_term(part: str, whole: str) -> Term:
    for operator, equal in (("!=", False), ("==", True), ("=", True)):
        key, found, value = part.partition(operator)
        if found:
            if not key.strip() or any(c in value for c in "=!"):
                break
            return Term(key=key.strip(), value=value.strip(), equal=equal)
    raise SpecError(
        f"{part!r} in the label selector {whole!r} is no condition.",
        hint="Write key=value or key!=value, with commas between: -l nodus.dev/job=train,nodus.dev/rank=1",
        field="labelSelector",
        got=part,
    )


def run_labels(run: Mapping[str, Any]) -> dict[str, str]:
    """What a run can be selected by."""
    metadata = run["metadata"]
    return {**metadata["labels"], JOB_LABEL: metadata["name"]}


def attempt_labels(attempt: Mapping[str, Any]) -> dict[str, str]:
    """What an attempt can be selected by."""
    return {**attempt["labels"], JOB_LABEL: attempt["run"], RANK_LABEL: str(attempt["rank"])}


def machine_labels(machine: Mapping[str, Any]) -> dict[str, str]:
    """What a machine can be selected by."""
    return {**machine["labels"], **({JOB_LABEL: machine["run"]} if machine["run"] else {})}


def event_labels(event: Mapping[str, Any]) -> dict[str, str]:
    """What an event can be selected by."""
    labels = {JOB_LABEL: event["run"]} if event["run"] else {}
    if event["rank"] is not None:
        labels[RANK_LABEL] = str(event["rank"])
    return labels
