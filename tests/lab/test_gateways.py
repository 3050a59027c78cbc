"""Two hosts, a gateway process on each, real nftables: a plain program reaches another by an overlay address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents.gateway_client import GatewayClient
from agents.gateway_wire import Counters, Host, Request, SetIdentity, SetMachines, SetRoster
from mesh.ids import Epoch, MachineName, Rank
from mesh.net import redirect
from mesh.net.authority import Authority, new_authority
from mesh.net.roster import MachinePlace, MemberPlace, Roster
from tests.lab.network import LabNetwork, call
from tests.net_world import DEPLOYMENT, RUN, credentials, machine, member

NUMBERS = {"m0": 3, "m1": 20}
PORT = 29500
GATEWAY_PORT = 7443
SECRET = "gradients of a paying customer"
TABLE = redirect.table_name(DEPLOYMENT)
LIMIT_S = 20.0

ECHO = """
import socket, sys, threading
def serve(sock):
    while data := sock.recv(65536):
        sock.sendall(data)
    sock.close()
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
print("ready", flush=True)
while True:
    sock, peer = listener.accept()
    print("accepted", flush=True)
    threading.Thread(target=serve, args=(sock,), daemon=True).start()
"""
CALL = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=15)
sock.sendall(sys.argv[3].encode())
sock.shutdown(socket.SHUT_WR)
got = b""
while data := sock.recv(65536):
    got += data
print(got.decode())
"""
SHOUT = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect((sys.argv[1], int(sys.argv[2])))
sock.send(sys.argv[3].encode())
sock.send(sys.argv[3].encode())
"""


def overlay(rank: int) -> tuple[str, str]:
    return f"198.18.0.{rank + 1}", f"fd67:6d00::{rank + 1}"


@dataclass
class TwoHosts:
    """Hosts m0 and m1 with a gateway process each, that know rank 0 on m0 and rank 1 on m1."""

    lab: LabNetwork
    folder: Path
    authority: Authority
    gateways: dict[str, subprocess.Popen[str]]
    others: list[subprocess.Popen[str]]

    def inside(self, host: str, *words: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.lab.namespace(host), *words)

    def start_gateway(self, host: str) -> None:
        listen = f"{self.lab.address(NUMBERS[host])}:{GATEWAY_PORT}"
        argv = self.inside(
            host,
            *(sys.executable, "-m", "agents.gateway", "--folder", str(self.folder / host)),
            *("--deployment", DEPLOYMENT, "--machine", host, "--listen", listen),
        )
        with (self.folder / f"{host}.log").open("a") as log:
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True)
        self.gateways[host] = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (self.folder / f"{host}.log").read_text()
        assert json.loads(line)["addresses"] == [[self.lab.address(NUMBERS[host]), GATEWAY_PORT]]

    def tell(self, host: str, *requests: Request) -> Any:
        async def talk() -> Any:
            client = await GatewayClient.connect(self.folder / host / "gateway.sock")
            try:
                return [await client.ask(request) for request in requests][-1]
            finally:
                client.close()

        return asyncio.run(talk())

    def brief(self, host: str, *, epoch: int = 1) -> None:
        """Everything that a gateway has to know."""
        rank = 0 if host == "m0" else 1
        machines = {
            MachineName(name): MachinePlace(gateway=((self.lab.address(number), GATEWAY_PORT),))
            for name, number in NUMBERS.items()
        }
        places = tuple(
            MemberPlace(rank=Rank(r), machine=MachineName(name), overlay=overlay(r))
            for r, name in enumerate(NUMBERS)
        )
        self.tell(
            host,
            SetIdentity(credentials=credentials(self.authority, machine(host))),
            SetMachines(machines=machines),
            SetRoster(roster=Roster(run=RUN, epoch=Epoch(epoch), members=places)),
            Host(
                credentials=credentials(self.authority, member(rank, host, epoch=epoch)),
                deliver_to=overlay(rank),
            ),
        )

    def start_echo(self, host: str, address: str) -> subprocess.Popen[str]:
        argv = self.inside(host, sys.executable, "-c", ECHO, address, str(PORT))
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.others.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        return server

    def run(self, host: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = self.inside(host, sys.executable, "-c", program, *arguments)
        return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)

    def close(self) -> None:
        for process in (*self.gateways.values(), *self.others):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.lab.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    lacking = redirect.why_not()
    if lacking is not None:
        pytest.skip(f"no redirect here: {lacking}")
    made = TwoHosts(
        lab=LabNetwork.build(),
        folder=tmp_path,
        authority=new_authority(DEPLOYMENT, now=time.time()),
        gateways={},
        others=[],
    )
    try:
        for name, number in NUMBERS.items():
            made.lab.plug(name, number, hosts_file="127.0.0.1 localhost\n")
            made.start_gateway(name)
            made.brief(name)
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def wiretap(interface: str) -> Iterator[bytearray]:
    """Every frame on an interface, in both directions."""
    everything = 0x0003
    seen = bytearray()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(everything)) as tap:
        tap.bind((interface, 0))
        tap.settimeout(0.05)
        done = threading.Event()

        def listen() -> None:
            while True:
                try:
                    seen.extend(tap.recv(70000))
                except TimeoutError:
                    if done.is_set():
                        return

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield seen
        finally:
            done.set()
            thread.join()


def test_a_plain_program_reaches_another_and_a_ghost_does_not(hosts: TwoHosts) -> None:
    server = hosts.start_echo("m1", overlay(1)[1])  # on the IPv6 address only; both can be dialled
    assert server.stdout is not None
    said = SECRET * 1000
    with wiretap(hosts.lab.port("m0")) as seen:
        for address in overlay(1):
            done = hosts.run("m0", CALL, address, str(PORT), said)
            assert done.stdout.strip() == said, done.stderr
        done = hosts.run("m0", SHOUT, overlay(1)[0], str(PORT), SECRET)
        assert done.returncode != 0, "what is no TCP must not go anywhere"
    assert len(seen) > 2 * len(said)
    assert SECRET.encode() not in seen
    assert hosts.tell("m1", Counters())["ended"] == {"finished": 2}
    assert [server.stdout.readline() for _ in range(2)] == ["accepted\n"] * 2

    # m1 is at epoch 2; nobody has told m0, on which everything of epoch 1 still runs.
    hosts.brief("m1", epoch=2)
    for address in overlay(1):
        done = hosts.run("m0", CALL, address, str(PORT), "from the grave")
        assert "ConnectionResetError" in done.stderr
    assert hosts.tell("m1", Counters())["refused_in"] == {"StaleEpoch": 2}
    heard, _, _ = select.select([server.stdout], [], [], 0)
    assert not heard, "the member has heard of the ghost"
    hosts.brief("m0", epoch=2)
    assert hosts.run("m0", CALL, overlay(1)[0], str(PORT), "alive").stdout.strip() == "alive"


def test_what_a_gateway_leaves_when_it_is_killed_and_when_it_ends(hosts: TwoHosts) -> None:
    namespace = hosts.lab.namespace("m0")
    hosts.start_echo("m1", overlay(1)[0])
    hosts.gateways["m0"].send_signal(signal.SIGKILL)
    hosts.gateways["m0"].communicate()
    with wiretap(hosts.lab.port("m0")) as seen:
        done = hosts.run("m0", CALL, overlay(1)[0], str(PORT), SECRET)
        assert "ConnectionRefusedError" in done.stderr
    assert SECRET.encode() not in seen

    hosts.start_gateway("m0")
    left = call("ip", "-n", namespace, "address", "show", "dev", "lo")
    assert not any(address in left for address in overlay(0)), "an address of the one that was killed"
    hosts.brief("m0")
    assert hosts.run("m0", CALL, overlay(1)[0], str(PORT), "again").stdout.strip() == "again"
    tables = call("ip", "netns", "exec", namespace, "nft", "list", "tables").split()
    assert tables.count(TABLE) == 1

    hosts.gateways["m0"].send_signal(signal.SIGTERM)
    assert hosts.gateways["m0"].wait(timeout=LIMIT_S) == 0
    assert call("ip", "netns", "exec", namespace, "nft", "list", "ruleset").strip() == ""
    left = call("ip", "-n", namespace, "address", "show", "dev", "lo")
    assert not any(address in left for address in overlay(0))
    for family in ("-4", "-6"):
        assert "dev lo" not in call("ip", family, "-n", namespace, "route")
