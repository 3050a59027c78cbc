"""Field failures that are about more than a loss: too few machines for two gangs, and a gang that hangs in silence."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mesh.messages import LEASE_TTL_S
from tests.e2e.real_mesh import wait_until
from tests.lab.deployment import Lab

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(300)]

HANGS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("met", flush=True)
if dist.get_rank() == 1:
    time.sleep(10**6)
dist.all_reduce(torch.ones(1))
print("never", flush=True)
"""


def test_of_two_gangs_that_want_the_same_machines_one_waits_and_holds_nothing(lab: Lab) -> None:
    """Case 11: three machines, two gangs of two at the same moment. Nobody holds a half."""
    names = [lab.new_name(), lab.new_name()]
    with ThreadPoolExecutor(2) as both:
        beacons = dict(
            zip(names, both.map(lambda name: lab.beacon("--nodes", "2", name=name), names), strict=True)
        )
    wait_until(
        lambda: {lab.run(name)["status"]["state"] for name in names} == {"Running", "Pending"}, "one to run"
    )
    first, second = sorted(names, key=lambda name: lab.run(name)["status"]["state"] != "Running")
    wait_until(
        lambda: lab.run(second)["status"]["message"].startswith("Waiting for 2 machines"),
        "the other to say why",
    )
    assert sorted(machine["run"] or "" for machine in lab.machines().values() if machine["state"] != "Lost") == [
        "", first, first,
    ]  # fmt: skip
    assert lab.observer.lives(beacons[second].uid) == []
    for name in (first, second):
        lab.running(name)
        beacons[name].finish()
        run = lab.ended(name, limit_s=120)
        assert (run["status"]["state"], run["status"]["epoch"]) == ("Succeeded", 1), run["status"]


@pytest.mark.torch
def test_a_gang_that_hangs_in_silence_lives_shows_its_age_and_ends_when_told(lab: Lab) -> None:
    """Case 25: a rank never enters the collective. That nothing is printed is no reason to take anybody for dead."""
    script = lab.script("hangs.py", HANGS)
    name = lab.submit("--nodes", "2", "--launcher", "torchrun", "--", "torchrun", str(script))
    lab.wait_for_print(name, "met", 0, 1)
    met_at = time.time()
    run = wait_until(
        lambda: (now := lab.run(name)) and time.time() - met_at > 2 * LEASE_TTL_S and now,
        "two leases to pass",
    )
    assert (run["status"]["state"], run["status"]["epoch"]) == ("Running", 1), run["status"]
    assert all(rank["lastOutputAt"] < met_at + 1 for rank in run["status"]["ranks"]), run["status"]["ranks"]
    uid = run["metadata"]["uid"]
    lives = lab.observer.lives(uid)
    assert {life.rank for life in lives if life.died_at is None} == {0, 1}
    lab.cli("cancel", name)
    run = lab.ended(name)
    assert (run["status"]["state"], run["status"]["reason"]) == ("Cancelled", "Cancelled"), run["status"]
    lab.observer.wait_for_none(uid)
