"""The lab's own faults do what they say: a cut that does not cut, or leaves something behind, would prove nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.real_mesh import wait_until
from tests.lab.hosts import Host
from tests.lab.network import HOST_NUMBERS, NETNS_ETC, REGISTRY, LabNetwork, sweep
from tests.lab.observer import observing

PORT = 5000
LISTEN = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", int(sys.argv[1])))
print("listening", flush=True)
while True:
    print(s.recv(100).decode(), flush=True)
"""
SAY = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[3].encode(), (sys.argv[1], int(sys.argv[2])))
"""
BUSY = "import time\nwhile True: time.sleep(0.001)"


class Pair:
    """Two hosts, each of which writes down what it is told."""

    def __init__(self, network: LabNetwork, folder: Path) -> None:
        self.network = network
        self.hosts = [Host(network=network, name=f"m{i}", number=HOST_NUMBERS[i]) for i in range(2)]
        self._heard = [folder / f"heard-{i}" for i in range(2)]
        self._words = 0
        for host, heard in zip(self.hosts, self._heard, strict=True):
            host.boot()
            with heard.open("wb") as file:
                host.start(sys.executable, "-S", "-c", LISTEN, str(PORT), stdout=file, stderr=file)
        wait_until(lambda: all("listening" in h.read_text() for h in self._heard), "both to listen")

    def reaches(self, sender: int, receiver: int) -> bool:
        """Whether a packet arrives; the one that shows that it does not is sent after it to oneself."""
        self._words += 1
        lost, marker = f"word-{self._words}", f"end-{self._words}"
        words = (sys.executable, "-S", "-c", SAY)
        self.hosts[sender].run(*words, self.hosts[receiver].address, str(PORT), lost)
        self.hosts[receiver].run(*words, "127.0.0.1", str(PORT), marker)
        heard = wait_until(lambda: self._told(receiver, marker), "the marker to arrive")
        return lost in heard

    def _told(self, receiver: int, marker: str) -> str | None:
        heard = self._heard[receiver].read_text()
        return heard if marker in heard else None


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    network = LabNetwork.build()
    made = None
    try:
        made = Pair(network, tmp_path)
        yield made
    finally:
        for host in made.hosts if made else []:
            host.shut_down()
        network.close()


def _traces(lab_id: str) -> list[str]:
    """What there is of a lab on this machine."""
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
    places = (Path("/run/netns"), NETNS_ETC, REGISTRY)
    found = [str(p) for place in places if place.exists() for p in place.iterdir() if lab_id in p.name]
    return found + [line for line in links.splitlines() if lab_id in line]


def test_each_host_is_a_world_of_its_own(pair: Pair) -> None:
    first, second = pair.hosts
    assert first.run("hostname").stdout == "lab-m0\n"
    assert second.run("sh", "-c", "echo $$").stdout.strip() != str(os.getpid())
    assert "lab-m0" not in second.run("cat", "/etc/hosts").stdout
    second.write_hosts_file("127.0.1.1 lab-m1\n")
    assert second.run("cat", "/etc/hosts").stdout == "127.0.1.1 lab-m1\n"
    texts = [host.address for host in pair.hosts]
    assert sorted(texts) != texts, "as text the addresses are in another order than as ranks"


def test_cuts_cut_what_they_say_and_are_mended(pair: Pair) -> None:
    first, second = pair.hosts
    assert pair.reaches(0, 1)
    assert pair.reaches(1, 0)
    first.cut_towards(second)
    assert not pair.reaches(0, 1)
    assert pair.reaches(1, 0)
    first.mend()
    assert pair.reaches(0, 1)
    second.cut()
    assert not pair.reaches(0, 1)
    assert not pair.reaches(1, 0)
    second.heal()
    wait_until(lambda: pair.reaches(0, 1) and pair.reaches(1, 0), "the cable to carry again")


@pytest.mark.soak
def test_a_frozen_host_does_nothing_and_a_killed_one_is_gone(pair: Pair, tmp_path: Path) -> None:
    host = pair.hosts[0]
    with observing(pair.network, tmp_path) as observer:
        marked = {**os.environ, "NODUS_INCARNATION": "run.3.1.token"}
        busy = host.start(sys.executable, "-S", "-c", BUSY, environment=marked)
        wait_until(
            lambda: [life for life in observer.living("run") if life.host == "m0"], "the watcher to see it"
        )
        host.freeze()
        wait_until(lambda: observer.frozen(host), "the watcher to see the host frozen")
        worker = max(psutil.Process(busy.pid).children(), key=lambda p: p.pid)
        before = worker.cpu_times()
        subprocess.run(["sleep", "0.2"], check=True)  # time in which it would have run
        assert worker.cpu_times() == before
        host.kill()
        assert host.pids() == []
        observer.wait_for_none("run")
        assert {(life.epoch, life.rank) for life in observer.lives("run")} == {(3, 1)}


@pytest.mark.soak
def test_a_slow_cable_carries_less(pair: Pair) -> None:
    pair.network.slow("m0", kbit=1000)
    assert pair.reaches(0, 1)
    pair.network.fast("m0")


@pytest.mark.soak
def test_a_lab_whose_tests_were_killed_leaves_nothing(tmp_path: Path) -> None:
    """Its hosts' processes end with it, and the next lab takes the rest away."""
    story = (
        "import sys, time\n"
        "from tests.lab.network import LabNetwork, HOST_NUMBERS\n"
        "from tests.lab.hosts import Host\n"
        "lab = LabNetwork.build()\n"
        "hosts = [Host(network=lab, name=f'm{i}', number=HOST_NUMBERS[i], own_processes=i == 0) for i in range(2)]\n"
        "for host in hosts:\n"
        "    host.boot()\n"
        "    host.start('sleep', '600')\n"
        "print(lab.id, flush=True)\n"
        "time.sleep(600)\n"
    )
    tests = subprocess.Popen(
        [sys.executable, "-c", story], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert tests.stdout is not None
    lab_id = tests.stdout.readline().decode().strip()
    processes = [p for p in psutil.process_iter() if lab_id in _group_of(p.pid)]
    assert len(processes) >= 4, processes
    tests.send_signal(signal.SIGKILL)
    tests.wait()
    tests.stdout.close()
    wait_until(
        lambda: not any(p.is_running() and lab_id in _group_of(p.pid) for p in processes), "the hosts to end"
    )
    assert _traces(lab_id)
    sweep()
    assert _traces(lab_id) == []


@pytest.mark.soak
def test_a_lab_that_is_in_use_is_left_alone(pair: Pair) -> None:
    sweep()
    assert _traces(pair.network.id)
    assert pair.reaches(0, 1)


def _group_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""
