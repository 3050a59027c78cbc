"""A stream through two gateways against the bare link, between two hosts as network namespaces (as root).

Both ways are taken in turns, several times; ratios are medians of neighbours. CPU is that of both gateways.
"""

from __future__ import annotations

import os
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

PORT = 29600
BULK_PORT = 29601
LIMIT_S = 120.0
TARGET_SHARE = 0.35
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
) -> Any:
    return {
        "name": name, "ours": ours, "theirs": theirs, "ratio": ratio, "unit": unit, "target": target, "ok": ok,
    }  # fmt: skip


def run(quick: bool) -> list[dict[str, Any]]:
    """Every row of this benchmark."""
    lacking = why_not() or redirect.why_not()
    if lacking is not None:
        raise RuntimeError(lacking)
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        argv = hosts.inside("m1", sys.executable, "-c", SERVER, str(PORT), str(BULK_PORT))
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        hosts.others.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        return take_rows(hosts, rounds=3 if quick else 7, megabytes=256 if quick else 1024)


def take_rows(hosts: TwoHosts, *, rounds: int, megabytes: int) -> list[dict[str, Any]]:
    bare, ours = hosts.lab.address(20), overlay(1)[0]
    rows = []
    for streams in (1, 8):
        before = sum(map(cpu_s, hosts.gateways.values()))
        mine, theirs, pairs = compare(
            lambda address, n=streams: measure(hosts, BULK, address, BULK_PORT, n, megabytes),  # type: ignore[misc]
            ours=ours,
            theirs=bare,
            rounds=rounds,
        )
        spent = (sum(map(cpu_s, hosts.gateways.values())) - before) / (rounds * (megabytes << 20) / 1e9)
        ratio = statistics.median(a / b for a, b in pairs)
        name = f"gateway: {streams} stream{'s' if streams > 1 else ''} against the bare link"
        target = f"ratio ≥ {TARGET_SHARE:g}"
        rows.append(row(name, mine / 1e6, theirs / 1e6, ratio, "MB/s", target, ratio >= TARGET_SHARE))
        rows.append(
            row(
                f"gateway: CPU of both ends, {streams}", spent, None, spent, "s/GB",
                f"≤ {TARGET_CPU_S_PER_GB:g}", spent <= TARGET_CPU_S_PER_GB,
            )
        )  # fmt: skip
    mine, theirs, pairs = compare(
        lambda address: measure(hosts, PING, address, PORT, 2000), ours=ours, theirs=bare, rounds=rounds
    )
    added = statistics.median(a - b for a, b in pairs)
    target = f"added ≤ {TARGET_ADDED_US:g}"
    rows.append(row("gateway: added round trip", mine, theirs, added, "µs", target, added <= TARGET_ADDED_US))
    return rows
