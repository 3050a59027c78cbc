"""A fixture that runs real deployments: `deployment(machines=2)` starts a head process.

Use it with `from tests.deployment_fixture import deployment` in a test marked `ray`. When the test is over, every
deployment that it started is stopped by SIGTERM, and no process with its mark may be left.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator import leftovers
from mesh.deployment import DeploymentRecord, read_record
from mesh.errors import MeshError

START_LIMIT_S = 90.0
STOP_LIMIT_S = 90.0
REAL_HEAD = "coordinator"
ROOT = Path(__file__).resolve().parents[1]


class StartFailedError(Exception):
    """The head said why it did not start: `error`."""

    def __init__(self, error: MeshError | None, log: str) -> None:
        super().__init__(f"{error}\n{log}")
        self.error = error


@dataclass(kw_only=True)
class RunningDeployment:
    """One head process. `stages` are what it told while it started."""

    state: Path
    process: subprocess.Popen[bytes]
    stages: list[str] = field(default_factory=list)

    @property
    def record(self) -> DeploymentRecord:
        record = read_record(self.state)
        assert record is not None, f"there is no deployment.json in {self.state}"
        return record

    @property
    def owner(self) -> leftovers.Owner:
        return leftovers.Owner(
            deployment_id=(self.state / "id").read_text(encoding="ascii")[:16], state=self.state
        )

    @property
    def log(self) -> str:
        path = self.state / "head.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else "(no head.log)"

    def processes(self) -> list[int]:
        """Everything of this deployment that runs, the head itself left out."""
        return [pid for pid in leftovers.find(self.owner) if pid != self.process.pid]

    def call(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> Any:
        """One request to the REST API, its JSON answer. Raises urllib.error.HTTPError."""
        record = self.record
        request = urllib.request.Request(
            record.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {token or record.token}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def stop(self) -> int:
        """SIGTERM, and the exit code once it is gone."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the head did not stop within {STOP_LIMIT_S:g} s\n{self.log}") from None

    def assert_nothing_left(self, *, limit_s: float = 0.0) -> None:
        """No process of this deployment runs (any more, within `limit_s`)."""
        try:
            wait_until(lambda: not self.processes(), limit_s=limit_s, what="all processes to end")
        except AssertionError as error:
            left = [" ".join(psutil.Process(pid).cmdline())[:200] for pid in self.processes()]
            raise AssertionError(f"{error}; left: {left}\n{self.log}") from None


def wait_until(condition: Callable[[], bool], *, limit_s: float, what: str) -> None:
    """Returns when the condition holds; fails the test when it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        select.select([], [], [], 0.02)


def start_deployment(
    state: Path,
    *,
    machines: int = 2,
    options: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    module: str = REAL_HEAD,
    until_ready: bool = True,
) -> RunningDeployment:
    """Starts a head as `mesh up` does. Raises StartFailedError with the error that the head told."""
    reading, writing = os.pipe()
    arguments = ["serve", "--state", str(state), "--machines", str(machines), "--ready-fd", str(writing)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {}), "PYTHONPATH": str(ROOT)},
        pass_fds=(writing,),
        start_new_session=True,
    )
    os.close(writing)
    started = RunningDeployment(state=state, process=process)
    with os.fdopen(reading, "rb") as news:
        if until_ready:
            _follow(news, started)
    return started


def _follow(news: Any, started: RunningDeployment) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    pending = b""
    while True:
        readable, _, _ = select.select([news], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(news.fileno(), 65536) if readable else b""
        if not part:
            started.process.kill() if not readable else None
            started.process.wait()
            raise StartFailedError(None, started.log)
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "error" in said:
                started.process.wait(STOP_LIMIT_S)
                raise StartFailedError(MeshError.from_wire(said["error"]), started.log)
            if said.get("ready"):
                return
            started.stages.append(said["stage"])


StartDeployment = Callable[..., RunningDeployment]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[StartDeployment]:
    """`deployment(machines=2, options=(…), environment={…}, state=PATH, module=…)` starts one, ready to be used."""
    running: list[RunningDeployment] = []

    def start(*, state: Path | None = None, **how: Any) -> RunningDeployment:
        started = start_deployment(state or tmp_path / "state", **how)
        running.append(started)
        return started

    yield start
    codes = [(one, one.stop() if one.process.poll() is None else one.process.returncode) for one in running]
    for one, code in codes:
        with contextlib.suppress(FileNotFoundError):
            one.assert_nothing_left(limit_s=5.0)
        assert code in (0, -signal.SIGKILL), f"the head ended with {code}\n{one.log}"
