"""The store as the Ray actor that it is in a deployment: killed, restarted by Ray, and honest about what it forgot."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.small_ray import ray_environment

pytestmark = pytest.mark.ray
LIMIT_S = 110.0
DRIVER = Path(__file__).with_name("store_ray_driver.py")


def test_a_killed_store_comes_back_as_another_instance_that_asks_to_be_told_again() -> None:
    with tempfile.TemporaryDirectory(prefix="gm-") as folder:  # Ray's sockets need a short path
        done = subprocess.run(
            [sys.executable, str(DRIVER), folder],
            env=ray_environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "gangs": 1,
        "is_another_instance": True,
        "reason": "UnknownGang",
        "payloads": ["me"],
    }
