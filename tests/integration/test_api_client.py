"""The client against the real API: what it raises, and that its streams come back without a gap or a repeat."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import mesh
from coordinator.api.app import make_app
from mesh import http_transport
from mesh.deployment import read_record, write_record
from mesh.errors import (
    AuthenticationError,
    ConflictError,
    DeploymentError,
    LocalProtocolError,
    MeshTimeoutError,
    NotFoundError,
    RemoteProtocolError,
    SpecError,
    TransportError,
)
from mesh.reasons import Reason
from mesh.spec import DeploymentFacts
from tests.fakes.service import FakeService

TOKEN = "s3cret"
DEADLINE_S = 30.0


class Server:
    """A real API over a fake coordinator that can be stopped and started again on the same port."""

    def __init__(self) -> None:
        self.service = FakeService()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = make_app(
            self.service,
            self.service.logs,
            token=TOKEN,
            deployment_facts=DeploymentFacts(machines=2),
            grow=self.service.grow,
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    def cut_connections(self) -> int:
        """Every connection breaks, in the middle of whatever it carries."""
        assert self._runner is not None and self._runner.server is not None
        connections = list(self._runner.server.connections)
        for connection in connections:
            if connection.transport is not None:
                connection.transport.abort()
        return len(connections)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    await made.stop()
    await made.service.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[mesh.MeshClient]:
    async with mesh.connect(server.url, TOKEN) as made:
        yield made


def job(name: str, *command: str, nodes: int | None = None) -> dict[str, Any]:
    distributed = {"nodes": nodes} if nodes else {}
    return {"metadata": {"name": name}, "spec": {"command": list(command), "distributed": distributed}}


async def test_a_whole_life_through_the_client(client: mesh.MeshClient) -> None:
    answer = await client.submit(job("r", "script", "say:hello", "exit:3", nodes=2))
    assert answer["run"]["metadata"]["name"] == "r"
    run = await client.wait("r")
    assert run["status"]["exitCode"] == 3
    lines = [line async for line in client.follow_logs("r")]
    assert sorted((line["rank"], line["text"]) for line in lines) == [(0, "hello"), (1, "hello")]
    assert [a["rank"] for a in await client.list_attempts("nodus.dev/job=r")] == [0, 1]
    assert [r["metadata"]["name"] for r in await client.list_runs()] == ["r"]
    assert b"".join([chunk async for chunk in client.raw_log("r", rank=0)]) == b"hello\n"
    assert (await client.list_events(run="r"))[0]["kind"] == "Submitted"
    assert len(await client.list_machines()) == 2
    assert (await client.status())["state"] == "Ready"
    assert (await client.version())["api"] == "nodus.dev/v1"
    assert "paths" in await client.openapi()
    await client.delete("r")
    assert await client.list_runs() == []


async def test_errors_are_the_classes_of_the_tree_with_their_facts(client: mesh.MeshClient) -> None:
    await client.submit(job("r", "script", "hang"))
    with pytest.raises(ConflictError) as conflict:
        await client.submit(job("r", "script", "hang"))
    assert conflict.value.reason is Reason.ALREADY_EXISTS
    with pytest.raises(NotFoundError):
        await client.get_run("nobody")
    with pytest.raises(NotFoundError):
        _ = [line async for line in client.follow_logs("nobody")]
    with pytest.raises(SpecError, match="nodes"):
        await client.submit(job("x", "true", nodes=9))
    with pytest.raises(SpecError):
        await client.dry_run({"spec": {}})
    with pytest.raises(ConflictError):
        await client.delete("r")


async def test_a_wrong_token_is_an_authentication_error(server: Server) -> None:
    async with mesh.connect(server.url, "wrong") as client:
        with pytest.raises(AuthenticationError, match="not the one of this deployment"):
            await client.list_runs()


async def test_something_else_that_answers_is_told_apart(tmp_path: Path) -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>")

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with mesh.connect("http://{}:{}".format(*runner.addresses[0][:2]), TOKEN) as client:
        with pytest.raises(RemoteProtocolError, match="no gangmesh API"):
            await client.list_runs()
    await runner.cleanup()


async def test_a_server_that_is_out_of_reach_is_waited_for_a_bounded_time(server: Server) -> None:
    async with mesh.connect(server.url, TOKEN) as client:
        await client.version()
        await server.stop()
        call = asyncio.create_task(client.list_runs())
        await asyncio.wait({call}, timeout=0.2)
        assert not call.done()
        await server.start()
        assert await call == []
        await server.stop()
        with pytest.raises(TransportError, match="cannot be reached"):
            await client._http.call("GET", "/v1/runs", repeat_s=0.2)


async def test_a_host_that_takes_no_connection_has_been_asked_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its machine is cut off, say. Seen in the lab, where it was called a request that may have taken effect."""
    monkeypatch.setattr(http_transport, "CONNECT_LIMIT_S", 0.2)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # the queue of a server that accepts nobody; then the kernel drops who knocks
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        async with mesh.connect(url=url, token="t") as client:
            with pytest.raises(TransportError, match="cannot be reached"):
                await client.version()


