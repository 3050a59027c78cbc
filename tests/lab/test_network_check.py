"""The network check over the lab's hosts: what is done to their links is found, by name, before anything is started.

Faults are made between machines only, by rules in their own namespaces: all of them and the head go on reaching each
other, so that nothing but the check can find out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.real_mesh import wait_until
from tests.lab.deployment import Lab
from tests.lab.hosts import Host
from tests.lab.network import call

pytestmark = [
    pytest.mark.ray,
    pytest.mark.soak,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("the_lab", ["private"], indirect=True),
]

RENDEZVOUS_PORT = 29500
TABLE = "inet spoiled"


class Spoiler:
    """Rules on hosts, by whom they are about; all of them are taken away in the end."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._spoiled: list[Host] = []

    def lose(self, sender: Host, rule: str) -> None:
        """Packets that leave this host and fit the rule are lost."""
        text = f"table {TABLE} {{\nchain out {{\ntype filter hook output priority 0\n{rule} drop\n}}\n}}\n"
        call(*self._inside(sender), "nft", "-f", "-", stdin=text)
        self._spoiled.append(sender)

    def whole_packets(self, *hosts: Host) -> None:
        """A packet is what goes over a real wire, not 64 KB that are cut up later."""
        for host in hosts:
            inside = ("ip", "-n", self._lab.network.namespace(host.name))
            call(*inside, "link", "set", "eth0", "gso_max_segs", "1")

    def _inside(self, host: Host) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._lab.network.namespace(host.name))

    def mend(self) -> None:
        for host in self._spoiled:
            call(*self._inside(host), "nft", "delete", "table", *TABLE.split())
        self._spoiled.clear()


@pytest.fixture
def spoiler(lab: Lab) -> Iterator[Spoiler]:
    made = Spoiler(lab)
    yield made
    made.mend()


def only_the_rendezvous_port(other: Host) -> str:
    return f"ip daddr {other.address} tcp dport != {RENDEZVOUS_PORT} tcp flags & (syn | ack) == syn"


def checked(lab: Lab, *hosts: Host) -> tuple[int, dict[str, Any]]:
    """`mesh check` of the machines on these hosts: its exit code, and its report."""
    names = [name for host in hosts if (name := lab.machine_on(host)) is not None]
    done = lab.cli(
        "check", *(word for name in names for word in ("--machine", name)), "-o", "json", code=None
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["notChecked"] == {}, report
    return done.returncode, report


def faults(report: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(found["kind"], found["machines"]) for found in report["findings"] if found["isFault"]]


def test_machines_that_are_well_pass_and_the_run_says_so(lab: Lab) -> None:
    code, report = checked(lab, *lab.hosts[:3])
    assert (code, report["passed"], faults(report)) == (0, True, [])
    assert {way["path"] for way in report["ways"]} == {"private"}
    assert all(machine["rendezvousPort"] == RENDEZVOUS_PORT for machine in report["machines"])
    beacon = lab.running_beacon("--nodes", "2")
    run = lab.run(beacon.name)
    assert run["status"]["epochs"][0]["network"].startswith("2 machines reach each other: round trips up to ")
    beacon.finish()
    lab.ended(beacon.name)
    story = lab.cli("describe", beacon.name).stdout
    assert "Network:      2 machines reach each other" in story and "NetworkChecked" in story
    [path] = json.loads(lab.cli("get", "paths", "--model-size", "7B", "-o", "json").stdout)["paths"]
    assert path["passed"] >= 2 and path["bytesPerSecond"] and path["allReduceSeconds"]


def test_a_firewall_that_admits_the_rendezvous_port_only_is_found_before_anything_hangs(
    lab: Lab, spoiler: Spoiler
) -> None:
    """Case 14: 29500 is open, and every collective would hang. The rank gets another machine, and the run runs."""
    one, two, three = lab.hosts[:3]
    for sender, receiver in ((one, two), (three, two)):
        spoiler.lose(sender, only_the_rendezvous_port(receiver))
    bad = lab.machine_on(two)
    code, report = checked(lab, one, two, three)
    assert (code, faults(report)) == (1, [("PortClosed", [bad])])
    [finding] = [found for found in report["findings"] if found["isFault"]]
    assert f"the rendezvous port {RENDEZVOUS_PORT} answers, the ephemeral port" in finding["message"]
    assert "admits the rendezvous port only" in finding["hint"]

    beacon = lab.running_beacon("--nodes", "2")
    run = lab.run(beacon.name)
    assert bad not in {rank["machine"] for rank in run["status"]["ranks"]}, run["status"]
    assert run["status"]["epoch"] == 1
    beacon.finish()
    lab.ended(beacon.name)
    refused = [event for event in lab.events(beacon.name) if event["kind"] == "Refused"]
    assert {event["reason"] for event in refused} <= {"NetworkCheckFailed"}


def test_where_no_machine_is_left_the_run_ends_with_the_pair_the_ports_and_the_remedy(
    lab: Lab, spoiler: Spoiler
) -> None:
    one, two, three = lab.hosts[:3]
    for sender in (one, three):
        spoiler.lose(sender, only_the_rendezvous_port(two))
    name = lab.new_name()
    lab.submit("--nodes", "3", "--", "true", name=name)
    run = lab.ended(name, limit_s=200)
    status = run["status"]
    assert (status["state"], status["reason"]) == ("Failed", "GangAssemblyTimeout"), status
    assert "the ephemeral port" in status["message"] and "does not answer" in status["message"]
    assert "admits the rendezvous port only" in status["message"]


def test_a_black_hole_for_full_packets_is_found_with_the_size_that_passes(lab: Lab, spoiler: Spoiler) -> None:
    one, two = lab.hosts[:2]
    spoiler.whole_packets(one, two)
    spoiler.lose(one, f"ip daddr {two.address} ip length > 1300")
    code, report = checked(lab, one, two)
    assert (code, faults(report)) == (1, [("PacketsTooLarge", [lab.machine_on(one), lab.machine_on(two)])])
    [finding] = report["findings"]
    assert "segments of 1200 bytes come through" in finding["message"] and "MTU" in finding["hint"]


def test_what_is_lost_in_one_direction_is_found_in_its_direction(lab: Lab, spoiler: Spoiler) -> None:
    """Neither can open a connection then, and only one way is to blame."""
    one, two = lab.hosts[:2]
    spoiler.lose(one, f"ip daddr {two.address}")
    code, report = checked(lab, one, two)
    assert (code, faults(report)) == (1, [("OneWay", [lab.machine_on(one), lab.machine_on(two)])])
    [finding] = report["findings"]
    assert "is lost; the other direction works" in finding["message"]
    assert one.address in finding["hint"]


def test_a_coordinator_that_is_killed_in_the_middle_checks_again(lab: Lab) -> None:
    name = lab.new_name()
    lab.submit("--nodes", "3", "--", "sleep", "5", name=name)
    wait_until(lambda: any(e["kind"] == "Checking" for e in lab.events(name)), "the check to begin")
    lab.one("ray::CoordinatorActor").kill()
    run = lab.ended(name, limit_s=120)
    assert (run["status"]["state"], run["status"]["epoch"]) == ("Succeeded", 1), run["status"]
    assert run["status"]["epochs"][0]["network"].startswith("3 machines reach each other")
