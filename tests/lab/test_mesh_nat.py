"""A machine behind a router that translates addresses joins, and is reached by the relay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.mesh_deployment import MeshLab, mesh_lab
from tests.lab.network import call, skip_without_redirect

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(240)]

ROUTER, ROUTER_NUMBER = "m8", 88
INSIDE, GATE = "192.168.77.2", "192.168.77.1"
TRANSLATES = """
table ip nat {
  chain leaving {
    type nat hook postrouting priority srcnat;
    oifname "eth0" masquerade
  }
}
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[MeshLab]:
    skip_without_redirect()
    with mesh_lab(tmp_path, hosts=1) as made:
        yield made


def put_behind_a_router(lab: MeshLab) -> None:
    """The machine's own cable is pulled; its way out is a router that has the only address on the lab's wire."""
    network, [host] = lab.network, lab.hosts
    network.plug(ROUTER, ROUTER_NUMBER, hosts_file="127.0.0.1 localhost\n")
    inner, outer = network.namespace(host.name), network.namespace(ROUTER)
    call("ip", "link", "add", "lan", "netns", outer, "type", "veth", "peer", "name", "lan", "netns", inner)
    for namespace, address in ((outer, GATE), (inner, INSIDE)):
        call("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "lan")
        call("ip", "-n", namespace, "link", "set", "lan", "up")
    call("ip", "-n", inner, "link", "set", "eth0", "down")
    call("ip", "-n", inner, "route", "add", "default", "via", GATE)
    call("ip", "netns", "exec", outer, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
    call("ip", "netns", "exec", outer, "nft", "-f", "-", stdin=TRANSLATES)


def test_a_machine_behind_nat_joins_and_works(lab: MeshLab) -> None:
    [host] = lab.hosts
    put_behind_a_router(lab)
    name = lab.join(host)
    done = lab.cli(
        "run", "--", "sh", "-c", "ip -4 -o address show dev lan; head -c 20000000 /dev/zero | wc -c"
    )
    assert INSIDE in done.stdout
    assert "20000000" in done.stdout
    assert lab.machine_on(host) == name
