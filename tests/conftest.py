"""What every test run gets: a seed and one command to repeat a failure, the check that no process is left, workers."""

from __future__ import annotations

import os
import signal

import pytest

# Started in the background of a shell, or under nohup: what the tests start would not hear these either.
for _signal, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _usual)

LONG_VARIABLE = "LONG"
"""`LONG=1` runs the tests marked `long` too, which `make test` leaves to `make soak`."""

pytest_plugins = ["tests.plugins.parallel", "tests.plugins.leaks", "tests.plugins.repeat"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get(LONG_VARIABLE):
        is_long = pytest.mark.skip(reason=f"takes long: {LONG_VARIABLE}=1 make test T=…, or make soak")
        for item in items:
            if "long" in item.keywords:
                item.add_marker(is_long)
    if os.geteuid() == 0:
        return
    needs_root = pytest.mark.skip(reason="needs root (namespaces, cgroups, mounts)")
    for item in items:
        if "root" in item.keywords:
            item.add_marker(needs_root)
