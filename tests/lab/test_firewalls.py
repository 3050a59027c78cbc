"""The firewall of a gang on real hosts: who reaches a member's ports, and what else of the machine is touched.

Case 14 of the field's failures: the members reach the whole range that they need, and nobody else any of it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunUid
from mesh.net import firewall
from mesh.net.programs import not_installed
from tests.lab.network import LabNetwork, call

DEPLOYMENT = "firewalled"
RUN = RunUid("0123456789abcdef")
NUMBERS = {"m0": 3, "m1": 20, "m2": 100}
RENDEZVOUS, EPHEMERAL, OWNERS, LOW = 29500, 45123, 8443, 222
LIMIT_S = 20.0

LISTEN = """
import socket, sys, threading
family = socket.AF_INET6 if sys.argv[1] == "::" else socket.AF_INET
for port in map(int, sys.argv[2:]):
    listener = socket.create_server((sys.argv[1], port), family=family)
    def serve(listener=listener):
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=lambda: sock.sendall(sock.recv(100))).start()
    threading.Thread(target=serve).start()
    shouts = socket.socket(family, socket.SOCK_DGRAM)
    shouts.bind((sys.argv[1], port))
    def echo(shouts=shouts):
        while True:
            shouts.sendto(*shouts.recvfrom(100))
    threading.Thread(target=echo).start()
