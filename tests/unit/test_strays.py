"""Runs that hold machines and that the journal does not know (any more)."""

from __future__ import annotations

from pathlib import Path

from mesh.states import RunState
from tests.unit.test_coordinator import Bench


async def test_a_run_that_the_journal_has_lost_is_ended_and_its_machines_are_anothers(tmp_path: Path) -> None:
    """Nobody could ever stop it: it is no run that one can name. It is told in the status."""
    bench = Bench(tmp_path)
    await bench.coordinator.start()
    lost = (await bench.submit("lost"))["metadata"]["uid"]
    await bench.start_all()
    await bench.until_state("lost", RunState.RUNNING)
    await bench.coordinator.stop()
    for file in tmp_path.glob("journal.db*"):
        file.unlink()
    bench.fleet.unreachable = 2
    await bench.restart()
    await bench.until(lambda: not bench.fleet.held)
    assert bench.fleet.unclean == ["m0", "m1"], "what runs there is ended before somebody else gets them"
    details = (await bench.coordinator.status())["details"]
    assert details["strays"] == f"run {lost} is not in the journal: everything of it on m0, m1 is ended"
    await bench.submit("next")
    await bench.until(lambda: len(bench.fleet.held) == 1)
    await bench.coordinator.stop()


async def test_a_run_that_the_journal_knows_is_no_stray(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.coordinator.start()
    await bench.submit("known")
    await bench.start_all()
    await bench.restart()
    await bench.submit("later")
    await bench.until_state("known", RunState.RUNNING)
    assert "strays" not in (await bench.coordinator.status())["details"]
    assert len(bench.fleet.held) == 1 and bench.fleet.unclean == []
    await bench.coordinator.stop()
