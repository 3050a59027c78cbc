"""What is read the same way for every way to join."""

from __future__ import annotations

from collections.abc import Sequence

from agents.join import GRACE_S_LARGEST
from mesh.errors import SpecError

OUR_PREFIXES = ("gangmesh.", "ray.io/")


def read_labels(labels: Sequence[str]) -> dict[str, str]:
    """From KEY=VALUE. Raises SpecError."""
    pairs = dict(label.partition("=")[::2] for label in labels)
    if "" in pairs or not all("=" in label for label in labels):
        raise SpecError("--label takes KEY=VALUE.", field="--label")
    for key in pairs:
        if key.startswith(OUR_PREFIXES):
            raise SpecError(
                f"Labels that begin with {key.partition('.')[0]} are not yours to give.", field="--label"
            )
    return pairs


def checked_grace(grace_s: float) -> float:
    """Raises SpecError."""
    if not 0 <= grace_s <= GRACE_S_LARGEST:
        raise SpecError(f"--grace takes 0 to {GRACE_S_LARGEST:g} seconds.", field="--grace", got=grace_s)
    return grace_s
