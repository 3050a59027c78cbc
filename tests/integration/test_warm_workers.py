"""A machine's worker processes over a real Ray: two wait for the next member, whatever used them, and no more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.fleet import Shape
from mesh.ids import MachineName, new_run_uid
from tests.contract.fleet_stages import RayStage

LIMIT_S = 60.0
LOOK_S = 0.2

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


async def test_two_wait_after_a_start_a_run_that_is_swept_and_a_new_coordinator(tmp_path: Path) -> None:
    stage = await RayStage.start(tmp_path, machines=1)
    try:
        [machine] = await stage.names()
        await _until_two_wait(stage, machine)

        await _run(stage, machine)
        await _until_two_wait(stage, machine)

        await stage.host("use_worker", machine)
        await stage.crash_coordinator()
        await stage.names()
        await _until_two_wait(stage, machine)
    finally:
        await stage.stop()


async def _run(stage: RayStage, machine: MachineName) -> None:
    """A member and its launcher come and go; the sweep after them is a task, and takes a worker as well."""
    uid = new_run_uid()
    await stage.fleet.reserve(
        uid, 1, Shape(nodes=1, gpus_per_node=0, gpu_types=(), avoid=()), on_waiting=print
    )
    for _ in range(2):
        await stage.host("use_worker", machine)
    await stage.fleet.release(uid, 1, machine, is_clean=False)


async def _until_two_wait(stage: RayStage, machine: MachineName) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (idle := await stage.host("idle_workers", machine)) < 2:
            await asyncio.sleep(LOOK_S)
    assert idle == 2
