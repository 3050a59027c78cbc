"""Machines join through one port of the head, and what they run is run: real Ray, real nftables, real walls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agents.raylet import CHECK_WORKERS, MEMBER_WORKERS
from tests.e2e.real_mesh import wait_until
from tests.lab.mesh_deployment import API_PORT, MESH_PORT, MeshLab, mesh_lab
from tests.lab.network import skip_without_redirect

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshLab]:
    skip_without_redirect()
    with mesh_lab(tmp_path_factory.mktemp("mesh"), hosts=2) as made:
        yield made


def test_a_machine_that_only_dials_out_joins_through_one_port_and_runs_what_it_is_given(lab: MeshLab) -> None:
    hidden = lab.hosts[0]
    lab.wall(hidden)  # nobody gets in
    name = lab.join(hidden, "--label", "provider=cave", "--name-hint", "cave")
    machine = lab.machines()[name]
    assert name == "cave-1"
    assert machine["labels"] == {"lab": "m0", "provider": "cave"}
    assert machine["address"].startswith("198.19.")
    wait_until(
        lambda: len(hidden.processes("ray::IDLE")) >= MEMBER_WORKERS + CHECK_WORKERS, "warm workers there"
    )

    words = "echo at $MASTER_ADDR $NODUS_NODE_IPS; ip -4 -o address"
    ran = lab.cli("run", "--name", "first", "--", "sh", "-c", words)
    assert f"at {machine['address']} {machine['address']}" in ran.stdout
    assert hidden.address in ran.stdout
    # With the walls of the lab taken away: what is the mesh's is closed by the mesh's own rules.
    for host in (lab.head_host, hidden):
        lab.unwall(host)
    assert lab.listening_outside(lab.head_host) == {MESH_PORT, API_PORT}
    assert lab.listening_outside(hidden) == {MESH_PORT}
