"""The whole suite on several workers (pytest-xdist, `-n`): what stays together, and what begins first.

Rules of this file:
1. A file stays on one worker, in order: what its tests share (a deployment, a server) is started once.
2. Files of one group of TOGETHER share a deployment and stay together as well. tests/e2e is two groups, each with a
   deployment of its own, since one would be the longest piece by far. Of a file in APART every test starts what it
   needs itself, so that its tests go to whoever is free.
3. What takes long begins first, or everybody waits for it at the end. LONGEST_FIRST names it.
4. A node id is what it is without workers: the seed, the repeat command and `--last-failed` all go by it. That is why
   this is a scheduler of ours, ten lines over xdist's, and not `--dist loadgroup`, which renames tests.

Two tests of different files may run at the same time, so none may count on a port, an address or a name that is not
its own. Without `-n` nothing of this has an effect.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER: dict[str, tuple[str, ...]] = {
    "lab": ("tests/lab/",),
    "e2e, deaths": tuple(f"tests/e2e/test_{name}.py" for name in ("deaths", "hidden_daemons", "cancel")),
    "e2e": ("tests/e2e/",),
}
APART: tuple[str, ...] = (
    "tests/e2e/test_head_deaths.py",
    "tests/integration/test_launcher_real.py",
    "tests/integration/test_member_real.py",
    "tests/integration/test_supervisor_torchrun.py",
)
LONGEST_FIRST = (
    *TOGETHER,
    "tests/integration/test_head.py",
    "tests/unit/test_contract_torchrun.py",
    *APART,
    "tests/integration/",
    "tests/packaging/",
)


def scope_of(node_id: str) -> str:
    """What is run as one piece, in its order, on one worker: the name of a group, a file, or a test."""
    file = node_id.partition("::")[0]
    if file in APART:
        return node_id
    groups = (name for name, places in TOGETHER.items() if file.startswith(places))
    return next(groups, file)


def _rank(node_id: str) -> int:
    scope = scope_of(node_id)
    places = (place for place, long in enumerate(LONGEST_FIRST) if scope.startswith(long))
    return next(places, len(LONGEST_FIRST))


class Scheduler(LoadScopeScheduling):
    """xdist's own, with our pieces in our order."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    if config.getoption("dist") != "load":  # somebody has asked for another way
        return None
    config.option.loadscopereorder = False
    return Scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_worker(config):
        items.sort(key=lambda item: _rank(item.nodeid))
