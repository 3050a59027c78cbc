"""Tasks beside each other, of one owner."""

from __future__ import annotations

import asyncio

import pytest

from mesh.net.guarded_tasks import GuardedTasks


async def test_a_fault_in_one_is_told_by_its_name_and_is_no_other_s(caplog: pytest.LogCaptureFixture) -> None:
    tasks, go_on, has_ended = GuardedTasks(), asyncio.Event(), asyncio.Event()

    async def fails() -> None:
        raise RuntimeError("of ours")

    async def works() -> None:
        await go_on.wait()
        has_ended.set()

    tasks.spawn(works(), name="the one that works")
    tasks.spawn(fails(), name="the one that fails")
    async with asyncio.timeout(10):
        while len(tasks) > 1:
            await asyncio.sleep(0)
    assert "the one that fails: a fault of this program" in caplog.text
    assert "of ours" in caplog.text
    go_on.set()
    await asyncio.wait_for(has_ended.wait(), 10)


async def test_stopped_are_all_also_who_has_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    tasks = GuardedTasks()

    async def waits() -> None:
        await asyncio.Event().wait()

    tasks.spawn(waits(), name="begun")
    await asyncio.sleep(0)
    tasks.spawn(waits(), name="not begun")
    for _ in range(2):
        await tasks.stop(limit_s=10.0)
    assert (len(tasks), caplog.text) == (0, "")
