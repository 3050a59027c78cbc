"""`mesh check` and `mesh get paths`, and the calls behind them: what is shown, what is refused, the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from mesh import network_resources
from tests.fakes.shell import Shell, until
from tests.integration.test_api_http import Server, server

__all__ = ["server"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("shared"))
    done = made.mesh("up", "--machines", "4")
    assert done.returncode == 0, done.stderr
    yield made
    made.stop()


def test_a_network_that_is_well_is_a_table_and_zero(running: Shell) -> None:
    done = running.mesh("check", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    title, *rows, verdict = done.stdout.splitlines()
    assert title.split() == ["FROM", "TO", "PORTS", "ROUND", "TRIP", "THROUGHPUT"]
    assert len(rows) == 2 and all("answered  0.3 ms" in row and "10.0 Gbit/s" in row for row in rows)
    assert verdict == "2 machines reach each other. (1.5 s)"


def test_a_bad_pair_is_named_with_the_remedy_and_one(running: Shell) -> None:
    names = [m["name"] for m in json.loads(running.mesh("get", "machines", "-o", "json").stdout)["machines"]]
    (running.state / "apart").write_text(names[1])
    try:
        until(lambda: running.mesh("check").returncode == 1)
        done = running.mesh("check", "--machine", names[0], "--machine", names[1])
        assert done.returncode == 1
        assert "answered/silent" in done.stdout
        assert f"Fault: {names[0]} (10.0.0.1) does not reach {names[1]} (10.0.0.2)" in done.stdout
        assert "admits the rendezvous port only" in done.stdout
        assert done.stdout.endswith("2 machines checked: 1 fault. (1.5 s)\n")
        report = json.loads(running.mesh("check", "-o", "json").stdout)
        TypeAdapter(network_resources.NetworkReport).validate_python(report)
        assert (report["passed"], len(report["machines"])) == (False, 4)
    finally:
        (running.state / "apart").unlink()


def test_what_cannot_be_checked_is_said(running: Shell) -> None:
    unknown = running.mesh("check", "--machine", "nobody", "--machine", "else")
    assert (unknown.returncode, "no machine named 'nobody'" in unknown.stderr) == (4, True)
    too_few = running.mesh("check", "--nodes", "9")
    assert (too_few.returncode, "needs 9 free machines" in too_few.stderr) == (5, True)
    assert running.mesh("check", "--nodes", "1").returncode == 2


def test_paths_are_listed_with_the_length_of_an_all_reduce(running: Shell) -> None:
    plain = running.mesh("get", "paths").stdout.splitlines()
    assert "ALL-REDUCE" not in plain[0] and "aws - gcp" in plain[1] and "1.0 Gbit/s" in plain[1]
    sized = running.mesh("get", "path", "--model-size", "7B").stdout.splitlines()
    assert "ALL-REDUCE" in sized[0] and "112 s" in sized[1]  # 14 GB over 125 MB/s, and a round trip
    [path] = json.loads(
        running.mesh("get", "paths", "--model-size", "7B", "--nodes", "4", "-o", "json").stdout
    )["paths"]
    assert path["allReduceSeconds"] == pytest.approx(168.03)
    for wrong in (["--model-size", "big"], ["some-run"], ["-l", "a=b"]):
        assert running.mesh("get", "paths", *wrong).returncode == 2
    assert running.mesh("get", "runs", "--model-size", "7B").returncode == 2


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"machine": "m0"},
        {"machines": "m0"},
        {"machines": [1]},
        {"machines": [""]},
        {"machines": ["m"] * 65},
        {"nodes": 1},
        {"nodes": 65},
        {"nodes": True},
        {"nodes": "2"},
    ],
)
async def test_a_request_for_a_check_that_is_none_is_refused_by_field(server: Server, body: Any) -> None:
    status, answer = await server.call("POST", "/v1/network/check", json=body)
    assert (status, answer["error"]["reason"]) == (422, "InvalidSpec")


async def test_a_check_and_its_paths_as_a_program_calls_them(server: Server) -> None:
    status, report = await server.call("POST", "/v1/network/check")
    assert status == 200
    TypeAdapter(network_resources.NetworkReport).validate_python(report)
    status, _ = await server.call("POST", "/v1/network/check", json={"machines": ["nobody", "else"]})
    assert status == 404
    status, listed = await server.call("GET", "/v1/paths?modelSize=350M&nodes=8")
    assert status == 200
    for path in listed["paths"]:
        TypeAdapter(network_resources.ProviderPath).validate_python(path)
    for query in ("modelSize=huge", "nodes=1", "nodes=x"):
        status, _ = await server.call("GET", f"/v1/paths?{query}")
        assert status == 422, query
