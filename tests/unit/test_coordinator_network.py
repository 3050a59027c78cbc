"""A run whose machines' network is checked first, through the coordinator's shell; a crash in the middle too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.coordinator import Coordinator
from coordinator.journal import SqlJournal
from mesh.states import RunState
from tests.fakes.fleet import FakeFleet
from tests.unit.test_coordinator import Bench, _join_order


class OpenBench(Bench):
    """Machines that are not all on this host."""

    def _make(self) -> Coordinator:
        self.fleet.names = FakeFleet(machines=3).names
        self.journal = SqlJournal(f"sqlite:///{self.folder}/journal.db")
        return Coordinator(
            journal=self.journal, fleet=self.fleet, store=self.store, join_order=_join_order,
            deployment={"version": "0", "local": False},
        )  # fmt: skip

    async def story(self, name: str) -> list[tuple[str, str]]:
        return [(e["kind"], e["message"]) for e in await self.coordinator.events(0, name, 100, 0)]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[OpenBench]:
    made = OpenBench(tmp_path)
    await made.coordinator.start()
    yield made
    await made.coordinator.stop()


async def test_nobody_is_ordered_before_the_network_was_checked_and_the_story_says_so(
    bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = _held_back(bench, monkeypatch)
    await bench.submit("a")
    await bench.until(lambda: go_on.began.is_set())
    run = await bench.coordinator.get_run("a")
    assert run["status"]["state"] == RunState.ASSEMBLING
    assert run["status"]["message"] == "The network is being checked. At the barrier: 0 of 2."
    assert bench.fleet.orders == []
    go_on.set()
    await bench.start_all()
    run = await bench.until_state("a", RunState.RUNNING)
    sentence = "2 machines reach each other: round trips up to 1 ms, 8.0 Gbit/s or more."
    assert run["status"]["epochs"][-1]["network"] == sentence
    story = await bench.story("a")
    assert ("Checking", "The network between m0, m1 is being checked.") in story
    assert ("NetworkChecked", sentence) in story


async def test_a_bad_machine_costs_its_rank_the_machine(bench: OpenBench) -> None:
    bench.fleet.shut = {("m0", "m1"), ("m1", "m0")}
    await bench.submit("a")
    await bench.start_all()
    run = await bench.until_state("a", RunState.RUNNING)
    assert [rank["machine"] for rank in run["status"]["ranks"]] == ["m0", "m2"]
    assert bench.fleet.looks == [({0: "m0", 1: "m1"}, (0, 1)), ({0: "m0", 1: "m2"}, (1,))]
    [refused] = [message for kind, message in await bench.story("a") if kind == "Refused"]
    assert refused.startswith("rank 0 (m0, 10.0.0.0) does not reach rank 1 (m1, 10.0.0.1)")
    assert bench.fleet.unclean == [], "nobody was there"


async def test_a_coordinator_that_dies_in_the_middle_has_it_checked_again(
    bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = _held_back(bench, monkeypatch)
    await bench.submit("a")
    await bench.until(lambda: go_on.began.is_set())
    go_on.began.clear()
    await bench.restart()
    await bench.until(lambda: go_on.began.is_set())
    assert bench.fleet.orders == []
    go_on.set()
    await bench.start_all()
    await bench.until_state("a", RunState.RUNNING)
    assert len(bench.fleet.looks) == 1, "the first one ended with the crash"


async def test_a_check_that_cannot_be_made_fails_no_run(bench: OpenBench) -> None:
    bench.fleet.mute = {"m0", "m1"}
    await bench.submit("a")
    await bench.start_all()
    await bench.until_state("a", RunState.RUNNING)
    [unchecked] = [message for kind, message in await bench.story("a") if kind == "NetworkUnchecked"]
    assert unchecked == "The network was not checked: m0 does not answer. m1 does not answer."


async def test_a_run_that_is_cancelled_waits_for_no_check(
    bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = _held_back(bench, monkeypatch)
    await bench.submit("a")
    await bench.until(lambda: go_on.began.is_set())
    await bench.coordinator.cancel("a", "")
    await bench.until_state("a", RunState.CANCELLED)
    await bench.until(lambda: go_on.was_cut_off)
    await bench.until(lambda: len(bench.fleet.free()) == 3)
    assert bench.fleet.orders == []


async def test_where_all_machines_are_on_one_host_nothing_is_checked(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.coordinator.start()
    await bench.submit("a")
    await bench.start_all()
    run = await bench.until_state("a", RunState.RUNNING)
    assert (bench.fleet.looks, run["status"]["epochs"][0]["network"]) == ([], None)
    await bench.coordinator.stop()


class _HeldBack(asyncio.Event):
    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.Event()
        self.was_cut_off = False


def _held_back(bench: OpenBench, monkeypatch: pytest.MonkeyPatch) -> _HeldBack:
    """Looks at the network begin, and wait."""
    go_on, look = _HeldBack(), bench.fleet.look

    async def held(*arguments: Any, **options: Any) -> Any:
        go_on.began.set()
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            go_on.was_cut_off = True
            raise
        return await look(*arguments, **options)

    monkeypatch.setattr(bench.fleet, "look", held)
    return go_on
