"""What every `CoordinatorService` does. Add an implementation to SUBJECTS; each makes a deployment of two machines.

A subject says how a command looks that ends with a code, and one that runs until it is stopped.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter

from coordinator.api.service import CoordinatorService
from mesh import network_resources, resources
from mesh.errors import ConflictError, NotFoundError
from mesh.reasons import Reason
from mesh.spec import job_from_data, resolve
from mesh.states import RunState
from tests.fakes.scripted_fleet import scripted_coordinator
from tests.fakes.service import FakeService

DEADLINE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One implementation under test."""

    service: CoordinatorService
    exits: Callable[[int], Sequence[str]]
    hangs: Sequence[str]


@asynccontextmanager
async def fake() -> AsyncIterator[Subject]:
    service = FakeService(machines=2)
    try:
        yield Subject(
            service=service, exits=lambda code: ("script", f"exit:{code}"), hangs=("script", "hang")
        )
    finally:
        await service.stop()


@asynccontextmanager
async def coordinator() -> AsyncIterator[Subject]:
    with tempfile.TemporaryDirectory() as folder:
        real, fleet = scripted_coordinator(f"sqlite:///{folder}/journal.db")
        await real.start()
        try:
            yield Subject(
                service=real, exits=lambda code: ("script", f"exit:{code}"), hangs=("script", "hang")
            )
        finally:
            await fleet.settle()
            await real.stop()


SUBJECTS: dict[str, Callable[[], AbstractAsyncContextManager[Subject]]] = {
    "fake": fake,
    "coordinator": coordinator,
}


@pytest.fixture(params=SUBJECTS.values(), ids=SUBJECTS.keys())
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    async with request.param() as made:
        yield made


async def submit(
    subject: Subject,
    name: str,
    command: Sequence[str],
    *,
    nodes: int | None = None,
    request_id: str | None = None,
    recovery: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    **labels: str,
) -> Any:
    distributed = {"nodes": nodes} if nodes else {}
    spec = {
        "command": list(command),
        "distributed": distributed,
        "recovery": recovery or {},
        "env": env or {},
    }
    job = job_from_data(
        {"metadata": {"name": name, "labels": labels}, "spec": spec},
        source="",
    )
    return await subject.service.submit(job.to_json(), resolve(job).to_record(), request_id)


async def reach(subject: Subject, name: str, done: Callable[[Any], bool]) -> Any:
    """The run once it satisfies `done`, found by waiting for events."""
    async with asyncio.timeout(DEADLINE_S):
        after = 0
        while True:
            run = await subject.service.get_run(name)
            if done(run):
                return run
            for event in await subject.service.events(after, run["metadata"]["uid"], 100, 5.0):
                after = event["seq"]


def has_ended(run: Any) -> bool:
    return RunState(run["status"]["state"]).is_terminal


def is_running(run: Any) -> bool:
    return run["status"]["state"] == "Running"


def fits(shape: Any, value: Any) -> None:
    """The value has every documented key, with values of the documented types, and no other key."""
    assert TypeAdapter(shape).validate_python(value) == value


async def test_a_submitted_run_has_the_documented_shape_at_once_and_at_its_end(subject: Subject) -> None:
    run = await submit(
        subject, "shape", subject.exits(0), nodes=2, env={"HF_TOKEN": "a secret", "STEPS": "3"}, team="a"
    )
    fits(resources.Run, run)
    assert run["metadata"]["name"] == "shape"
    assert run["metadata"]["labels"] == {"team": "a"}
    assert run["spec"]["env"] == {"HF_TOKEN": None, "STEPS": "3"}
    assert run["status"]["topology"] == {
        "nodes": 2,
        "gpusPerNode": 0,
        "processesPerNode": 1,
        "worldSize": 2,
    }
    ended = await reach(subject, "shape", has_ended)
    fits(resources.Run, ended)
    assert (ended["status"]["state"], ended["status"]["exitCode"]) == ("Succeeded", 0)
    assert [rank["rank"] for rank in ended["status"]["ranks"]] == [0, 1]
    assert [rank["exit"] for rank in ended["status"]["ranks"]] == [{"code": 0, "signal": None}] * 2


async def test_a_failed_run_has_its_exit_code_and_its_cause(subject: Subject) -> None:
    await submit(subject, "fails", subject.exits(42))
    run = await reach(subject, "fails", has_ended)
    fits(resources.Run, run)
    status = run["status"]
    assert (status["state"], status["exitCode"], status["reason"]) == ("Failed", 42, "CommandFailed")
    assert status["cause"]["rank"] == 0
    assert status["cause"]["exit"] == {"code": 42, "signal": None}


