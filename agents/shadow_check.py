"""Are `mesh`, `agents` and `coordinator` really ours? Other packages have these names too.

Rules of this file:
1. Asked at the start of a process, before it imports anything else of ours by name.
2. A package is ours when Python would import it from the folder that this file is in, and its files are there: another
   distribution that was installed over it has the same place, but not the same files.
3. Nothing is imported to find out, so the check has no side effects and takes no time.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

OUR_FILES = {
    "mesh": ("reasons.py", "wire.py", "plan.py"),
    "agents": ("shadow_check.py", "supervisor.py", "spool.py"),
    "coordinator": ("deployment.py", "head.py"),
}
"""Files that no other package of that name has all of."""


def shadowed_packages(root: Path | None = None) -> list[str]:
    """One sentence for each of our packages that Python would import from elsewhere; empty when all is well.

    Args:
        root: the folder that our packages are in; that of this file.
    """
    root = root or Path(__file__).resolve().parents[1]
    return [problem for name in OUR_FILES if (problem := _problem(name, root)) is not None]


def _problem(name: str, root: Path) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        return f"'{name}' cannot be imported: {error}"
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places:
        found = spec.origin if spec is not None else "nowhere"
        return f"'{name}' is not our package; Python finds it at {found}"
    if Path(places[0]).resolve() != root / name:
        return f"'{name}' comes from {places[0]} instead of {root / name}"
    missing = [file for file in OUR_FILES[name] if not (root / name / file).is_file()]
    if missing:
        return f"'{name}' in {root} was replaced by another package of that name ({missing[0]} is missing)"
    return None


def advice(problems: Sequence[str]) -> str:
    """The problems, and what the user can do about them."""
    return (
        f"{'; '.join(problems)}. Use an environment of its own for gangmesh (python -m venv), and start it from a "
        f"folder without packages of these names. Python looks in: {', '.join(p or '.' for p in sys.path[:4])} …"
    )
