"""The small parts of the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.head_parts import RunEnds
from mesh.errors import NotFoundError


class _Runs:
    """Of a `CoordinatorService`, what `RunEnds` asks."""

    def __init__(self) -> None:
        self.states = {"a": ("uid-a", "Running"), "b": ("uid-b", "Succeeded")}
        self.lists = 0

    def _run(self, name: str) -> Any:
        uid, state = self.states[name]
        return {"metadata": {"name": name, "uid": uid}, "status": {"state": state}}

    async def get_run(self, name: str) -> Any:
        if name not in self.states:
            raise NotFoundError(f"no run {name}")
        return self._run(name)

    async def list_runs(self, labels: Mapping[str, str]) -> list[Any]:
        self.lists += 1
        return [self._run(name) for name in self.states]


async def test_a_followed_run_is_looked_up_by_its_name_after_the_first_time() -> None:
    runs = _Runs()
    ends = RunEnds(runs)  # type: ignore[arg-type]
    assert [await ends.has_ended("uid-a") for _ in range(3)] == [False] * 3
    assert runs.lists == 1
    runs.states["a"] = ("uid-a", "Fencing")
    assert not await ends.has_ended("uid-a")
    runs.states["a"] = ("uid-a", "Failed")
    assert await ends.has_ended("uid-a")


async def test_a_suspended_run_says_nothing_more_for_now() -> None:
    runs = _Runs()
    runs.states["a"] = ("uid-a", "Suspended")
    ends = RunEnds(runs)  # type: ignore[arg-type]
    assert await ends.has_ended("uid-a")
    runs.states["a"] = ("uid-a", "Running")
    assert not await ends.has_ended("uid-a")


@pytest.mark.parametrize("then", [None, ("another-uid", "Running")])
async def test_a_followed_run_that_was_deleted_has_ended_whoever_has_its_name(then: Any) -> None:
    runs = _Runs()
    ends = RunEnds(runs)  # type: ignore[arg-type]
    assert not await ends.has_ended("uid-a")
    del runs.states["a"]
    if then is not None:
        runs.states["a"] = then
    assert await ends.has_ended("uid-a")
    assert await ends.has_ended("uid-a")


async def test_a_run_that_nobody_knows_has_ended() -> None:
    assert await RunEnds(_Runs()).has_ended("uid-z")  # type: ignore[arg-type]