async def test_the_same_request_id_is_the_same_run_and_starts_nothing_new(subject: Subject) -> None:
    first = await submit(subject, "once", subject.hangs, request_id="r1")
    again = await submit(subject, "once", subject.hangs, request_id="r1")
    assert again["metadata"]["uid"] == first["metadata"]["uid"]
    assert len(await subject.service.list_runs({})) == 1
    await subject.service.cancel("once", "")
    await reach(subject, "once", has_ended)
    ended = await submit(subject, "once", subject.hangs, request_id="r1")
    assert ended["metadata"]["uid"] == first["metadata"]["uid"]


async def test_of_simultaneous_submits_of_one_name_exactly_one_is_accepted(subject: Subject) -> None:
    answers = await asyncio.gather(
        *(submit(subject, "twin", subject.hangs) for _ in range(4)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, ConflictError)]
    assert len(refused) == 3
    assert {error.reason for error in refused} == {Reason.ALREADY_EXISTS}
    assert len(await subject.service.list_runs({})) == 1
    await subject.service.cancel("twin", "")
    await reach(subject, "twin", has_ended)


async def test_an_ended_run_keeps_its_name_until_it_is_deleted(subject: Subject) -> None:
    first = await submit(subject, "name", subject.exits(0))
    await reach(subject, "name", has_ended)
    with pytest.raises(ConflictError):
        await submit(subject, "name", subject.exits(0))
    await delete_when_released(subject, "name")
    with pytest.raises(NotFoundError):
        await subject.service.get_run("name")
    second = await submit(subject, "name", subject.exits(0))
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    await reach(subject, "name", has_ended)


