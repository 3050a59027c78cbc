"""What the coordinator makes of a look at its machines' network: a gang's verdict, `mesh check`, and what it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.core.effects import CheckNetwork
from coordinator.journal import SqlJournal
from coordinator.network_watch import NetworkWatch
from mesh.errors import ConflictError, NotFoundError
from mesh.ids import MachineName, Rank
from tests.fakes.fleet import FakeFleet


class Bench:
    """A watch over four machines, and its journal."""

    def __init__(self, folder: Path) -> None:
        self.fleet = FakeFleet(machines=4)
        self.journal = SqlJournal(f"sqlite:///{folder}/journal.db")
        self.used_by: dict[str, str] = {}
        self.watch = self.again()

    def again(self) -> NetworkWatch:
        return NetworkWatch(
            fleet=self.fleet, journal=self.journal, used_by=lambda: self.used_by, wall=lambda: 1000.0
        )


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.journal.open()
    await made.watch.start()
    yield made
    await made.journal.close()


def asked(*names: str, fresh: tuple[int, ...] | None = None, suspects: tuple[int, ...] = ()) -> CheckNetwork:
    machines = tuple((Rank(rank), MachineName(name)) for rank, name in enumerate(names))
    ranks = tuple(rank for rank, _ in machines) if fresh is None else tuple(Rank(rank) for rank in fresh)
    return CheckNetwork(
        number=7, machines=machines, fresh=ranks, suspects=tuple(Rank(rank) for rank in suspects)
    )


# ---- a gang's machines ----------------------------------------------------------------------------------


async def test_a_network_that_is_well_is_told_in_a_sentence(bench: Bench) -> None:
    verdict = await bench.watch.check_gang(asked("m0", "m1", "m2"))
    assert (verdict.number, verdict.is_performed, verdict.refusals, verdict.warnings) == (7, True, (), ())
    assert verdict.message == "3 machines reach each other: round trips up to 1 ms, 8.0 Gbit/s or more."


async def test_a_bad_pair_costs_one_of_its_ranks_the_machine_and_names_the_remedy(bench: Bench) -> None:
    bench.fleet.shut = {("m0", "m1")}
    verdict = await bench.watch.check_gang(asked("m0", "m1"))
    assert verdict.message == (
        "m1 cannot be worked with: rank 0 (m0, 10.0.0.0) does not reach rank 1 (m1, 10.0.0.1): the rendezvous port "
        "29500 does not answer, the ephemeral port 40000 does not answer; the other way works."
    )
    [refusal] = verdict.refusals
    assert (refusal.rank, refusal.machine, refusal.peers) == (1, "m1", (0,))
    assert refusal.message.startswith(
        "rank 0 (m0, 10.0.0.0) does not reach rank 1 (m1, 10.0.0.1): the rendezvous port 29500 does not answer, the "
        "ephemeral port 40000 does not answer; the other way works. Admit all TCP ports from 10.0.0.0"
    )


async def test_only_the_ways_of_a_new_machine_are_looked_at_and_who_was_suspected_goes(bench: Bench) -> None:
    bench.fleet.shut = {("m0", "m2")}
    verdict = await bench.watch.check_gang(asked("m0", "m2", fresh=(1,), suspects=(0,)))
    assert bench.fleet.looks == [({0: "m0", 1: "m2"}, (1,))]
    assert [refusal.machine for refusal in verdict.refusals] == ["m0"]


async def test_a_machine_that_cannot_be_looked_at_is_told_and_passed(bench: Bench) -> None:
    bench.fleet.mute = {"m2"}
    verdict = await bench.watch.check_gang(asked("m0", "m1", "m2"))
    assert (verdict.is_performed, verdict.refusals) == (True, ())
    assert verdict.warnings == ("m2 does not answer. It was not checked.",)


@pytest.mark.parametrize("fault", ["nobody answers", "the fleet cannot be asked", "a fault of ours"])
async def test_a_check_that_fails_itself_is_told_and_passed(
    bench: Bench, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "nobody answers":
        bench.fleet.mute = {"m0", "m1"}
    elif fault == "the fleet cannot be asked":
        bench.fleet.unreachable = 1
    else:
        monkeypatch.setattr("coordinator.network_watch.judge", lambda seen: [][0])
        monkeypatch.setattr(bench.fleet, "look", lambda *_, **__: [][0])
    verdict = await bench.watch.check_gang(asked("m0", "m1"))
    assert (verdict.is_performed, verdict.refusals) == (False, ())
    assert verdict.message.startswith("The network was not checked: ")


# ---- mesh check -----------------------------------------------------------------------------------------


async def test_free_machines_are_checked_in_the_order_of_their_names(bench: Bench) -> None:
    bench.used_by = {"m1": "a"}
    bench.fleet.cordoned = {MachineName("m3")}
    report = await bench.watch.check_machines([], None)
    assert [machine["name"] for machine in report["machines"]] == ["m0", "m2"]
    assert report["passed"]


async def test_a_fault_is_named_by_machine_and_not_by_a_rank_that_nobody_has(bench: Bench) -> None:
    bench.fleet.shut = {("m0", "m1")}
    report = await bench.watch.check_machines(["m0", "m1"], None)
    assert not report["passed"]
    [finding] = report["findings"]
    assert finding["machines"] == ["m0", "m1"]
    assert finding["message"].startswith(
        "m0 (10.0.0.0) does not reach m1 (10.0.0.1): the rendezvous port 29500"
    )


async def test_who_could_not_be_looked_at_fails_the_check(bench: Bench) -> None:
    bench.fleet.mute = {"m3"}
    report = await bench.watch.check_machines([], None)
    assert (report["passed"], report["findings"]) == (False, [])
    assert report["notChecked"] == {"m3": "m3 does not answer."}


async def test_machines_in_use_lost_or_unknown_are_refused(bench: Bench) -> None:
    bench.used_by = {"m1": "a"}
    bench.fleet.lost = {MachineName("m2")}
    with pytest.raises(ConflictError, match="m1 is in use by a"):
        await bench.watch.check_machines(["m0", "m1"], None)
    with pytest.raises(ConflictError, match="m2 is lost"):
        await bench.watch.check_machines(["m0", "m2"], None)
    with pytest.raises(NotFoundError, match="no machine named 'x'"):
        await bench.watch.check_machines(["x"], None)
    with pytest.raises(ConflictError, match="needs 3 free machines; there are 2"):
        await bench.watch.check_machines([], 3)


async def test_one_check_at_a_time_and_a_gang_that_gets_the_machines_waits_for_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, go_on, began = bench.fleet.look, asyncio.Event(), asyncio.Event()

    async def slow(machines, *, fresh):  # type: ignore[no-untyped-def]
        began.set()
        await go_on.wait()
        return await look(machines, fresh=fresh)

    monkeypatch.setattr(bench.fleet, "look", slow)
    first = asyncio.create_task(bench.watch.check_machines(["m0", "m1"], None))
    await began.wait()
    with pytest.raises(ConflictError, match="under way"):
        await bench.watch.check_machines([], None)
    gang = asyncio.create_task(bench.watch.check_gang(asked("m1", "m2")))
    await asyncio.sleep(0)
    assert bench.fleet.looks == []
    go_on.set()
    assert (await first)["passed"] and (await gang).is_performed
    assert [set(machines.values()) for machines, _ in bench.fleet.looks] == [{"m0", "m1"}, {"m1", "m2"}]


# ---- what is kept ---------------------------------------------------------------------------------------


async def test_what_was_seen_outlives_the_coordinator_and_keeps_two_providers_apart(bench: Bench) -> None:
    bench.fleet.providers = {"m2": "other", "m3": "other"}
    bench.fleet.shut = {(a, b) for a in ("m0", "m1") for b in ("m2", "m3")}
    for _ in range(2):
        await bench.watch.check_machines([], None)
    again = bench.again()
    await again.start()
    paths = {tuple(path["providers"]): path for path in again.paths(parameters=None, members=2)}
    assert (paths["fake", "other"]["failed"], paths["fake", "other"]["offered"]) == (2, False)
    assert (paths["fake", "fake"]["passed"], paths["fake", "fake"]["offered"]) == (2, True)
    why = again.why_apart("other", "fake")
    assert why is not None and why.startswith("fake and other never passed a network check. ")
    assert again.why_apart("other", "other") is None
    bench.fleet.shut = set()
    await again.check_machines(["m1", "m2"], None)
    assert again.why_apart("fake", "other") is None


@pytest.mark.parametrize("text", ["", "7", '[{"providers": ["a"]}]', '[{"x": 1}]'])
async def test_what_was_kept_and_cannot_be_read_is_begun_anew(bench: Bench, text: str) -> None:
    await bench.journal.keep("paths", text)
    await bench.watch.start()
    assert bench.watch.paths(parameters=None, members=2) == []


async def test_a_journal_that_cannot_be_written_stops_no_check(bench: Bench) -> None:
    await bench.journal.close()
    assert (await bench.watch.check_gang(asked("m0", "m1"))).is_performed
    assert bench.watch.paths(parameters=None, members=2)[0]["passed"] == 1
    await bench.journal.open()
