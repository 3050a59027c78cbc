"""What the gateways are compared with: stunnel and wireguard-go between the same two hosts, as Debian has them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.lab.gateways import NUMBERS, TwoHosts
from tests.lab.network import call
from tests.net_world import credentials, machine

STUNNEL_PORT = 29602
WIREGUARD_PORT = 51820
WIREGUARD = {"m0": "10.66.0.1", "m1": "10.66.0.2"}
WIREGUARD_SOCKETS = Path("/var/run/wireguard")
START_LIMIT_S = 10.0
CONGESTION_CONTROL = "net.ipv4.tcp_congestion_control"
PLAIN = "reno"
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


def start_stunnel(hosts: TwoHosts, folder: Path, *, target: int) -> list[subprocess.Popen[str]]:
    """One on each host, with certificates of the same kind as the gateways' and the same checks."""
    far = f"{hosts.lab.address(20)}:{STUNNEL_PORT}"
    ends = (
        ("m1", "no", far, f"127.0.0.1:{target}"),
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


def start_wireguard(hosts: TwoHosts) -> list[subprocess.Popen[str]]:
    """One on each host, each the other's only peer. Raises RuntimeError: why this machine has none."""
    if not Path("/dev/net/tun").exists():
        raise RuntimeError("wireguard-go needs /dev/net/tun: the kernel's module tun")
    started = []
    devices = {host: f"{hosts.lab.id}{host}wg" for host in WIREGUARD}
    for host, device in devices.items():
        environment = os.environ | {"LOG_LEVEL": "error", "WG_PROCESS_FOREGROUND": "1"}
        argv = hosts.inside(host, "wireguard-go", "-f", device)
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment))
        hosts.others.append(started[-1])
        deadline = time.monotonic() + START_LIMIT_S
        while not (WIREGUARD_SOCKETS / f"{device}.sock").exists():
            if time.monotonic() > deadline or started[-1].poll() is not None:
                raise RuntimeError(f"wireguard-go made no {device}")
            time.sleep(0.01)
    keys = {host: call("wg", "genkey").strip() for host in WIREGUARD}
    for host, other in (("m0", "m1"), ("m1", "m0")):
        device, private = devices[host], hosts.folder / f"wireguard-{host}"
        private.touch(mode=0o600)
        private.write_text(keys[host])
        peer = call("wg", "pubkey", stdin=keys[other]).strip()
        where = f"{hosts.lab.address(NUMBERS[other])}:{WIREGUARD_PORT}"
        here = ("private-key", str(private), "listen-port", str(WIREGUARD_PORT))
        there = ("peer", peer, "allowed-ips", f"{WIREGUARD[other]}/32", "endpoint", where)
        call(*hosts.inside(host, "wg", "set", device, *here, *there))
        call(*hosts.inside(host, "ip", "address", "add", f"{WIREGUARD[host]}/24", "dev", device))
        call(*hosts.inside(host, "ip", "link", "set", device, "up"))
    return started


def remove_wireguard(hosts: TwoHosts) -> None:
    """What a killed wireguard-go leaves."""
    for host in WIREGUARD:
        (WIREGUARD_SOCKETS / f"{hosts.lab.id}{host}wg.sock").unlink(missing_ok=True)


def is_paced(hosts: TwoHosts) -> bool:
    """Whether programs on the hosts have BBR when they choose nothing, as on this machine."""
    return "bbr" in call(*hosts.inside("m0", "sysctl", "-n", CONGESTION_CONTROL))


def even_out(hosts: TwoHosts, names: tuple[str, ...]) -> None:
    """From now on everybody's connections are without pacing, not only those of gateways and relays."""
    for name in names:
        call(*hosts.inside(name, "sysctl", "-qw", f"{CONGESTION_CONTROL}={PLAIN}"))
