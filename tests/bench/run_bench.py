"""From submit to the first line, from nothing to the first line, and from cancel to silence.

Every figure of ours stands beside the bare launcher's, measured in turn in the same run: two `torchrun`s started
by hand on two loopback addresses, with the same script. The script prints the time as its very first act.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import mesh
from mesh.client import MeshClient
from tests.bench.real_runs import free_port

FIRST_LINE = "import time; print('first', time.time(), flush=True)\n"
OBEYS = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)\n"
LIMIT_S = 120.0
SETTLE_S = 4.0
"""Before each round: a machine that was just given back starts worker processes for its next member."""


def run(quick: bool) -> list[dict[str, Any]]:
    """Medians of a few rounds, ours and bare in turn."""
    rounds = 3 if quick else 7
    folder = Path(tempfile.mkdtemp(prefix="gm-bench-"))
    script = folder / "first.py"
    script.write_text(FIRST_LINE)
    (folder / "obeys.py").write_text(OBEYS)
    try:
        cold = _from_nothing(folder, script)
        bare_cold = _bare(script)
        warm, bare, cancels = asyncio.run(_warm(folder, script, rounds))
    finally:
        _mesh(folder, "down", "--yes")
        shutil.rmtree(folder, ignore_errors=True)
    over_s = statistics.median(warm) - statistics.median(bare)
    cancel_ms = statistics.median(cancels) * 1000
    return [
        _row("submit to first line on all ranks, warm", statistics.median(warm), statistics.median(bare),
             over_s, "s", "≤ 0.5 s over bare", over_s <= 0.5),
        _row("mesh run from nothing to first line", cold, bare_cold, cold - bare_cold, "s",
             "≤ 10 s over bare", cold - bare_cold <= 10),
        _row("cancel to every process dead", cancel_ms, None, cancel_ms / 200, "ms", "≤ 200 ms",
             cancel_ms <= 200),
    ]  # fmt: skip


def _row(
    name: str, ours: float, theirs: float | None, ratio: float, unit: str, target: str, ok: bool
) -> dict[str, Any]:
    return {
        "name": name, "ours": ours, "theirs": theirs, "ratio": ratio, "unit": unit, "target": target, "ok": ok,
    }  # fmt: skip


def _environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "GANGMESH_STATE": str(folder / "state"), "PATH": path}


def _mesh(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mesh.cli", *arguments],
        env=_environment(folder), capture_output=True, text=True, timeout=LIMIT_S, cwd=folder,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"mesh {' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout


def _from_nothing(folder: Path, script: Path) -> float:
    started = time.time()
    output = _mesh(folder, "run", "--nodes", "2", "--launcher", "torchrun", "--", "torchrun", str(script))
    return _last_first_line(output) - started


def _last_first_line(output: str) -> float:
    times = [float(line.split("first ")[1]) for line in output.splitlines() if "first " in line]
    if len(times) != 2:
        raise RuntimeError(f"two first lines were to come: {output!r}")
    return max(times)


def _bare(script: Path) -> float:
    """The same by hand: two torchruns that meet on loopback."""
    port = str(free_port())
    started = time.time()
    launchers = [
        subprocess.Popen(
            [
                str(Path(sys.executable).parent / "torchrun"), "--nnodes=2", f"--node-rank={rank}",
                "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}",
                "--local-addr=127.0.0.1", str(script),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    output = "".join(launcher.communicate(timeout=LIMIT_S)[0] for launcher in launchers)
    return _last_first_line(output) - started


async def _warm(folder: Path, script: Path, rounds: int) -> tuple[list[float], list[float], list[float]]:
    warm, bare, cancels = [], [], []
    async with mesh.connect(state=folder / "state") as client:
        for number in range(rounds):
            bare.append(await asyncio.to_thread(_bare, script))
            await asyncio.sleep(SETTLE_S)
            warm.append(await _submit_to_first_line(client, f"warm-{number}", script))
            cancels.append(await _cancel_to_silence(client, f"cancel-{number}", folder / "obeys.py"))
    return warm, bare, cancels


def _job(name: str, launcher: str, command: list[str]) -> dict[str, Any]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        "apiVersion": "nodus.dev/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "command": command, "env": {"PATH": path},
            "distributed": {"nodes": 2, "launcher": launcher},
        },
    }  # fmt: skip


async def _submit_to_first_line(client: MeshClient, name: str, script: Path) -> float:
    started = time.time()
    await client.submit(_job(name, "Torchrun", ["torchrun", str(script)]))
    await client.wait(name, timeout_s=LIMIT_S)
    lines = [line["text"] async for line in client.logs(name)]
    return _last_first_line("\n".join(lines)) - started


async def _cancel_to_silence(client: MeshClient, name: str, script: Path) -> float:
    await client.submit(_job(name, "Plain", [sys.executable, str(script)]))
    processes: list[psutil.Process] = []
    async for line in client.follow_logs(name):
        processes.append(psutil.Process(int(line["text"].split()[1])))
        if len(processes) == 2:
            break
    started = time.monotonic()
    await client.cancel(name)
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        await asyncio.sleep(0.002)
    took_s = time.monotonic() - started
    await client.wait(name, timeout_s=LIMIT_S)
    return took_s
