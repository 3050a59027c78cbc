"""A deployment over the lab's hosts: the head on a host of its own, an agent on each of the others.

Rules of this file:
1. The product is started as its documents say: `python -m coordinator serve --address …`, `python -m agents join …`.
2. A machine is known by the label that its host gives it: its name changes whenever it joins anew.
3. What another kind of deployment does differently is in the methods under "how it is deployed", and nowhere else
   (`direct_deployment.py`): the stories are the same over every path.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

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
HOLD_LOOK_S = 0.3
"""A worker takes longer than that to start."""
API_PORT = 8470
"""Fixed, so that machines find a head that was started again."""


@dataclass(kw_only=True)
class Beacon:
    """A run of `scripts.BEACON`, and what its ranks have said."""

    name: str
    uid: str
    folder: Path
    ranks_talk: bool = True
    """Whether its ranks talk to rank 0; those of other scripts do as they like."""

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
        return sorted(float(line) for line in lines if line[0].isdigit())

    def heard(self, *, epoch: int) -> set[tuple[int, int]]:
        """Epoch and rank of everybody who has spoken to rank 0 of this epoch."""
        said = [line.split() for line in self.lines(epoch=epoch) if line.startswith("heard ")]
        return {(int(words[1]), int(words[2])) for words in said if len(words) == 3}

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

    # ---- how it is deployed -----------------------------------------------------------------------

    path: ClassVar[str] = "private"
    """How ranks reach each other here."""
    run_options: ClassVar[tuple[str, ...]] = ()
    """What `mesh run` has to be told so that the machines may be used together."""

    def lay(self) -> None:
        """Called once, before anything is started."""

    def start_head(self) -> None:
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
            environment=self.environment({"PYTHONPATH": str(ROOT)}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writing,),
        )
        os.close(writing)
        with os.fdopen(reading, "rb") as news:
            _until_ready(news.fileno(), self)

    def stop_head(self) -> None:
        """SIGTERM, and it ends well."""
        assert self._head_process is not None
        if self._head_process.poll() is None:
            os.kill(self.record.pid, signal.SIGTERM)
        assert self._head_process.wait(STOP_LIMIT_S) == 0, self.log_tail()

    def join_command(self, host: Host) -> tuple[str, ...]:
        """What is called on this host to make it a machine, or one again."""
        token = self.folder / "join-token"
        token.touch(mode=0o600)
        token.write_text(self.record.token)
        return (
            *(*PYTHON, "agents", "join", "--head", self.record.url, "--token-file", str(token)),
            *("--address", host.address, "--state", str(self.folder / host.name)),
            *("--label", f"lab={host.name}"),
        )

    def wire_port(self, host: Host, process: psutil.Process) -> int:
        """This side's port on the host's cable of the one connection that the process has with the head."""
        [port] = host.connected_ports(process)
        return port

    def assert_path(self, run: dict[str, Any]) -> None:
        """Its ranks reach each other by this lab's path."""
        assert run["status"]["path"]["transport"] == self.path, run["status"]

    # ---- life -------------------------------------------------------------------------------------

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
        with self._agent_log(host).open("ab") as log:
            self._agents[host.name] = host.start(
                *self.join_command(host),
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
            if machine["labels"].get("lab") == host.name and machine["state"] != "Lost":
                return name
        return None

    def host_of(self, name: str, rank: int) -> Host:
        """Where a rank of a run is now."""
        return self.hosts_of(name)[rank]

    def hosts_of(self, name: str) -> dict[int, Host]:
        """Where each rank of a run is now: of those that have a machine."""
        members, machines = self.run(name)["status"]["ranks"], self.machines()
        hosts = {host.name: host for host in self.hosts}
        return {m["rank"]: hosts[machines[m["machine"]]["labels"]["lab"]] for m in members}

    def is_warm(self, host: Host) -> bool:
        """Whether worker processes wait there for a member and its launcher, and for a network check before them."""
        return len(host.processes("ray::IDLE")) >= MEMBER_WORKERS + CHECK_WORKERS

    @contextlib.contextmanager
    def held_back(self, host: Host) -> Iterator[None]:
        """No member gets ready on this host: the worker processes that wait for one are stopped.

        So is every one that the raylet starts in their stead meanwhile.
        """
        wait_until(lambda: self.is_warm(host), f"{host.name} to be warm")
        stopped: set[psutil.Process] = set()
        is_over = threading.Event()

        def stop_all() -> None:
            for worker in {*host.processes("ray::IDLE"), *host.processes("default_worker.py")} - stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGSTOP)
                    stopped.add(worker)

        def go_on() -> None:
            while not is_over.wait(HOLD_LOOK_S):
                stop_all()

        stop_all()
        holding = threading.Thread(target=go_on, name=f"holds {host.name} back")
        holding.start()
        try:
            yield
        finally:
            is_over.set()
            holding.join()
            for worker in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGCONT)

    # ---- runs ---

    def submit(self, *arguments: str, name: str | None = None) -> str:
        return super().submit(*self.run_options, *arguments, name=name)

    def running(self, name: str) -> dict[str, Any]:
        run = super().running(name)
        self.assert_path(run)
        return run

    def beacon(self, *options: str, text: str = BEACON, name: str | None = None) -> Beacon:
        """Submits a run whose ranks say every 10 ms that they are alive, until `finish`; or one of another script."""
        name = name or self.new_name()
        folder = self.work / name
        folder.mkdir()
        script = self.script(f"{name}.py", text)
        self.submit(*options, "--", "python", str(script), str(folder), name=name)
        uid = self.run(name)["metadata"]["uid"]
        return Beacon(name=name, uid=uid, folder=folder, ranks_talk=text is BEACON)

    def running_beacon(self, *options: str, text: str = BEACON) -> Beacon:
        """As `beacon`; returns when every rank has said something."""
        beacon = self.beacon(*options, text=text)
        self.running(beacon.name)
        self.until_all_speak(beacon, epoch=1)
        return beacon

    def ranks_of(self, beacon: Beacon) -> int:
        """How many there are when all are there: of a rank that waits for a machine the run does not speak."""
        nodes: int = self.run(beacon.name)["status"]["topology"]["nodes"]
        return nodes

    def until_all_speak(self, beacon: Beacon, *, epoch: int, limit_s: float = 120.0) -> None:
        """Returns when every rank of this epoch has said something, and rank 0 has heard the others."""
        ranks = self.ranks_of(beacon)
        others = {(epoch, rank) for rank in range(1, ranks)} if beacon.ranks_talk else set()
        wait_until(
            lambda: len(beacon.files(epoch=epoch)) == ranks and others <= beacon.heard(epoch=epoch),
            f"every rank to say something in epoch {epoch}; it is {self.run(beacon.name)['status']['message']}",
            limit_s=limit_s,
        )

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
def build_lab(folder: Path, *, hosts: int, joined: int | None = None, kind: type[Lab] = Lab) -> Iterator[Lab]:
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
            lab = kind(
                state=folder / "state",
                work=work,
                network=network,
                head_host=head,
                hosts=machines,
                folder=folder,
                observer=observer,
            )
            lab.lay()
            lab.start_head()
            lab.join(*machines[: hosts if joined is None else joined])
            yield lab
            lab.stop_head()
    finally:
        for host in (head, *machines):
            host.shut_down()
        network.close()