async def delete_when_released(subject: Subject, name: str) -> None:
    """A run that has just ended may still give its machines back."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await subject.service.delete(name)
            except ConflictError:
                await subject.service.events(2**60, None, 1, 0.1)


async def test_an_active_run_is_not_deleted(subject: Subject) -> None:
    await submit(subject, "busy", subject.hangs)
    with pytest.raises(ConflictError):
        await subject.service.delete("busy")
    await subject.service.cancel("busy", "")
    await reach(subject, "busy", has_ended)


async def test_cancel_ends_a_run_and_a_second_one_changes_nothing(subject: Subject) -> None:
    await submit(subject, "stop-me", subject.hangs, nodes=2)
    await reach(subject, "stop-me", is_running)
    fits(resources.Run, await subject.service.cancel("stop-me", ""))
    await subject.service.cancel("stop-me", "")
    run = await reach(subject, "stop-me", has_ended)
    assert run["status"]["state"] == "Cancelled"
    assert await subject.service.cancel("stop-me", "") == run


async def test_a_client_that_was_interrupted_is_the_reason(subject: Subject) -> None:
    await submit(subject, "ctrl-c", subject.hangs)
    await reach(subject, "ctrl-c", is_running)
    await subject.service.cancel("ctrl-c", Reason.CLIENT_INTERRUPTED)
    run = await reach(subject, "ctrl-c", has_ended)
    assert (run["status"]["state"], run["status"]["reason"]) == ("Cancelled", "ClientInterrupted")


async def test_what_is_not_there_is_not_found(subject: Subject) -> None:
    for call in (
        subject.service.get_run("nobody"),
        subject.service.cancel("nobody", ""),
        subject.service.suspend("nobody"),
        subject.service.resume("nobody"),
        subject.service.reclaim("nobody", 10.0, ""),
        subject.service.chaos("nobody", "KillRank", 0, None, False),
        subject.service.delete("nobody"),
    ):
        with pytest.raises(NotFoundError):
            await call


async def test_runs_and_attempts_are_selected_by_labels(subject: Subject) -> None:
    await submit(subject, "one", subject.exits(0), nodes=2, team="a")
    await reach(subject, "one", has_ended)
    await submit(subject, "two", subject.exits(0), team="b")
    await reach(subject, "two", has_ended)
    named = [run["metadata"]["name"] for run in await subject.service.list_runs({"team": "b"})]
    assert named == ["two"]
    wanted = {"nodus.dev/job": "one", "nodus.dev/rank": "1"}
    attempts = await subject.service.list_attempts(wanted)
    assert [(a["run"], a["rank"], a["epoch"]) for a in attempts] == [("one", 1, 1)]
    for attempt in await subject.service.list_attempts({}):
        fits(resources.Attempt, attempt)


async def test_events_come_in_order_are_told_apart_by_run_and_are_waited_for(subject: Subject) -> None:
    first = await submit(subject, "first", subject.exits(0))
    await reach(subject, "first", has_ended)
    second = await submit(subject, "second", subject.exits(0))
    await reach(subject, "second", has_ended)
    everything = await subject.service.events(0, None, 1000, 0.0)
    for event in everything:
        fits(resources.Event, event)
    numbers = [event["seq"] for event in everything]
    assert numbers == sorted(set(numbers))
    by_name = await subject.service.events(0, "second", 1000, 0.0)
    assert {event["uid"] for event in by_name} == {second["metadata"]["uid"]}
    by_uid = await subject.service.events(0, first["metadata"]["uid"], 1000, 0.0)
    assert {event["run"] for event in by_uid} == {"first"}
    middle = numbers[len(numbers) // 2]
    assert [e["seq"] for e in await subject.service.events(middle, None, 2, 0.0)] == [
        n for n in numbers if n > middle
    ][:2]
    assert await subject.service.events(numbers[-1], "first", 10, 0.0) == []
    assert await subject.service.events(0, "nobody", 10, 0.0) == []
    waiting = asyncio.create_task(subject.service.events(numbers[-1], None, 10, DEADLINE_S))
    await submit(subject, "third", subject.exits(0))
    assert (await waiting)[0]["run"] == "third"
    await reach(subject, "third", has_ended)


async def test_machines_and_status_have_the_documented_shapes(subject: Subject) -> None:
    machines = await subject.service.list_machines()
    assert len(machines) == 2
    for machine in machines:
        fits(resources.Machine, machine)
    status = await subject.service.status()
    fits(resources.DeploymentStatus, status)
    assert status["state"] == "Ready"
    assert sum(status["machines"].values()) == 2


def is_suspended(run: Any) -> bool:
    return run["status"]["state"] == "Suspended"


def runs_in(epoch: int) -> Callable[[Any], bool]:
    return lambda run: is_running(run) and run["status"]["epoch"] == epoch


async def end(subject: Subject, name: str) -> None:
    await subject.service.cancel(name, "")
    await reach(subject, name, has_ended)


async def test_a_suspended_run_has_not_ended_and_goes_on_in_a_new_epoch(subject: Subject) -> None:
    await submit(subject, "pause", subject.hangs, nodes=2)
    with pytest.raises(ConflictError):
        await subject.service.resume("pause")
    await reach(subject, "pause", is_running)
    await subject.service.suspend("pause")
    suspended = await reach(subject, "pause", is_suspended)
    fits(resources.Run, suspended)
    status = suspended["status"]
    assert (status["reason"], status["exitCode"], status["endedAt"]) == ("Suspended", None, None)
    assert is_suspended(await subject.service.suspend("pause"))
    with pytest.raises(ConflictError):
        await subject.service.delete("pause")
    await subject.service.resume("pause")
    run = await reach(subject, "pause", runs_in(2))
    assert [epoch["chargedTo"] for epoch in run["status"]["epochs"]] == [None, None]
    assert [epoch["reason"] for epoch in run["status"]["epochs"]] == ["Suspended", None]
    assert run["status"]["restarts"]["total"] == 0
    await end(subject, "pause")
    with pytest.raises(ConflictError):
        await subject.service.suspend("pause")


async def test_a_suspended_run_can_be_cancelled(subject: Subject) -> None:
    await submit(subject, "stay", subject.hangs)
    await reach(subject, "stay", is_running)
    await subject.service.suspend("stay")
    await reach(subject, "stay", is_suspended)
    await end(subject, "stay")
    assert (await subject.service.get_run("stay"))["status"]["state"] == "Cancelled"


async def test_a_lost_machine_costs_its_rank_the_machine_and_the_story_says_so(subject: Subject) -> None:
    await submit(subject, "loses", subject.hangs)
    before = await reach(subject, "loses", is_running)
    harm = await subject.service.chaos("loses", "LoseMachine", 0, None, False)
    fits(resources.Harm, harm)
    old = before["status"]["ranks"][0]["machine"]
    assert (harm["rank"], harm["epoch"], harm["machine"]) == (0, 1, old)
    run = await reach(subject, "loses", runs_in(2))
    fits(resources.Run, run)
    status = run["status"]
    assert status["ranks"][0]["machine"] != old
    assert (status["restarts"]["loss"], status["restarts"]["total"], status["restarts"]["of"]) == (1, 1, 3)
    first, second = status["epochs"]
    assert (first["cause"]["rank"], first["cause"]["reason"], first["chargedTo"]) == (
        0,
        "MachineLost",
        "Loss",
    )
    assert (first["reason"], first["ledSomewhere"]) == ("MachineLost", False)
    assert first["beganAt"] <= first["openedAt"] <= first["runningAt"] <= first["stoppedAt"]
    assert first["stoppedAt"] <= first["endedAt"] <= second["beganAt"]
    assert (second["kept"], second["replaced"], second["cause"]) == ([], [0], None)
    assert second["ledSomewhere"]
    attempts = await subject.service.list_attempts({"nodus.dev/job": "loses", "nodus.dev/rank": "0"})
    for attempt in attempts:
        fits(resources.Attempt, attempt)
    assert [a["epoch"] for a in attempts] == [1, 2]
    assert attempts[0]["reason"] == "MachineLost"
    assert attempts[0]["cause"]["rank"] == 0
    assert (attempts[1]["reason"], attempts[1]["cause"]) == (None, None)
    kinds = [e["kind"] for e in await subject.service.events(0, "loses", 1000, 0.0)]
    assert kinds.index("Rehearsed") < kinds.index("MemberLost") < kinds.index("Restarting")
    states = {m["name"]: m["state"] for m in await subject.service.list_machines()}
    assert states[old] == "Lost"
    await end(subject, "loses")


async def test_a_killed_command_restarts_the_gang_only_when_the_run_wants_it(subject: Subject) -> None:
    await submit(subject, "again", subject.hangs, nodes=2, recovery={"onProcessFailure": "RestartGang"})
    before = await reach(subject, "again", is_running)
    await subject.service.chaos("again", "KillRank", 1, None, False)
    run = await reach(subject, "again", runs_in(2))
    assert [r["machine"] for r in run["status"]["ranks"]] == [r["machine"] for r in before["status"]["ranks"]]
    assert (run["status"]["restarts"]["failure"], run["status"]["epochs"][1]["kept"]) == (1, [0, 1])
    await end(subject, "again")
    await submit(subject, "once", subject.hangs, nodes=2)
    await reach(subject, "once", is_running)
    await subject.service.chaos("once", "KillRank", 1, None, False)
    status = (await reach(subject, "once", has_ended))["status"]
    assert (status["state"], status["exitCode"], status["cause"]["rank"]) == ("Failed", 137, 1)


async def test_a_machine_that_is_wanted_back_is_left_and_given_to_nobody(subject: Subject) -> None:
    await submit(subject, "moves", subject.hangs)
    before = await reach(subject, "moves", is_running)
    old = before["status"]["ranks"][0]["machine"]
    machine = await subject.service.reclaim(old, 30.0, "Maintenance.")
    fits(resources.Machine, machine)
    assert (machine["name"], machine["state"]) == (old, "Leaving")
    await subject.service.reclaim(old, 30.0, "")
    run = await reach(subject, "moves", runs_in(2))
    assert run["status"]["ranks"][0]["machine"] != old
    assert run["status"]["restarts"]["reclaim"] == 1
    assert run["status"]["epochs"][0]["cause"]["reason"] == "MachineReclaimed"
    await end(subject, "moves")
    await submit(subject, "later", subject.exits(0))
    assert (await reach(subject, "later", has_ended))["status"]["ranks"][0]["machine"] != old


async def test_harm_is_done_only_to_a_rank_that_is_there(subject: Subject) -> None:
    await submit(subject, "alone", subject.hangs)
    await reach(subject, "alone", is_running)
    with pytest.raises((ConflictError, NotFoundError)):
        await subject.service.chaos("alone", "LoseMachine", 5, None, False)
    await end(subject, "alone")
    with pytest.raises(ConflictError):
        await subject.service.chaos("alone", "LoseMachine", 0, None, False)


async def test_the_network_between_free_machines_is_checked_without_a_run(subject: Subject) -> None:
    report = await subject.service.check_network([], None)
    TypeAdapter(network_resources.NetworkReport).validate_python(report)
    assert report["passed"] and report["notChecked"] == {} and report["findings"] == []
    names = [machine["name"] for machine in report["machines"]]
    assert names == sorted(machine["name"] for machine in await subject.service.list_machines())
    assert [(way["sender"], way["receiver"]) for way in report["ways"]] == [tuple(names), tuple(names[::-1])]
    again = await subject.service.check_network(names, 2)
    assert [machine["name"] for machine in again["machines"]] == names


async def test_a_check_takes_two_free_machines_that_there_are(subject: Subject) -> None:
    names = [machine["name"] for machine in await subject.service.list_machines()]
    with pytest.raises(NotFoundError):
        await subject.service.check_network([names[0], "nobody"], None)
    for machines, nodes in (([names[0]], None), ([], 3)):
        with pytest.raises(ConflictError, match=r"needs \d free machines"):
            await subject.service.check_network(machines, nodes)


async def test_paths_say_how_long_an_all_reduce_takes_when_they_are_asked(subject: Subject) -> None:
    await subject.service.check_network([], None)
    for path in await subject.service.list_paths(None, 2):
        TypeAdapter(network_resources.ProviderPath).validate_python(path)
        assert (path["passed"] > 0, path["offered"], path["allReduceSeconds"]) == (True, True, None)
    [path] = await subject.service.list_paths(7e9, 2)
    assert path["bytesPerSecond"] is not None and path["roundTripSeconds"] is not None
    assert path["allReduceSeconds"] == pytest.approx(14e9 / path["bytesPerSecond"] + path["roundTripSeconds"])
