"""A deployment over the lab's hosts: the head on a host of its own, an agent on each of the others.

Rules of this file:
1. The product is started as its documents say: `python -m coordinator serve --address …`, `python -m agents join …`.
2. A machine is known by its host's address: its name changes whenever it joins anew.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from agents.raylet import CHECK_WORKERS, MEMBER_WORKERS
from tests.e2e.real_mesh import INCARNATION, RealMesh, wait_until
from tests.lab.hosts import Host
from tests.lab.network import HEAD_NUMBER, HOST_NUMBERS, LabNetwork
from tests.lab.observer import Observer, observing
from tests.lab.scripts import BEACON

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0
STOP_LIMIT_S = 90.0
JOIN_LIMIT_S = 120.0
PYTHON = (sys.executable, "-P", "-m")
API_PORT = 8470
"""Fixed, so that machines find a head that was started again."""


@dataclass(kw_only=True)
class Beacon:
    """A run of `scripts.BEACON`, and what its ranks have said."""

    name: str
    uid: str
    folder: Path

    def finish(self) -> None:
        """Every rank ends with 0."""
        (self.folder / "done").touch()

    def files(self, *, epoch: int, host: Host | None = None) -> list[Path]:
        found = [path for path in self.folder.iterdir() if path.name.startswith(f"{epoch}.")]
        return [path for path in found if host is None or path.name.endswith(f".{host.name}")]

    def lines(self, *, epoch: int, host: Host | None = None) -> list[str]:
        return [line for path in self.files(epoch=epoch, host=host) for line in path.read_text().splitlines()]

    def said(self, *, epoch: int, host: Host | None = None) -> list[float]:
        """When ranks of the epoch (on that host) said that they were alive, in order."""
        lines = self.lines(epoch=epoch, host=host)
        return sorted(float(line) for line in lines if not line.startswith("stop"))

    def stopped_at(self, host: Host, *, epoch: int = 1) -> float:
        """When the rank on that host was told to stop."""
        lines = self.lines(epoch=epoch, host=host)
        return float(next(line for line in lines if line.startswith("stop")).split()[1])


@dataclass(kw_only=True)
class Lab(RealMesh):
    """The hosts and the deployment over them. `mesh …` is called outside, and reaches the head by its address."""

    network: LabNetwork
    head_host: Host
    hosts: list[Host]
    folder: Path
    _head_process: subprocess.Popen[Any] | None = None
    _agents: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)
    observer: Observer

    # ---- life -------------------------------------------------------------------------------------

    def start_head(self, *, environment: Mapping[str, str] | None = None) -> None:
        """Returns when it is ready."""
        reading, writing = os.pipe()
        address = self.head_host.address
        arguments = [
            "serve",
            "--state",
            str(self.state),
            "--address",
            address,
            "--api",
            f"{address}:{API_PORT}",
        ]
        self._head_process = self.head_host.start(
            *PYTHON,
            "coordinator",
            *arguments,
            "--ready-fd",
            str(writing),
            environment={**self.environment(dict(environment or {})), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writing,),
        )
        os.close(writing)
        with os.fdopen(reading, "rb") as news:
            _until_ready(news.fileno(), self)

    def stop_head(self) -> int:
        """SIGTERM, and its exit code."""
        assert self._head_process is not None
        if self._head_process.poll() is None:
            os.kill(self.record.pid, signal.SIGTERM)
        return self._head_process.wait(STOP_LIMIT_S)

    def join(self, *hosts: Host) -> None:
        """Starts an agent on each of these, one after the other, and waits until all are machines."""
        for host in hosts:
            self.start_agent(host)
            wait_until(partial(self._has_joined, host), f"{host.name} to join", limit_s=JOIN_LIMIT_S)
            assert self.machine_on(host), self.agent_log(host)

    def _has_joined(self, host: Host) -> bool:
        """Or never will."""
        return self.machine_on(host) is not None or self._agents[host.name].poll() is not None

    def start_agent(self, host: Host) -> None:
        token = self.folder / "join-token"
        token.touch(mode=0o600)
        token.write_text(self.record.token)
        with self._agent_log(host).open("ab") as log:
            self._agents[host.name] = host.start(
                *PYTHON,
                *("agents", "join", "--head", self.record.url, "--token-file", str(token)),
                *(
                    "--address",
                    host.address,
                    "--state",
                    str(self.folder / host.name),
                    "--label",
                    f"lab={host.name}",
                ),
                environment=self.environment({"PYTHONPATH": str(ROOT), "LAB_HOST": host.name}),
                stdout=log,
                stderr=log,
            )

    def stop_agent(self, host: Host) -> int:
        """SIGTERM, and its exit code."""
        way_in = self._agents.pop(host.name)
        if way_in.poll() is not None:
            return way_in.returncode
        for process in psutil.Process(way_in.pid).children():
            process.terminate()
        return way_in.wait(STOP_LIMIT_S)

    def _agent_log(self, host: Host) -> Path:
        return self.folder / f"agent-{host.name}.log"

    def agent_log(self, host: Host) -> str:
        return self._agent_log(host).read_text(errors="replace")[-3000:]

    def restore(self, *, joined: int) -> None:
        """Mends every host, ends what a test left running, and lets the first `joined` hosts be machines again."""
        for host in (self.head_host, *self.hosts):
            host.mend()
        gone = [host for host in self.hosts if not host.is_up]
        stale = [name for host in gone if (name := self.machine_on(host))]
        self.end_runs()
        for host in gone:
            host.boot()
            self._agents.pop(host.name, None)
        wait_until(
            lambda: all(self.machines()[name]["state"] == "Lost" for name in stale),
            "lost machines to be told so",
        )
        for host in self.hosts[joined:]:
            if host.name in self._agents:
                self.stop_agent(host)
        for host in self.hosts[:joined]:
            if host.name not in self._agents:
                self.start_agent(host)
        wait_until(
            lambda: all(self.machine_on(host) for host in self.hosts[:joined]),
            "every host to be a machine again",
            limit_s=JOIN_LIMIT_S,
        )

    # ---- what the deployment says -----------------------------------------------------------------

    def machine_on(self, host: Host) -> str | None:
        """The name of the living machine on this host."""
        for name, machine in self.machines().items():
            if machine["address"] == host.address and machine["state"] != "Lost":
                return name
        return None

    def host_of(self, name: str, rank: int) -> Host:
        """Where a rank of a run is now."""
        member = next(m for m in self.run(name)["status"]["ranks"] if m["rank"] == rank)
        return next(h for h in self.hosts if h.address == member["address"])

    def is_warm(self, host: Host) -> bool:
        """Whether worker processes wait there for a member and its launcher, and for a network check before them."""
        return len(host.processes("ray::IDLE")) >= MEMBER_WORKERS + CHECK_WORKERS

    @contextlib.contextmanager
    def held_back(self, host: Host) -> Iterator[None]:
        """No member gets ready on this host: the worker processes that wait for one are stopped."""
        wait_until(lambda: self.is_warm(host), f"{host.name} to be warm")
        workers = host.processes("ray::IDLE")
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGCONT)

    # ---- runs ---

    def beacon(self, *options: str, text: str = BEACON, name: str | None = None) -> Beacon:
        """Submits a run whose ranks say every 10 ms that they are alive, until `finish`; or one of another script."""
        name = name or self.new_name()
        folder = self.work / name
        folder.mkdir()
        script = self.script(f"{name}.py", text)
        self.submit(*options, "--", "python", str(script), str(folder), name=name)
        return Beacon(name=name, uid=self.run(name)["metadata"]["uid"], folder=folder)

    def running_beacon(self, *options: str, text: str = BEACON) -> Beacon:
        """As `beacon`; returns when every rank has said something."""
        beacon = self.beacon(*options, text=text)
        ranks = len(self.running(beacon.name)["status"]["ranks"])
        wait_until(lambda: len(beacon.files(epoch=1)) == ranks, "every rank to say something")
        return beacon

    # ---- what is seen -----------------------------------------------------------------------------

    def user_processes(self, uid: str, host: Host) -> dict[int, int]:
        """The processes of a run's commands on a host: pid, and the epoch that it belongs to."""
        found = {}
        for pid in host.pids():
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                parts = process.environ().get(INCARNATION, "").split(".")
                if parts[0] == uid and process.status() != psutil.STATUS_ZOMBIE:
                    found[pid] = int(parts[1])
        return found


