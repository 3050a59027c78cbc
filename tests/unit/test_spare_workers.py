"""Each use of a machine's workers is made up for once: in a while, or when the machine is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.warm_workers import SpareWorkers

LIMIT_S = 5.0


class Started(list[str]):
    def start(self, node_ids: Sequence[str]) -> None:
        self.extend(node_ids)

    async def until(self, *node_ids: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while sorted(self) != sorted(node_ids):
                await asyncio.sleep(0.001)


async def test_a_machine_that_is_given_back_gets_new_ones_at_once() -> None:
    started = Started()
    spares = SpareWorkers(start=started.start, make_up_s=3600.0)
    spares.used("n1", "a")
    spares.used("n2", "b")
    spares.given_back("n1")
    await started.until("n1")
    spares.given_back("n2")
    await started.until("n1", "n2")


async def test_a_machine_that_is_kept_gets_them_in_a_while_and_no_more_when_it_is_given_back() -> None:
    started = Started()
    spares = SpareWorkers(start=started.start, make_up_s=0.001)
    spares.used("n", "a")
    await started.until("n")
    spares.used("n", "a")  # ordered again
    spares.given_back("n")
    spares.used("n", "b")  # the next member has those two
    await started.until("n", "n")
    spares.used("n", "c")  # and a third one, on a machine that was kept
    await started.until("n", "n", "n")
    spares.given_back("n")
    await asyncio.sleep(0.01)
    assert started == ["n", "n", "n"]


async def test_a_member_that_began_before_this_process_is_made_up_for_when_it_ends() -> None:
    started = Started()
    SpareWorkers(start=started.start).given_back("n")
    await started.until("n")
