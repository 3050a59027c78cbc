"""A real supervisor under test, seen from its launcher's side; whatever a test does, nothing of it survives."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents import process_tree
from agents.spool import STDERR, STDOUT, Record, SpoolReader

SUPERVISOR = Path(process_tree.__file__).with_name("supervisor.py")
LIMIT_S = 30.0
"""For whatever must happen: far above what it takes, since other work may hold the machine."""

PLAIN_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
SUPERVISOR_COMMAND = [sys.executable, "-I", "-S", str(SUPERVISOR)]


def wait_until(condition: Callable[[], object], what: str, *, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        select.select([], [], [], 0.01)


def is_running(pid: int) -> bool:
    process = process_tree.read_process(pid)
    return process is not None and process.is_alive


def new_incarnation() -> str:
    return f"{secrets.token_hex(8)}.1.0.{secrets.token_hex(8)}"


class Supervised:
    """One supervisor and its command. `events` holds what it has said so far."""

    def __init__(self, folder: Path, *, program: str | None = None, **popen_options: Any) -> None:
        """`program` is run instead of the supervisor's own file: for one that has a fault put into it."""
        self.incarnation = new_incarnation()
        self.spool = folder / f"spool-{self.incarnation}"
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self._received = b""
        self.complaints = folder / f"complaints-{self.incarnation}"
        with self.complaints.open("wb") as complaints:
            self.process = subprocess.Popen(
                SUPERVISOR_COMMAND if program is None else [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                bufsize=0,
                **popen_options,
            )

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def start(
        self, *arguments: str, env: dict[str, str] | None = None, cwd: str | None = None, **options: Any
    ) -> None:
        self.send(
            op="start",
            argv=list(arguments),
            env=PLAIN_ENVIRONMENT if env is None else env,
            cwd=str(self.folder) if cwd is None else cwd,
            spool=str(self.spool),
            incarnation=self.incarnation,
            **options,
        )

    def start_python(self, program: str, *arguments: str, **options: Any) -> None:
        self.start(sys.executable, "-I", "-S", "-u", "-c", program, *arguments, **options)

    def event(self, name: str) -> dict[str, Any]:
        """The event of that name, waited for."""
        deadline = time.monotonic() + LIMIT_S
        while not (found := [event for event in self.events if event["ev"] == name]):
            assert time.monotonic() < deadline, (
                f"no {name!r} among {self.events}; {self.complaints.read_text()}"
            )
            self._receive(deadline - time.monotonic())
        return found[0]

    def end(self) -> dict[str, Any]:
        """Wait until it has ended by itself; answers how the command exited."""
        self.event("empty")
        assert self.process.wait(LIMIT_S) == 0, self.complaints.read_text()
        return self.event("exited")

    def wait_for_output(self, text: bytes) -> None:
        wait_until(lambda: text in self.output(STDOUT) + self.output(STDERR), f"{text!r} in the output")

    def records(self) -> list[Record]:
        reader = SpoolReader(str(self.spool))
        found: list[Record] = []
        while records := reader.read():
            found += records
        return found

    def output(self, stream: int = STDOUT) -> bytes:
        return b"".join(record.data for record in self.records() if record.stream == stream)

    def tree(self) -> list[int]:
        """The living processes of the command, however they hide from their supervisor."""
        return sorted(process_tree.find(self.incarnation))

    def close(self) -> None:
        roots = [self.process.pid] if self.process.poll() is None else []
        outcome = process_tree.kill_incarnation(self.incarnation, roots=roots)
        self.process.kill()
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        assert outcome.is_empty, outcome

    def _receive(self, limit_s: float) -> None:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(limit_s, 0))
        if not ready:
            return
        piece = os.read(self.process.stdout.fileno(), 65536)
        assert piece, f"the supervisor ended after {self.events}; {self.complaints.read_text()}"
        *lines, self._received = (self._received + piece).split(b"\n")
        self.events += [json.loads(line) for line in lines]


def the_pid_in(path: Path) -> int:
    """The pid that a command wrote into a file, waited for."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"a pid in {path.name}")
    return int(path.read_text())


@pytest.fixture(name="supervised")
def supervised_fixture(tmp_path: Path) -> Any:
    """Makes supervisors: `supervised()`. All of them end with the test."""
    made: list[Supervised] = []

    def make(**options: Any) -> Supervised:
        made.append(Supervised(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
