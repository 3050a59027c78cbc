"""The member's way to its coordinator, without a cluster."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from agents.node import CoordinatorHandle
from mesh.ids import Epoch, Incarnation, Rank, new_run_uid, new_token
from mesh.messages import CheckpointTroubled

LIMIT_S = 10.0


async def test_a_ray_that_does_not_answer_takes_no_thread_from_a_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head has vanished: each report waits for Ray's directory, and is given up by its sender."""
    is_back = threading.Event()
    calls = 0

    def hang(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        is_back.wait(LIMIT_S * 2)
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", hang)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    coordinator = CoordinatorHandle(namespace="test")
    me = Incarnation(run_uid=new_run_uid(), epoch=Epoch(1), rank=Rank(0), token=new_token())
    report = CheckpointTroubled(incarnation=me, at=0.0, message="")
    try:
        for _ in range(4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await coordinator.report(report)
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.to_thread(lambda: "killed") == "killed"
        assert calls == 1
    finally:
        is_back.set()
