"""The head's parts die or fall silent for a moment while ranks run on other hosts: no rank is restarted for it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from mesh.messages import LEASE_GUARD_S, LEASE_TTL_S
from tests.e2e.real_mesh import wait_until
from tests.lab.deployment import Beacon, Lab

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SHORT_S = (LEASE_TTL_S - LEASE_GUARD_S) / 2
"""A fault of this length is over before any lease."""


def unharmed(lab: Lab, beacon: Beacon) -> None:
    """Each rank's one process has lived through, and the run ends well at its first epoch."""
    lives = lab.observer.lives(beacon.uid)
    assert [life.died_at for life in lives] == [None] * len(lives)
    beacon.finish()
    run = lab.ended(beacon.name, limit_s=120)
    assert (run["status"]["state"], run["status"]["epoch"]) == ("Succeeded", 1), run["status"]
    lab.observer.wait_for_none(beacon.uid)
    assert len(lab.observer.lives(beacon.uid)) == len(lives)


@pytest.mark.soak
@pytest.mark.parametrize("actor", ["ray::CoordinatorActor", "ray::RendezvousStore"])
def test_a_killed_part_of_the_head_comes_back_and_no_rank_notices(lab: Lab, actor: str) -> None:
    beacon = lab.running_beacon("--nodes", "3")
    [victim] = lab.head_host.processes(actor)
    victim.kill()
    wait_until(lambda: [p for p in lab.head_host.processes(actor) if p != victim], f"another {actor}")
    lab.running(beacon.name)
    unharmed(lab, beacon)


@pytest.mark.parametrize(
    ("whose", "fault"),
    [
        pytest.param("the head's", "cut", marks=pytest.mark.soak),
        pytest.param("the head's", "freeze", marks=pytest.mark.soak),
        pytest.param("a machine's", "cut", marks=pytest.mark.soak),
        pytest.param("a machine's", "freeze", marks=pytest.mark.soak),
    ],
)
def test_a_silence_that_is_shorter_than_a_lease_changes_nothing(lab: Lab, fault: str, whose: str) -> None:
    beacon = lab.running_beacon("--nodes", "3")
    host = lab.head_host if whose == "the head's" else lab.host_of(beacon.name, 1)
    begin: Callable[[], None] = getattr(host, fault)
    begin()
    time.sleep(SHORT_S)  # the fault's length
    host.mend()
    lab.running(beacon.name)
    unharmed(lab, beacon)


@pytest.mark.soak
def test_a_middlebox_that_forgets_the_connection_of_a_lease_costs_no_lease(lab: Lab) -> None:
    """Case 14: what is sent on it is dropped without a word, both ways. The keeper makes another one in time."""
    beacon = lab.running_beacon("--nodes", "2")
    host = lab.host_of(beacon.name, 1)
    [keeper] = host.processes("keeper.py")
    before = host.connected_ports(keeper)
    forgotten = lab.wire_port(host, keeper)
    words = [
        "add table inet forgets",
        "add chain inet forgets out { type filter hook output priority 0 ; }",
        "add chain inet forgets in { type filter hook input priority 0 ; }",
        f"add rule inet forgets out tcp sport {forgotten} drop",
        f"add rule inet forgets in tcp dport {forgotten} drop",
    ]
    try:
        for line in words:
            done = host.run("nft", line)
            assert done.returncode == 0, done.stdout
        wait_until(
            lambda: host.connected_ports(keeper) - before, "another connection", limit_s=LEASE_TTL_S * 3
        )
        time.sleep(2 * LEASE_TTL_S)  # the fault's length
        lab.running(beacon.name)
        unharmed(lab, beacon)
    finally:
        host.run("nft", "delete table inet forgets")


@pytest.mark.soak
def test_a_store_that_stands_still_for_longer_than_a_lease_costs_no_machine_and_no_budget(lab: Lab) -> None:
    """The ranks end by themselves. The coordinator, which lives, hears nothing of the store either."""
    beacon = lab.running_beacon("--nodes", "3")
    hosts = [lab.host_of(beacon.name, rank) for rank in range(3)]
    [store] = lab.head_host.processes("ray::RendezvousStore")
    store.send_signal(signal.SIGSTOP)
    try:
        lab.observer.wait_for_none(beacon.uid)
        time.sleep(LEASE_TTL_S)  # the fault's length
    finally:
        store.send_signal(signal.SIGCONT)
    wait_until(lambda: len(beacon.files(epoch=2)) == 3, "the next epoch's ranks to speak", limit_s=120)
    assert [lab.host_of(beacon.name, rank) for rank in range(3)] == hosts
    lab.observer.assert_one_epoch_at_a_time(beacon.uid)
    [restart] = [e for e in lab.events(beacon.name) if e["kind"] == "Restarting"]
    assert restart["reason"] == "StoreUnreachable", restart
    assert "counts for nothing" in restart["message"], restart
    beacon.finish()
    run = lab.ended(beacon.name, limit_s=120)
    assert (run["status"]["state"], run["status"]["epoch"]) == ("Succeeded", 2), run["status"]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_head_that_burnt_down_and_is_back_carries_on_with_its_runs(lab: Lab) -> None:
    """Without a store nobody may run: every rank ends by itself. The machines join again, and the next epoch begins."""
    beacon = lab.running_beacon("--nodes", "2")
    lab.head_host.power_off()
    lab.observer.wait_for_none(beacon.uid)
    lab.head_host.mend()
    lab.head_host.boot()
    lab.start_head()
    wait_until(lambda: len(beacon.files(epoch=2)) == 2, "the next epoch's ranks to speak", limit_s=300)
    lab.observer.assert_one_epoch_at_a_time(beacon.uid)
    beacon.finish()
    run = lab.ended(beacon.name, limit_s=120)
    assert (run["status"]["state"], run["status"]["epoch"]) == ("Succeeded", 2), run["status"]
