"""A store that is stopped, killed, or killed again, under real keepers, watched by the coordinator's real link.

On the store's own machine nobody is lost by it. Elsewhere members end themselves in time, as they must, and say that it
was the store; the store itself, back again, buries nobody.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agents import process_tree
from agents.core import events as ev
from agents.keeper_process import KeeperProcess
from coordinator.core.events import GangEvent, LeaseGone, LeaseLapsed
from coordinator.core.gang_state import Gang, MemberPhase, MemberRecord
from coordinator.store_link import StoreLink
from mesh.errors import RendezvousError, TransportError
from mesh.ids import Epoch, Incarnation, MachineName, Rank, RunName, new_run_uid, new_token
from mesh.messages import JoinOrder
from mesh.plan import Endpoint, RunPlan
from mesh.reasons import Reason
from mesh.states import RunState
from mesh.store.client import StoreClient
from mesh.store.local import local_name

LIMIT_S = 30.0
TTL_S, GUARD_S, HEARTBEAT_S = 1.0, 0.1, 0.2
OUTAGE_S = 4.0
"""Four leases long."""
STORE = Path(__file__).with_name("store_process.py")


class Scene:
    """A store's process, a coordinator's link (to this), and two ranks, each a keeper and a command."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uid = new_run_uid()
        self.heard: list[GangEvent] = []
        self.told: dict[Rank, list[ev.MemberEvent]] = {Rank(0): [], Rank(1): []}
        self.keepers: list[KeeperProcess] = []
        self.commands: list[subprocess.Popen[bytes]] = []
        self.store: subprocess.Popen[str] | None = None
        self.gang = self._gang()
        self.link = StoreLink(self.endpoint("admin"), lease_ttl_s=TTL_S, lease_guard_s=GUARD_S)
        self._short_way: socket.socket | None = None

    def endpoint(self, secret: str) -> Endpoint:
        return Endpoint(host="127.0.0.1", port=self.port, secret=secret)

    def _gang(self) -> Gang:
        members = {
            Rank(rank): MemberRecord(
                incarnation=Incarnation(run_uid=self.uid, epoch=Epoch(1), rank=Rank(rank), token=new_token()),
                machine=MachineName(f"m{rank}"), address="127.0.0.1", phase=MemberPhase.STARTED, ordered_at=0.0,
            )
            for rank in range(2)
        }  # fmt: skip
        return Gang(
            uid=self.uid, plan=RunPlan(name=RunName("r"), command=("true",), nodes=2), created_at=0.0,
            state=RunState.RUNNING, epoch=Epoch(1), members=members, barrier_open=True,
        )  # fmt: skip

    # ---- the coordinator --------------------------------------------------------------------------

    def post(self, uid: str, event: GangEvent) -> None:
        self.heard.append(event)

    def live_gangs(self) -> list[Gang]:
        return [self.gang]

    # ---- what is done to it -----------------------------------------------------------------------

    def as_from_another_machine(self) -> None:
        """Somebody else has the short way's name: everybody comes over TCP, where nothing can be seen of the store."""
        self._short_way = socket.socket(socket.AF_UNIX)
        self._short_way.bind(local_name("127.0.0.1", self.port))

    async def start_store(self) -> None:
        command = [sys.executable, str(STORE), str(self.port), "admin", "member"]
        self.store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=STORE.parents[2])
        assert self.store.stdout is not None
        assert await asyncio.to_thread(self.store.stdout.readline) == f"{self.port}\n"

    def kill_store(self) -> None:
        assert self.store is not None
        self.store.kill()
        self.store.wait()
        assert self.store.stdout is not None
        self.store.stdout.close()

    async def begin(self) -> None:
        await self.start_store()
        self.link.start(self)
        while True:
            try:
                await self.link.open_epoch(self.uid, Epoch(1), 2, is_new=True)
                break
            except TransportError:
                await asyncio.sleep(0.01)
        for member in self.gang.members.values():
            await self._start_member(member.incarnation)

    async def _start_member(self, me: Incarnation) -> None:
        order = JoinOrder(
            incarnation=me, plan=self.gang.plan, machine=MachineName("m"), store=self.endpoint("member"),
            logs=Endpoint(host="127.0.0.1", port=1, secret=""),
            lease_ttl_s=TTL_S, lease_guard_s=GUARD_S, heartbeat_s=HEARTBEAT_S,
        )  # fmt: skip
        self.commands.append(subprocess.Popen(["sleep", "600"], env={"NODUS_INCARNATION": str(me)}))
        keeper = KeeperProcess(order, tell=self.told[me.rank].append)
        self.keepers.append(keeper)
        await keeper.start()
        await until(lambda: bool(self.told[me.rank]))
        assert isinstance(self.told[me.rank][0], ev.LeaseGranted), self.told

    async def end(self) -> None:
        for keeper in self.keepers:
            await keeper.close()
        await self.link.stop()
        for command in self.commands:
            command.kill()
            command.wait()
        if self.store is not None:
            self.kill_store()
        if self._short_way is not None:
            self._short_way.close()

    # ---- what is seen -----------------------------------------------------------------------------

    def is_running(self) -> list[bool]:
        return [bool(process_tree.find(str(m.incarnation))) for m in self.gang.members.values()]

    def buried(self) -> list[GangEvent]:
        return [event for event in self.heard if isinstance(event, LeaseLapsed | LeaseGone)]

    async def all_renew(self) -> None:
        """Until every lease has been renewed by its own holder, for more than a lease's length."""
        admin = await StoreClient.connect(self.endpoint("admin"), timeout_s=LIMIT_S)
        seen = 0
        async with asyncio.timeout(LIMIT_S):
            while seen < 12:
                try:
                    leases = (await admin.snapshot(self.uid)).leases
                except RendezvousError:  # it has just come back, and is being told
                    leases = ()
                is_fresh = len(leases) == 2 and all(
                    lease.connected and lease.remaining_s > TTL_S + GUARD_S - 3 * HEARTBEAT_S
                    for lease in leases
                )
                seen = seen + 1 if is_fresh else 0
                await asyncio.sleep(HEARTBEAT_S)
        await admin.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    await scene.end()


