"""Processes of gateways and relays, without root: nothing is redirected."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.net_world import DEPLOYMENT

ROOT = Path(__file__).parents[3]


def command(
    module: str, folder: Path, *, name: str, listen: str = "127.0.0.1:0", capture: str = "--no-redirect"
) -> list[str]:
    argv = [sys.executable, "-m", module, "--folder", str(folder), "--deployment", DEPLOYMENT]
    argv += ["--machine", name, "--listen", listen]
    return argv + ([capture] if module == "agents.gateway" else [])


@contextlib.contextmanager
def running(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    found: dict[str, object] = json.loads(process.stdout.readline())
    return found
