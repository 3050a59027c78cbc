"""The network check between machines that joined through mesh ports: over their gateways, dialled or relayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.mesh_deployment import MeshLab, mesh_lab
from tests.lab.network import skip_without_redirect

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshLab]:
    skip_without_redirect()
    with mesh_lab(tmp_path_factory.mktemp("mesh"), hosts=3) as made:
        made.wall(made.hosts[2])  # nobody gets in
        for host, provider in zip(made.hosts, ("home", "home", "cave"), strict=True):
            made.join(host, "--label", f"provider={provider}")
        yield made


def checked(lab: MeshLab, code: int) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(lab.cli("check", "-o", "json", code=code).stdout)
    assert report["notChecked"] == {}, report
    return report


def test_machines_reach_each_other_through_their_gateways_and_the_path_is_told(lab: MeshLab) -> None:
    report = checked(lab, 0)
    home, other, cave = (lab.machine_on(host) for host in lab.hosts)
    assert {machine["address"][:7] for machine in report["machines"]} == {"198.18."}
    paths = {(way["sender"], way["receiver"]): way["path"] for way in report["ways"]}
    assert (paths[home, other], paths[home, cave], paths[cave, other]) == ("direct", "relayed", "relayed")
    listed = json.loads(lab.cli("get", "paths", "-o", "json").stdout)["paths"]
    assert {(*path["providers"], path["path"], path["passed"] > 0) for path in listed} == {
        ("home", "home", "direct", True),
        ("cave", "home", "relayed", True),
    }


def test_a_machine_whose_mesh_port_is_shut_to_the_others_is_found(lab: MeshLab) -> None:
    one, two = lab.hosts[:2]
    lab.wall(two, f"ip saddr {lab.head_host.address} accept", f"ip saddr {lab.network.address(1)} accept")
    try:
        report = checked(lab, 1)
        bad = lab.machine_on(two)
        faults = [found for found in report["findings"] if found["isFault"]]
        assert faults and all(bad in found["machines"] for found in faults), report["findings"]
        assert any("the way through their gateways (direct)" in found["message"] for found in faults)
        assert any("its mesh port has to admit" in found["hint"] for found in faults)
        assert lab.machine_on(one) is not None
    finally:
        lab.unwall(two)


def test_a_gang_over_the_mesh_is_checked_first(lab: MeshLab) -> None:
    lab.cli("run", "--nodes", "2", "--name", "pair", "--", "true")
    [epoch] = lab.run("pair")["status"]["epochs"]
    assert epoch["network"].startswith("2 machines reach each other: round trips up to "), epoch
