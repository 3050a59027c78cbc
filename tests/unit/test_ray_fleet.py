"""The fleet over Ray, without Ray: what its exceptions become."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.exceptions import RpcError

from coordinator.fleet import MemberGoneError
from coordinator.ray_call import ask_ray
from coordinator.ray_fleet import RayFleet
from mesh.errors import TransportError
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunUid
from mesh.messages import FenceOrder

FLEET = RayFleet(namespace="n", member_config={}, used_by=dict)
MEMBER = Incarnation(run_uid=RunUid("run"), epoch=Epoch(1), rank=Rank(0), token=IncarnationToken("t"))


@pytest.mark.parametrize("error", [RpcError("unavailable"), RuntimeError("not connected"), OSError("broken")])
async def test_a_ray_that_cannot_be_asked_may_be_asked_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(ray, "nodes", fail)
    with pytest.raises(TransportError, match="cannot be asked now"):
        await FLEET.machines()


async def test_an_actor_that_is_not_there_is_a_member_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", fail)
    with pytest.raises(MemberGoneError):
        await FLEET.fence(FenceOrder(incarnation=MEMBER, grace_s=1.0))


async def test_what_takes_long_in_other_threads_holds_up_no_question_to_ray() -> None:
    """All of the loop's own threads wait; an order or a fence must not."""
    may_end = threading.Event()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as only_thread:
        loop.set_default_executor(only_thread)
        busy = asyncio.create_task(asyncio.to_thread(may_end.wait, 10.0))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5.0):
                assert await ask_ray(lambda: "an answer") == "an answer"
        finally:
            may_end.set()
            await busy
