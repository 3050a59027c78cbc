"""The REST API as a program sees it: real HTTP, a fake coordinator behind it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import TypeAdapter

from coordinator.api import routes_mesh, routes_relays, streams
from coordinator.api.app import BODY_BYTES_MAX, ENDPOINTS, document, make_app
from mesh import resources
from mesh.spec import DeploymentFacts
from tests.fakes.service import FakeService

TOKEN = "s3cret"
DEADLINE_S = 20.0


@dataclass
class Server:
    """A running API."""

    service: FakeService
    runner: web.AppRunner
    app: web.Application
    url: str
    http: aiohttp.ClientSession

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, **options) as response:
            return response.status, await response.json()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    service = FakeService()
    app = make_app(
        service,
        service.logs,
        token=TOKEN,
        deployment_facts=DeploymentFacts(machines=2),
        grow=service.grow,
    )
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        yield Server(service=service, runner=runner, app=app, url=url, http=http)
    await runner.cleanup()
    await service.stop()


def job(name: str, *command: str, nodes: int | None = None, **spec: Any) -> dict[str, Any]:
    distributed = {"nodes": nodes} if nodes else {}
    return {
        "metadata": {"name": name},
        "spec": {"command": list(command), "distributed": distributed, **spec},
    }


async def ended(server: Server, name: str) -> Any:
    after = 0
    async with asyncio.timeout(DEADLINE_S):
        while True:
            _, run = await server.call("GET", f"/v1/runs/{name}")
            if run["status"]["endedAt"] is not None:
                return run
            _, news = await server.call("GET", f"/v1/events?run={name}&after={after}&wait=5")
            after = news["next"]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "needs a token"),
        ("Basic abc", "takes Bearer tokens"),
        ("Bearer wrong", "not the one of this deployment"),
        ("Bearer", "not the one of this deployment"),
        ("Bearer \xff\xfe", "not the one of this deployment"),
    ],
)
async def test_without_the_token_everything_is_refused_with_the_way_to_get_it(
    server: Server, header: str | None, words: str
) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with (
        aiohttp.ClientSession(headers=headers) as stranger,
        stranger.get(server.url + "/v1/runs") as response,
    ):
        body = await response.json()
    assert response.status == 401
    assert response.headers["WWW-Authenticate"].startswith("Bearer")
    assert words in body["error"]["message"]
    assert "deployment.json" in body["error"]["hint"]
    assert server.service.calls == []


async def test_every_answer_carries_the_request_id_and_a_sane_one_is_kept(server: Server) -> None:
    async with server.http.get(server.url + "/v1/version", headers={"X-Request-Id": "mine-1"}) as response:
        assert response.headers["X-Request-Id"] == "mine-1"
    async with server.http.get(server.url + "/v1/nope", headers={"X-Request-Id": "b\tad <id>"}) as response:
        body = await response.json()
        assert response.headers["X-Request-Id"] == body["requestId"] != "b\tad <id>"


async def test_unknown_paths_and_methods_are_answered_in_json(server: Server) -> None:
    status, body = await server.call("GET", "/v1/nonsense")
    assert (status, body["error"]["reason"]) == (404, "NotFound")
    status, body = await server.call("PUT", "/v1/runs")
    assert (status, "GET, POST" in body["error"]["message"]) == (405, True)
    TypeAdapter(resources.ErrorReply).validate_python(body)


async def test_a_body_over_the_limit_is_refused_and_a_megabyte_of_environment_is_not(server: Server) -> None:
    status, body = await server.call("POST", "/v1/runs", data=io.BytesIO(b"x" * (BODY_BYTES_MAX + 1)))
    assert (status, str(BODY_BYTES_MAX) in body["error"]["message"]) == (413, True)
    env = {f"V{number}": "\x01" * 100_000 for number in range(10)}
    status, body = await server.call(
        "POST", "/v1/runs", data=io.BytesIO(json.dumps(job("big", "true", env=env)).encode())
    )
    assert status == 201, body
    assert body["run"]["spec"]["env"] == env


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no body"),
        (b"{", "line 1, column 2"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "mapping"),
        (b'{"spec": ' + b"9" * 6000 + b"}", "too long"),
        (b'{"spec": {"comand": ["x"]}}', "command"),
    ],
)
async def test_a_bad_body_is_told_what_is_wrong_with_it(server: Server, data: bytes, words: str) -> None:
    status, body = await server.call("POST", "/v1/runs", data=data)
    assert status == 422
    assert words in body["error"]["message"] + body["error"]["hint"]
    assert "submit" not in server.service.calls


async def test_a_body_that_cannot_be_decompressed_is_told_so(server: Server) -> None:
    status, body = await server.call("POST", "/v1/runs", data=b"{}", headers={"Content-Encoding": "gzip"})
    assert status == 422
    assert "gzip" in body["error"]["message"]


async def test_a_submitted_run_comes_back_with_warnings_and_ends(server: Server) -> None:
    status, body = await server.call("POST", "/v1/runs", json=job("r", "script", "exit:3", nodes=4))
    assert status == 201
    TypeAdapter(resources.Submission).validate_python(body)
    assert any("NoSuchCapacity" in warning for warning in body["warnings"])
    run = await ended(server, "r")
    assert run["status"]["exitCode"] == 3


async def test_flags_in_the_command_that_override_the_contract_are_said_at_submit(server: Server) -> None:
    command = ["torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400", "ok.py"]
    asked = job("flags", *command, nodes=2)
    asked["spec"]["distributed"]["launcher"] = "torchrun"
    _, body = await server.call("POST", "/v1/runs?dryRun=true", json=asked)
    assert "rdzv-endpoint" in json.dumps(body)


async def test_a_dry_run_creates_nothing(server: Server) -> None:
    asked = job("r", "torchrun", "train.py", resources={"gpu": "H100"})
    asked["spec"]["distributed"] = {"totalGPUs": 16, "launcher": "torchrun"}
    status, body = await server.call("POST", "/v1/runs?dryRun=true", json=asked)
    assert status == 200
    TypeAdapter(resources.DryRun).validate_python(body)
    assert body["topology"]["worldSize"] == 16
    assert "submit" not in server.service.calls


async def test_the_size_of_a_model_is_for_a_dry_run_and_has_to_be_one(server: Server) -> None:
    asked = job("r", "true", nodes=2)
    status, body = await server.call("POST", "/v1/runs?dryRun=true&modelSize=7B", json=asked)
    assert (status, body["paths"]) == (200, []), "the machines here stand on one trusted network"
    for query, word in (("dryRun=true&modelSize=large", "such as 7B"), ("modelSize=7B", "dry run")):
        status, body = await server.call("POST", f"/v1/runs?{query}", json=asked)
        assert (status, word in json.dumps(body)) == (422, True), body
    assert "submit" not in server.service.calls


async def test_the_same_key_and_body_is_one_run_and_another_body_is_another(server: Server) -> None:
    unnamed = {"spec": {"command": ["script", "exit:0"]}}
    headers = {"Idempotency-Key": "k1"}
    answers = [await server.call("POST", "/v1/runs", json=unnamed, headers=headers) for _ in range(3)]
    assert len({body["run"]["metadata"]["uid"] for _, body in answers}) == 1
    other = {"spec": {"command": ["script", "exit:1"]}}
    _, body = await server.call("POST", "/v1/runs", json=other, headers=headers)
    assert body["run"]["metadata"]["uid"] != answers[0][1]["run"]["metadata"]["uid"]
    status, body = await server.call("POST", "/v1/runs", json=unnamed, headers={"Idempotency-Key": "k" * 300})
    assert status == 422


async def test_of_four_twins_one_is_accepted_and_the_others_are_told(server: Server) -> None:
    asked = job("twin", "script", "hang")
    answers = await asyncio.gather(*(server.call("POST", "/v1/runs", json=asked) for _ in range(4)))
    assert sorted(status for status, _ in answers) == [201, 409, 409, 409]
    assert {b["error"]["reason"] for s, b in answers if s == 409} == {"AlreadyExists"}


async def test_a_run_is_cancelled_once_and_deleted_when_it_has_ended(server: Server) -> None:
    await server.call("POST", "/v1/runs", json=job("r", "script", "hang"))
    status, body = await server.call("DELETE", "/v1/runs/r")
    assert (status, body["error"]["reason"]) == (409, "Conflict")
    status, _ = await server.call("POST", "/v1/runs/r/cancel", json={"reason": "ClientInterrupted"})
    assert status == 202
    status, _ = await server.call("POST", "/v1/runs/r/cancel")
    assert status == 202
    assert (await ended(server, "r"))["status"]["reason"] == "ClientInterrupted"
    status, body = await server.call("POST", "/v1/runs/r/cancel", json={"reason": "Whim"})
    assert status == 422
    assert await server.call("DELETE", "/v1/runs/r") == (200, {"deleted": "r"})
    status, _ = await server.call("DELETE", "/v1/runs/r")
    assert status == 404


async def test_a_run_says_when_each_rank_last_printed_and_a_deleted_one_leaves_no_log(
    server: Server,
) -> None:
    await server.call("POST", "/v1/runs", json=job("talks", "script", "say:hello", "exit:0"))
    run = await ended(server, "talks")
    assert run["status"]["ranks"][0]["lastOutputAt"] == pytest.approx(
        run["status"]["endedAt"], abs=DEADLINE_S
    )
    uid = run["metadata"]["uid"]
    assert await server.service.logs.last_output_at(uid)
    await server.call("DELETE", "/v1/runs/talks")
    assert await server.service.logs.last_output_at(uid) == {}


async def test_names_with_teeth_stay_names(server: Server) -> None:
    for name in ("..%2F..%2Fetc", "a%20b", "%00", "%C3%9Cn%C3%AF"):
        status, body = await server.call("GET", f"/v1/runs/{name}")
        assert (status, body["error"]["reason"]) == (404, "NotFound")
    for name in ("../x", "a b", "Ünï", "x" * 300):
        status, _ = await server.call("POST", "/v1/runs", json=job(name, "true"))
        assert status == 422


async def test_lists_are_selected_by_labels(server: Server) -> None:
    asked = job("a", "script", "exit:0", nodes=2)
    asked["metadata"]["labels"] = {"team": "x"}
    await server.call("POST", "/v1/runs", json=asked)
    await ended(server, "a")
    await server.call("POST", "/v1/runs", json=job("b", "script", "exit:0"))
    await ended(server, "b")
    for selector, names in (
        ("team=x", ["a"]),
        ("team!=x", ["b"]),
        ("nodus.dev/job=b", ["b"]),
        ("", ["a", "b"]),
    ):
        _, body = await server.call("GET", "/v1/runs", params={"labelSelector": selector})
        assert [run["metadata"]["name"] for run in body["runs"]] == names
    _, body = await server.call(
        "GET", "/v1/attempts", params={"labelSelector": "nodus.dev/job=a,nodus.dev/rank=1"}
    )
    assert [(a["run"], a["rank"]) for a in body["attempts"]] == [("a", 1)]
    _, body = await server.call("GET", "/v1/machines", params={"labelSelector": "region!=here"})
    assert body["machines"] == []
    _, body = await server.call("GET", "/v1/events", params={"labelSelector": "nodus.dev/rank=1"})
    assert {event["rank"] for event in body["events"]} == {1}
    status, _ = await server.call("GET", "/v1/runs", params={"labelSelector": "what?"})
    assert status == 422


async def test_machines_are_added_up_to_a_count(server: Server) -> None:
    _, body = await server.call("POST", "/v1/machines", json={"count": 3})
    assert len(body["machines"]) == 3
    _, body = await server.call("POST", "/v1/machines", json={"count": 1})
    assert len(body["machines"]) == 3
    for count in (0, 65, "3", True, None):
        status, _ = await server.call("POST", "/v1/machines", json={"count": count})
        assert status == 422


async def test_a_restarting_coordinator_is_waited_for_and_then_said(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.service.outage = True
    call = asyncio.create_task(server.call("GET", "/v1/runs"))
    await until(lambda: "list_runs" in server.service.calls)
    server.service.outage = False
    assert await call == (200, {"runs": []})

    monkeypatch.setattr("coordinator.api.retry.ask.__kwdefaults__", {"limit_s": 0.2})
    server.service.outage = True
    async with server.http.get(server.url + "/v1/runs") as response:
        body = await response.json()
    assert (response.status, response.headers["Retry-After"]) == (503, "2")
    assert body["error"]["error"] == "TransportError"


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_fault_of_ours_is_an_answer_without_a_traceback(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(labels: Any) -> Any:
        raise KeyError("oops")

    monkeypatch.setattr(server.service, "list_runs", broken)
    status, body = await server.call("GET", "/v1/runs")
    assert (status, body["error"]["reason"]) == (500, "InternalError")
    assert "oops" not in json.dumps(body)
    assert body["requestId"] in caplog.text
    assert "KeyError" in caplog.text


async def lines_of(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await response.read()).splitlines() if line]


async def test_logs_come_as_ndjson_and_go_on_behind_a_cursor(server: Server) -> None:
    await server.call("POST", "/v1/runs", json=job("r", "script", *(f"say:{n}" for n in range(10)), nodes=2))
    run = await ended(server, "r")
    path = f"{server.url}/v1/runs/r/logs"
    async with server.http.get(path, params={"follow": "true"}) as response:
        everything = await lines_of(response)
        assert response.headers["X-Run-Uid"] == run["metadata"]["uid"]
        assert response.content_type == "application/x-ndjson"
    assert len(everything) == 20
    for line in everything:
        TypeAdapter(resources.LogLine).validate_python(line)
    async with server.http.get(path, params={"cursor": everything[4]["cursor"], "tail": "1"}) as response:
        assert await lines_of(response) == everything[5:]
    async with server.http.get(path, params={"rank": "1", "tail": "3"}) as response:
        assert [(line["rank"], line["text"]) for line in await lines_of(response)] == [
            (1, "7"),
            (1, "8"),
            (1, "9"),
        ]
    status, body = await server.call("GET", "/v1/runs/r/logs?cursor=nonsense")
    assert (status, body["error"]["error"]) == (422, "SpecError")
    status, body = await server.call("GET", "/v1/runs/r/logs?rank=2")
    assert (status, "ranks are 0 to 1" in body["error"]["message"]) == (404, True)
    status, body = await server.call("GET", "/v1/runs/r/logs?uid=other")
    assert (status, "has been deleted" in body["error"]["message"]) == (404, True)


async def test_logs_come_as_server_sent_events_with_their_cursor_as_id(server: Server) -> None:
    await server.call("POST", "/v1/runs", json=job("r", "script", "say:a", "say:b"))
    await ended(server, "r")
    headers = {"Accept": "text/event-stream"}
    async with server.http.get(server.url + "/v1/runs/r/logs?follow=true", headers=headers) as response:
        text = (await response.read()).decode()
    assert text.startswith("retry: ")
    assert [line for line in text.splitlines() if line.startswith("id: ")] == ["id: 1", "id: 2"]
    assert text.endswith("event: end\ndata: {}\n\n")
    headers["Last-Event-ID"] = "1"
    async with server.http.get(server.url + "/v1/runs/r/logs?follow=true", headers=headers) as response:
        assert "id: 1" not in (await response.read()).decode().splitlines()


async def test_raw_logs_are_the_bytes(server: Server) -> None:
    await server.call("POST", "/v1/runs", json=job("r", "script", "say:x", "err:y"))
    await ended(server, "r")
    async with server.http.get(server.url + "/v1/runs/r/logs/raw?rank=0") as response:
        assert await response.read() == b"x\ny\n"
    status, _ = await server.call("GET", "/v1/runs/r/logs/raw?rank=0&epoch=9")
    assert status == 404
    status, _ = await server.call("GET", "/v1/runs/r/logs/raw")
    assert status == 422


async def test_events_stream_resumes_behind_the_last_id(server: Server) -> None:
    await server.call("POST", "/v1/runs", json=job("r", "script", "exit:0"))
    await ended(server, "r")
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "2"}
    async with server.http.get(server.url + "/v1/events?run=r", headers=headers) as response:
        seen: list[int] = []
        async for raw in response.content:
            if raw.startswith(b"data: "):
                seen.append(json.loads(raw[6:])["seq"])
            if len(seen) == 3:
                break
    assert seen == [3, 4, 5]
    headers["Last-Event-ID"] = "x"
    status, _ = await server.call("GET", "/v1/events", headers=headers)
    assert status == 422


async def test_a_quiet_stream_has_a_heartbeat(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streams.stream.__kwdefaults__, "heartbeat_s", 0.05)
    await server.call("POST", "/v1/runs", json=job("r", "script", "hang"))
    async with server.http.get(server.url + "/v1/runs/r/logs?follow=true") as response:
        async with asyncio.timeout(DEADLINE_S):
            assert await response.content.readline() == b"\n"
            assert await response.content.readline() == b"\n"
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "999999"}
    async with server.http.get(server.url + "/v1/events", headers=headers) as response:
        async with asyncio.timeout(DEADLINE_S):
            while b": still here" not in await response.content.readline():
                pass


async def test_a_stopping_server_cuts_its_streams_and_does_not_hang(server: Server) -> None:
    await server.call("POST", "/v1/runs", json=job("r", "script", "say:x", "hang"))
    async with server.http.get(server.url + "/v1/runs/r/logs?follow=true") as logs:
        assert json.loads(await logs.content.readline())["text"] == "x"
        async with asyncio.timeout(DEADLINE_S):
            await server.runner.cleanup()
            with pytest.raises(aiohttp.ClientPayloadError):
                await logs.read()


async def test_a_reader_that_stops_reading_slows_its_own_stream_only(server: Server) -> None:
    await server.call("POST", "/v1/runs", json=job("flood", "script", "flood:20000"))
    path = f"{server.url}/v1/runs/flood/logs?follow=true"
    async with server.http.get(path) as stuck, server.http.get(path) as reading:
        async with asyncio.timeout(DEADLINE_S * 2):
            count = 0
            async for _ in reading.content:
                count += 1
        assert count == 20_000
        assert await stuck.content.readline()
        assert (await server.call("GET", "/v1/version"))[0] == 200


async def test_a_client_that_goes_away_leaves_no_task_behind(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(streams.stream.__kwdefaults__, "heartbeat_s", 0.05)
    await server.call("POST", "/v1/runs", json=job("r", "script", "say:x", "hang"))
    before = len(asyncio.all_tasks())
    async with server.http.get(server.url + "/v1/runs/r/logs?follow=true") as response:
        await response.content.readline()
        assert len(asyncio.all_tasks()) > before
        response.close()
    await until(lambda: len(asyncio.all_tasks()) <= before)


def test_the_document_names_every_route_and_every_route_is_in_the_document() -> None:
    service = FakeService.__new__(FakeService)
    app = make_app(service, None, token="t", deployment_facts=DeploymentFacts(machines=1))  # type: ignore[arg-type]
    served = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method.upper(), path) for path, item in document()["paths"].items() for method in item}
    assert served == described
    assert len(ENDPOINTS) == len(described)


def test_the_document_is_openapi_with_resolvable_references() -> None:
    text = json.dumps(document())
    assert document()["openapi"].startswith("3.1")
    schemas = document()["components"]["schemas"]
    for part in text.split('"$ref": "')[1:]:
        reference = part.split('"', 1)[0]
        assert reference.rpartition("/")[2] in schemas, reference
    assert schemas["LogLine"]["properties"]["cursor"]["description"].startswith("Opaque")
    assert "command" in json.dumps(schemas["JobSpec"])


async def test_every_answer_is_as_the_document_says(server: Server) -> None:
    """The declared type of each endpoint's JSON answer takes what the endpoint really answers."""
    await server.call("POST", "/v1/runs", json=job("r", "script", "exit:0"))
    await ended(server, "r")
    checked = 0
    for endpoint in ENDPOINTS:
        shapes = [a.shape for a in endpoint.answers if "application/json" in a.media]
        if endpoint.method != "GET" or not shapes:
            continue
        status, body = await server.call("GET", endpoint.path.format(name="r"))
        if endpoint in (
            *routes_mesh.ENDPOINTS,
            *routes_relays.ENDPOINTS,
        ):  # net/test_mesh_relays.py has a mesh port
            assert (status, "no mesh port" in body["error"]["message"]) == (HTTPStatus.CONFLICT, True)
            assert HTTPStatus.CONFLICT in endpoint.errors
            continue
        assert TypeAdapter(shapes[0]).validate_python(body) == body, endpoint.path
        checked += 1
    assert checked >= 7
