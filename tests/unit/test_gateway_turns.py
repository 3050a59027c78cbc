"""Who waits for whom at a gateway's control socket: a probe waits for machines that may not answer, nobody for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agents.gateway import GatewayProcess
from agents.gateway_keeper import GatewayKeeper, GatewayPlan
from agents.gateway_wire import Counters, Probe, Request
from mesh.ids import MachineName
from mesh.wire import FrameParser, encode_frame

LIMIT_S = 10.0
PROBE = Probe(machine=MachineName("machine-1"), addresses=(("192.0.2.1", 8471),))


async def test_a_probe_holds_up_no_other_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = GatewayProcess(
        folder=tmp_path, deployment="d", machine="head", overlay=("198.18.0.0/15",), redirects=False
    )
    answers, is_asked = asyncio.Event(), asyncio.Event()

    async def probe(machine: MachineName, addresses: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        is_asked.set()
        await answers.wait()
        return list(addresses)

    monkeypatch.setattr(process.gateway, "probe", probe)
    probing = asyncio.create_task(process.perform(PROBE))
    async with asyncio.timeout(LIMIT_S):
        await is_asked.wait()
        await process.perform(Counters())
        assert not probing.done()
        answers.set()
        assert await probing == [["192.0.2.1", 8471]]
    await process.gateway.stop()


async def test_what_is_asked_aside_holds_up_nothing_that_is_told(tmp_path: Path) -> None:
    plan = GatewayPlan(
        folder=tmp_path,
        deployment="d",
        machine="head",
        listen=(),
        closed=(1, 2),
        environment={},
        log=tmp_path / "log",
    )
    keeper = GatewayKeeper(plan)
    may_answer, asked = asyncio.Event(), asyncio.Queue[str](maxsize=10)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser()
        while data := await reader.read(65536):
            for words in parser.feed(data):
                asked.put_nowait(words["do"])
                if words["do"] == "Probe":
                    await may_answer.wait()
                writer.write(encode_frame({"id": words["id"], "ok": words["do"]}))
        writer.close()

    server = await asyncio.start_unix_server(serve, plan.socket)
    asking: list[asyncio.Task[Any]] = []

    def ask(request: Request) -> None:
        asking.append(asyncio.create_task(keeper.ask_aside(request)))

    async with server, asyncio.timeout(LIMIT_S):
        ask(PROBE)  # before the gateway is up: it waits, and is not refused
        await asyncio.sleep(0)
        keeper._is_up.set()
        ask(PROBE)
        assert [await asked.get(), await asked.get()] == ["Probe", "Probe"]
        ask(Counters())
        assert await asking[2] == "Counters"
        may_answer.set()
        assert await asyncio.gather(*asking) == ["Probe", "Probe", "Counters"]
