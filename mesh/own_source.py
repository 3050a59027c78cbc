"""Programs of this project that others of it start import the same packages as they do, installed or not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages")


def source_folder() -> Path | None:
    """What has to be on PYTHONPATH for our packages to be found; None where they are installed."""
    folder = Path(__file__).resolve().parents[1]
    return None if folder.name in _INSTALLED else folder


def with_own_source(environment: Mapping[str, str]) -> dict[str, str]:
    """This environment, in which they are found."""
    source, known = source_folder(), environment.get("PYTHONPATH")
    if source is None:
        return dict(environment)
    return {**environment, "PYTHONPATH": f"{source}{os.pathsep}{known}" if known else str(source)}
