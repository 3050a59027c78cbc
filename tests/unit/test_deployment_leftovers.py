"""Processes of a deployment are found by their marks and ended, and no other ones are."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.leftovers import MARK, RANK_STATE_MARK, Owner, end_all, find

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True: time.sleep(60)
"""
OBEDIENT = """
import time
print("up", flush=True)
while True: time.sleep(60)
"""


PARENT = """
import subprocess
child = subprocess.Popen(["sleep", "600"], env={})
print(f"up\\n{child.pid}", flush=True)
child.wait()
"""


class Zoo:
    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, code: str, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process


@pytest.fixture
def zoo() -> Iterator[Zoo]:
    made = Zoo()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(deployment_id=secrets.token_hex(8), state=tmp_path / "state")


async def test_what_obeys_and_what_does_not_are_both_ended(zoo: Zoo, owner: Owner) -> None:
    mine = {MARK: owner.deployment_id}
    polite, stubborn = zoo.start(OBEDIENT, **mine), zoo.start(STUBBORN, **mine)
    assert set(find(owner)) == {polite.pid, stubborn.pid}
    assert await end_all(owner, grace_s=0.3) == []
    assert polite.wait(5) == -15
    assert stubborn.wait(5) == -9


async def test_a_users_command_is_found_by_its_folder(zoo: Zoo, owner: Owner) -> None:
    command = zoo.start(OBEDIENT, **{RANK_STATE_MARK: str(owner.state / "machines" / "local-1" / "run")})
    assert await end_all(owner, grace_s=5) == []
    assert command.wait(5) == -15


async def test_other_deployments_are_left_alone(zoo: Zoo, owner: Owner) -> None:
    other = zoo.start(OBEDIENT, **{MARK: "0" * 16, RANK_STATE_MARK: f"{owner.state}-2/machines"})
    assert find(owner) == []
    assert await end_all(owner, grace_s=0) == []
    assert other.poll() is None


async def test_what_is_below_the_head_is_found_though_it_threw_its_environment_away(
    zoo: Zoo, owner: Owner
) -> None:
    head = zoo.start(PARENT)
    assert head.stdout is not None
    child = int(head.stdout.readline())
    outsider = zoo.start(OBEDIENT)
    assert find(owner) == []
    owner = replace(owner, head_pid=head.pid)
    assert find(owner) == [child]
    assert await end_all(owner, grace_s=0.3) == []
    assert head.wait(5) == 0
    assert outsider.poll() is None
