"""A Ray of its own with one MemberNode after the other, each driven through a life. Prints the results as JSON.

python tests/integration/member_ray_driver.py FOLDER CASE...        CASE: exit | kill-launcher | kill-member
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from agents import process_tree
from agents.node import MemberNode
from coordinator.logs.sink import LogSink
from coordinator.logs.store import LogStore
from coordinator.store_actor import StoreServer
from mesh.ids import Epoch, Incarnation, MachineName, Rank, RunName, new_run_uid, new_token
from mesh.messages import FenceOrder, JoinOrder, MemberReport
from mesh.plan import Endpoint, RunPlan
from mesh.store.client import StoreClient
from tests.integration.small_ray import connect, small_ray

LIMIT_S = 90.0


class Coordinator:
    """Takes every report, as the real one does."""

    def __init__(self) -> None:
        self._reports: list[MemberReport] = []

    async def report(self, report: MemberReport) -> bool:
        self._reports.append(report)
        return True

    async def reports(self) -> list[MemberReport]:
        return self._reports


class Play:
    """The store and the sink in this process, the coordinator and the member in Ray's."""

    def __init__(self, folder: Path, coordinator: Any) -> None:
        self.folder = folder
        self.coordinator = coordinator
        self.me = Incarnation(run_uid=new_run_uid(), epoch=Epoch(1), rank=Rank(0), token=new_token())

    async def start(self, *command: str) -> None:
        self.logs = LogStore(self.folder / "logs")
        self.sink = LogSink(self.logs, secret="l", host="127.0.0.1")
        self.server = StoreServer(host="127.0.0.1", port=0, admin_secret="a", member_secret="m")
        address = await self.server.start()
        admin = await StoreClient.connect(Endpoint(host="127.0.0.1", port=address.port, secret="a"))
        await admin.set_floor(self.me.run_uid, self.me.epoch, 1)
        await admin.close()
        config = {
            "machine": "m0",
            "machines_dir": str(self.folder / "machines"),
            "environment": dict(os.environ),
            "address": "127.0.0.1",
        }
        self.member: Any = MemberNode.remote(config)
        order = JoinOrder(
            incarnation=self.me,
            plan=RunPlan(name=RunName("job"), command=command),
            machine=MachineName("m0"),
            store=Endpoint(host="127.0.0.1", port=address.port, secret="m"),
            logs=await self.sink.start(),
            lease_ttl_s=5.0,
        )
        await self.member.join.remote(order)

    async def wait_for(self, kind: str) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_S):
            while True:
                for report in await self.coordinator.reports.remote():
                    if report.incarnation == self.me and type(report).__name__ == kind:
                        return asdict(report)
                await asyncio.sleep(0.02)

    async def wait_until_empty(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while process_tree.find(str(self.me)):
                await asyncio.sleep(0.02)

    async def fence_and_leave(self) -> dict[str, Any]:
        await self.member.fence.remote(FenceOrder(incarnation=self.me, grace_s=5.0))
        fenced = await self.wait_for("MemberFenced")
        await self.member.leave.remote()
        return fenced

    async def stop(self) -> None:
        ray.kill(self.member)
        await self.server.stop("done")
        await self.sink.stop()
        self.logs.close()


async def play(folder: Path, coordinator: Any, case: str) -> dict[str, Any]:
    stage = Play(folder, coordinator)
    try:
        if case == "exit":
            await stage.start("sh", "-c", "env; exit 3")
            exited = await stage.wait_for("MemberExited")
            fenced = await stage.fence_and_leave()
            logged = b"".join(p.read_bytes() for p in sorted((folder / "logs").rglob("*.seg")))
            return {
                "exited": exited,
                "fenced": fenced,
                "logged": logged.decode(errors="replace"),
            }
        await stage.start("bash", "-c", "setsid sleep 600 & sleep 600")
        started = await stage.wait_for("MemberStarted")
        supervisor = process_tree.read_process(started["pid"])
        assert supervisor is not None
        if case == "kill-launcher":
            above = process_tree.read_process(supervisor.parent)
            assert above is not None
            os.kill(above.parent, signal.SIGKILL)
            exited = await stage.wait_for("MemberExited")
            await stage.wait_until_empty()
            return {"exited": exited, "fenced": await stage.fence_and_leave()}
        ray.kill(stage.member)
        await stage.wait_until_empty()
        return {}
    finally:
        await stage.stop()


async def main(folder: Path, cases: list[str]) -> None:
    async with small_ray(folder, cpus=2) as address:
        connect(address)
        try:
            coordinator = ray.remote(num_cpus=0)(Coordinator).options(name="coordinator").remote()
            results = {case: await play(folder / case, coordinator, case) for case in cases}
        finally:
            ray.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
