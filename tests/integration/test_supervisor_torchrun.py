"""A stop and torchrun: through a shell that does not exec it, to every worker, once, and with the time to save."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agents.spool import STDERR
from tests.integration.supervised import PLAIN_ENVIRONMENT, supervised_fixture  # noqa: F401

WORKER = r"""
import os, signal, sys, time
heard = 0
def save(*_):
    global heard
    heard += 1
signal.signal(signal.SIGTERM, save)
rank = os.environ["RANK"]
os.write(1, f"ready {rank}\n".encode())
until = time.monotonic() + 300
while not heard and time.monotonic() < until:
    time.sleep(0.01)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    time.sleep(0.01)
with open(f"saved-{rank}", "w") as file:
    file.write(str(heard))
os.write(1, f"saved {rank}\n".encode())
"""


@pytest.mark.torch
@pytest.mark.parametrize("line", ["{torchrun}; echo after", "{torchrun} 2>&1 | tee log", "exec {torchrun}"])
def test_every_worker_of_torchrun_hears_of_the_stop_once_and_saves(
    supervised, tmp_path: Path, line: str
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 worker.py 1"
    one = supervised()
    one.start(
        "bash",
        "-c",
        line.format(torchrun=torchrun),
        env={**PLAIN_ENVIRONMENT, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60", "OMP_NUM_THREADS": "1"},
    )
    one.wait_for_output(b"ready 0")
    one.wait_for_output(b"ready 1")
    one.send(op="stop", grace_s=60)
    one.event("exited")
    one.end()
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["1", "1"], one.output(STDERR)
    for rank in (b"0", b"1"):
        assert b"saved " + rank in one.output()
    assert one.event("empty")["leftover"] == []
