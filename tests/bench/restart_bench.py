"""One rank is killed (-9), its machine is kept: how soon do all ranks speak again, in the next epoch.

Like with like:
- the same script everywhere: it says so as its very first act (`first line`) and after its first all-reduce over gloo
  (`met`); both are times of one monotonic clock, written to a file by the process itself;
- two ranks on two machines of this host: ours with the launchers plain and torchrun, theirs two torchruns with
  `--rdzv-backend=c10d --max-restarts` and `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which makes their restarts reliable;
  and, easier for it, one torchrun with both ranks, which has nobody to agree with;
- rounds are taken in turns. Ours begin when the worker processes that wait for the next epoch are there again.

Ray Train is compared where `ray[train]` is installed; the tests' environment has it not (pandas and pyarrow, 60 MB).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.raylet import MEMBER_WORKERS
from tests.bench.real_runs import free_port, has_idle_workers, torchruns
from tests.bench.rows import compared
from tests.e2e.real_mesh import RealMesh, real_mesh, wait_until

LIMIT_S = 120.0
MACHINES = ("local-1", "local-2")
TRAINS = """
import os, sys, time
said = open(f"{sys.argv[1]}/{os.getpid()}", "w", buffering=1)
said.write(f"first {time.monotonic()}\\n")
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
said.write(f"met {time.monotonic()} {os.environ['RANK']}\\n")
while True:
    dist.all_reduce(x)
    time.sleep(0.01)
"""
THEIR_TARGET = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """From the kill until the last rank of the next epoch said it, in seconds."""

    first_line: float
    met: float
    tries: int
    """Processes beyond one a rank that were started before they met."""


def run(quick: bool) -> list[dict[str, Any]]:
    """A few rounds of each."""
    rounds = 3 if quick else 20
    folder = Path(tempfile.mkdtemp(prefix="gm-restart-bench-"))
    taken: dict[str, list[Restart]] = {"plain": [], "torchrun": [], "two torchruns": [], "one torchrun": []}
    try:
        script = folder / "trains.py"
        script.write_text(TRAINS)
        with real_mesh(folder, "--machines", "2") as mesh:
            for number in range(rounds):
                for launcher in ("plain", "torchrun"):
                    taken[launcher].append(_ours(mesh, launcher, script, folder / f"{launcher}-{number}"))
                taken["two torchruns"].append(_theirs(script, folder / f"two-{number}", agents=2))
                taken["one torchrun"].append(_theirs(script, folder / f"one-{number}", agents=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for who, restarts in taken.items():
        print(f"{who}: {sum(r.tries for r in restarts)} processes in vain", file=sys.stderr)
    print(f"Ray Train: {_why_no_ray_train()}", file=sys.stderr)
    return [
        _row(f"rank killed: {ours} to {what}, beside {theirs}", taken[ours], taken[theirs], what)
        for ours in ("plain", "torchrun")
        for theirs in ("two torchruns", "one torchrun")
        for what in ("first line", "met")
    ]


def _row(name: str, ours: list[Restart], theirs: list[Restart], what: str) -> dict[str, Any]:
    field = what.replace(" ", "_")
    return compared(
        name, [getattr(r, field) for r in ours], [getattr(r, field) for r in theirs], at_most=THEIR_TARGET
    )


def _why_no_ray_train() -> str:
    try:
        import ray.train  # noqa: F401
    except ImportError as error:
        return f"not compared: {error}"
    return "installed, not compared by this benchmark yet"


# ---- a round ----------------------------------------------------------------------------------------


def _ours(mesh: RealMesh, launcher: str, script: Path, folder: Path) -> Restart:
    folder.mkdir()
    program = "torchrun" if launcher == "torchrun" else "python"
    options = (
        "--nodes",
        "2",
        "--on-process-failure",
        "restart",
        "--max-attempts",
        "1",
        "--launcher",
        launcher,
    )
    name = mesh.submit(*options, "--", program, str(script), str(folder))
    try:
        return _kill_and_wait(
            folder, ready=lambda: all(has_idle_workers(mesh, m, MEMBER_WORKERS) for m in MACHINES)
        )
    finally:
        mesh.cli("cancel", name)
        mesh.ended(name)


def _theirs(script: Path, folder: Path, *, agents: int) -> Restart:
    folder.mkdir()
    command = [
        f"--nnodes={agents}", f"--nproc-per-node={2 // agents}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=restart", "--max-restarts=3",
        "--local-addr=127.0.0.1", str(script), str(folder),
    ]  # fmt: skip
    with torchruns([command] * agents, output=folder.with_suffix(".out")):
        return _kill_and_wait(folder, ready=lambda: True)


def _kill_and_wait(folder: Path, *, ready: Callable[[], bool]) -> Restart:
    wait_until(lambda: len(_met(folder)) == 2, "two ranks to meet", limit_s=LIMIT_S)
    wait_until(ready, "what the next epoch needs to be ready", limit_s=LIMIT_S)
    first = _met(folder)
    [victim] = [pid for pid, words in first.items() if words["met"][1] == "1"]
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(_met(folder)) >= 4, "the next epoch's ranks to meet", limit_s=LIMIT_S)
    second = [words for pid, words in _met(folder).items() if pid not in first]
    return Restart(
        first_line=max(float(words["first"][0]) for words in second) - killed_at,
        met=max(float(words["met"][0]) for words in second) - killed_at,
        tries=len(list(folder.iterdir())) - 4,
    )


def _met(folder: Path) -> dict[int, dict[str, list[str]]]:
    """By process: what each one that has met its peer has said."""
    said = {}
    for path in folder.iterdir():
        words = {line.split()[0]: line.split()[1:] for line in path.read_text().splitlines()}
        if "met" in words:
            said[int(path.name)] = words
    return said
