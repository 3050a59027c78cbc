"""MemberNode and Launcher as Ray actors: one life, and the deaths of each."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integration.small_ray import ray_environment

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]
LIMIT_S = 180.0
CASES = ("exit", "kill-launcher", "kill-member")
DRIVER = Path(__file__).with_name("member_ray_driver.py")


@pytest.fixture(scope="module")
def lives() -> dict[str, Any]:
    """What became of three members, by case, all in one Ray: to start one takes seconds."""
    with tempfile.TemporaryDirectory(prefix="gm-") as folder:  # Ray's sockets need a short path
        done = subprocess.run(
            [sys.executable, str(DRIVER), folder, *CASES],
            env=ray_environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_a_member_in_ray_lives_its_life_and_its_output_reaches_the_head(lives: dict[str, Any]) -> None:
    result = lives["exit"]
    assert result["exited"]["exit"] == {"code": 3, "signal": None}
    assert result["fenced"]["exit"] == {"code": 3, "signal": None}
    assert "NODUS_NODE_RANK=0" in result["logged"]
    assert "RAY_" not in result["logged"]
    assert "PYTHONBREAKPOINT" not in result["logged"]


def test_a_killed_launcher_ends_the_command_and_is_blamed_on_the_machine(lives: dict[str, Any]) -> None:
    result = lives["kill-launcher"]
    assert result["exited"]["exit"] == {"code": None, "signal": 9}
    assert result["exited"]["evidence"]["by_infrastructure"] is True


def test_a_killed_member_leaves_no_process_of_its_command(lives: dict[str, Any]) -> None:
    assert lives["kill-member"] == {}