async def test_an_encrypted_api_that_is_closed_is_told_in_words_and_not_by_an_object_of_ours() -> None:
    """Seen by a newcomer: "ssl:<ssl.SSLContext object at …>"."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{closed.getsockname()[1]}"
        http = http_transport.HttpTransport(
            url=url, token="t", fate=lambda: None, tls=ssl.create_default_context()
        )
        await http.open()
        with pytest.raises(TransportError, match="cannot be reached") as raised:
            await http.call("GET", "/v1/runs", repeat_s=0.0)
        await http.close()
    assert "object at" not in str(raised.value)


async def test_a_repeated_submit_is_one_run(client: mesh.MeshClient, server: Server) -> None:
    unnamed = {"spec": {"command": ["script", "hang"]}}
    first = await client.submit(unnamed, request_id="k")
    again = await client.submit(unnamed, request_id="k")
    assert again["run"]["metadata"]["uid"] == first["run"]["metadata"]["uid"]
    assert len(await client.list_runs()) == 1


async def test_waiting_has_a_limit_and_ends_early_when_the_run_does(client: mesh.MeshClient) -> None:
    await client.submit(job("hangs", "script", "hang"))
    assert (await client.wait("hangs", "running"))["status"]["state"] == "Running"
    with pytest.raises(MeshTimeoutError, match="not ended after"):
        await client.wait("hangs", timeout_s=0.1)
    await client.submit(job("fails", "script", "exit:1"))
    await client.wait("fails")
    assert (await client.wait("fails", "running"))["status"]["state"] == "Failed"
    await client.cancel("hangs")
    assert (await client.wait("hangs"))["status"]["state"] == "Cancelled"


async def test_followed_logs_survive_cut_connections_and_a_restarted_server(
    client: mesh.MeshClient, server: Server
) -> None:
    steps = [step for n in range(60) for step in (f"say:{n}", "sleep:0.01")]
    await client.submit(job("r", "script", *steps, nodes=2))
    seen: list[tuple[int, str]] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in client.follow_logs("r"):
            seen.append((line["rank"], line["text"]))
            if len(seen) in (7, 30):
                assert server.cut_connections() > 0
            if len(seen) == 50:
                await server.stop()
                await server.start()
    for rank in (0, 1):
        assert [text for of, text in seen if of == rank] == [str(n) for n in range(60)]


async def test_watched_events_survive_cuts_too(client: mesh.MeshClient, server: Server) -> None:
    seen: list[int] = []
    await client.submit(job("r", "script", "sleep:0.2", "exit:0", nodes=4))
    async with asyncio.timeout(DEADLINE_S):
        async for event in client.watch_events(run="r"):
            seen.append(event["seq"])
            if len(seen) == 2:
                server.cut_connections()
            if event["kind"] == "Succeeded":
                break
    assert seen == [event["seq"] for event in await client.list_events(run="r")]


async def test_a_watched_run_is_seen_to_its_end_across_an_outage(
    client: mesh.MeshClient, server: Server
) -> None:
    await client.submit(job("r", "script", "sleep:0.3", "exit:7"))
    states: list[str] = []
    kinds: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for run, events in client.watch_run("r"):
            states.append(run["status"]["state"])
            kinds += [event["kind"] for event in events]
            if len(states) == 1:
                server.service.outage = True
                asyncio.get_running_loop().call_later(0.5, setattr, server.service, "outage", False)
    assert states[-1] == "Failed"
    assert kinds == [event["kind"] for event in await client.list_events(run="r")]


async def test_what_happens_between_the_two_questions_of_a_watch_is_seen(
    client: mesh.MeshClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's last events came after its events were read, and before its state was."""
    await client.submit(job("r", "script", "exit:7"))
    async with asyncio.timeout(DEADLINE_S):
        async for _ in client.watch_run("r"):
            pass
    story = await client.list_events(run="r")
    ask, calls = client.events, iter([story[:1]])

    async def early(**what: Any) -> Any:
        return next(calls, None) or await ask(**what)

    monkeypatch.setattr(client, "events", early)
    seen = [event["seq"] async for _, events in client.watch_run("r") for event in events]
    assert seen == [event["seq"] for event in story]


