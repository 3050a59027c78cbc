"""A stream through two gateways against the bare link, stunnel and wireguard-go, between two namespaces (as root).

The ways are taken in turns, several times; ratios are medians of neighbours. CPU is that of both ends together. Where
the system's congestion control is BBR, which gateways do without on such a way (mesh/net/sockets.py), there are also
rows of a world in which nobody has it; they are told, not judged.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.net.programs import not_installed
from tests.bench.rows import told
from tests.bench.tunnels import (
    STUNNEL_PORT,
    WIREGUARD,
    even_out,
    install_missing,
    is_paced,
    remove_wireguard,
    start_stunnel,
    start_wireguard,
)
from tests.lab.gateways import TwoHosts, overlay, two_hosts
from tests.lab.network import why_not

PORT = 29600
BULK_PORT = 29601
LIMIT_S = 120.0
PINGS = 2000
TARGETS = {"bare link": 0.35, "stunnel": 1.05, "wireguard-go": 5.0}
WIREGUARD_SHARE = 4
"""It is slow: it gets a part of the others' bytes."""
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
    sock.sendall(b"!")
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
assert all(sock.recv(1) == b"!" for sock in socks)
print("ready", flush=True)
sys.stdin.readline()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What became of some bytes."""

    rate: float
    """Bytes a second."""
    cpu_s: float
    """Of the processes between, for the bytes."""
    dials_cpu_s: float
    """And for the connections before them."""


def carry(
    hosts: TwoHosts,
    address: str,
    port: int,
    *,
    streams: int,
    megabytes: int,
    between: Sequence[subprocess.Popen[Any]] = (),
) -> Carried:
    """From m0 to who swallows them, on connections that are there before the clock runs. Raises RuntimeError."""
    argv = hosts.inside("m0", sys.executable, "-c", BULK, *map(str, (address, port, streams, megabytes)))
    pipe = subprocess.PIPE
    before = sum(map(cpu_s, between))
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as sender:
        assert sender.stdout is not None
        sender.stdout.readline()
        dialled = sum(map(cpu_s, between))
        out, errors = sender.communicate("\n", timeout=LIMIT_S)
    if sender.returncode != 0:
        raise RuntimeError(f"a client failed: {errors}")
    spent = sum(map(cpu_s, between)) - dialled
    return Carried(rate=float(out), cpu_s=spent, dials_cpu_s=dialled - before)


def round_trip_us(hosts: TwoHosts, address: str) -> float:
    """The median of many, one after the other. Raises RuntimeError."""
    done = hosts.run("m0", PING, address, str(PORT), str(PINGS), limit_s=LIMIT_S)
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
    lacking = why_not() or not_installed()
    if lacking is not None:
        raise RuntimeError(lacking)
    install_missing({"stunnel": "stunnel4", "wireguard-go": "wireguard-go", "wg": "wireguard-tools"})
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        argv = hosts.inside("m1", sys.executable, "-c", SERVER, str(PORT), str(BULK_PORT))
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        hosts.others.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        try:
            ends = {
                "stunnel": start_stunnel(hosts, Path(folder), target=BULK_PORT),
                "wireguard-go": start_wireguard(hosts),
            }
            return take_rows(hosts, ends, rounds=3 if quick else 7, megabytes=256 if quick else 1024)
        finally:
            remove_wireguard(hosts)


Ends = dict[str, list[subprocess.Popen[str]]]
"""The processes of the other tunnels, by their names in the rows."""


def take_rows(hosts: TwoHosts, ends: Ends, *, rounds: int, megabytes: int) -> list[dict[str, Any]]:
    rows = []
    for streams in (1, 8):
        rows += bulk_rows(hosts, ends, streams, rounds=rounds, megabytes=megabytes)
    mine, theirs, pairs = compare(
        lambda address: round_trip_us(hosts, address),
        ours=overlay(1)[0],
        theirs=hosts.lab.address(20),
        rounds=rounds,
    )
    added = statistics.median(a - b for a, b in pairs)
    target = f"added ≤ {TARGET_ADDED_US:g}"
    rows.append(row("gateway: added round trip", mine, theirs, added, "µs", target, added <= TARGET_ADDED_US))
    if is_paced(hosts):
        even_out(hosts, ("m0", "m1"))
        for streams in (1, 8):
            unjudged = bulk_rows(hosts, ends, streams, rounds=rounds, megabytes=megabytes)
            rows += [without_pacing(each) for each in unjudged]
    return rows


def without_pacing(found: dict[str, Any]) -> dict[str, Any]:
    """A row of the world in which nobody has BBR."""
    return {**found, "name": f"{found['name']}, nobody paced", "target": "–", "ok": None}


def bulk_rows(
    hosts: TwoHosts, ends: Ends, streams: int, *, rounds: int, megabytes: int
) -> list[dict[str, Any]]:
    """The gateways against each of the others, and what a GB costs them and stunnel."""
    addresses = {
        "ours": overlay(1)[0],
        "bare link": hosts.lab.address(20),
        "stunnel": "127.0.0.1",
        "wireguard-go": WIREGUARD["m1"],
    }
    count = f"{streams} stream{'s' if streams > 1 else ''}"
    between = {"ours": list(hosts.gateways.values()), **ends}
    taken: dict[str, list[tuple[int, Carried]]] = {name: [] for name in between}

    def rate(name: str, megabytes: int) -> float:
        address = addresses[name]
        port = STUNNEL_PORT if name == "stunnel" else BULK_PORT
        found = carry(
            hosts, address, port, streams=streams, megabytes=megabytes, between=between.get(name, ())
        )
        if name in taken:
            taken[name].append((megabytes << 20, found))
        return found.rate

    rows = []
    for name, target in TARGETS.items():
        size = megabytes // WIREGUARD_SHARE if name == "wireguard-go" else megabytes
        mine, other, pairs = compare(
            lambda way, size=size: rate(way, size), ours="ours", theirs=name, rounds=rounds
        )
        ratio = statistics.median(a / b for a, b in pairs)
        text = f"ratio ≥ {target:g}"
        rows.append(
            row(f"gateway: {count}, {name}", mine / 1e6, other / 1e6, ratio, "MB/s", text, ratio >= target)
        )
    costs = {
        name: sum(each.cpu_s for _, each in found) / sum(size for size, _ in found) * 1e9
        for name, found in taken.items()
    }
    text, is_met = f"ours ≤ {TARGET_CPU_S_PER_GB:g}", costs["ours"] <= TARGET_CPU_S_PER_GB
    for name in ends:
        ratio = costs["ours"] / costs[name]
        rows.append(
            row(f"gateway: CPU, {count}, {name}", costs["ours"], costs[name], ratio, "s/GB", text, is_met)
        )
    dials = [each.dials_cpu_s / streams * 1e3 for _, each in taken["ours"]]
    rows.append(told(f"gateway: CPU of a dial, {count}", dials, unit="ms"))
    return rows
