"""Hosts of the mesh with a gateway process each, and members of a run on them: all but Ray and the coordinator.

The store and the log sink are this process's, at the bridge's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.gateway_wire import Counters, Request, SetIdentity, SetMachines, SetRelays
from agents.launcher.base import read_tail
from agents.overlay_line import ask
from coordinator.logs.sink import LogSink
from coordinator.logs.store import LogStore
from coordinator.store_actor import StoreServer
from mesh.ids import Epoch, Incarnation, MachineName, Rank, new_run_uid, new_token
from mesh.messages import JoinOrder
from mesh.net.authority import Authority, new_authority
from mesh.net.overlay import member_overlay
from mesh.net.paths import NetworkFacts
from mesh.net.relay_client import RelayPlace
from mesh.net.roster import MachinePlace
from mesh.plan import Endpoint, RunPlan
from mesh.store.client import StoreClient
from tests.lab.member_host import Part
from tests.lab.network import GATE_NUMBER, LabNetwork, call
from tests.net_world import DEPLOYMENT, credentials, machine, relay_identity

ROOT = Path(__file__).parents[2]
NUMBERS = {"m0": 3, "m1": 20, "m2": 100}
RELAY, RELAY_NUMBER = "m9", 9
GATEWAY_PORT = 7443
LIMIT_S = 60.0
ONLY_OUT = """
table inet nat_like {
  chain arriving {
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
    meta l4proto ipv6-icmp accept
  }
}
"""


@dataclass
class MeshHosts:
    """Hosts m0, m1 and m2; each gateway knows every machine, and nothing of any run."""

    lab: LabNetwork
    folder: Path
    authority: Authority
    hosts_file: str
    facts: dict[str, NetworkFacts] = field(default_factory=dict)
    gateways: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    others: list[subprocess.Popen[str]] = field(default_factory=list)

    def plug(self, host: str, *, is_ipv6_only: bool = False) -> None:
        number = list(NUMBERS).index(host)
        self.lab.plug(host, NUMBERS[host], hosts_file=self.hosts_file)
        if is_ipv6_only:
            namespace = self.lab.namespace(host)
            call("ip", "-n", namespace, "addr", "flush", "dev", "eth0")
            call("ip", "-n", namespace, "addr", "add", f"{self.ipv6(host)}/64", "dev", "eth0", "nodad")
        self.facts[host] = NetworkFacts(
            machine=MachineName(host),
            address=member_overlay(number)[0],
            is_on_mesh=True,
            is_dialable=True,
        )
        self.start_gateway(host)

    def ipv6(self, host: str) -> str:
        return f"fd77::{NUMBERS[host]}"

    def place(self, host: str) -> str:
        """Where the host is for others."""
        has_v4 = "inet " in call("ip", "-n", self.lab.namespace(host), "addr", "show", "dev", "eth0")
        return self.lab.address(NUMBERS[host]) if has_v4 else self.ipv6(host)

    def inside(self, host: str, *words: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.lab.namespace(host), *words)

    def socket(self, host: str) -> Path:
        return self.folder / host / "gateway.sock"

    def start_gateway(self, host: str) -> None:
        at = self.place(host)
        listen = f"[{at}]:{GATEWAY_PORT}" if ":" in at else f"{at}:{GATEWAY_PORT}"
        argv = self.inside(
            host,
            *(sys.executable, "-m", "agents.gateway", "--folder", str(self.folder / host)),
            *("--deployment", DEPLOYMENT, "--machine", host, "--listen", listen),
        )
        with (self.folder / f"{host}.log").open("a") as log:
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        self.gateways[host] = process
        assert process.stdout is not None
        assert process.stdout.readline(), (self.folder / f"{host}.log").read_text()

    def kill_gateway(self, host: str) -> None:
        _end(self.gateways[host])

    def tell(self, host: str, *requests: Request) -> Any:
        return asyncio.run(ask(self.socket(host), *requests))

    def introduce(self, *hosts: str) -> None:
        """What its agent would tell each gateway: who it is, and where all machines are."""
        machines = {
            MachineName(name): MachinePlace(
                gateway=((self.place(name), GATEWAY_PORT),) if facts.is_dialable else ()
            )
            for name, facts in self.facts.items()
        }
        for host in hosts or self.facts:
            who = credentials(self.authority, machine(host))
            self.tell(host, SetIdentity(credentials=who), SetMachines(machines=machines))

    def hide(self, *hosts: str) -> None:
        """These dial out only, and everybody knows a relay, on a host of its own."""
        self.lab.plug(RELAY, RELAY_NUMBER, hosts_file=self.hosts_file)
        self.start_relay()
        for host in hosts:
            call(*self.inside(host, "nft", "-f", "-"), stdin=ONLY_OUT)
            self.facts[host] = replace(self.facts[host], is_dialable=False)
        self.introduce()
        address = (self.lab.address(RELAY_NUMBER), GATEWAY_PORT)
        for host in self.facts:
            self.tell(host, SetRelays(places=(RelayPlace(machine=MachineName(RELAY), addresses=(address,)),)))
        deadline = time.monotonic() + LIMIT_S
        while not all(self.tell(host, Counters())["relay_lines"] for host in self.facts):
            assert time.monotonic() < deadline, "no line to the relay"

    def start_relay(self) -> None:
        folder = self.folder / RELAY
        folder.mkdir()
        who = credentials(self.authority, relay_identity(RELAY))
        for name in ("certificate", "key", "bundle"):
            (folder / f"{name}.pem").write_bytes(getattr(who, f"{name}_pem"))
        argv = self.inside(
            RELAY,
            *(sys.executable, "-m", "tests.net_relay", "--folder", str(folder)),
            *("--deployment", DEPLOYMENT, "--machine", RELAY),
            *("--listen", f"{self.lab.address(RELAY_NUMBER)}:{GATEWAY_PORT}"),
        )
        with (self.folder / f"{RELAY}.log").open("a") as log:
            relay = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        self.others.append(relay)
        assert relay.stdout is not None
        assert relay.stdout.readline(), (self.folder / f"{RELAY}.log").read_text()

    def close(self) -> None:
        for process in (*self.others, *self.gateways.values()):
            _end(process)
        self.lab.close()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def mesh_hosts(
    folder: Path, *hosts: str, hosts_file: str = "127.0.0.1 localhost\n", is_ipv6_only: bool = False
) -> Iterator[MeshHosts]:
    made = MeshHosts(
        lab=LabNetwork.build(),
        folder=folder,
        authority=new_authority(DEPLOYMENT, now=time.time()),
        hosts_file=hosts_file,
    )
    try:
        if is_ipv6_only:
            call("ip", "addr", "add", "fd77::1/64", "dev", made.lab.bridge, "nodad")
        for host in hosts:
            made.plug(host, is_ipv6_only=is_ipv6_only)
        made.introduce()
        yield made
    finally:
        made.close()


class LabMember:
    """A member's process on its host, and what it has reported."""

    def __init__(self, host: str, part: Part, process: asyncio.subprocess.Process) -> None:
        self.host = host
        self.part = part
        self.process = process
        self.reports: list[dict[str, Any]] = []

    async def report(self, kind: str) -> dict[str, Any]:
        """The first of this kind, waited for."""
        assert self.process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            while True:
                for report in self.reports:
                    if report["kind"] == kind:
                        return report
                    assert "Failed" not in report["kind"], report
                line = await self.process.stdout.readline()
                assert line, f"{self.host}'s member ended: {self.reports}"
                self.reports.append(json.loads(line))

    async def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        await self.process.stdin.drain()

    async def end(self) -> None:
        """Fenced, and gone in order."""
        await self.say("fence")
        await self.report("MemberFenced")
        await self.say("leave")
        async with asyncio.timeout(LIMIT_S):
            await self.process.wait()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def output(self) -> str:
        return read_tail(str(self.part.folders.spool))


