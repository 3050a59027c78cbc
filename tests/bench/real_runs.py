"""What several benchmarks need of a real deployment and of bare torchruns."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.e2e.real_mesh import RealMesh

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
TORCHRUN_STOP_S = 60.0


def has_idle_workers(mesh: RealMesh, machine: str, count: int) -> bool:
    """Whether so many worker processes of Ray's wait on this machine."""
    idle = 0
    for process in mesh.raylet(machine).children(recursive=True):
        with suppress(psutil.Error):
            idle += process.cmdline()[:1] == ["ray::IDLE"]
    return idle >= count


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def torchruns(commands: Sequence[Sequence[str]], *, output: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts these; those that still run afterwards are stopped. Their restarts are reliable: see restart_bench."""
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with output.open("wb") as said:
        launchers = [
            subprocess.Popen([TORCHRUN, *command], env=environment, stdout=said, stderr=said)
            for command in commands
        ]
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            launcher.wait(TORCHRUN_STOP_S)
