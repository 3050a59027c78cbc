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
from mesh import resources
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
    **labels: str,
) -> Any:
    distributed = {"nodes": nodes} if nodes else {}
    job = job_from_data(
        {
            "metadata": {"name": name, "labels": labels},
            "spec": {"command": list(command), "distributed": distributed},
        },
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
    run = await submit(subject, "shape", subject.exits(0), nodes=2, team="a")
    fits(resources.Run, run)
    assert run["metadata"]["name"] == "shape"
    assert run["metadata"]["labels"] == {"team": "a"}
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
