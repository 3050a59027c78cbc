"""Machines are lost and replaced: survivors keep theirs, epochs never meet, and what comes back finds nothing to do."""

from __future__ import annotations

import time

import pytest

from mesh.messages import LEASE_TTL_S
from tests.e2e.real_mesh import wait_until
from tests.lab.deployment import Beacon, Lab
from tests.lab.hosts import Host
from tests.lab.scripts import STUBBORN
from tests.lab.test_head_deaths import unharmed

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def _finished(lab: Lab, beacon: Beacon, *, epoch: int) -> None:
    beacon.finish()
    run = lab.ended(beacon.name, limit_s=120)
    assert (run["status"]["state"], run["status"]["epoch"]) == ("Succeeded", epoch), run["status"]
    lab.assert_path(run)
    lab.observer.wait_for_none(beacon.uid)
    assert [line for host in lab.hosts for line in host.rendezvous_sockets()] == []


def _lose(host: Host, how: str) -> None:
    {"kill": host.kill, "power_off": host.power_off, "cut": host.cut, "freeze": host.freeze}[how]()


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        pytest.param(1, "kill", marks=pytest.mark.soak),
        pytest.param(0, "power_off", marks=pytest.mark.soak),
        pytest.param(1, "cut", marks=pytest.mark.soak),
        pytest.param(0, "cut", marks=pytest.mark.soak),
    ],
)
def test_only_the_lost_rank_gets_another_machine(lab: Lab, rank: int, how: str) -> None:
    beacon = lab.running_beacon("--nodes", "2")
    lost, kept = lab.host_of(beacon.name, rank), lab.host_of(beacon.name, 1 - rank)
    _lose(lost, how)
    lab.until_all_speak(beacon, epoch=2)
    assert lab.host_of(beacon.name, 1 - rank) is kept
    assert lab.host_of(beacon.name, rank) is not lost
    assert max(beacon.said(epoch=1)) < min(beacon.said(epoch=2))
    lab.observer.assert_one_epoch_at_a_time(beacon.uid)
    assert {life.host for life in lab.observer.living(beacon.uid)} == {
        kept.name,
        lab.host_of(beacon.name, rank).name,
    }
    _finished(lab, beacon, epoch=2)


@pytest.mark.soak
def test_a_machine_whose_agent_is_told_to_stop_lets_its_rank_save_and_move(lab: Lab) -> None:
    """A reclaim, not a loss: the rank hears of it while everything still runs, and nobody waits for a lease to end."""
    beacon = lab.running_beacon("--nodes", "2")
    leaving, kept = lab.host_of(beacon.name, 1), lab.host_of(beacon.name, 0)
    assert lab.stop_agent(leaving) == 0, lab.agent_log(leaving)
    assert not lab.observer.living(beacon.uid, host=leaving)
    assert beacon.stopped_at(leaving)
    lab.until_all_speak(beacon, epoch=2)
    assert lab.host_of(beacon.name, 0) is kept
    lab.observer.assert_one_epoch_at_a_time(beacon.uid)
    restarts = lab.run(beacon.name)["status"]["restarts"]
    assert (restarts["reclaim"], restarts["loss"]) == (1, 0), restarts
    _finished(lab, beacon, epoch=2)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_host_that_thaws_in_the_middle_of_the_next_epoch_finds_every_door_closed(
    lab: Lab, rank: int
) -> None:
    beacon = lab.running_beacon("--nodes", "2")
    lost = lab.host_of(beacon.name, rank)
    lost.freeze()
    lab.until_all_speak(beacon, epoch=2)
    assert lab.observer.living(beacon.uid, epoch=1, host=lost), "frozen, with its processes"
    lost.thaw()
    lab.observer.wait_for_none(beacon.uid, epoch=1)
    lab.observer.assert_one_epoch_at_a_time(beacon.uid, but_thawed=lost)
    second = lab.observer.living(beacon.uid, epoch=2)
    assert {life.rank for life in second} == {0, 1}
    assert lost.name not in {life.host for life in second}
    _finished(lab, beacon, epoch=2)


@pytest.mark.torch
@pytest.mark.soak
def test_a_ghost_that_goes_back_to_the_rendezvous_meets_nobody(lab: Lab) -> None:
    """Rank 0 keeps its machine, so the next epoch's store listens where the last one's did, and a stale worker that
    is left alone finds it: what others paid for. Its host thaws while the next epoch trains."""
    beacon = lab.running_beacon("--nodes", "2", text=STUBBORN)
    lost, kept = lab.host_of(beacon.name, 1), lab.host_of(beacon.name, 0)
    wait_until(lambda: _meetings(beacon, 1), "the ranks to meet")
    lost.freeze()
    wait_until(lambda: _meetings(beacon, 2), "the next epoch's ranks to meet", limit_s=120)
    assert lab.host_of(beacon.name, 0) is kept
    lost.thaw()
    lab.observer.wait_for_none(beacon.uid, epoch=1)
    assert lost.rendezvous_sockets() == []
    assert kept.rendezvous_sockets() != []
    before = len(_meetings(beacon, 2))
    wait_until(lambda: len(_meetings(beacon, 2)) > before + 50, "the next epoch to train on")
    assert set(_meetings(beacon, 2)) == {"[2, 2]"}
    assert set(_meetings(beacon, 1)) == {"[1, 1]"}
    _finished(lab, beacon, epoch=2)


