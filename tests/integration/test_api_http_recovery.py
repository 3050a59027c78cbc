"""Suspend, resume, reclaim and chaos as a program calls them: what is taken, what is refused, by field."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import TypeAdapter

from mesh import resources
from tests.integration.test_api_http import DEADLINE_S, Server, job, server

__all__ = ["server"]


async def reached(server: Server, name: str, state: str) -> Any:
    after = 0
    async with asyncio.timeout(DEADLINE_S):
        while True:
            _, run = await server.call("GET", f"/v1/runs/{name}")
            if run["status"]["state"] == state:
                return run
            _, news = await server.call("GET", f"/v1/events?run={name}&after={after}&wait=5")
            after = news["next"]


async def running(server: Server, name: str) -> None:
    status, body = await server.call("POST", "/v1/runs", json=job(name, "script", "hang"))
    assert status == 201, body
    await reached(server, name, "Running")


async def test_a_run_is_suspended_and_resumed(server: Server) -> None:
    await running(server, "r")
    status, body = await server.call("POST", "/v1/runs/r/resume")
    assert (status, body["error"]["reason"]) == (409, "Conflict")
    status, run = await server.call("POST", "/v1/runs/r/suspend")
    assert status == 202
    TypeAdapter(resources.Run).validate_python(run)
    await reached(server, "r", "Suspended")
    status, run = await server.call("POST", "/v1/runs/r/resume")
    assert (status, run["status"]["state"] in ("Pending", "Running")) == (202, True)
    assert (await reached(server, "r", "Running"))["status"]["epoch"] == 2
    for path in ("suspend", "resume", "chaos"):
        status, _ = await server.call("POST", f"/v1/runs/nobody/{path}", json={"kind": "KillRank", "rank": 0})
        assert status == 404


async def test_a_log_is_followed_up_to_the_suspension(server: Server) -> None:
    await server.call("POST", "/v1/runs", json=job("talks", "script", "say:one", "hang"))
    await reached(server, "talks", "Running")
    await server.call("POST", "/v1/runs/talks/suspend")
    async with (
        asyncio.timeout(DEADLINE_S),
        server.http.get(server.url + "/v1/runs/talks/logs?follow=true") as response,
    ):
        assert "one" in await response.text()


async def test_a_machine_is_reclaimed(server: Server) -> None:
    status, machine = await server.call("POST", "/v1/machines/m0/reclaim")
    assert (status, machine["state"], machine["run"]) == (202, "Leaving", None)
    TypeAdapter(resources.Machine).validate_python(machine)
    _, facts = await server.call("GET", "/v1/status")
    assert facts["machines"]["Leaving"] == 1
    status, _ = await server.call("POST", "/v1/machines/nobody/reclaim", json={"graceSeconds": 5})
    assert status == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"graceSeconds": -1}, "graceSeconds"),
        ({"graceSeconds": "2m"}, "graceSeconds"),
        ({"graceSeconds": True}, "graceSeconds"),
        ({"message": 7}, "message"),
        ({"message": "x" * 501}, "message"),
    ],
)
async def test_a_notice_that_is_none_is_refused_by_field(server: Server, body: Any, field: str) -> None:
    status, answer = await server.call("POST", "/v1/machines/m0/reclaim", json=body)
    assert (status, answer["error"]["details"]["field"]) == (422, field)
    _, machines = await server.call("GET", "/v1/machines")
    assert {machine["state"] for machine in machines["machines"]} == {"Ready"}


async def test_a_rank_is_harmed_where_that_is_allowed(server: Server) -> None:
    await running(server, "r")
    server.service.allows_chaos = False
    status, body = await server.call("POST", "/v1/runs/r/chaos", json={"kind": "LoseMachine", "rank": 0})
    assert (status, body["error"]["reason"]) == (403, "Forbidden")
    server.service.allows_chaos = True
    status, harm = await server.call("POST", "/v1/runs/r/chaos", json={"kind": "Freeze", "rank": 0})
    assert (status, harm["seconds"], harm["oneWay"]) == (202, 10.0, False)
    TypeAdapter(resources.Harm).validate_python(harm)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kind": "Explode", "rank": 0}, "kind"),
        ({"rank": 0}, "kind"),
        ({"kind": "KillRank"}, "rank"),
        ({"kind": "KillRank", "rank": -1}, "rank"),
        ({"kind": "KillRank", "rank": True}, "rank"),
        ({"kind": "KillRank", "rank": 0, "seconds": 3}, "seconds"),
        ({"kind": "Freeze", "rank": 0, "seconds": 0}, "seconds"),
        ({"kind": "Freeze", "rank": 0, "seconds": 601}, "seconds"),
        ({"kind": "Freeze", "rank": 0, "oneWay": True}, "oneWay"),
        ({"kind": "Cut", "rank": 0, "oneWay": 1}, "oneWay"),
        ({"kind": "Cut", "rank": 0, "delay": 1}, "delay"),
    ],
)
async def test_a_harm_that_is_none_is_refused_by_field(server: Server, body: Any, field: str) -> None:
    status, answer = await server.call("POST", "/v1/runs/r/chaos", json=body)
    assert (status, answer["error"]["details"]["field"]) == (422, field)
    assert "chaos" not in server.service.calls
