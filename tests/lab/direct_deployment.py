"""The lab's deployment over the direct path: a head with a mesh port, machines of different providers by `mesh join`.

Rules of this file:
1. Between hosts nothing but the mesh ports is open, so what passes passes the gateways. That it does is looked up in
   the kernel's tables, not asked of the product.
2. A machine's folder outlives its host, as a disk does: who comes back needs no token.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, ClassVar

import psutil

from tests.e2e.real_mesh import wait_until
from tests.lab.deployment import API_PORT, Beacon, Lab
from tests.lab.hosts import Host
from tests.lab.mesh_deployment import MESH_PORT, join_words, raise_wall, start_head, stop_head
from tests.lab.network import GATE_NUMBER, call

TLS_RECORD_BYTES = 22
"""What TLS 1.3 with an AEAD adds to a record: header 5, type 1, tag 16."""
BEATS = 4
Flow = tuple[int, int, int, int]
"""Of a connection: bytes and segments with data that were sent, then received."""


class DirectLab(Lab):
    """See the rules."""

    path: ClassVar[str] = "direct"
    run_options: ClassVar[tuple[str, ...]] = ("--network", "global")

    # ---- how it is deployed -----------------------------------------------------------------------

    def lay(self) -> None:
        hole = f"tcp dport {MESH_PORT} accept"
        tests = f"ip saddr {self.network.address(GATE_NUMBER)} tcp dport {API_PORT} accept"
        raise_wall(self.head_host, hole, tests)
        for host in self.hosts:
            raise_wall(host, hole)

    def start_head(self) -> None:
        start_head(self, self.head_host)

    def stop_head(self) -> None:
        stop_head(self)

    def join_command(self, host: Host) -> tuple[str, ...]:
        folder = self.folder / host.name
        token = () if folder.exists() else ("--token", self.cli("token", "create").stdout.strip())
        provider = ("--label", f"provider=cloud-{host.name}")
        return (*join_words(self.head_host, folder, host), *provider, *token)

    def assert_path(self, run: dict[str, Any]) -> None:
        super().assert_path(run)
        providers = {
            self.machines()[rank["machine"]]["labels"]["provider"] for rank in run["status"]["ranks"]
        }
        assert len(providers) == len(run["status"]["ranks"]), providers

    def until_all_speak(self, beacon: Beacon, *, epoch: int, limit_s: float = 120.0) -> None:
        """And what they say to rank 0 goes from gateway to gateway, of their own hosts."""
        super().until_all_speak(beacon, epoch=epoch, limit_s=limit_s)
        if not beacon.ranks_talk:
            return
        first, *others = (self.host_of(beacon.name, rank) for rank in range(self.ranks_of(beacon)))
        for other in others:
            between = wait_until(
                lambda other=other: [ends for ends in _established(other) if _is_at(ends[1], first)],
                f"a connection from {other.name} to {first.name}",
            )
            assert f"{first.address}:{MESH_PORT}" in [peer for _, peer in between], between
            assert all(f":{MESH_PORT}" in "".join(ends) for ends in between), between
        assert {said for said, _ in beacon.heard(epoch=epoch)} <= {epoch}, "rank 0 has heard a ghost"

    def wire_port(self, host: Host, process: psutil.Process) -> int:
        """That of the gateway's connection that carries the process's: as many bytes as that one, and TLS's."""
        [port] = host.connected_ports(process)
        [gateway] = host.processes("agents.gateway")
        begun = _flows(host, gateway)

        def carrying() -> list[int]:
            grown = {
                ends: _less(flow, begun[ends])
                for ends, flow in _flows(host, gateway).items()
                if ends in begun
            }
            [(sent, sends, received, receives)] = [
                flow for (_, peer), flow in grown.items() if peer.endswith(f":{port}")
            ]
            if receives < BEATS:
                return []
            wanted = (
                received + receives * TLS_RECORD_BYTES, receives,
                sent + sends * TLS_RECORD_BYTES, sends,
            )  # fmt: skip
            outside = [ends for ends, flow in grown.items() if flow == wanted]
            return [int(own.rpartition(":")[2]) for own, peer in outside if peer.endswith(f":{MESH_PORT}")]

        [found] = wait_until(carrying, "a connection of the gateway that carries as much as the process's")
        return int(found)


def _is_at(end: str, host: Host) -> bool:
    return end.rpartition(":")[0] == host.address


def _established(host: Host) -> list[tuple[str, str]]:
    """Both ends of every connection that the host's kernel has, this one's first."""
    table = call(
        "ip", "netns", "exec", host.network.namespace(host.name), "ss", "-Htn", "state", "established"
    )
    return [(line.split()[2], line.split()[3]) for line in table.splitlines()]


def _flows(host: Host, process: psutil.Process) -> dict[tuple[str, str], Flow]:
    """How much the connections of this process have carried, by their ends."""
    inside = ("ip", "netns", "exec", host.network.namespace(host.name))
    table = call(*inside, "ss", "-HtnpiO", "state", "established")
    found = {}
    for line in table.splitlines():
        if f"pid={process.pid}," in line:
            counts = Counter({name: int(count) for name, count in re.findall(r"(\w+):(\d+)\b", line)})
            found[line.split()[2], line.split()[3]] = (
                counts["bytes_acked"], counts["data_segs_out"],
                counts["bytes_received"], counts["data_segs_in"],
            )  # fmt: skip
    return found


def _less(now: Flow, before: Flow) -> Flow:
    return (now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3])
