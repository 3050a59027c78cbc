"""Machines that are as busy as can be: every core burnt, every write waited for. Nobody is taken for dead."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lab.deployment import Lab
from tests.lab.hosts import Host
from tests.lab.test_head_deaths import unharmed

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

BURNERS_PER_HOST = 3
BURN = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
"""
STALL = """
import os, sys, time
end = time.monotonic() + float(sys.argv[1])
piece = os.urandom(1 << 20)
while time.monotonic() < end:
    with open(sys.argv[2], "wb") as file:
        for _ in range(16):
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
os.unlink(sys.argv[2])
"""


@pytest.mark.parametrize(
    "length_s", [pytest.param(20, marks=pytest.mark.soak), pytest.param(600, marks=pytest.mark.soak)]
)
def test_a_machine_that_is_only_busy_is_not_taken_for_dead(lab: Lab, length_s: int) -> None:
    beacon = lab.running_beacon("--nodes", "3")
    hosts = [lab.head_host, *lab.hosts[:3]]
    loads = [load for host in hosts for load in _load(lab, host, length_s)]
    codes = [load.wait(length_s + 120) for load in loads]
    assert set(codes) == {0}
    unharmed(lab, beacon)


def _load(lab: Lab, host: Host, length_s: int) -> list[subprocess.Popen[bytes]]:
    """Burners and a writer on this host, which end by themselves."""
    python = (sys.executable, "-S", "-c")
    burners = [host.start(*python, BURN, str(length_s)) for _ in range(BURNERS_PER_HOST)]
    stalled = lab.folder / f"stalled-{host.name}"
    return [*burners, host.start(*python, STALL, str(length_s), str(stalled))]
