"""Two hosts with a gateway process each, real nftables, and the plain programs that run on them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.gateway_client import GatewayClient
from agents.gateway_wire import Counters, Host, Request, SetIdentity, SetMachines, SetRelays, SetRoster
from mesh.ids import Epoch, MachineName, Rank
from mesh.net import redirect
from mesh.net.authority import Authority, new_authority
from mesh.net.relay_client import RelayPlace
from mesh.net.roster import MachinePlace, MemberPlace, Roster
from tests.lab.network import LabNetwork, call
from tests.net_world import DEPLOYMENT, RUN, credentials, machine, member, relay_identity

NUMBERS = {"m0": 3, "m1": 20}
PORT = 29500
GATEWAY_PORT = 7443
SECRET = "gradients of a paying customer"
TABLE = redirect.table_name(DEPLOYMENT)
LIMIT_S = 20.0
ROOT = Path(__file__).parents[2]
RELAY = "m2"
ONLY_OUT = """
table inet firewall {
  chain arriving {
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
    meta l4proto ipv6-icmp accept
  }
}
"""

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

    def start_relay(self, *options: str) -> subprocess.Popen[str]:
        """On a host of its own, m2."""
        self.lab.plug(RELAY, 100, hosts_file="127.0.0.1 localhost\n")
        folder = self.folder / RELAY
        folder.mkdir()
        who = credentials(self.authority, relay_identity(RELAY))
        for name, content in (
            ("certificate", who.certificate_pem),
            ("key", who.key_pem),
            ("bundle", who.bundle_pem),
        ):
            (folder / f"{name}.pem").write_bytes(content)
        argv = self.inside(
            RELAY,
            *(sys.executable, "-m", "tests.net_relay", "--folder", str(folder)),
            *("--deployment", DEPLOYMENT, "--machine", RELAY),
            *("--listen", f"{self.lab.address(100)}:{GATEWAY_PORT}", *options),
        )
        with (self.folder / f"{RELAY}.log").open("a") as log:
            relay = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        self.others.append(relay)
        assert relay.stdout is not None
        assert relay.stdout.readline(), (self.folder / f"{RELAY}.log").read_text()
        return relay

    def only_by_relay(self) -> None:
        """Neither gateway knows an address of the other, nor could be dialled; both have a line to the relay."""
        place = RelayPlace(machine=MachineName(RELAY), addresses=((self.lab.address(100), GATEWAY_PORT),))
        machines = {MachineName(name): MachinePlace(gateway=()) for name in NUMBERS}
        for host in NUMBERS:
            call(*self.inside(host, "nft", "-f", "-"), stdin=ONLY_OUT)
            self.tell(host, SetMachines(machines=machines), SetRelays(places=(place,)))
        deadline = time.monotonic() + LIMIT_S
        while not all(self.tell(host, Counters())["relay_lines"] for host in NUMBERS):
            assert time.monotonic() < deadline, "no line to the relay"

    def start_echo(self, host: str, address: str) -> subprocess.Popen[str]:
        argv = self.inside(host, sys.executable, "-c", ECHO, address, str(PORT))
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.others.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        return server

    def run(
        self, host: str, program: str, *arguments: str, limit_s: float = LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        argv = self.inside(host, sys.executable, "-c", program, *arguments)
        return subprocess.run(argv, capture_output=True, text=True, timeout=limit_s)

    def close(self) -> None:
        for process in (*self.gateways.values(), *self.others):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self.lab.close()


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Both gateways have been told everything."""
    made = TwoHosts(
        lab=LabNetwork.build(),
        folder=folder,
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
