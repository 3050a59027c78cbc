"""A relay against HAProxy (TCP mode, one thread), socat and a router.

Three hosts as network namespaces (as root). The ways are taken in turns; ratios are medians of neighbours. All forward
bytes as they are: what gateways encrypt inside is theirs. HAProxy and socat are Debian's; what is missing is installed.
Where the system's congestion control is BBR there are also rows of a world in which nobody has it, as in gateway_bench.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mesh.net.programs import not_installed
from tests.bench.gateway_bench import BULK_PORT, PORT, SERVER, carry, cpu_s, row, without_pacing
from tests.bench.rows import told
from tests.bench.tunnels import even_out, install_missing, is_paced
from tests.lab.gateways import GATEWAY_PORT, RELAY, TwoHosts, two_hosts
from tests.lab.network import call, why_not
from tests.net_world import credentials, machine

HAPROXY_PORT = 29700
SOCAT_PORT = 29701
PROGRAMS = ("haproxy", "socat")
OURS, HAPROXY, SOCAT, ROUTED = "relay", "HAProxy", "socat", "routed"
TARGETS = {HAPROXY: 1.5, SOCAT: 1.1, ROUTED: 0.75}
TARGET_CPU_S_PER_GB = 0.25
TARGET_IDLE_MB = 50.0
IDLE_STREAMS = 1000
HAPROXY_CONFIGURATION = """
global
  nbthread 1
  maxconn 4096
defaults
  mode tcp
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  option splice-auto
listen relay
  bind {here}:{port}
  server target {target}
"""


class Ways:
    """The four ways from m0 to m1."""

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.relay = hosts.start_relay("--streams-per-machine", str(IDLE_STREAMS + 64))
        self.relay_address = hosts.lab.address(100)
        self.target = hosts.lab.address(20)
        for name in ("m0", "m1"):
            who = credentials(hosts.authority, machine(name))
            (folder / f"end-{name}").mkdir()
            for part, content in (
                ("certificate", who.certificate_pem),
                ("key", who.key_pem),
                ("bundle", who.bundle_pem),
            ):
                (folder / f"end-{name}" / f"{part}.pem").write_bytes(content)
        self.start("m1", sys.executable, "-c", SERVER, str(PORT), str(BULK_PORT))
        self.start("m1", *self.ends("swallow", "m1"))
        configuration = folder / "haproxy.cfg"
        configuration.write_text(
            HAPROXY_CONFIGURATION.format(
                here=self.relay_address, port=HAPROXY_PORT, target=f"{self.target}:{BULK_PORT}"
            )
        )
        self.haproxy = self.start(RELAY, "haproxy", "-db", "-q", "-f", str(configuration), says=False)
        self.start(
            RELAY,
            *("socat", "-b", "131072", f"TCP-LISTEN:{SOCAT_PORT},fork,reuseaddr,backlog=64"),
            f"TCP:{self.target}:{BULK_PORT}",
            says=False,
        )
        self.route()

    def ends(self, what: str, host: str, *arguments: str) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", "tests.bench.relay_ends", what, str(self.folder / f"end-{host}")),
            *(self.relay_address, str(GATEWAY_PORT), *arguments),
        )

    def start(self, host: str, *words: str, says: bool = True) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.hosts.inside(host, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hosts.others.append(process)
        assert process.stdout is not None
        assert not says or process.stdout.readline() == "ready\n"
        return process

    def route(self) -> None:
        """m2 is also a router between an address of m0 and one of m1."""
        for name, host in (("m0", "10.9.0.1"), ("m1", "10.9.1.1"), (RELAY, "10.9.0.2"), (RELAY, "10.9.1.2")):
            call("ip", "-n", self.hosts.lab.namespace(name), "addr", "add", f"{host}/24", "dev", "eth0")
        for name, network, via in (("m0", "10.9.1.0/24", "10.9.0.2"), ("m1", "10.9.0.0/24", "10.9.1.2")):
            call("ip", "-n", self.hosts.lab.namespace(name), "route", "add", network, "via", via)
        settings = (
            "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 0 >/proc/sys/net/ipv4/conf/eth0/send_redirects"
        )
        call(*self.hosts.inside(RELAY, "sh", "-c", settings))

    def ours(self, streams: int, megabytes: int) -> tuple[float, float, float]:
        """Bytes a second; the relay's CPU seconds for the bytes, and those for the dials before them."""
        argv = self.hosts.inside("m0", *self.ends("send", "m0", str(streams), str(megabytes)))
        pipe = subprocess.PIPE
        before = cpu_s(self.relay)
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as sender:
            assert sender.stdout is not None
            sender.stdout.readline()
            dialled = cpu_s(self.relay)
            out, errors = sender.communicate("\n", timeout=120)
        if sender.returncode != 0:
            raise RuntimeError(errors)
        return float(out), cpu_s(self.relay) - dialled, dialled - before

    def theirs(self, way: str, streams: int, megabytes: int) -> float:
        """Bytes a second."""
        address, port = {
            HAPROXY: (self.relay_address, HAPROXY_PORT),
            SOCAT: (self.relay_address, SOCAT_PORT),
            ROUTED: ("10.9.1.1", BULK_PORT),
        }[way]
        return carry(self.hosts, address, port, streams=streams, megabytes=megabytes).rate


