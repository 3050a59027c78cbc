"""The wheel: it builds, installs beside nothing but what it asks for, and its commands answer.

The environment that it is installed into is empty but for the packages that its own metadata asks for, and what those
ask for in turn. They are links to the ones that are installed here: that an index has them in these versions is proven
whenever `./.venv` is made, and fetching them again would take a minute and a network.
"""

from __future__ import annotations

import email
import os
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
COMMANDS = ("mesh", "nodus")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path, limit_s: float = 250) -> str:
    """stdout of a command that must end with 0, without this environment's variables of Python's own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert ended.returncode == 0, f"{command}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def tracked_files() -> list[str]:
    """What a clone has, and what is about to be committed; the whole tree where there is no git."""
    if not (ROOT / ".git").exists():
        return [
            str(p.relative_to(ROOT))
            for part in ("mesh", "agents", "coordinator")
            for p in (ROOT / part).rglob("*")
        ]
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree: building writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in {*tracked_files(), "pyproject.toml", "README.md", "LICENSE"}:
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*pip, "-w", folder, source, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


def metadata_of(wheel: Path) -> email.message.Message:
    archive = zipfile.ZipFile(wheel)
    [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(archive.read(name))


def asked_for(requirements: Iterable[str], extras: frozenset[str] = frozenset()) -> dict[str, Distribution]:
    """By name, every package that these lines ask for here, and what those ask for, as it is installed here."""
    found: dict[str, Distribution] = {}
    pending = [(line, extras) for line in requirements]
    seen = set(pending)
    while pending:
        line, extras = pending.pop()
        wanted = Requirement(line)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        package = distribution(wanted.name)
        found[package.name] = package
        new = {(one, frozenset(wanted.extras)) for one in package.requires or []} - seen
        seen |= new
        pending += new
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The bin folder of an environment that holds the wheel and what it asks for, nothing else."""
    place = wheel.parent / "environment"
    venv.create(place)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)}))
    for package in asked_for(metadata_of(wheel).get_all("Requires-Dist", [])).values():
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(package.locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python"]
    run(*pip, "install", "-q", "--no-index", "--no-deps", wheel, cwd=wheel.parent)
    run(
        *pip, "check", cwd=wheel.parent
    )  # everything that the wheel asks for is there, in a version that it takes
    return place / "bin"


def test_the_wheel_holds_every_module_the_types_marker_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {n for n in tracked_files() if n.startswith(("mesh/", "agents/", "coordinator/"))}
    assert expected - names == set()
    assert {"mesh/py.typed", "agents/py.typed", "coordinator/py.typed"} <= names
    assert [n for n in names if n.endswith("licenses/LICENSE")]
    assert "mesh/net/shim/native/gangmesh-shim.so" in names
    assert "-py3-none-" in wheel.name
    assert not [n for n in names if n.startswith(("tests/", "examples/", "docs/", "tools/"))]


def test_the_wheel_asks_for_no_torch_and_no_test_tool(wheel: Path) -> None:
    wanted = [line for line in metadata_of(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert wanted
    assert not [
        line for line in wanted if line.startswith(("torch", "numpy", "pytest", "hypothesis", "mypy"))
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_answers_from_an_empty_environment(command: str, installed: Path, tmp_path: Path) -> None:
    run(installed / command, "--help", cwd=tmp_path)  # the first call compiles
    began = time.perf_counter()
    helped = run(installed / command, "--help", cwd=tmp_path)
    print(f"{command} --help: {time.perf_counter() - began:.3f} s (wanted: under 0.5 s; not asserted here)")
    for word in ("run", "up", "logs", "describe"):
        assert word in helped


def test_every_module_of_the_wheel_can_be_imported_without_the_extras(
    installed: Path, tmp_path: Path
) -> None:
    text = """
import importlib.util, pkgutil, sys
assert [name for name in ("torch", "pytest", "asyncpg") if importlib.util.find_spec(name)] == []
for name in ("mesh", "agents", "coordinator"):
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print("imported", len([m for m in sys.modules if m.partition(".")[0] in ("mesh", "agents", "coordinator")]))
"""
    assert run(installed / "python", "-c", text, cwd=tmp_path).startswith("imported")


def test_help_imports_nothing_heavy(installed: Path, tmp_path: Path) -> None:
    text = """
import sys
sys.argv = ["mesh", "--help"]
from mesh.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = sorted({"ray", "torch", "sqlalchemy", "aiohttp", "pydantic", "numpy"} & set(sys.modules))
assert heavy == [], heavy
"""
    run(installed / "python", "-c", text, cwd=tmp_path)
