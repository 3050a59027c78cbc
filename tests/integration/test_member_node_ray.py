"""MemberNode and Launcher as Ray actors: one life, and the deaths of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ray
LIMIT_S = 110.0
DRIVER = Path(__file__).with_name("member_ray_driver.py")


@pytest.fixture
def play() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Ray's sockets need a short path, so the folder is not pytest's."""
    with tempfile.TemporaryDirectory(prefix="gm-") as folder:

        def run(case: str) -> dict[str, Any]:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
            environment["PYTHONPATH"] = str(DRIVER.parents[2])
            done = subprocess.run(
                [sys.executable, str(DRIVER), folder, case],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return result

        yield run


def test_a_member_in_ray_lives_its_life_and_its_output_reaches_the_head(
    play: Callable[[str], dict[str, Any]],
) -> None:
    result = play("exit")
    assert result["exited"]["exit"] == {"code": 3, "signal": None}
    assert result["phase"] == "Exited"
    assert result["fenced"]["exit"] == {"code": 3, "signal": None}
    assert "NODUS_NODE_RANK=0" in result["logged"]
    assert "RAY_" not in result["logged"]
    assert "PYTHONBREAKPOINT" not in result["logged"]


def test_a_killed_launcher_ends_the_command_and_is_blamed_on_the_machine(
    play: Callable[[str], dict[str, Any]],
) -> None:
    result = play("kill-launcher")
    assert result["exited"]["exit"] == {"code": None, "signal": 9}
    assert result["exited"]["evidence"]["by_infrastructure"] is True


def test_a_killed_member_leaves_no_process_of_its_command(play: Callable[[str], dict[str, Any]]) -> None:
    assert play("kill-member") == {}
