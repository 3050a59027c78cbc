"""Gangs over the mesh, as a user runs them: real Ray, real gateways, scripts that know nothing of either.

The ghosts of an epoch that is over are programs that somebody has left on a machine: they dial its peers for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agents.gateway_wire import Counters
from agents.overlay_line import ask
from mesh.private_files import write_private
from tests.e2e.real_mesh import wait_until
from tests.lab.hosts import Host
from tests.lab.mesh_deployment import MESH_PORT, MeshLab, mesh_lab
from tests.lab.network import skip_without_redirect
from tests.lab.scripts import GHOST

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(400)]

TALK = """
import os, socket, sys, time
rank, at = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    listener = socket.create_server(("0.0.0.0", at[1]))
    sock, _ = listener.accept()
else:
    while True:
        try:
            sock = socket.create_connection(at, timeout=20)
            sock.sendall(b"hello")
            assert sock.recv(100) == b"hello"
            break
        except OSError:
            time.sleep(0.1)
print("connected", os.environ["NODUS_GANG_EPOCH"], os.environ["NODUS_GANG_TRANSPORT"], flush=True)
if rank:
    while not os.path.exists(sys.argv[1]):
        sock.sendall(b"word")
        assert sock.recv(100), "connection closed by peer"
        time.sleep(0.1)
else:
    while data := sock.recv(100):
        sock.sendall(data)
    assert os.path.exists(sys.argv[1]), "connection closed by peer"
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshLab]:
    skip_without_redirect()
    with mesh_lab(tmp_path_factory.mktemp("gangs"), hosts=3) as made:
        for host in made.hosts:
            made.wall(host, f"tcp dport {MESH_PORT} accept")  # a provider's firewall with a single hole
            made.join(host)
        yield made


def host_of(lab: MeshLab, run: dict[str, Any], rank: int) -> Host:
    machine = run["status"]["ranks"][rank]["machine"]
    [host] = [host for host in lab.hosts if lab.machine_on(host) == machine]
    return host


def ready(lab: MeshLab) -> list[str]:
    return [name for name, machine in lab.machines().items() if machine["state"] == "Ready"]


def refused_in(lab: MeshLab, host: Host) -> dict[str, int]:
    """What others asked of the host's gateway in vain, by reason."""
    argv = lab.gateway(host).cmdline()
    folder = Path(argv[argv.index("--folder") + 1])
    counters: Any = asyncio.run(ask(folder / "gateway.sock", Counters()))
    return dict(counters["refused_in"])


def test_a_gateway_that_is_killed_in_the_middle_costs_an_epoch_and_is_back_by_itself(lab: MeshLab) -> None:
    """Leases go through it as well: one that takes longer than a lease to be back costs the rank its machine."""
    done = lab.work / "done with the gateway"
    name = lab.submit("--nodes", "2", "--", sys.executable, "-c", TALK, str(done))
    try:
        lab.wait_for_print(name, "connected 1 direct", 0, 1)
        broken = host_of(lab, lab.run(name), 1)
        killed = lab.gateway(broken)
        killed.kill()
        lab.wait_for_print(name, "connected 2 direct", 0, 1)
        [story] = [epoch for epoch in lab.run(name)["status"]["epochs"] if epoch["epoch"] == 1]
        assert story["chargedTo"] == "Loss", story
        assert story["cause"]["rank"] == 1, story
        assert lab.gateway(broken) != killed
    finally:
        done.touch()
    assert lab.ended(name)["status"]["state"] == "Succeeded"
    wait_until(lambda: len(ready(lab)) == len(lab.hosts), "every machine to be there again")


def test_the_authority_is_rotated_while_a_gang_runs_and_nobody_notices(lab: MeshLab) -> None:
    """Its times are facts in the authority's file, so that nobody waits for a week."""
    done = lab.work / "done with the first authority"
    name = lab.submit("--nodes", "2", "--", sys.executable, "-c", TALK, str(done))
    try:
        lab.wait_for_print(name, "connected 1 direct", 0, 1)
        first = authority(lab)["signing"]["fingerprint"]
        told = json.loads(lab.cli("authority", "rotate", "--overlap", "12h", "-o", "json").stdout)
        second = told["next"]["fingerprint"]
        wait_until(lambda: authority(lab)["waitsFor"] == [], "every machine to trust the next one")
        assert authority(lab)["signing"]["fingerprint"] == first
        turn_clock(lab, promote_at=1.0)
        wait_until(lambda: authority(lab)["signing"]["fingerprint"] == second, "the next one to sign")
        run = lab.run(name)
        taken = [host_of(lab, run, rank) for rank in (0, 1)]
        [left] = [host for host in lab.hosts if host not in taken]
        lab.stop_agent(left)
        lab.join(left)
        turn_clock(lab, promoted_at=1.0)
        wait_until(lambda: authority(lab)["old"] is None, "the first one to be forgotten")
        assert all(lab.machine_on(host) is not None for host in lab.hosts)
    finally:
        done.touch()
    ended = lab.ended(name)["status"]
    assert (ended["state"], ended["epoch"]) == ("Succeeded", 1)
    again = lab.submit("--nodes", "3", "--", sys.executable, "-c", "print('hello')")
    assert lab.ended(again)["status"]["state"] == "Succeeded"


def test_a_machine_is_lost_the_next_epoch_runs_and_the_ghost_is_refused(lab: MeshLab) -> None:
    """The last one: its host stays away."""
    done = lab.work / "done"
    name = lab.submit("--nodes", "2", "--", sys.executable, "-c", TALK, str(done))
    lab.wait_for_print(name, "connected 1 direct", 0, 1)
    run = lab.run(name)
    assert run["status"]["path"]["transport"] == "direct"
    kept, lost = host_of(lab, run, 0), host_of(lab, run, 1)
    peer = run["status"]["ranks"][0]["address"]

    # All of the machine dies but its gateway, whose agent stands still, and a program that somebody has left there.
    ghost = subprocess.Popen(
        lab.inside(lost, sys.executable, "-c", GHOST, peer, "29500"), stdout=subprocess.PIPE, text=True
    )
    try:
        agent, gateway = lab.agent(lost), lab.gateway(lost)
        agent.send_signal(signal.SIGSTOP)
        for process in [p for p in agent.children(recursive=True) if p != gateway]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        lab.wait_for_print(name, "connected 2 direct", 0, 1)
        again = lab.run(name)
        assert host_of(lab, again, 0) == kept
        assert again["status"]["epoch"] == 2
        before = refused_in(lab, kept)
        wait_until(lambda: refused_in(lab, kept) != before, "the ghost to be refused in epoch 2")
        grown = {reason for reason, count in refused_in(lab, kept).items() if count != before.get(reason)}
        assert grown <= {"StaleEpoch", "Revoked"}, grown
    finally:
        lost.shut_down()
        ghost.kill()
        said, _ = ghost.communicate()
    assert "ConnectionResetError" in said.split(), said
    assert "heard" not in said.split(), said
    done.touch()
    assert lab.ended(name)["status"]["state"] == "Succeeded"
    assert "Path" in [event["kind"] for event in lab.events(name)]


def authority(lab: MeshLab) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(lab.cli("authority", "show", "-o", "json").stdout)
    return told


def turn_clock(lab: MeshLab, **moments: float) -> None:
    path = lab.state / "authority" / "authority.json"
    write_private(path, json.dumps(json.loads(path.read_text()) | moments))
