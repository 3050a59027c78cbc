"""`mesh relay` between two machines that nobody can dial: what it carries is known, and a gang survives its death."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.real_mesh import BIN, wait_until
from tests.lab.hosts import Host
from tests.lab.mesh_deployment import MeshLab, mesh_lab
from tests.lab.network import skip_without_redirect

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(600)]
RELAY_PORT = 8472
LIMIT_S = 120.0
MEGABYTE = 1_000_000

CARRY = """
import os, pathlib, socket, sys, time
done, rank = pathlib.Path(sys.argv[1]), os.environ["NODE_RANK"]
if rank == "0":
    server = socket.create_server(("0.0.0.0", 23456))
    peer, _ = server.accept()
    peer.sendall(b"!")
    received = 0
    while data := peer.recv(65536):
        received += len(data)
    print("received", received, flush=True)
    sys.exit(0 if done.exists() else 1)
while True:
    try:
        peer = socket.create_connection((os.environ["MASTER_ADDR"], 23456))
        if peer.recv(1):
            break
    except OSError:  # rank 0 does not listen yet: a captured connect learns that later
        time.sleep(0.2)
peer.sendall(b"x" * 1_000_000)
print("sent", flush=True)
while not done.exists():
    peer.sendall(b"x" * 10_000)
    time.sleep(0.02)
peer.close()
"""
"""Rank 1 sends, rank 0 receives, until they are told that it is enough; a connection that breaks is a failure."""


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshLab]:
    skip_without_redirect()
    with mesh_lab(tmp_path_factory.mktemp("relays"), hosts=3) as made:
        for host in made.hosts[:2]:
            made.wall(host)
            made.join(host)
        yield made


def start_relay(lab: MeshLab, host: Host, *options: str) -> subprocess.Popen[Any]:
    """`mesh relay` on that host, in the foreground."""
    with (lab.folder / "relay.log").open("ab") as log:
        return host.start(
            str(BIN / "mesh"),
            *("relay", lab.head_url, "--listen", f"{host.address}:{RELAY_PORT}"),
            *("--state", str(lab.folder / "relay"), *options),
            environment=lab.environment(),
            stdout=log,
            stderr=log,
        )


def relays(lab: MeshLab) -> dict[str, dict[str, Any]]:
    listed = json.loads(lab.cli("get", "relays", "-o", "json").stdout)["relays"]
    return {relay["name"]: relay for relay in listed}


def until_used(lab: MeshLab) -> None:
    """Both machines have a line to the relay."""

    def is_used() -> bool:
        relay = relays(lab).get("relay-3", {"state": "", "lines": 0})
        # The head is a machine too.
        return (relay["state"], relay["lines"]) == ("Up", 3)

    wait_until(is_used, "the machines to use the relay", limit_s=LIMIT_S)


def relay_process(host: Host) -> psutil.Process:
    [process] = host.processes("agents.relay_agent")
    return process


def test_a_relay_carries_a_gang_says_how_much_and_the_gang_outlives_its_death(lab: MeshLab) -> None:
    host = lab.hosts[2]
    start_relay(lab, host, "--token", lab.token("--relay"))
    until_used(lab)
    done = lab.gate("done")
    script = lab.script("carry.py", CARRY)
    anywhere = ("--network", "global", "--transport", "auto", "--on-process-failure", "restart")
    name = lab.submit("--nodes", "2", *anywhere, "--", "python3", str(script), str(done))
    lab.wait_for_print(name, "sent", 1)
    assert lab.run(name)["status"]["path"]["transport"] == "relayed"
    uid = lab.run(name)["metadata"]["uid"]

    def carried(by: str) -> int:
        rows = lab.call("GET", f"/v1/relayed?run={uid}")["relayed"]
        return sum(row["bytes"] for row in rows if row["relay"] == by)

    wait_until(lambda: carried("relay-3") > MEGABYTE, "the head to know what was carried", limit_s=LIMIT_S)
    assert carried("head") == 0
    assert "through relay-3" in lab.cli("describe", name).stdout

    # Its streams break with it, the gang begins again, and the head's own relay is what is left.
    relay_process(host).kill()
    wait_until(lambda: carried("head") > MEGABYTE, "the gang to go on through the head's", limit_s=LIMIT_S)
    assert lab.run(name)["status"]["epoch"] == 2
    assert "the relay relay-3 ended, and its connections with it" in lab.cli("describe", name).stdout
    done.touch()
    assert lab.ended(name, limit_s=LIMIT_S)["status"]["state"] == "Succeeded"

    # Begun again, without a token, it is the same one.
    start_relay(lab, host)
    until_used(lab)
    assert relays(lab)["relay-3"]["bytes"] > MEGABYTE

    left = host.run(
        str(BIN / "mesh"), "leave", "--state", str(lab.folder / "relay"), environment=lab.environment()
    )
    assert left.returncode == 0, left.stdout
    assert list(relays(lab)) == ["head"]
