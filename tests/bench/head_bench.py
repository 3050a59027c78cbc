"""The coordinator is killed (-9) while a gang prints numbered lines: when does the API serve again, at what cost.

It serves again when it answers for the run. When all kills are over, the run ends well, and then it is counted: ranks
that were started more than once, and lines that are missing or there twice.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import urllib.error
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.ray_processes import HEAD_NAME
from tests.bench.real_runs import has_idle_workers
from tests.bench.rows import bounded, counted
from tests.e2e.real_mesh import RealMesh, real_mesh, wait_until

LIMIT_S = 60.0
LOOK_S = 0.01
SERVING_S = 5.0
ACTOR = "ray::CoordinatorActor"
PRINTS = """
import os, sys, time
number = 0
while not os.path.exists(sys.argv[1]):
    print("line", number, os.getpid(), flush=True)
    number += 1
    time.sleep(0.005)
print("end", number, os.getpid(), flush=True)
"""


def run(quick: bool) -> list[dict[str, Any]]:
    """So many kills in one run."""
    rounds = 3 if quick else 20
    folder = Path(tempfile.mkdtemp(prefix="gm-head-bench-"))
    try:
        with real_mesh(folder, "--machines", "2") as mesh:
            end, script = mesh.gate("end"), mesh.script("prints.py", PRINTS)
            name = mesh.submit("--nodes", "2", "--", "python", str(script), str(end))
            for rank in (0, 1):
                mesh.wait_for_print(name, "line", rank)
            took_s = [_kill(mesh, name) for _ in range(rounds)]
            end.touch()
            run = mesh.ended(name)
            if run["status"]["state"] != "Succeeded":
                raise RuntimeError(f"the run did not live through it: {run['status']}")
            printed = [mesh.printed(name, rank) for rank in (0, 1)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    restarts = run["status"]["epoch"] - 1 + sum(_processes(text) - 1 for text in printed)
    lines = sum(text.count("\n") for text in printed)
    return [
        bounded("coordinator killed: until the API serves again", took_s, at_most=SERVING_S),
        counted("coordinator killed: restarts of healthy ranks", restarts, of=rounds),
        counted("coordinator killed: lines lost or doubled", sum(map(_wrong, printed)), of=lines),
    ]


def _kill(mesh: RealMesh, name: str) -> float:
    """Seconds until the run can be looked at again."""
    wait_until(lambda: has_idle_workers(mesh, HEAD_NAME, 1), "a worker that can be the next coordinator")
    victim = mesh.one(ACTOR)
    killed_at = time.monotonic()
    victim.kill()
    victim.wait(LIMIT_S)
    while time.monotonic() - killed_at < LIMIT_S:
        with suppress(urllib.error.HTTPError):
            mesh.call("GET", f"/v1/runs/{name}")
            return time.monotonic() - killed_at
        time.sleep(LOOK_S)
    raise RuntimeError(f"the API did not serve again within {LIMIT_S:g} s")


def _processes(printed: str) -> int:
    """How many processes have printed this."""
    return len({line.split()[-1] for line in printed.splitlines()})


def _wrong(printed: str) -> int:
    """Numbers that are missing, and those that are there more than once."""
    numbers = [int(line.split()[1]) for line in printed.splitlines()]
    return len(set(range(max(numbers) + 1)) - set(numbers)) + len(numbers) - len(set(numbers))
