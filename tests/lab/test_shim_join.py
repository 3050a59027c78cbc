"""A machine whose agent may not touch the network joins, and a gang runs over it and one that may: real Ray and TLS."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.net.programs import not_installed
from tests.lab.mesh_deployment import MeshLab, mesh_lab

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(300)]
NO_RIGHT = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")
TALK = """
import os, socket, time
ranks, port = os.environ["NODUS_NODE_IPS"].split(","), int(os.environ["MASTER_PORT"])
me = int(os.environ["RANK"])
probe = socket.socket(type=socket.SOCK_DGRAM)
probe.connect((ranks[1 - me], 9))
is_shimmed, is_member = "GANGMESH_SHIM" in os.environ, probe.getsockname()[0] == ranks[me]
print("rank", me, os.environ["NODUS_GANG_TRANSPORT"], is_shimmed, is_member, flush=True)
if me == 0:
    listener = socket.create_server((ranks[0], port))
    peer, name = listener.accept()
    print("heard", peer.recv(100).decode(), name[0] == ranks[1])
    peer.sendall(b"pong")
    peer.recv(1)
else:
    for _ in range(300):
        try:
            peer = socket.create_connection((ranks[0], port), timeout=10)
            peer.sendall(b"ping")
            print("heard", peer.recv(100).decode(), peer.getsockname()[0] == ranks[1])
            break
        except ConnectionError:  # nobody listens yet: a captured connection is made, and reset then
            time.sleep(0.1)
"""
STATIC = """
#include <unistd.h>
int main(void) { write(1, "static runs\\n", 12); sleep(60); return 0; }
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshLab]:
    lacking = not_installed()
    if lacking is not None:
        pytest.skip(f"no redirect for the head here: {lacking}")
    with mesh_lab(tmp_path_factory.mktemp("shim"), hosts=2) as made:
        yield made


def test_a_gang_runs_over_a_machine_with_rules_and_one_without_rights(lab: MeshLab, tmp_path: Path) -> None:
    lab.start_agent(lab.hosts[0], token=lab.token(), before=NO_RIGHT)
    without = lab.until_joined(lab.hosts[0])
    assert "programs here reach the overlay by a library" in lab.agent_says(lab.hosts[0])
    rules = lab.inside(lab.hosts[0], "nft", "list", "ruleset")
    assert subprocess.run(rules, capture_output=True, text=True).stdout == ""
    gateway = lab.gateway(lab.hosts[0]).environ()
    assert (gateway["GANGMESH_SHIM"], gateway.get("LD_PRELOAD")) == ("", None), "it is the other end"
    lab.join(lab.hosts[1])

    (tmp_path / "talk.py").write_text(TALK)
    ran = lab.cli("run", "--name", "talk", "--nodes", "2", "--", "python", str(tmp_path / "talk.py"))
    ends = {line.partition("rank ")[2] for line in ran.stdout.splitlines() if "rank " in line}
    assert any("direct True True" in end for end in ends), ran.stdout
    assert any("direct False" in end for end in ends), ran.stdout
    assert ran.stdout.count("heard pong True") == 1
    assert "heard ping True" in ran.stdout or "heard ping False" in ran.stdout

    (tmp_path / "static.c").write_text(STATIC)
    subprocess.run(["gcc", "-static", "-o", tmp_path / "static", tmp_path / "static.c"], check=True)
    failed = lab.cli("run", "--name", "still", "--nodes", "2", "--", str(tmp_path / "static"), code=None)
    said = failed.stdout + failed.stderr
    assert failed.returncode != 0
    assert "ShimNotLoaded" in lab.cli("describe", "still").stdout
    assert f"on {without}" in said
    assert f"{tmp_path / 'static'} is linked statically" in said