async def test_a_store_that_is_stopped_costs_nothing_on_its_own_machine(scene: Scene) -> None:
    await scene.begin()
    assert scene.store is not None
    scene.store.send_signal(signal.SIGSTOP)
    await asyncio.sleep(OUTAGE_S)  # the length of the stall that is played, not a wait for something
    scene.store.send_signal(signal.SIGCONT)
    await scene.all_renew()
    assert scene.is_running() == [True, True]
    assert [len(told) for told in scene.told.values()] == [1, 1], scene.told
    assert scene.buried() == []


@pytest.mark.long
async def test_a_store_that_is_killed_twice_costs_nothing_on_its_own_machine(scene: Scene) -> None:
    """However long the next one takes to come."""
    await scene.begin()
    for _ in range(2):
        scene.kill_store()
        await asyncio.sleep(OUTAGE_S)  # the outage that is played
        await scene.start_store()
        await scene.all_renew()
    assert scene.is_running() == [True, True]
    assert [len(told) for told in scene.told.values()] == [1, 1], scene.told
    assert scene.buried() == []


async def test_a_store_that_is_stopped_and_then_killed_costs_nothing_on_its_own_machine(scene: Scene) -> None:
    await scene.begin()
    assert scene.store is not None
    scene.store.send_signal(signal.SIGSTOP)
    await asyncio.sleep(OUTAGE_S / 2)  # the stall that is played
    scene.kill_store()
    await asyncio.sleep(OUTAGE_S / 2)
    await scene.start_store()
    await scene.all_renew()
    assert scene.is_running() == [True, True]
    assert scene.buried() == []


async def test_elsewhere_members_end_themselves_and_say_that_it_was_the_store(scene: Scene) -> None:
    """No false blame: every rank tells the same, and the store, back again, lets each lease start over."""
    scene.as_from_another_machine()
    await scene.begin()
    assert scene.store is not None
    scene.store.send_signal(signal.SIGSTOP)
    await until(lambda: scene.is_running() == [False, False])
    for told in scene.told.values():
        await until(lambda told=told: len(told) > 1)  # type: ignore[misc]
        lost = told[1]
        assert isinstance(lost, ev.LeaseLost)
        assert lost.reason is Reason.STORE_UNREACHABLE
        assert "rendezvous store" in lost.message and "nothing was heard for" in lost.message
    assert scene.buried() == [], "nobody was declared lost while the store stood"
    scene.store.send_signal(signal.SIGCONT)
    await until(lambda: len(scene.buried()) == 2)
    assert {type(event) for event in scene.buried()} == {LeaseLapsed}


async def test_elsewhere_a_store_that_comes_back_in_time_costs_nothing(scene: Scene) -> None:
    scene.as_from_another_machine()
    await scene.begin()
    assert scene.store is not None
    scene.store.send_signal(signal.SIGSTOP)
    await asyncio.sleep(TTL_S / 2)  # the stall that is played
    scene.store.send_signal(signal.SIGCONT)
    await scene.all_renew()
    assert scene.is_running() == [True, True]
    assert scene.buried() == []