def _until_ready(news: int, lab: Lab) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    text = b""
    while b'"ready"' not in text:
        readable, _, _ = select.select([news], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(news, 65536) if readable else b""
        assert part, f"the head did not start: {text.decode()}\n{lab.log_tail()}"
        text += part
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                assert "error" not in json.loads(line), line.decode()


@contextlib.contextmanager
def build_lab(folder: Path, *, hosts: int, joined: int | None = None) -> Iterator[Lab]:
    """A deployment over so many hosts, the first `joined` of them machines of it. Everything is gone afterwards."""
    network = LabNetwork.build()
    head = Host(network=network, name="head", number=HEAD_NUMBER, own_processes=False)
    machines = [Host(network=network, name=f"m{i}", number=HOST_NUMBERS[i]) for i in range(hosts)]
    work = folder / "work"
    work.mkdir()
    try:
        for host in (head, *machines):
            host.boot()
        with observing(network, folder) as observer:
            lab = Lab(
                state=folder / "state",
                work=work,
                network=network,
                head_host=head,
                hosts=machines,
                folder=folder,
                observer=observer,
            )
            lab.start_head()
            lab.join(*machines[: hosts if joined is None else joined])
            yield lab
            assert lab.stop_head() == 0, lab.log_tail()
    finally:
        for host in (head, *machines):
            host.shut_down()
        network.close()