class LabGang:
    """A run's members, epoch by epoch, with a store and a sink."""

    def __init__(self, hosts: MeshHosts, plan: RunPlan) -> None:
        self.hosts = hosts
        self.plan = plan
        self.uid = new_run_uid()
        self.members: list[LabMember] = []

    async def start(self) -> None:
        here = self.hosts.lab.address(GATE_NUMBER)
        if self.hosts.place("m0").startswith("fd77"):
            here = "fd77::1"
        self._logs = LogStore(self.hosts.folder / "logs")
        self._sink = LogSink(self._logs, secret="logs", host=here)
        self._log_endpoint = await self._sink.start()
        self._store = StoreServer(host=here, port=0, admin_secret="admin", member_secret="member")
        address = await self._store.start()
        self._endpoint = Endpoint(host=here, port=address.port, secret="member")

    async def epoch(self, number: int, *hosts: str) -> list[LabMember]:
        """Orders each rank to its host."""
        admin = await StoreClient.connect(replace(self._endpoint, secret="admin"))
        await admin.set_floor(self.uid, Epoch(number), len(hosts))
        await admin.close()
        return [await self._begin(number, rank, host) for rank, host in enumerate(hosts)]

    async def _begin(self, epoch: int, rank: int, host: str) -> LabMember:
        order = JoinOrder(
            incarnation=Incarnation(run_uid=self.uid, epoch=Epoch(epoch), rank=Rank(rank), token=new_token()),
            plan=self.plan,
            machine=MachineName(host),
            store=self._endpoint,
            logs=self._log_endpoint,
            lease_ttl_s=5.0,
        )
        part = Part(
            order=order,
            facts=self.hosts.facts[host],
            gateway=self.hosts.socket(host),
            authority=self.hosts.authority,
            machine_dir=self.hosts.folder / f"machine-{host}",
        )
        told = self.hosts.folder / f"part-{epoch}-{rank}.pickle"
        told.write_bytes(pickle.dumps(part))
        argv = self.hosts.inside(host, sys.executable, "-m", "tests.lab.member_host", str(told))
        with (self.hosts.folder / f"member-{epoch}-{rank}.log").open("a") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=ROOT,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.members.append(LabMember(host, part, process))
        return self.members[-1]

    async def close(self) -> None:
        for member in self.members:
            await member.kill()
        await self._store.stop("done")
        await self._sink.stop()
        self._logs.close()


@contextlib.asynccontextmanager
async def lab_gang(hosts: MeshHosts, plan: RunPlan) -> AsyncIterator[LabGang]:
    gang = LabGang(hosts, plan)
    await gang.start()
    try:
        yield gang
    finally:
        await gang.close()


def _environment() -> Mapping[str, str]:
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1"}
