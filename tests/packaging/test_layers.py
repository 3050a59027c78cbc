"""The layers hold: mesh <- agents <- coordinator, and the cores import vocabulary only (pyproject, importlinter)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mesh", "agents", "coordinator")
CORES = (
    "coordinator/core",
    "agents/core",
    *(f"mesh/store/{name}.py" for name in ("state", "barrier", "books", "keys", "leases")),
    *(
        f"mesh/net/{name}.py"
        for name in ("identity", "roster", "gate", "door", "relay_book", "overlay", "client_hello")
    ),
)
PURE = {"__future__", "abc", "bisect", "collections", "copy", "dataclasses", "enum", "functools", "hashlib"}
PURE |= {
    "heapq",
    "ipaddress",
    "itertools",
    "json",
    "math",
    "operator",
    "re",
    "string",
    "textwrap",
    "types",
    "typing",
}
PURE |= set(PACKAGES)
"""What a core may import: our own vocabulary (import-linter knows which) and what only computes."""


def modules(*where: str) -> list[Path]:
    found: list[Path] = []
    for place in where:
        path = ROOT / place
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module).partition(".")[0])
    return names


def test_the_contracts_of_import_linter_are_kept() -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c(['--no-cache', '--no-logo'])",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("path", modules(*CORES), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_core_imports_nothing_that_acts_not_even_inside_a_function(path: Path) -> None:
    assert imported(path) - PURE == set()


def test_whoever_gets_the_coordinators_handle_imports_nothing_of_what_it_is_made_of() -> None:
    """Ray loads an actor's class wherever its handle is got by name: in every member, while its gang waits for it."""
    code = "import sys, coordinator.actor; print(*(m for m in sys.modules if m.startswith(('coordinator.', 'sql'))))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert ended.stdout.split() == ["coordinator.actor"], ended.stderr


def test_what_the_supervisor_runs_is_of_the_standard_library() -> None:
    """Followed from file to file: siblings are loaded by path (`agents` is for type checkers only)."""
    waiting, seen = ["supervisor"], set[str]()
    while waiting:
        stem = waiting.pop()
        seen.add(stem)
        names = imported(ROOT / "agents" / f"{stem}.py") - {"agents"}
        siblings = {name for name in names if (ROOT / "agents" / f"{name}.py").exists()}
        assert names - siblings - set(sys.stdlib_module_names) == set(), stem
        waiting += sorted(siblings - seen)
    assert len(seen) > 1


def test_ray_and_torch_are_imported_only_where_that_is_the_modules_business() -> None:
    users = {
        str(path.relative_to(ROOT)): imported(path) & {"ray", "torch"}
        for path in modules(*PACKAGES)
        if imported(path) & {"ray", "torch"}
    }
    users.pop("agents/launcher/torchrun_program.py")  # the user's interpreter runs it
    assert not [place for place, names in users.items() if "torch" in names], (
        "the control plane needs no torch"
    )
    assert not [place for place in users if place.startswith("mesh/")], "the common language needs no ray"
