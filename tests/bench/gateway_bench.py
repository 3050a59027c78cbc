"""A stream through two gateways against the bare link and stunnel, between two network namespaces (as root).

The ways are taken in turns, several times; ratios are medians of neighbours. CPU is that of both ends together.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mesh.net import redirect
from tests.lab.gateways import TwoHosts, overlay, two_hosts
from tests.lab.network import why_not
from tests.net_world import credentials, machine

PORT = 29600
BULK_PORT = 29601
LIMIT_S = 120.0
STUNNEL_PORT = 29602
TARGET_SHARE = 0.35
TARGET_STUNNEL = 1.05
TARGET_ADDED_US = 150.0
TARGET_CPU_S_PER_GB = 1.6
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

SERVER = """
import socket, sys, threading
def echo(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := sock.recv(1024):
        sock.sendall(data)
def swallow(sock):
    buffer = bytearray(1 << 20)
    total = 0
    while count := sock.recv_into(buffer):
        total += count
    sock.sendall(b"%d" % total)
    sock.close()
def listen(port, serve):
    listener = socket.create_server(("0.0.0.0", port))
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
threading.Thread(target=listen, args=(int(sys.argv[1]), echo), daemon=True).start()
print("ready", flush=True)
listen(int(sys.argv[2]), swallow)
"""
BULK = """
import socket, sys, threading, time
address, port, streams, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
data = bytes(1 << 20)
def send(sock):
    for _ in range(megabytes // streams):
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(100) == b"%d" % (megabytes // streams << 20)
socks = [socket.create_connection((address, port)) for _ in range(streams)]
began = time.perf_counter()
threads = [threading.Thread(target=send, args=(sock,)) for sock in socks]
for thread in threads: thread.start()
for thread in threads: thread.join()
print((megabytes // streams * streams << 20) / (time.perf_counter() - began))
"""
PING = """
import socket, statistics, sys, time
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
found = []
for _ in range(int(sys.argv[3])):
    began = time.perf_counter()
    sock.sendall(b"x")
    sock.recv(1)
    found.append(time.perf_counter() - began)
print(statistics.median(found) * 1e6)
"""


STUNNEL = """
foreground = yes
pid =
debug = 3
sslVersion = TLSv1.3
verifyChain = yes
CAfile = {folder}/bundle.pem
cert = {folder}/pair.pem
[bench]
client = {client}
accept = {accept}
connect = {connect}
"""


def install_missing(programs: dict[str, str]) -> None:
    """Debian packages by the program that they bring. Raises RuntimeError: why they cannot be had."""
    missing = [package for program, package in programs.items() if shutil.which(program) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise RuntimeError(f"not installed, and there is no apt-get: {', '.join(missing)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *missing]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")


def start_stunnel(hosts: TwoHosts, folder: Path) -> list[subprocess.Popen[str]]:
    """One on each host, with certificates of the same kind as the gateways' and the same checks."""
    far = f"{hosts.lab.address(20)}:{STUNNEL_PORT}"
    ends = (
        ("m1", "no", far, f"127.0.0.1:{BULK_PORT}"),
        ("m0", "yes", f"127.0.0.1:{STUNNEL_PORT}", far),
    )
    started = []
    for host, client, accept, connect in ends:
        own = folder / f"stunnel-{host}"
        own.mkdir()
        who = credentials(hosts.authority, machine(host))
        (own / "bundle.pem").write_bytes(who.bundle_pem)
        (own / "pair.pem").write_bytes(who.certificate_pem + who.key_pem)
        (own / "pair.pem").chmod(0o600)
        configuration = own / "stunnel.conf"
        configuration.write_text(
            STUNNEL.format(folder=own, client=client, accept=accept, connect=connect).lstrip()
        )
        argv = hosts.inside(host, "stunnel", str(configuration))
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        hosts.others.append(started[-1])
    return started


def measure(hosts: TwoHosts, program: str, *arguments: object) -> float:
    done = hosts.run("m0", program, *map(str, arguments), limit_s=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"a client failed: {done.stderr}")
    return float(done.stdout)


def cpu_s(process: subprocess.Popen[Any]) -> float:
    """User and system time of a process so far; `ip netns exec` has become the program itself."""
    words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / CLOCK_TICKS


def compare(
    take: Callable[[str], float], *, ours: str, theirs: str, rounds: int
) -> tuple[float, float, list[tuple[float, float]]]:
    """Medians, and the pairs that were taken next to each other."""
    pairs = []
    for turn in range(rounds):
        if turn % 2:
            pairs.append((take(ours), take(theirs)))
        else:
            other = take(theirs)
            pairs.append((take(ours), other))
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), pairs


def row(
    name: str, ours: float | None, theirs: float | None, ratio: float, unit: str, target: str, ok: bool
) -> dict[str, Any]:
    return {
        "name": name, "ours": ours, "theirs": theirs, "ratio": ratio, "unit": unit, "target": target, "ok": ok,
    }  # fmt: skip


def run(quick: bool) -> list[dict[str, Any]]:
    """Every row of this benchmark."""
    lacking = why_not() or redirect.why_not()
    if lacking is not None:
        raise RuntimeError(lacking)
    install_missing({"stunnel": "stunnel4"})
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        argv = hosts.inside("m1", sys.executable, "-c", SERVER, str(PORT), str(BULK_PORT))
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        hosts.others.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        stunnels = start_stunnel(hosts, Path(folder))
        return take_rows(hosts, stunnels, rounds=3 if quick else 7, megabytes=256 if quick else 1024)


def take_rows(
    hosts: TwoHosts, stunnels: list[subprocess.Popen[str]], *, rounds: int, megabytes: int
) -> list[dict[str, Any]]:
    bare, ours = hosts.lab.address(20), overlay(1)[0]
    rows = []
    for streams in (1, 8):
        rows += bulk_rows(hosts, stunnels, streams, rounds=rounds, megabytes=megabytes)
    mine, theirs, pairs = compare(
        lambda address: measure(hosts, PING, address, PORT, 2000), ours=ours, theirs=bare, rounds=rounds
    )
    added = statistics.median(a - b for a, b in pairs)
    target = f"added ≤ {TARGET_ADDED_US:g}"
    rows.append(row("gateway: added round trip", mine, theirs, added, "µs", target, added <= TARGET_ADDED_US))
    return rows


def bulk_rows(
    hosts: TwoHosts, stunnels: list[subprocess.Popen[str]], streams: int, *, rounds: int, megabytes: int
) -> list[dict[str, Any]]:
    """The gateways against each of the other two, and what a GB costs them and stunnel."""
    ours, bare, tunnelled = overlay(1)[0], hosts.lab.address(20), "127.0.0.1"
    ports = {ours: BULK_PORT, bare: BULK_PORT, tunnelled: STUNNEL_PORT}
    count = f"{streams} stream{'s' if streams > 1 else ''}"
    gigabytes = rounds * (megabytes << 20) / 1e9

    def spent() -> tuple[float, float]:
        return sum(map(cpu_s, hosts.gateways.values())), sum(map(cpu_s, stunnels))

    def rate(address: str) -> float:
        return measure(hosts, BULK, address, ports[address], streams, megabytes)

    rows = []
    before = spent()
    for name, theirs, target in (("bare link", bare, TARGET_SHARE), ("stunnel", tunnelled, TARGET_STUNNEL)):
        mine, other, pairs = compare(rate, ours=ours, theirs=theirs, rounds=rounds)
        ratio = statistics.median(a / b for a, b in pairs)
        text = f"ratio ≥ {target:g}"
        rows.append(
            row(f"gateway: {count}, {name}", mine / 1e6, other / 1e6, ratio, "MB/s", text, ratio >= target)
        )
    cpu, other_cpu = (after - b for after, b in zip(spent(), before, strict=True))
    cpu, other_cpu = cpu / (2 * gigabytes), other_cpu / gigabytes  # the gateways ran in both comparisons
    target_text, is_met = f"ours ≤ {TARGET_CPU_S_PER_GB:g}", cpu <= TARGET_CPU_S_PER_GB
    rows.append(
        row(f"gateway: CPU, {count}, stunnel", cpu, other_cpu, cpu / other_cpu, "s/GB", target_text, is_met)
    )
    return rows