print("ready", flush=True)
"""
CALL = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET
kind = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}[sys.argv[1]]
for port in map(int, sys.argv[3:]):
    sock = socket.socket(family, kind)
    sock.settimeout(1.0)
    try:
        sock.connect((sys.argv[2], port))
        sock.send(b"hello")
        print(port if sock.recv(100) == b"hello" else "-")
    except OSError:
        print("-")
"""
ADMIT = """
import sys
from mesh.ids import Incarnation
from mesh.net import firewall
print(firewall.admit_only(sys.argv[1], Incarnation.parse(sys.argv[2]), sys.argv[3:]))
"""
END = """
import sys
from mesh.ids import Incarnation
from mesh.net import firewall
firewall.admit_all(sys.argv[1], Incarnation.parse(sys.argv[2]))
"""
HOLD = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
print("open", flush=True)
sys.stdin.readline()
sock.sendall(b"still")
print(sock.recv(100).decode(), flush=True)
"""


def life(epoch: int) -> Incarnation:
    return Incarnation(run_uid=RUN, epoch=Epoch(epoch), rank=Rank(0), token=IncarnationToken(f"{epoch:016x}"))


@dataclass
class Three:
    """Three hosts on one wire."""

    lab: LabNetwork
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def address(self, host: str) -> str:
        return self.lab.address(NUMBERS[host])

    def inside(self, host: str, *words: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.lab.namespace(host), *words)

    def begin(self, host: str, program: str, *arguments: str, ready: str) -> subprocess.Popen[str]:
        argv = self.inside(host, sys.executable, "-c", program, *arguments)
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == ready
        return process

    def listen(self, host: str, *ports: int, address: str = "0.0.0.0") -> None:
        self.begin(host, LISTEN, address, *map(str, ports), ready="ready")

    def reached(self, host: str, address: str, *ports: int, kind: str = "tcp") -> list[int]:
        """Those of the ports at which somebody answers."""
        argv = self.inside(host, sys.executable, "-c", CALL, kind, address, *map(str, ports))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
        return [int(line) for line in done.stdout.split() if line != "-"]

    def admit(self, host: str, *members: str, epoch: int = 1) -> None:
        argv = self.inside(host, sys.executable, "-c", ADMIT, DEPLOYMENT, str(life(epoch)), *members)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr

    def end(self, host: str, *, epoch: int) -> None:
        call(*self.inside(host, sys.executable, "-c", END, DEPLOYMENT, str(life(epoch))))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.lab.close()


@pytest.fixture
def three() -> Iterator[Three]:
    lacking = not_installed()
    if lacking is not None:
        pytest.skip(f"no firewall here: {lacking}")
    made = Three(LabNetwork.build())
    try:
        for name, number in NUMBERS.items():
            made.lab.plug(name, number, hosts_file="127.0.0.1 localhost\n")
        yield made
    finally:
        made.close()


def test_members_reach_every_port_of_each_other_and_nobody_else_any(three: Three) -> None:
    m0 = three.address("m0")
    call(*three.inside("m0", "nft", "-f", "-"), stdin="table inet owners {}\n")
    three.listen("m0", OWNERS, LOW)  # the owner's, before the gang came
    three.admit("m0", m0, three.address("m1"))
    three.listen("m0", RENDEZVOUS, EPHEMERAL)
    everything = (RENDEZVOUS, EPHEMERAL, OWNERS, LOW)
    for kind in ("tcp", "udp"):
        assert three.reached("m1", m0, *everything, kind=kind) == list(everything)
        assert three.reached("m0", m0, *everything, kind=kind) == list(everything), "its own programs"
        assert three.reached("m2", m0, *everything, kind=kind) == [OWNERS, LOW]
        three.listen("m2", RENDEZVOUS if kind == "tcp" else EPHEMERAL)
    assert three.reached("m0", three.address("m2"), RENDEZVOUS, EPHEMERAL) == [RENDEZVOUS, EPHEMERAL]
    assert three.reached("m0", three.address("m2"), RENDEZVOUS, kind="udp") == [RENDEZVOUS], "answers come in"
    assert "table inet owners" in call(*three.inside("m0", "nft", "list", "tables"))


def test_the_next_epoch_admits_its_own_members_and_the_last_ones_are_strangers(three: Three) -> None:
    m0, m1, m2 = (three.address(name) for name in NUMBERS)
    three.admit("m0", m0, m1)
    three.listen("m0", RENDEZVOUS)
    assert three.reached("m1", m0, RENDEZVOUS) == [RENDEZVOUS]
    ghost = three.begin("m1", HOLD, m0, str(RENDEZVOUS), ready="open")
    three.processes[0].kill()  # what ran here in epoch 1 is dead before epoch 2 opens
    three.processes[0].wait()
    three.admit("m0", m0, m2, epoch=2)
    three.listen("m0", RENDEZVOUS)
    out, _ = ghost.communicate("go on\n", timeout=LIMIT_S)
    assert out.strip() == "", "a connection of epoch 1 reached somebody of epoch 2"
    assert three.reached("m1", m0, RENDEZVOUS) == []
    assert three.reached("m2", m0, RENDEZVOUS) == [RENDEZVOUS]
    listing = call(*three.inside("m0", "nft", "list", "tables"))
    assert firewall.tables_in(listing) == {firewall.life_table(DEPLOYMENT, life(2)): RUN}
    three.end("m0", epoch=1)  # late
    assert three.reached("m1", m0, RENDEZVOUS) == []
    three.end("m0", epoch=2)
    assert three.reached("m1", m0, RENDEZVOUS) == [RENDEZVOUS]


def test_nothing_is_left_after_a_crash(three: Three) -> None:
    others = f"table inet gangmesh_fedcba987654_{'c' * 16}_{'d' * 16}"
    call(*three.inside("m0", "nft", "-f", "-"), stdin=f"{others} {{}}\ntable inet owners {{}}\n")
    for swept in (f"sweep({DEPLOYMENT!r})", f"sweep_run({RUN!r})"):
        three.admit("m0", three.address("m0"))
        assert len(tables(three)) == 3
        call(*three.inside("m0", sys.executable, "-c", f"from mesh.net import firewall; firewall.{swept}"))
        assert tables(three) == [others, "table inet owners"]


def tables(three: Three) -> list[str]:
    return sorted(call(*three.inside("m0", "nft", "list", "tables")).splitlines())


def test_by_ipv6_too(three: Three) -> None:
    for number, host in enumerate(NUMBERS):
        call(
            "ip", "-n", three.lab.namespace(host), "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad"
        )
    three.admit("m0", "fd77::0", "fd77::1")
    three.listen("m0", RENDEZVOUS, address="::")
    assert three.reached("m1", "fd77::0", RENDEZVOUS) == [RENDEZVOUS]
    assert three.reached("m2", "fd77::0", RENDEZVOUS) == []
