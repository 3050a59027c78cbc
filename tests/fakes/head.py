"""A head process with a `FakeService` behind the real API: `python -m tests.fakes.head serve …`, as the real one.

$FAKE_HEAD makes it misbehave: `refuse` (tells an error and ends), `crash` (ends without a word), `slow` (waits for the
file `go` in the state folder before it is ready); `open` makes it say that machines join it, and that it has no
checkpoint store. A file `outage` in the state folder makes the coordinator unreachable
for as long as it is there; machines that are named in a file `apart` are reached by nobody. SIGUSR1 cuts every open
connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from coordinator.api.app import make_app
from mesh.deployment import LOCK_NAME, DeploymentRecord, process_started, write_record
from mesh.errors import DeploymentError
from mesh.reasons import Reason
from mesh.spec import DeploymentFacts
from tests.fakes.service import FakeService

LOOK_S = 0.02


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--machines", type=int, required=True)
    parser.add_argument("--gpu")
    parser.add_argument("--api", default="127.0.0.1:0")
    parser.add_argument("--db")
    parser.add_argument("--allow-chaos", action="store_true")
    parser.add_argument("--ready-fd", type=int)
    return parser.parse_args(arguments)


async def serve(options: argparse.Namespace) -> int:
    def tell(news: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(options.ready_fd, (json.dumps(news) + "\n").encode())

    lock = (options.state / LOCK_NAME).open("w", encoding="utf-8")  # for life, as the real one
    lock.write(str(os.getpid()))
    lock.flush()

    tell({"stage": "starting the fake"})
    misbehaviour = os.environ.get("FAKE_HEAD", "")
    if misbehaviour == "crash":
        print("the fake crashes now", flush=True)
        return 7
    if misbehaviour == "refuse":
        error = DeploymentError("Port 7788 is taken by process 12.", hint="--api.", reason=Reason.PORT_TAKEN)
        tell({"error": error.to_wire()})
        return 1
    while misbehaviour == "slow" and not (options.state / "go").exists():
        await asyncio.sleep(LOOK_S)
    kind, _, count = (options.gpu or "").partition(":")
    service = FakeService(machines=options.machines, gpu_type=kind or None, gpu_count=int(count or 0))
    started_with = {"--allow-chaos": ""} if options.allow_chaos else {}
    is_open = misbehaviour == "open"
    if is_open:
        started_with = {"--listen": "0.0.0.0:8471", **started_with}
        service.allows_chaos = options.allow_chaos
        service.details = {
            "chaos": options.allow_chaos,
            "checkpoints": None,
            "state": str(options.state),
            "startedWith": started_with,
        }
    app = make_app(
        service,
        service.logs,
        token="s3cret",
        deployment_facts=DeploymentFacts(machines=options.machines),
        grow=service.grow,
    )
    runner = web.AppRunner(app, shutdown_timeout=2.0)
    await runner.setup()
    host, _, port = options.api.partition(":")
    site = web.TCPSite(runner, host, int(port))
    await site.start()
    address = runner.addresses[0]
    record = DeploymentRecord(
        version="fake",
        url=f"http://{address[0]}:{address[1]}",
        token="s3cret",
        pid=os.getpid(),
        pid_started=process_started(os.getpid()) or 0.0,
        local=not is_open,
        machines=options.machines,
        mesh_port=8471 if is_open else 0,
        started_with=started_with,
    )
    write_record(options.state, record)
    with (options.state / "starts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, cut_connections, runner)
    tell({"ready": True, "url": record.url})
    os.close(options.ready_fd)
    while not stop.is_set():
        service.outage = (options.state / "outage").exists()
        apart = options.state / "apart"
        service.apart = set(apart.read_text().split()) if apart.exists() else set()
        await asyncio.sleep(LOOK_S)
    await runner.cleanup()
    await service.stop()
    (options.state / "deployment.json").unlink()
    return 0


def cut_connections(runner: web.AppRunner) -> None:
    server = runner.server
    assert server is not None
    print("the fake cut its connections", flush=True)
    for connection in list(server.connections):
        if connection.transport is not None:
            connection.transport.abort()


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(parse(sys.argv[1:]))))
