"""Real kills of a rank, one after the other, in one gang that lives on: does each recover at the first new epoch?

The ranks meet through a rendezvous of rank 0's at MASTER_ADDR:MASTER_PORT, each tells its epoch there and reads its
peer's. A peer of another epoch is a stale read: a worker that somebody left alive, or a store that was not the epoch's
own. Some kills meet through plain sockets, for speed, some through torch's TCPStore.

The gang is `tests.bench.one_host`'s: everything but Ray is real. Its budget is earned back between two kills: the
coordinator's clock (not that of the leases) is put on by ten healthy minutes. That thousands of restarts come
without a pause is no case of the product's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from coordinator.core.events import TimePassed
from coordinator.core.recovery import HEALTHY_S
from mesh.ids import RunName
from mesh.plan import RunPlan
from mesh.states import FailurePolicy, RunState
from tests.bench.one_host import Deployment, deployment
from tests.bench.rows import counted, told

RECOVERY_LIMIT_S = 60.0
LOOK_S = 0.005
SOCKETS = """
import os, socket, sys, time
folder, epoch, rank = sys.argv[1], os.environ["NODUS_GANG_EPOCH"], os.environ["RANK"]
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == "0":
    door = socket.create_server(where)
    line, _ = door.accept()
else:
    while True:
        try:
            line = socket.create_connection(where)
            break
        except OSError:
            time.sleep(0.005)
line.sendall(epoch.zfill(9).encode())
def say(peer):
    with open(f"{folder}/said", "a") as file:
        file.write(f"{epoch} {rank} {peer} {os.getpid()}\\n")
heard = b""
while len(heard) < 9:
    heard += line.recv(9) or sys.exit(3)
say(int(heard))
while line.recv(9):
    pass
sys.exit(4)
"""
TORCH = """
import os, sys, time
from torch.distributed import TCPStore
folder, epoch, rank = sys.argv[1], os.environ["NODUS_GANG_EPOCH"], int(os.environ["RANK"])
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
store.set(f"rank {rank}", epoch)
peer = int(store.get(f"rank {1 - rank}"))
with open(f"{folder}/said", "a") as file:
    file.write(f"{epoch} {rank} {peer} {os.getpid()}\\n")
while True:
    store.add("beat", 1)
    time.sleep(0.05)
"""


@dataclass(slots=True)
class Tally:
    """What came of the kills."""

    took_s: list[float] = field(default_factory=list)
    late: int = 0
    """Kills after which another epoch than the first new one was needed."""
    stale: int = 0


def run(quick: bool) -> list[dict[str, Any]]:
    """1,000 kills, 50 of them with torch; or 20 with 2."""
    kills, with_torch = (18, 2) if quick else (950, 50)
    total = Tally()
    for script, count in ((SOCKETS, kills), (TORCH, with_torch)):
        folder = Path(tempfile.mkdtemp(prefix="gm-kills-bench-"))
        try:
            uvloop.run(_kill_again_and_again(folder, script, count, total))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    every = len(total.took_s)
    return [
        counted("real kills that did not recover at the first new epoch", total.late, of=every),
        counted("stale reads after real kills", total.stale, of=2 * every),
        told("real kills, no Ray, no torch: until both ranks have met again", total.took_s[:kills], unit="s"),
    ]


async def _kill_again_and_again(folder: Path, script: str, count: int, total: Tally) -> None:
    path = folder / "meets.py"
    path.write_text(script)
    said = folder / "said"
    said.touch()
    plan = RunPlan(
        name=RunName("kills"), command=(sys.executable, str(path), str(folder)), nodes=2, max_restarts=1,
        on_process_failure=FailurePolicy.RESTART_GANG,
    )  # fmt: skip
    async with deployment(folder) as here:
        await here.coordinator.submit({"spec": {}}, plan.to_record(), None)
        epoch, pids = await _met(here, said, since=1)
        for number in range(count):
            await _earn_back(here)
            before, killed_at = epoch, time.monotonic()
            os.kill(pids[number % 2], signal.SIGKILL)
            epoch, pids = await _met(here, said, since=before + 1)
            total.took_s.append(time.monotonic() - killed_at)
            total.late += epoch != before + 1
            if (number + 1) % 50 == 0:
                print(f"{number + 1} of {count} kills", file=sys.stderr)
        total.stale += sum(epoch != peer for epoch, _, peer, _ in _lines(said))
        await here.coordinator.cancel("kills", "")
        await _until(lambda: not here.coordinator.live_gangs(), "the gang to end")


async def _met(here: Deployment, said: Path, *, since: int) -> tuple[int, dict[int, int]]:
    """The first epoch since this one in which both ranks have met, and their processes by rank."""
    found: dict[int, int] = {}

    def have_met() -> bool:
        gang = here.gang()
        if gang is None or gang.state is not RunState.RUNNING or gang.epoch < since:
            return False
        found.update({rank: pid for epoch, rank, _, pid in _lines(said) if epoch == gang.epoch})
        return len(found) == 2

    await _until(have_met, f"both ranks to meet in epoch {since}")
    gang = here.gang()
    assert gang is not None
    return gang.epoch, found


async def _earn_back(here: Deployment) -> None:
    gang = here.gang()
    assert gang is not None
    here.clock.ahead_s += HEALTHY_S + 1
    here.coordinator.post(gang.uid, TimePassed())
    await _until(lambda: gang.restarts.failure == 0, "the restart to be earned back")


def _lines(said: Path) -> list[tuple[int, ...]]:
    """epoch, rank, the epoch that its peer told, pid"""
    return [tuple(map(int, line.split())) for line in said.read_text().splitlines()]


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(RECOVERY_LIMIT_S):
            while not condition():
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise RuntimeError(f"waited {RECOVERY_LIMIT_S:g} s for {what}") from None
