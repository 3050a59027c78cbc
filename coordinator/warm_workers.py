"""Keeps worker processes ready on machines, so that a member's start does not pay for a Python start.

Theory of operation. A member takes two worker processes of its machine (its own and its launcher's), and they end with
it. A raylet starts as many when it starts (`--num_prestart_python_workers`); after that, new ones have to be asked for.
Ray has no call for it, and a worker that has once run a task is never used for an actor. So tasks are begun on
the machine and cancelled before their workers have come up: the workers find nothing to do, and stay for the
next member. What is imported ahead is a setting of the raylet (`RAY_preload_python_modules`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

WORKERS_READY = 2
"""A member and its launcher."""
BEGIN_S = 0.3
"""From asking for a task until its worker is being started; a worker takes longer than this to come up."""
CANCEL_LIMIT_S = 10.0

_log = logging.getLogger(__name__)


def warm(node_ids: Sequence[str], *, workers: int = WORKERS_READY) -> None:
    """Lets each node start so many workers. Blocking; whatever fails leaves a machine cold, no more."""
    # A worker that comes up too early and does run the task ends after it (max_calls): it would be of no use.
    task: Any = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(_nothing)
    try:
        begun = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()
            for node_id in node_ids
            for _ in range(workers)
        ]
        time.sleep(BEGIN_S)
        for reference in begun:
            ray.cancel(reference)
        ray.wait(begun, num_returns=len(begun), timeout=CANCEL_LIMIT_S)
    except RayError as error:
        _log.info("machines are not warm: %s", error)


def _nothing() -> None:
    """What a warming task would do."""