async def test_a_run_deleted_and_made_again_under_a_reader_is_said(
    client: mesh.MeshClient, server: Server
) -> None:
    await client.submit(job("r", "script", "say:x", "hang"))
    with pytest.raises(NotFoundError):
        async with asyncio.timeout(DEADLINE_S):
            async for _ in client.follow_logs("r"):
                server.cut_connections()
                await client.cancel("r")
                await client.wait("r")
                await client.delete("r")
                await client.submit(job("r", "script", "say:other"))


async def test_a_client_is_not_used_before_it_is_open(server: Server) -> None:
    with pytest.raises(LocalProtocolError, match="not open"):
        await mesh.connect(server.url, TOKEN).list_runs()


def test_without_a_deployment_it_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GANGMESH_URL", raising=False)
    with pytest.raises(DeploymentError, match="No deployment is running") as caught:
        mesh.connect(state=tmp_path)
    assert "mesh up" in caught.value.hint
    monkeypatch.delenv("GANGMESH_TOKEN", raising=False)
    monkeypatch.setenv("GANGMESH_STATE", str(tmp_path))
    with pytest.raises(AuthenticationError, match="no token"):
        mesh.connect("http://127.0.0.1:1")


async def test_a_killed_deployment_is_not_waited_for(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    head = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.head", "serve", "--state", str(tmp_path)),
        *("--machines", "1", "--ready-fd", str(writing)),
        pass_fds=(writing,),
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as news:
        await asyncio.to_thread(news.read)
    record = read_record(tmp_path)
    assert record is not None and record.is_alive
    async with mesh.connect(state=tmp_path) as client:
        assert client.is_local
        await client.submit(job("r", "script", "say:x", "hang"))
        with pytest.raises(DeploymentError, match="has ended"):
            async with asyncio.timeout(DEADLINE_S):
                async for _ in client.follow_logs("r"):
                    head.send_signal(signal.SIGKILL)
                    await head.wait()
        with pytest.raises(DeploymentError, match="has ended"):
            await client.list_runs()
    with pytest.raises(DeploymentError, match="was killed"):
        mesh.connect(state=tmp_path)
    # another process has the pid now: its start time tells
    write_record(tmp_path, replace(record, pid=os.getpid()))
    with pytest.raises(DeploymentError, match="No deployment is running"):
        mesh.connect(state=tmp_path)
