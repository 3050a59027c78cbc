"""Keeps worker processes ready on machines, so that a member's start does not pay for a Python start.

Theory of operation. A member takes two worker processes of its machine (its own and its launcher's), and they end with
it. A raylet starts as many when it starts (`--num_prestart_python_workers`); after that, new ones have to be asked for.
Ray has no call for it, and a worker that has once run a task is never used for an actor. So tasks are begun on
the machine and cancelled before their workers have come up: the workers find nothing to do, and stay for the
next member. What is imported ahead is a setting of the raylet (`RAY_preload_python_modules`).

When. A machine that is given back gets new ones at once. One that is kept may need them for the next epoch, and a start
takes a second of two processors, which the user's command wants for itself when it begins: so they come MAKE_UP_S after
a member. Each use is made up for once, since nobody ends a worker that nobody needs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

WORKERS_READY = 2
"""A member and its launcher."""
BEGIN_S = 0.3
"""From asking for a task until its worker is being started; a worker takes longer than this to come up."""
CANCEL_LIMIT_S = 10.0
MAKE_UP_S = 8.0

_log = logging.getLogger(__name__)


class SpareWorkers:
    """Makes up for the workers that members use.

    Args:
        start: lets one node start the workers of one member; blocking.
    """

    def __init__(
        self, *, start: Callable[[Sequence[str]], None] | None = None, make_up_s: float = MAKE_UP_S
    ) -> None:
        self._start = start or warm
        self._make_up_s = make_up_s
        self._owed: dict[str, asyncio.Task[None]] = {}
        """By node: a use that is made up for in a while."""
        self._latest: dict[str, str] = {}
        """By node: the member that was the last to begin there."""
        self._made_up: set[str] = set()
        """Nodes whose last use has been made up for, while it still lasts."""
        self._starting: set[asyncio.Task[None]] = set()
        """Kept, so that they are not collected while they run; nobody waits for them."""

    def used(self, node_id: str, member: str) -> None:
        """This member has begun there; may be told again."""
        if self._latest.get(node_id) == member:
            return
        self._latest[node_id] = member
        self._made_up.discard(node_id)
        if node_id not in self._owed:
            self._owed[node_id] = asyncio.create_task(self._later(node_id), name="spare workers")

    def given_back(self, node_id: str) -> None:
        """No member is there any more."""
        self._latest.pop(node_id, None)
        if (owed := self._owed.pop(node_id, None)) is not None:
            owed.cancel()
        if node_id in self._made_up:
            self._made_up.discard(node_id)
        else:  # also when the member began before this process did
            self._begin(node_id)

    async def _later(self, node_id: str) -> None:
        await asyncio.sleep(self._make_up_s)
        del self._owed[node_id]
        self._made_up.add(node_id)
        self._begin(node_id)

    def _begin(self, node_id: str) -> None:
        task = asyncio.create_task(asyncio.to_thread(self._start, [node_id]), name="warm workers")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)


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
