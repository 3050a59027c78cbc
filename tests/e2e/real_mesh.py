"""A real deployment as a user has it: started by `mesh up`, asked by `mesh`, looked at through /proc.

Rules of this file:
1. What a user does goes through the command line. What a test waits for is asked over the REST API, which is quicker.
2. Nobody sleeps to wait: a condition is waited for, within a limit.
3. Only processes of this deployment are ever signalled, each by its pid.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from coordinator import leftovers
from mesh.deployment import DeploymentRecord, read_record

BIN = Path(sys.executable).parent
LIMIT_S = 60.0
LOOK_S = 0.1
ENDED = ("Succeeded", "Failed", "Cancelled")
INCARNATION = "NODUS_INCARNATION"

WAIT_FOR = "while [ ! -e {0} ]; do sleep 0.1; done"
"""Shell words that wait until a file exists: how a test holds a command and lets it go."""


def wait_until(condition: Callable[[], Any], what: str, *, limit_s: float = LIMIT_S) -> Any:
    """What the condition gave when it became true. Fails the test when it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        time.sleep(LOOK_S)
    return value


@dataclass(kw_only=True)
class Client:
    """A `mesh` that runs in the background. What it writes is in two files."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def stdout(self) -> str:
        return self.out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.err.read_text(errors="replace")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"{self.process.args} did not end; stdout:\n{self.stdout[-2000:]}\nstderr:\n{self.stderr}"
            ) from None

    def expect(self, text: str) -> None:
        """Returns when stdout has this text."""
        wait_until(lambda: text in self.stdout, f"{text!r} on stdout; stderr: {self.stderr}")


@dataclass(kw_only=True)
class RealMesh:
    """One deployment.

    Args:
        state: its state folder.
        work: where the commands are called, and where scripts lie.
    """

    state: Path
    work: Path
    clients: list[Client] = field(default_factory=list)
    _names: int = 0

    # ---- the command line -------------------------------------------------------------------------

    def environment(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        """Of a user's shell: this test run's, with the virtual environment active."""
        shell = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GANGMESH_URL")}
        shell["PATH"] = f"{BIN}:{os.environ['PATH']}"
        return {**shell, "GANGMESH_STATE": str(self.state), **(extra or {})}

    def cli(
        self,
        *arguments: str,
        program: str = "mesh",
        code: int | None = 0,
        stdin: str | None = None,
        environment: dict[str, str] | None = None,
        limit_s: float = 90.0,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `mesh …` to its end. `code` is what it must exit with; None takes any."""
        done = subprocess.run(
            [str(BIN / program), *arguments],
            cwd=self.work,
            env=self.environment(environment),
            capture_output=True,
            text=True,
            errors="replace",
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            timeout=limit_s,
        )
        shown = f"{program} {' '.join(arguments)[:500]} -> {done.returncode}\n"
        assert code is None or done.returncode == code, (
            shown + done.stdout[-3000:] + done.stderr[-5000:] + self.log_tail()
        )
        return done

    def shell(self, line: str) -> subprocess.CompletedProcess[str]:
        """One line for bash, with `mesh` in it."""
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.work,
            env=self.environment(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=90,
        )

    def client(self, *arguments: str) -> Client:
        """Starts `mesh …` in a session of its own."""
        number = len(self.clients)
        out, err = self.work / f"client-{number}.out", self.work / f"client-{number}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [str(BIN / "mesh"), *arguments],
                cwd=self.work,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self.clients.append(Client(process=process, out=out, err=err))
        return self.clients[-1]

    def submit(self, *arguments: str, name: str | None = None) -> str:
        """`mesh run -d`; returns the run's name."""
        name = name or self.new_name()
        self.cli("run", "-d", "--name", name, *arguments)
        return name

    def new_name(self) -> str:
        self._names += 1
        return f"e2e-{self._names}"

    def script(self, name: str, text: str) -> Path:
        path = self.work / name
        path.write_text(text)
        return path

    def gate(self, name: str) -> Path:
        """A file that is not there yet; see WAIT_FOR."""
        path = self.work / f"gate-{name}"
        path.unlink(missing_ok=True)
        return path

    # ---- the API ----------------------------------------------------------------------------------

    @property
    def record(self) -> DeploymentRecord:
        record = read_record(self.state)
        assert record is not None, f"there is no deployment in {self.state}"
        return record

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request, its JSON answer. Raises urllib.error.HTTPError."""
        record = self.record
        request = urllib.request.Request(
            record.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {record.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def look(self, path: str) -> Any:
        """GET, patient while the coordinator is being restarted, or while a client has not submitted its run yet."""

        def ask() -> Any:
            try:
                return self.call("GET", path)
            except urllib.error.HTTPError as error:
                if error.code not in (404, 502, 503, 504):
                    raise
                return None

        return wait_until(ask, f"an answer to GET {path}")

    def run(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.look(f"/v1/runs/{name}")
        return answer.get("run", answer)

    def events(self, name: str) -> list[dict[str, Any]]:
        answer = self.look(f"/v1/events?run={name}&limit=1000")
        events: list[dict[str, Any]] = answer["events"] if isinstance(answer, dict) else answer
        return events

    def machines(self) -> dict[str, dict[str, Any]]:
        answer = self.look("/v1/machines")
        return {machine["name"]: machine for machine in answer["machines"]}

    def wait_for(self, name: str, *states: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The run, once it is in one of these states."""
        last: dict[str, Any] = {}

        def reached() -> bool:
            last.update(self.run(name))
            state = last["status"]["state"]
            assert state in states or state not in ENDED, (
                f"{name} is {state}: {last['status']}\n{self.log_tail()}"
            )
            return state in states

        try:
            wait_until(reached, f"{name} to be {' or '.join(states)}", limit_s=limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {last.get('status')}\n{self.log_tail()}") from None
        return last

    def running(self, name: str) -> dict[str, Any]:
        return self.wait_for(name, "Running")

    def ended(self, name: str, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
        return self.wait_for(name, *ENDED, limit_s=limit_s)

    def printed(self, name: str, rank: int) -> str:
        """What a rank has printed so far, byte by byte; empty when the head has nothing of it yet."""
        record = self.record
        request = urllib.request.Request(
            f"{record.url}/v1/runs/{name}/logs/raw?rank={rank}",
            headers={"Authorization": f"Bearer {record.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                content: bytes = answer.read()
        except urllib.error.HTTPError as error:
            assert error.code == 404, error
            return ""
        return content.decode(errors="replace")

    def wait_for_print(self, name: str, text: str, *ranks: int) -> None:
        """Returns when each of these ranks has printed the text."""
        for rank in ranks:
            wait_until(lambda rank=rank: text in self.printed(name, rank), f"rank {rank} to print {text!r}")

    # ---- the processes ----------------------------------------------------------------------------

    @property
    def owner(self) -> leftovers.Owner:
        return leftovers.Owner(
            deployment_id=(self.state / "id").read_text(encoding="ascii")[:16], state=self.state
        )

    @property
    def head(self) -> psutil.Process:
        return psutil.Process(self.record.pid)

    def everything(self) -> list[psutil.Process]:
        """The head and everything below it: it is the reaper of every orphan of the deployment."""
        return [self.head, *self.head.children(recursive=True)]

    def named(self, word: str) -> list[psutil.Process]:
        """Processes of the deployment whose command line has this word: `ray::CoordinatorActor`, `keeper.py`…"""
        found = []
        for process in self.everything():
            with suppress(psutil.Error):
                if any(part.startswith(word) or part.endswith(word) for part in process.cmdline()):
                    found.append(process)
        return found

    def one(self, word: str) -> psutil.Process:
        found = wait_until(lambda: self.named(word), f"a process {word}")
        assert len(found) == 1, found
        return found[0]

    def raylet(self, machine: str) -> psutil.Process:
        return next(p for p in self.named(f"--node-name={machine}") if p.ppid() == self.record.pid)

    def tree(self, uid: str, rank: int | None = None) -> dict[int, psutil.Process]:
        """The processes of a run's commands, by the variable that each inherits."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                parts = process.environ().get(INCARNATION, "").split(".")
                if parts[0] == uid and (rank is None or parts[2] == str(rank)):
                    found[process.pid] = process
        return found

    def command(self, name: str, rank: int) -> psutil.Process:
        """A rank's main process; its parent is the supervisor, whose parent is the launcher."""
        uid = self.run(name)["metadata"]["uid"]

        def top() -> psutil.Process | None:
            tree = self.tree(uid, rank)
            for process in tree.values():
                with suppress(psutil.Error):  # a child that has just ended
                    if process.ppid() not in tree:
                        return process
            return None

        process = wait_until(top, f"the command of rank {rank} of {name}")
        assert isinstance(process, psutil.Process)
        return process

    def no_process_left(self, run: dict[str, Any], *, limit_s: float = 20.0) -> None:
        """Nothing of the run's commands lives, daemons and orphans included."""
        uid = run["metadata"]["uid"]
        try:
            wait_until(lambda: not self.tree(uid), "every process of the run to end", limit_s=limit_s)
        except AssertionError as error:
            left = [f"{p.pid} {p.cmdline()}" for p in self.tree(uid).values()]
            raise AssertionError(f"{error}; left: {left}\n{self.log_tail()}") from None

    def log_tail(self) -> str:
        path = self.state / "head.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else "(no head.log)"

    # ---- tidy up ----------------------------------------------------------------------------------

    def end_runs(self) -> None:
        """Cancels what a test left running, and ends its clients."""
        for client in self.clients:
            if client.process.poll() is None:
                client.process.kill()
                client.process.wait()
        self.clients.clear()
        active = [r for r in self.look("/v1/runs")["runs"] if r["status"]["state"] not in ENDED]
        for run in active:
            self.call("POST", f"/v1/runs/{run['metadata']['name']}/cancel", {})
        for run in active:
            self.ended(run["metadata"]["name"])
            self.no_process_left(run)


@contextmanager
def real_mesh(folder: Path, *options: str, state: Path | None = None) -> Iterator[RealMesh]:
    """A deployment by `mesh up`; afterwards it is ended by `mesh down`, and nothing of it may be left."""
    work = folder / "work"
    work.mkdir(parents=True)
    mesh = RealMesh(state=state or folder / "state", work=work)
    mesh.cli("up", *options)
    owner = mesh.owner
    try:
        yield mesh
        if mesh.record.is_alive:
            mesh.end_runs()
    finally:
        mesh.cli("down", "--yes")
        left = leftovers.find(owner)
        assert not left, [psutil.Process(pid).cmdline() for pid in left]