def memory_mb(process: subprocess.Popen[Any]) -> float:
    [line] = [
        line
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1]) / 1024


def run(quick: bool) -> list[dict[str, Any]]:
    """Every row of this benchmark."""
    lacking = why_not() or not_installed()
    if lacking is not None:
        raise RuntimeError(lacking)
    install_missing({name: name for name in PROGRAMS})
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        ways = Ways(hosts, Path(folder))
        rows = []
        for streams in (1, 16):
            rows += compare(ways, streams, rounds=3 if quick else 7, megabytes=256 if quick else 1024)
        rows += idle_rows(ways)
        if is_paced(hosts):
            even_out(hosts, ("m0", "m1", RELAY))
            for streams in (1, 16):
                unjudged = compare(ways, streams, rounds=3 if quick else 7, megabytes=256 if quick else 1024)
                rows += [without_pacing(each) for each in unjudged]
        return rows


def compare(ways: Ways, streams: int, *, rounds: int, megabytes: int) -> list[dict[str, Any]]:
    rates: dict[str, list[float]] = {way: [] for way in (OURS, *TARGETS)}
    gigabytes = rounds * (megabytes << 20) / 1e9
    haproxy_before = cpu_s(ways.haproxy)
    for_bytes = for_dials = 0.0
    for turn in range(rounds):
        order: Callable[[list[str]], Any] = reversed if turn % 2 else list
        for way in order(list(rates)):
            if way == OURS:
                rate, cpu_bytes, cpu_dials = ways.ours(streams, megabytes)
                rates[OURS].append(rate)
                for_bytes += cpu_bytes
                for_dials += cpu_dials
            else:
                rates[way].append(ways.theirs(way, streams, megabytes))
    count = f"{streams} stream{'s' if streams > 1 else ''}"
    rows = []
    for way, target in TARGETS.items():
        ratio = statistics.median(a / b for a, b in zip(rates[OURS], rates[way], strict=True))
        ours, theirs = (statistics.median(rates[w]) / 1e6 for w in (OURS, way))
        rows.append(
            row(f"relay: {count}, {way}", ours, theirs, ratio, "MB/s", f"ratio ≥ {target:g}", ratio >= target)
        )
    ours, theirs = for_bytes / gigabytes, (cpu_s(ways.haproxy) - haproxy_before) / gigabytes
    target = f"ours ≤ {TARGET_CPU_S_PER_GB:g}"
    ratio = ours / max(theirs, 1e-9)
    is_met = ours <= TARGET_CPU_S_PER_GB
    rows.append(row(f"relay: CPU, {count}, HAProxy", ours, theirs, ratio, "s/GB", target, is_met))
    dial_ms = for_dials / (rounds * streams) * 1e3
    rows.append(told(f"relay: CPU of a dial, {count}", [dial_ms], unit="ms"))
    return rows


def idle_rows(ways: Ways) -> list[dict[str, Any]]:
    empty = memory_mb(ways.relay)
    idle = ways.start("m0", *ways.ends("idle", "m0", str(IDLE_STREAMS)))
    used = memory_mb(ways.relay) - empty
    assert idle.stdin is not None
    idle.stdin.close()
    name = f"relay: memory for {IDLE_STREAMS} idle streams"
    return [row(name, used, None, used, "MB", f"≤ {TARGET_IDLE_MB:g}", used <= TARGET_IDLE_MB)]
