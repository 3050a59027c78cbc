"""What supervision costs a training loop: steps per second under gangmesh, and under two torchruns started by hand.

Like with like: the same DDP loop on gloo, one thread a rank, which prints a line every ten steps, measured from inside.
The two take turns, and who begins changes from pair to pair; a ratio is that of a pair, the figure the median of the
pairs. Both train before they are measured. Ours does until the worker processes for the next epoch are up: a start
costs every run the same second or two of two processors, some seconds after it began, and is no cost of training. The
deployment is there all the time, so what it costs a machine merely to be part of it is a row of its own: the processor
time of everything of it but the commands.

How far apart rounds of the very same thing are is a row too: below that, nothing can be seen.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from agents.raylet import MEMBER_WORKERS
from tests.bench.real_runs import free_port, has_idle_workers, torchruns
from tests.bench.rows import told
from tests.e2e.real_mesh import RealMesh, real_mesh, wait_until

LIMIT_S = 300.0
SETTLE_S = 3.0
MACHINES = ("local-1", "local-2")
COST_MAX_PERCENT = 1.0
TRAINS = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(64, 256)

def train(steps):
    for step in range(steps):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

def train_until(is_over):
    steps, over = 0, torch.zeros(1)
    while not over:
        train(20)
        steps += 20
        over[0] = is_over()
        dist.broadcast(over, 0)
    return steps

train(20)
if dist.get_rank() == 0:
    open(sys.argv[1] + ".trains", "w").close()
train_until(lambda: os.path.exists(sys.argv[1] + ".go"))
began = time.monotonic()
steps = train_until(lambda: time.monotonic() - began > float(sys.argv[2]))
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(f"{steps / (time.monotonic() - began)}\\n")
dist.barrier()
dist.destroy_process_group()
"""


def run(quick: bool) -> list[dict[str, Any]]:
    """Pairs of rounds."""
    pairs, seconds = (3, 10) if quick else (12, 20)
    folder = Path(tempfile.mkdtemp(prefix="gm-cost-bench-"))
    ours: list[float] = []
    bare: list[float] = []
    beside: list[float] = []
    try:
        with real_mesh(folder, "--machines", "2") as mesh:
            idle = _idle(mesh, seconds)
            command = [str(mesh.script("trains.py", TRAINS)), "", str(seconds)]
            for number in range(pairs):
                for is_ours in (number % 2 == 0, number % 2 == 1):
                    command[1] = str(folder / f"{number}-{is_ours}")
                    if is_ours:
                        rate, share = _supervised(mesh, command)
                        ours.append(rate)
                        beside.append(share)
                    else:
                        bare.append(_bare(command))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    costs = [100 * (theirs / mine - 1) for mine, theirs in zip(ours, bare, strict=True)]
    apart = [100 * abs(rate / statistics.median(bare) - 1) for rate in bare]
    return [
        {
            "name": "supervised training loop, median cost of pairs", "ours": statistics.median(ours),
            "theirs": statistics.median(bare), "ratio": statistics.median(costs), "n": pairs, "worst": min(ours),
            "unit": "steps/s, %", "target": f"< {COST_MAX_PERCENT:g} %",
            "ok": statistics.median(costs) < COST_MAX_PERCENT,
        },
        told("bare rounds differ from their median", apart, unit="%"),
        told("head and two machines beside the commands", beside, unit="% of a core"),
        told("head and two machines without a run", [idle], unit="% of a core"),
    ]  # fmt: skip


def _idle(mesh: RealMesh, seconds: float) -> float:
    """The share of a core that a deployment uses whose machines are ready and free, in percent."""
    wait_until(lambda: _is_ready(mesh), "the machines to be ready", limit_s=LIMIT_S)
    time.sleep(SETTLE_S)
    before, began = _used_s(mesh, "no run"), time.monotonic()
    time.sleep(seconds)
    return _share(before, _used_s(mesh, "no run"), since=began)


def _is_ready(mesh: RealMesh) -> bool:
    return all(has_idle_workers(mesh, machine, MEMBER_WORKERS) for machine in MACHINES)


def _share(before: dict[int, float], after: dict[int, float], *, since: float) -> float:
    used_s = sum(used - before.get(pid, 0.0) for pid, used in after.items())
    return 100 * used_s / (time.monotonic() - since)


def _supervised(mesh: RealMesh, command: list[str]) -> tuple[float, float]:
    """Steps per second, and the share of a core that the deployment used meanwhile, in percent."""
    result = Path(command[1])
    name = mesh.submit("--nodes", "2", "--launcher", "torchrun", "--", "torchrun", *command)
    uid = mesh.run(name)["metadata"]["uid"]
    _let_settle(result, ready=lambda: _is_ready(mesh))
    before, began = _used_s(mesh, uid), time.monotonic()
    wait_until(result.exists, "the ranks to have trained", limit_s=LIMIT_S)
    share = _share(before, _used_s(mesh, uid), since=began)
    status = mesh.ended(name, limit_s=LIMIT_S)["status"]
    if status["state"] != "Succeeded":
        raise RuntimeError(f"the training loop did not end well: {status}")
    return float(result.read_text()), share


def _used_s(mesh: RealMesh, uid: str) -> dict[int, float]:
    """Processor time so far of each process of the deployment that is no user's."""
    used = {}
    commands = mesh.tree(uid)
    for process in mesh.everything():
        with suppress(psutil.Error):
            if process.pid not in commands:
                times = process.cpu_times()
                used[process.pid] = times.user + times.system
    return used


def _let_settle(result: Path, *, ready: Callable[[], bool]) -> None:
    """Returns when the ranks train, what is around them is `ready`, and they have been told to measure."""
    wait_until(result.with_name(f"{result.name}.trains").exists, "the ranks to train", limit_s=LIMIT_S)
    time.sleep(SETTLE_S)
    wait_until(ready, "what is around the ranks to be ready", limit_s=LIMIT_S)
    time.sleep(SETTLE_S)
    result.with_name(f"{result.name}.go").touch()


def _bare(command: list[str]) -> float:
    """Steps per second."""
    result, port = Path(command[1]), free_port()
    commands = [
        [
            "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=127.0.0.1",
            f"--master-port={port}", "--local-addr=127.0.0.1", *command,
        ]
        for rank in (0, 1)
    ]  # fmt: skip
    with torchruns(commands, output=result.with_suffix(".out")) as launchers:
        _let_settle(result, ready=lambda: True)
        for launcher in launchers:
            if code := launcher.wait(LIMIT_S):
                raise RuntimeError(
                    f"a bare torchrun ended with {code}: {result.with_suffix('.out').read_text()[-2000:]}"
                )
    return float(result.read_text())
