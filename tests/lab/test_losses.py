"""Machines that are lost while a gang runs or assembles: what is seen of it on every host.

The runs here may not be restarted (`--max-attempts 0`): each loss ends its run. `test_recovery.py` has what comes next.
"""

from __future__ import annotations

import time

import pytest

from tests.e2e.real_mesh import wait_until
from tests.lab.deployment import Lab
from tests.lab.scripts import OK

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

FINAL = ("--max-attempts", "0")


@pytest.mark.torch
@pytest.mark.soak
def test_two_hosts_with_useless_names_are_one_world(lab: Lab) -> None:
    """Cases 1 and 2: no host knows its own name, or knows it as 127.0.1.1."""
    names = ["127.0.0.1 localhost\n", "127.0.0.1 localhost\n127.0.1.1 {}\n"]
    for number, host in enumerate(lab.hosts):
        host.write_hosts_file(names[number % 2].format(host.host_name))
    script = lab.script("ok.py", OK)
    name = lab.submit("--nodes", "2", "--launcher", "torchrun", "--", "torchrun", str(script))
    run = lab.ended(name, limit_s=120)
    assert run["status"]["state"] == "Succeeded", run["status"]
    lab.assert_path(run)
    for rank in (0, 1):
        assert f"ok world=2 mesh={rank} rank={rank}" in lab.printed(name, rank)
    lab.observer.wait_for_none(run["metadata"]["uid"])


@pytest.mark.soak
def test_no_rank_starts_before_the_last_one_has_arrived(lab: Lab) -> None:
    """Case 9: one machine is slow to become ready. Nobody's command runs meanwhile, and the run succeeds."""
    with lab.held_back(lab.hosts[1]):
        beacon = lab.beacon("--nodes", "3")
        wait_until(lambda: lab.run(beacon.name)["status"]["barrier"]["arrived"] == 2, "two ranks to arrive")
        released_at = time.monotonic()
    lab.running(beacon.name)
    lab.observer.assert_together(beacon.uid, epoch=1, not_before=released_at)
    beacon.finish()
    assert lab.ended(beacon.name)["status"]["state"] == "Succeeded"


@pytest.mark.parametrize(
    "how", [pytest.param("kill", marks=pytest.mark.soak), pytest.param("power_off", marks=pytest.mark.soak)]
)
def test_a_host_that_dies_takes_its_run_with_it(lab: Lab, how: str) -> None:
    beacon = lab.running_beacon("--nodes", "2", *FINAL)
    lost, other = lab.host_of(beacon.name, 1), lab.host_of(beacon.name, 0)
    getattr(lost, how)()
    run = lab.ended(beacon.name)
    assert run["status"]["reason"] == "MachineLost", run["status"]
    assert "Rank 1" in run["status"]["message"]
    lab.observer.wait_for_none(beacon.uid)
    assert lab.observer.lives(beacon.uid, host=other)


@pytest.mark.parametrize(
    "direction",
    [
        pytest.param("both ways", marks=pytest.mark.soak),
        "to the head",
        pytest.param("from the head", marks=pytest.mark.soak),
    ],
)
def test_a_host_that_is_cut_off_ends_its_ranks_before_anybody_else_learns_of_it(
    lab: Lab, direction: str
) -> None:
    """It kills its own processes while the store still counts; rank 0 is told to stop once the lease is over."""
    beacon = lab.running_beacon("--nodes", "2", *FINAL)
    lost, other = lab.host_of(beacon.name, 1), lab.host_of(beacon.name, 0)
    _cut(lab, lost.name, direction)
    cut_at = time.monotonic()
    run = lab.ended(beacon.name)
    assert run["status"]["reason"] == "MachineLost", run["status"]
    lab.observer.wait_for_none(beacon.uid)
    dead_at = lab.observer.last_death(beacon.uid, epoch=1, host=lost)
    assert cut_at < dead_at < beacon.stopped_at(other)
    assert not [since for since, _ in lab.observer.frozen(lost) if since > cut_at]


def _cut(lab: Lab, name: str, direction: str) -> None:
    host = next(h for h in lab.hosts if h.name == name)
    if direction == "both ways":
        host.cut()
    elif direction == "to the head":
        host.cut_towards(lab.head_host)
    else:
        lab.head_host.cut_towards(host)


@pytest.mark.soak
def test_a_host_that_froze_finds_its_lease_over_and_does_nothing_more(lab: Lab) -> None:
    beacon = lab.running_beacon("--nodes", "2", *FINAL)
    lost, other = lab.host_of(beacon.name, 1), lab.host_of(beacon.name, 0)
    lost.freeze()
    run = lab.ended(beacon.name)
    assert run["status"]["reason"] == "MachineLost", run["status"]
    lab.observer.wait_for_none(beacon.uid, host=other)
    assert lab.observer.living(beacon.uid, host=lost), "frozen, with its processes"
    lost.thaw()
    lab.observer.wait_for_none(beacon.uid)
