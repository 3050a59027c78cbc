"""Members as they are, without Ray: store, keeper, supervisor, torchrun with gloo; only the head is played."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agents import process_tree
from agents.launcher.base import read_tail
from agents.launcher.launcher import Launcher
from agents.member import Member, MemberConfig
from agents.preparation import Folders
from coordinator.logs.sink import LogSink
from coordinator.logs.store import LogStore
from coordinator.store_actor import StoreServer
from mesh.ids import Epoch, Incarnation, MachineName, Rank, RunName, RunUid, new_run_uid, new_token
from mesh.messages import (
    FenceOrder,
    JoinOrder,
    MemberArrived,
    MemberExited,
    MemberFenced,
    MemberPreparationFailed,
    MemberRegistered,
    MemberReport,
    MemberStarted,
    ProcessExit,
)
from mesh.plan import Endpoint, RunPlan
from mesh.reasons import Reason
from mesh.states import LauncherKind
from mesh.store import messages as ms
from mesh.store.client import StoreClient

LIMIT_S = 60.0
ADDRESSES = ("127.0.0.12", "127.0.0.3")
"""Not in the order of their text: rank 0 must be rank 0 all the same."""

OK = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(8)
dist.all_reduce(x)
print(f"ok world={int(x[0])} node={os.environ['NODUS_NODE_RANK']} rank={dist.get_rank()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


class Head:
    """The parts of the head that a member talks to: the store and the log sink, both real."""

    def __init__(self, folder: Path) -> None:
        self._logs = LogStore(folder / "logs")
        self._sink = LogSink(self._logs, secret="logs", host="127.0.0.1")
        self._server: StoreServer | None = None
        self.store = Endpoint(host="127.0.0.1", port=0, secret="member")

    async def start(self) -> None:
        self.logs = await self._sink.start()
        await self.start_store()

    async def start_store(self) -> None:
        """Also again: a restarted store listens on the same port and knows nothing."""
        self._server = StoreServer(
            host="127.0.0.1", port=self.store.port, admin_secret="admin", member_secret="member"
        )
        address = await self._server.start()
        self.store = Endpoint(host="127.0.0.1", port=address.port, secret="member")

    async def stop_store(self) -> None:
        assert self._server is not None
        await self._server.stop("the test says so")

    async def set_floor(self, uid: RunUid, epoch: int, *, size: int) -> None:
        async with self._admin() as admin:
            await admin.set_floor(uid, Epoch(epoch), size)

    async def arrived(self, uid: RunUid) -> tuple[int, ...]:
        async with self._admin() as admin:
            barriers = (await admin.snapshot(uid)).barriers
        return tuple(rank for barrier in barriers for rank in barrier.arrived)

    async def leases(self, uid: RunUid) -> tuple[ms.LeaseView, ...]:
        async with self._admin() as admin:
            return (await admin.snapshot(uid)).leases

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[StoreClient]:
        client = await StoreClient.connect(replace(self.store, secret="admin"))
        try:
            yield client
        finally:
            await client.close()

    async def stop(self) -> None:
        await self.stop_store()
        await self._sink.stop()
        self._logs.close()


class Gang:
    """Members of one run in this process, and everything that they reported."""

    def __init__(self, head: Head, folder: Path, plan: RunPlan) -> None:
        self.head = head
        self.folder = folder
        self.plan = plan
        self.uid: RunUid = new_run_uid()
        self.members: list[Member] = []
        self.reports: list[MemberReport] = []
        self.refused_reports = 0
        self.incarnations = [
            Incarnation(run_uid=self.uid, epoch=Epoch(1), rank=Rank(rank), token=new_token())
            for rank in range(plan.nodes)
        ]
        for rank in range(plan.nodes):
            self.add(rank)

    def incarnation(self, rank: int) -> Incarnation:
        return self.incarnations[rank]

    async def join(self, *ranks: int) -> None:
        """Opens the epoch and orders these ranks to join, all when none is given."""
        await self.head.set_floor(self.uid, 1, size=self.plan.nodes)
        for rank in ranks or range(self.plan.nodes):
            await self.members[rank].join(self.order(rank))

    def add(self, rank: int) -> None:
        member = Member(
            MemberConfig(
                address=ADDRESSES[rank],
                machine_dir=self.folder / f"machine-{rank}",
                base_environment={**os.environ, "RAY_JOB_ID": "7", "OMP_NUM_THREADS": "1"},
            ),
            send_report=self.take,
            launcher=Launcher(),
            validate=True,
        )
        member.start()
        self.members.append(member)

    def order(self, rank: int) -> JoinOrder:
        return JoinOrder(
            incarnation=self.incarnations[rank],
            plan=self.plan,
            machine=MachineName(f"m{rank}"),
            store=self.head.store,
            logs=self.head.logs,
            lease_ttl_s=5.0,
        )

    async def take(self, report: MemberReport) -> bool:
        if self.refused_reports:
            self.refused_reports -= 1
            return False
        self.reports.append(report)
        return True

    def of(self, rank: int) -> list[MemberReport]:
        return [report for report in self.reports if report.incarnation.rank == rank]

    def kinds(self, rank: int) -> list[type[MemberReport]]:
        return [type(report) for report in self.of(rank)]

    async def last(self, rank: int, kind: type[MemberReport]) -> MemberReport:
        await until(lambda: kind in self.kinds(rank))
        return next(report for report in reversed(self.of(rank)) if type(report) is kind)

    async def wait_until_arrived(self, rank: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while rank not in await self.head.arrived(self.uid):
                await asyncio.sleep(0.01)

    async def exit(self, rank: int) -> MemberExited:
        report = await self.last(rank, MemberExited)
        assert isinstance(report, MemberExited)
        return report

    async def fenced(self, rank: int) -> MemberFenced:
        report = await self.last(rank, MemberFenced)
        assert isinstance(report, MemberFenced)
        return report

    async def fence(self, rank: int, *, grace_s: float = 30.0) -> None:
        await self.members[rank].fence(FenceOrder(incarnation=self.incarnation(rank), grace_s=grace_s))

    def output(self, rank: int) -> str:
        folders = Folders.of(self.incarnation(rank), machine_dir=self.folder / f"machine-{rank}")
        return read_tail(str(folders.spool))

    def tree(self, rank: int) -> dict[int, process_tree.Process]:
        return process_tree.find(str(self.incarnation(rank)))

    async def close(self) -> None:
        for member in self.members:
            await member.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Callable[..., Gang]]:
    head = Head(tmp_path)
    await head.start()
    gangs: list[Gang] = []

    def make(*command: str, nodes: int = 2, launcher: LauncherKind = LauncherKind.PLAIN) -> Gang:
        plan = RunPlan(name=RunName("job"), command=command, nodes=nodes, launcher=launcher)
        gangs.append(Gang(head, tmp_path, plan))
        return gangs[-1]

    yield make
    for each in gangs:
        await each.close()
    await head.stop()


async def test_two_plain_members_run_the_command_together_and_report_everything(
    gang: Callable[..., Gang],
) -> None:
    pair = gang("sh", "-c", 'echo "rank $RANK of $WORLD_SIZE"; exit $RANK')
    await pair.join()
    exits = [await pair.exit(rank) for rank in (0, 1)]
    assert [e.exit for e in exits] == [ProcessExit(code=0), ProcessExit(code=1)]
    for rank in (0, 1):
        assert pair.kinds(rank) == [MemberRegistered, MemberArrived, MemberStarted, MemberExited]
        assert pair.output(rank) == f"rank {rank} of 2\n"
        await pair.fence(rank)
        assert (await pair.fenced(rank)).exit == ProcessExit(code=rank)
        await pair.members[rank].leave()
    assert await pair.head.leases(pair.uid) == ()


async def test_the_command_gets_the_contract_and_nothing_of_ours_or_rays(gang: Callable[..., Gang]) -> None:
    one = gang("env", nodes=1)
    await one.join()
    await one.exit(0)
    env = dict(line.split("=", 1) for line in one.output(0).splitlines() if "=" in line)
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env["NODUS_INCARNATION"] == str(one.incarnation(0))
    assert env["NODUS_STATE_DIR"] == env["PWD"]
    assert not [name for name in env if name.startswith("RAY_")]
    assert env["PATH"] == os.environ["PATH"]


async def test_a_rank_waits_for_the_others_and_no_command_starts_before_all_are_there(
    gang: Callable[..., Gang],
) -> None:
    pair = gang("sh", "-c", "echo started")
    await pair.join(0)
    await pair.last(0, MemberArrived)
    await pair.wait_until_arrived(0)
    assert MemberStarted not in pair.kinds(0)
    assert pair.tree(0) == {}
    await pair.join(1)
    await pair.last(0, MemberStarted)
    await pair.last(1, MemberStarted)


async def test_a_member_waits_through_a_restart_of_the_store(gang: Callable[..., Gang]) -> None:
    pair = gang("true")
    await pair.join(0)
    await pair.wait_until_arrived(0)
    await pair.head.stop_store()
    await pair.head.start_store()
    await pair.join(1)
    for rank in (0, 1):
        assert (await pair.exit(rank)).exit.ok


async def test_a_fence_at_the_barrier_means_that_the_command_never_runs(gang: Callable[..., Gang]) -> None:
    pair = gang("sh", "-c", "echo started")
    await pair.join(0)
    await pair.wait_until_arrived(0)
    await pair.fence(0)
    assert (await pair.fenced(0)).exit is None
    await pair.join(1)
    await pair.last(1, MemberArrived)
    assert MemberStarted not in pair.kinds(0)


async def test_a_fence_stops_the_command_with_its_grace_period(gang: Callable[..., Gang]) -> None:
    one = gang(
        sys.executable,
        "-c",
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\ntime.sleep(600)",
        nodes=1,
    )
    await one.join()
    await one.last(0, MemberStarted)
    await until(lambda: "ready" in one.output(0))
    await one.fence(0)
    await one.fence(0)
    assert (await one.fenced(0)).exit == ProcessExit(code=5)
    assert one.tree(0) == {}
    assert MemberExited not in one.kinds(0)


async def test_a_killed_keeper_ends_the_command_and_is_reported(gang: Callable[..., Gang]) -> None:
    one = gang("bash", "-c", "setsid sleep 600 & sleep 600", nodes=1)
    await one.join()
    await one.last(0, MemberStarted)
    keeper = one.members[0].keeper_pid
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    fenced = await one.fenced(0)
    assert fenced.reason is Reason.LEASE_LOST
    assert fenced.exit == ProcessExit(signal=9)
    assert one.tree(0) == {}


async def test_a_newer_epoch_in_the_store_ends_the_command(gang: Callable[..., Gang]) -> None:
    one = gang("sleep", "600", nodes=1)
    await one.join()
    await one.last(0, MemberStarted)
    await one.head.set_floor(one.uid, 2, size=1)
    assert (await one.fenced(0)).reason is Reason.STALE_EPOCH
    assert one.tree(0) == {}


async def test_reports_are_repeated_until_the_coordinator_takes_them(gang: Callable[..., Gang]) -> None:
    one = gang("true", nodes=1)
    one.refused_reports = 4
    await one.join()
    assert (await one.exit(0)).exit.ok
    assert one.kinds(0) == [MemberRegistered, MemberArrived, MemberStarted, MemberExited]


async def test_a_machine_whose_folder_cannot_be_made_says_so(
    gang: Callable[..., Gang], tmp_path: Path
) -> None:
    (tmp_path / "machine-0").write_text("in the way")
    one = gang("true", nodes=1)
    await one.join()
    report = await one.last(0, MemberPreparationFailed)
    assert isinstance(report, MemberPreparationFailed)
    assert report.reason is Reason.STATE_NOT_WRITABLE


async def test_two_runs_on_one_host_get_two_rendezvous_ports(gang: Callable[..., Gang]) -> None:
    first, second = gang("sleep", "600", nodes=1), gang("sleep", "600", nodes=1)
    ports = []
    for run in (first, second):
        await run.join()
        report = await run.last(0, MemberStarted)
        assert isinstance(report, MemberStarted)
        ports.append(report.master_port)
    assert ports[0] != ports[1]


@pytest.mark.torch
@pytest.mark.parametrize("launcher", [LauncherKind.PLAIN, LauncherKind.TORCHRUN])
async def test_two_members_train_together_with_gloo(
    gang: Callable[..., Gang], launcher: LauncherKind, tmp_path: Path
) -> None:
    file = tmp_path / "ok.py"
    file.write_text(OK)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    command = [*(torchrun if launcher is LauncherKind.TORCHRUN else torchrun[:1]), str(file)]
    pair = gang(*command, launcher=launcher)
    await pair.join()
    for rank in (0, 1):
        ended = await pair.exit(rank)
        assert ended.exit.ok, (ended.evidence, ended.last_lines)
        assert f"ok world=2 node={rank} rank={rank}" in pair.output(rank)


@pytest.mark.torch
async def test_a_rank_that_leaves_early_makes_its_peer_blame_a_peer(
    gang: Callable[..., Gang], tmp_path: Path
) -> None:
    file = tmp_path / "early.py"
    file.write_text(
        OK.replace("x = torch.ones(8)", "x = torch.ones(8)\nif dist.get_rank() == 1: os._exit(0)")
    )
    pair = gang(sys.executable, "-m", "torch.distributed.run", str(file), launcher=LauncherKind.TORCHRUN)
    await pair.join()
    assert (await pair.exit(1)).exit.ok
    victim = await pair.exit(0)
    assert victim.exit == ProcessExit(code=1)
    assert victim.evidence.blames_peer, victim.evidence
    assert victim.evidence.global_rank == 0