def _meetings(beacon: Beacon, epoch: int) -> list[str]:
    """Who met whom in each step of this epoch's ranks."""
    return [line.split(maxsplit=2)[2] for line in beacon.lines(epoch=epoch) if line.startswith("met")]


@pytest.mark.soak
def test_two_losses_in_one_recovery(lab: Lab) -> None:
    lab.join(lab.hosts[3])
    beacon = lab.running_beacon("--nodes", "2")
    first, kept = lab.host_of(beacon.name, 1), lab.host_of(beacon.name, 0)
    first.kill()
    second = wait_until(lambda: _replacement(lab, beacon, first), "another host for rank 1")
    second.kill()
    epoch = wait_until(lambda: _running_epoch(lab, beacon), "an epoch that runs", limit_s=120)
    lab.until_all_speak(beacon, epoch=epoch)
    assert lab.host_of(beacon.name, 0) is kept
    assert lab.host_of(beacon.name, 1) not in (first, second)
    lab.observer.assert_one_epoch_at_a_time(beacon.uid)
    _finished(lab, beacon, epoch=epoch)


def _replacement(lab: Lab, beacon: Beacon, lost: Host) -> Host | None:
    host = lab.hosts_of(beacon.name).get(1)  # None while the next epoch waits for a machine
    return None if host is lost else host


def _running_epoch(lab: Lab, beacon: Beacon) -> int | None:
    status = lab.run(beacon.name)["status"]
    return status["epoch"] if status["state"] == "Running" and status["epoch"] > 1 else None


@pytest.mark.soak
def test_all_hosts_lost_at_once_and_back_again(lab: Lab) -> None:
    beacon = lab.running_beacon("--nodes", "3")
    for host in lab.hosts[:3]:
        host.power_off()
    lab.wait_for(beacon.name, "Pending", "Assembling", limit_s=120)
    lab.observer.wait_for_none(beacon.uid)
    for host in lab.hosts[:3]:
        host.mend()
        host.boot()
        lab.start_agent(host)
    epoch = wait_until(lambda: _running_epoch(lab, beacon), "an epoch that runs", limit_s=120)
    lab.until_all_speak(beacon, epoch=epoch)
    lab.observer.assert_one_epoch_at_a_time(beacon.uid)
    beacon.finish()
    assert lab.ended(beacon.name, limit_s=120)["status"]["state"] == "Succeeded"


@pytest.mark.soak
def test_a_host_that_is_lost_while_the_gang_assembles_is_replaced(lab: Lab) -> None:
    """Two ranks wait at the barrier; the third one's host dies before it could arrive. Nobody has begun meanwhile."""
    lost = lab.hosts[2]
    with lab.held_back(lost):
        beacon = lab.beacon("--nodes", "3")
        wait_until(lambda: lab.run(beacon.name)["status"]["barrier"]["arrived"] == 2, "two ranks to arrive")
        lab.join(lab.hosts[3])
        lost_at = time.monotonic()
        lost.power_off()
    run = lab.wait_for(beacon.name, "Running", limit_s=200)
    assert lost not in [lab.host_of(beacon.name, rank) for rank in range(3)]
    epoch = run["status"]["epoch"]
    lab.until_all_speak(beacon, epoch=epoch)
    lab.observer.assert_together(beacon.uid, epoch=epoch, not_before=lost_at)
    assert {life.epoch for life in lab.observer.lives(beacon.uid)} == {epoch}
    _finished(lab, beacon, epoch=epoch)


@pytest.mark.soak
@pytest.mark.parametrize("actor", ["ray::CoordinatorActor", "ray::RendezvousStore"])
def test_a_part_of_the_head_that_dies_in_the_middle_of_a_recovery(lab: Lab, actor: str) -> None:
    beacon = lab.running_beacon("--nodes", "2")
    lost, kept = lab.host_of(beacon.name, 1), lab.host_of(beacon.name, 0)
    lost.power_off()
    wait_until(lambda: not lab.observer.living(beacon.uid, host=kept), "the fence to reach the other host")
    [victim] = lab.head_host.processes(actor)
    victim.kill()
    epoch = wait_until(lambda: _running_epoch(lab, beacon), "an epoch that runs", limit_s=200)
    lab.until_all_speak(beacon, epoch=epoch)
    assert lab.host_of(beacon.name, 0) is kept
    lab.observer.assert_one_epoch_at_a_time(beacon.uid)
    _finished(lab, beacon, epoch=epoch)


@pytest.mark.soak
def test_a_slow_cable_is_no_loss(lab: Lab) -> None:
    beacon = lab.running_beacon("--nodes", "2")
    slow = lab.host_of(beacon.name, 1)
    lab.network.slow(slow.name, kbit=256)
    try:
        time.sleep(2 * LEASE_TTL_S)  # the fault's length
        unharmed(lab, beacon)
    finally:
        lab.network.fast(slow.name)
