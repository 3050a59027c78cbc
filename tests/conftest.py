"""What every test run gets: a seed and one command to repeat a failure, the check that no process is left, workers."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["tests.plugins.parallel", "tests.plugins.leaks", "tests.plugins.repeat"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    needs_root = pytest.mark.skip(reason="needs root (namespaces, cgroups, mounts)")
    for item in items:
        if "root" in item.keywords:
            item.add_marker(needs_root)
