"""A shell in which tests type `mesh …`: a home and a state folder of its own, fake heads behind it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from mesh.deployment import process_started

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


class Shell:
    """Runs `mesh` with a state folder and a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.here = folder / "here"
        self.here.mkdir()
        keep = {
            k: v for k, v in os.environ.items() if not k.startswith(("GANGMESH_U", "GANGMESH_TOKEN", "FAKE_"))
        }
        self.env = {**keep, "GANGMESH_STATE": str(self.state), "HOME": str(folder), "PYTHONPATH": str(ROOT)}
        self.argv = (sys.executable, "-m", "tests.fakes.mesh_cli")

    def mesh(self, *arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.argv, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env={**self.env, **env},
            cwd=self.here,
            timeout=DEADLINE_S,
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        env = {**self.env, **options.pop("env", {})}
        return subprocess.Popen(
            [*self.argv, *arguments], text=True, env=env, cwd=self.here, **{**pipes, **options}
        )

    def run_state(self, name: str) -> dict[str, Any]:
        done = self.mesh("status", name, "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)["status"]
        return status

    def stop(self) -> None:
        """Ends every fake head that was started from this folder."""
        with contextlib.suppress(FileNotFoundError):
            for pid in (self.state / "starts").read_text().split():
                if process_started(int(pid)) is not None:
                    os.kill(int(pid), signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def line_with(stream: IO[str] | None, text: str) -> str:
    """Reads lines until one has this text."""
    assert stream is not None
    seen = []
    for line in stream:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came: {seen}")
