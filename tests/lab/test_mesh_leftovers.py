"""Rules of gateways that were killed are taken away by the next one, and one that runs is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agents.gateway_wire import Counters
from mesh.net import redirect
from tests.lab.gateways import TwoHosts, two_hosts
from tests.lab.network import call, skip_without_redirect
from tests.net_world import DEPLOYMENT

START_LIMIT_S = 20.0
pytestmark = pytest.mark.soak


@pytest.fixture
def hosts(tmp_path: Path):  # type: ignore[no-untyped-def]
    skip_without_redirect()
    with two_hosts(tmp_path) as made:
        yield made


def start_another(hosts: TwoHosts, folder: Path, *, deployment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        hosts.inside(
            "m0",
            *(sys.executable, "-m", "agents.gateway", "--folder", str(folder), "--machine", "m9"),
            *("--deployment", deployment, "--listen", "127.0.0.1:0"),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tables(hosts: TwoHosts) -> set[str]:
    listed = call(*hosts.inside("m0", "nft", "list", "tables"))
    return {line.split()[2] for line in listed.splitlines() if "gangmesh_" in line}


def test_beside_a_gateway_that_runs_there_is_no_other_and_of_a_dead_one_nothing_stays(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    ours, theirs = redirect.table_name(DEPLOYMENT), redirect.table_name("another")
    for deployment in ("another", DEPLOYMENT):
        refused = start_another(hosts, tmp_path / "refused", deployment=deployment)
        _, said = refused.communicate(timeout=START_LIMIT_S)
        assert refused.returncode == 1
        assert f"process {hosts.gateways['m0'].pid}" in said
        assert tables(hosts) == {ours}
    hosts.tell("m0", Counters())

    hosts.gateways["m0"].kill()
    hosts.gateways["m0"].wait()
    another = start_another(hosts, tmp_path / "next", deployment="another")
    try:
        assert another.stdout is not None
        assert another.stdout.readline()
        assert tables(hosts) == {theirs}
        links = call(*hosts.inside("m0", "ip", "-o", "link"))
        assert redirect.device_name(DEPLOYMENT) not in links
        assert redirect.device_name("another") in links
    finally:
        another.kill()
        another.communicate()
