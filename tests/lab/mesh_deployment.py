"""A deployment over the lab's hosts through mesh ports: the head behind a wall with one hole, machines that dial out.

Rules of this file:
1. The product is started as its documents say: `mesh up --listen`, `mesh token create`, `mesh join`.
2. The tests ask the plain API at the head's lab address; the wall lets in nobody but them there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.real_mesh import BIN, RealMesh, wait_until
from tests.lab.hosts import Host
from tests.lab.network import GATE_NUMBER, HEAD_NUMBER, HOST_NUMBERS, LabNetwork, call

ROOT = Path(__file__).resolve().parents[2]
MESH_PORT = 8471
API_PORT = 8470
UP_LIMIT_S = 180.0
JOIN_LIMIT_S = 60.0
STOP_LIMIT_S = 90.0
WALL = """
table inet wall {{
  chain arriving {{
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
    meta l4proto ipv6-icmp accept
    {holes}
  }}
}}
"""


def head_url(head: Host) -> str:
    return f"https://{head.address}:{MESH_PORT}"


def up_words(head: Host) -> tuple[str, ...]:
    """What is called on the head's host."""
    ports = ("--listen", f"0.0.0.0:{MESH_PORT}", "--api", f"{head.address}:{API_PORT}")
    return (str(BIN / "mesh"), "up", *ports)


def start_head(mesh: RealMesh, host: Host) -> None:
    """`mesh up` on the head's host; returns when it is ready."""
    done = host.run(*up_words(host), environment=mesh.environment(), limit_s=UP_LIMIT_S)
    assert done.returncode == 0, done.stdout + mesh.log_tail()


def stop_head(mesh: RealMesh) -> None:
    """SIGTERM; returns when it has ended."""
    pid = mesh.record.pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not psutil.pid_exists(pid), "the head to stop", limit_s=STOP_LIMIT_S)


def join_words(head: Host, folder: Path, host: Host) -> tuple[str, ...]:
    """What is called on a host that is to be a machine, whose folder this is."""
    return (str(BIN / "mesh"), "join", head_url(head), "--state", str(folder), "--label", f"lab={host.name}")


def raise_wall(host: Host, *holes: str) -> None:
    """Nothing comes in but answers, and what the holes let through."""
    inside = ("ip", "netns", "exec", host.network.namespace(host.name))
    call(*inside, "nft", "-f", "-", stdin=WALL.format(holes="\n    ".join(holes)))


@dataclass(kw_only=True)
class MeshLab(RealMesh):
    """The hosts. `mesh …` of the tests is called outside of them."""

    network: LabNetwork
    head_host: Host
    hosts: list[Host]
    folder: Path
    _agents: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)

    program: tuple[str, ...] = (str(BIN / "mesh"),)

    @property
    def head_url(self) -> str:
        return head_url(self.head_host)

    def wall(self, host: Host, *holes: str) -> None:
        raise_wall(host, *holes)

    def unwall(self, host: Host) -> None:
        call(*self.inside(host, "nft", "delete", "table", "inet", "wall"))

    def inside(self, host: Host, *words: str) -> tuple[str, ...]:
        """As somebody on that host, without its process table."""
        return ("ip", "netns", "exec", self.network.namespace(host.name), *words)

    # ---- the head ---------------------------------------------------------------------------------

    def start_head(self) -> None:
        start_head(self, self.head_host)

    def stop_head(self) -> None:
        stop_head(self)

    def token(self, *options: str) -> str:
        return self.cli("token", "create", *options).stdout.strip()

    # ---- machines ---------------------------------------------------------------------------------

    def start_agent(
        self,
        host: Host,
        *options: str,
        token: str | None = None,
        state: str | None = None,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> subprocess.Popen[Any]:
        """`mesh join` on that host, in the foreground, by what is put before it."""
        given = () if token is None else ("--token", token)
        with self.agent_log(host).open("ab") as log:
            process = host.start(
                *before,
                *join_words(self.head_host, self.folder / (state or host.name), host),
                *given,
                *options,
                environment=self.environment({"LAB_HOST": host.name, **(environment or {})}),
                stdout=log,
                stderr=log,
            )
        self._agents[host.name] = process
        return process

    def join(self, host: Host, *options: str) -> str:
        """With a fresh token; the machine's name, once it can be used."""
        self.start_agent(host, *options, token=self.token())
        return self.until_joined(host)

    def until_joined(self, host: Host) -> str:
        wait_until(
            lambda: self.machine_on(host) is not None or self._agents[host.name].poll() is not None,
            f"{host.name} to join",
            limit_s=JOIN_LIMIT_S,
        )
        name = self.machine_on(host)
        assert name is not None, self.agent_says(host)
        return name

    def stop_agent(self, host: Host) -> int:
        """SIGTERM, and its exit code."""
        way_in = self._agents.pop(host.name)
        if way_in.poll() is None:
            for process in psutil.Process(way_in.pid).children():
                process.terminate()
        return way_in.wait(STOP_LIMIT_S)

    def agent(self, host: Host) -> psutil.Process:
        """The agent's own process."""
        [process] = [p for p in host.processes("agents") if "join" in p.cmdline()]
        return process

    def gateway(self, host: Host) -> psutil.Process:
        [process] = host.processes("agents.gateway")
        return process

    def gateways_up(self) -> bool:
        """Whether every host that should have a gateway has one, which has been told everything: its line is open."""
        return all(len(host.processes("agents.gateway")) == 1 for host in (self.head_host, *self.hosts))

    def machine_on(self, host: Host) -> str | None:
        """The name of the living machine on this host."""
        for name, machine in self.machines().items():
            if machine["labels"].get("lab") == host.name and machine["state"] != "Lost":
                return name
        return None

    def agent_log(self, host: Host) -> Path:
        return self.folder / f"agent-{host.name}.log"

    def agent_says(self, host: Host) -> str:
        path = self.agent_log(host)
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def listening_outside(self, host: Host) -> set[int]:
        """Ports of the host that somebody else on the lab's wire gets a connection to, walls apart."""
        table = call(*self.inside(host, "ss", "-Htln"))
        ports = {int(line.split()[3].rpartition(":")[2]) for line in table.splitlines()}
        return {port for port in ports if _answers(host.address, port)}


def _answers(address: str, port: int) -> bool:
    import socket

    try:
        with socket.create_connection((address, port), timeout=0.3):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def mesh_lab(folder: Path, *, hosts: int) -> Iterator[MeshLab]:
    """The head is up, behind its wall; no machine has joined. Everything is gone afterwards."""
    network = LabNetwork.build()
    head = Host(network=network, name="head", number=HEAD_NUMBER, own_processes=False)
    machines = [Host(network=network, name=f"m{i}", number=HOST_NUMBERS[i]) for i in range(hosts)]
    work = folder / "work"
    work.mkdir()
    lab = MeshLab(
        state=folder / "state",
        work=work,
        network=network,
        head_host=head,
        hosts=machines,
        folder=folder,
    )
    try:
        for host in (head, *machines):
            host.boot()
        tests = f"ip saddr {network.address(GATE_NUMBER)} tcp dport {API_PORT} accept"
        lab.wall(head, f"tcp dport {MESH_PORT} accept", tests)
        lab.start_head()
        yield lab
        for host in machines:
            if host.name in lab._agents:
                lab.stop_agent(host)
        lab.stop_head()
    finally:
        for host in (head, *machines):
            host.shut_down()
        network.close()
