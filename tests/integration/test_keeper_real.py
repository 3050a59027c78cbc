"""The keeper as a real process: it holds the lease, and when that is over the tree is dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from agents import process_tree
from agents.core import events as ev
from agents.keeper_process import KeeperProcess, keeper_command, keeper_config, keeper_environment
from coordinator.store_actor import StoreServer
from mesh.ids import Epoch, Incarnation, MachineName, Rank, RunName, new_run_uid, new_token
from mesh.messages import JoinOrder
from mesh.plan import Endpoint, RunPlan
from mesh.reasons import Reason
from mesh.store import messages as ms
from mesh.store.client import StoreClient
from tests.fakes.store import FakeStore

LIMIT_S = 20.0


class Kept:
    """A keeper, the command that it answers for, and what it told."""

    def __init__(
        self, store: Endpoint, *, ttl_s: float = 1.0, heartbeat_s: float = 0.2, watches_silence: bool = True
    ) -> None:
        self.me = Incarnation(run_uid=new_run_uid(), epoch=Epoch(3), rank=Rank(0), token=new_token())
        self.told: list[ev.MemberEvent] = []
        self.order = JoinOrder(
            incarnation=self.me,
            plan=RunPlan(name=RunName("job"), command=("true",)),
            machine=MachineName("m0"),
            store=store,
            logs=Endpoint(host="127.0.0.1", port=1, secret=""),
            lease_ttl_s=ttl_s,
            lease_guard_s=0.1,
            heartbeat_s=heartbeat_s,
        )
        self.keeper = KeeperProcess(self.order, tell=self.told.append, watches_silence=watches_silence)
        self.command: subprocess.Popen[bytes] | None = None
        self.late: subprocess.Popen[bytes] | None = None

    def start_command(self) -> None:
        """Not our child alone: it has a child of its own, in another session."""
        self.command = subprocess.Popen(
            ["bash", "-c", "setsid sleep 600 & sleep 600"],
            env={"PATH": os.environ["PATH"], "NODUS_INCARNATION": str(self.me)},
            start_new_session=True,
        )

    def start_late(self) -> int:
        """Another process of the incarnation; answers its pid."""
        environment = {"PATH": os.environ["PATH"], "NODUS_INCARNATION": str(self.me)}
        self.late = subprocess.Popen(["sleep", "600"], env=environment)
        return self.late.pid

    async def end(self) -> None:
        await self.keeper.close()
        await asyncio.to_thread(process_tree.kill_incarnation, str(self.me))
        for process in (self.command, self.late):
            if process is not None:
                process.wait(LIMIT_S)

    def states(self) -> list[str]:
        return sorted(p.state for p in process_tree.find(str(self.me)).values())

    async def granted(self) -> None:
        await self.keeper.start()
        await until(lambda: bool(self.told))
        assert isinstance(self.told[0], ev.LeaseGranted), self.told

    async def lost(self) -> ev.LeaseLost:
        await until(lambda: len(self.told) > 1)
        event = self.told[1]
        assert isinstance(event, ev.LeaseLost)
        return event


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def store() -> AsyncIterator[FakeStore]:
    store = FakeStore()
    await store.start()
    yield store
    await store.stop()


@pytest.fixture(params=[True])
async def kept(store: FakeStore, request: pytest.FixtureRequest) -> AsyncIterator[Kept]:
    kept = Kept(store.endpoint, watches_silence=request.param)
    kept.start_command()
    await until(lambda: len(kept.states()) >= 3)
    yield kept
    await kept.end()


async def test_it_takes_the_lease_renews_it_and_gives_it_back(store: FakeStore, kept: Kept) -> None:
    await kept.granted()
    await until(lambda: store.count("GrantLease") >= 3)
    await kept.keeper.release()
    assert store.leases == set()
    assert store.count("ReleaseLease") == 1
    assert len(kept.told) == 1
    assert kept.states() != []


async def test_without_an_answer_it_kills_the_tree_and_says_so(store: FakeStore, kept: Kept) -> None:
    await kept.granted()
    store.is_silent = True
    assert (await kept.lost()).reason is Reason.STORE_UNREACHABLE
    await until(lambda: kept.states() == [])


async def test_a_newer_epoch_ends_the_tree_at_once(store: FakeStore, kept: Kept) -> None:
    await kept.granted()
    store.floor = 4
    assert (await kept.lost()).reason is Reason.STALE_EPOCH
    await until(lambda: kept.states() == [])


async def test_a_store_that_is_restarted_and_learns_of_the_gang_late_costs_nothing(store: FakeStore) -> None:
    kept = Kept(store.endpoint, ttl_s=8.0)
    await kept.granted()
    await store.stop()
    store.floor = None
    await store.start()
    renewals = store.count("GrantLease")
    await until(lambda: store.count("GrantLease") > renewals + 2)
    store.floor = 3
    await until(lambda: store.leases == {0})
    assert len(kept.told) == 1
    await kept.keeper.close()


async def test_a_refused_lease_is_told_with_its_reason(store: FakeStore) -> None:
    store.floor = 9
    kept = Kept(store.endpoint)
    await kept.keeper.start()
    await until(lambda: bool(kept.told))
    (event,) = kept.told
    assert isinstance(event, ev.LeaseRefused)
    assert event.reason is Reason.STALE_EPOCH
    await kept.keeper.close()


async def test_a_wrong_secret_is_refused_at_once(store: FakeStore) -> None:
    kept = Kept(store.endpoint)
    store.secret = "another"
    await kept.keeper.start()
    await until(lambda: bool(kept.told))
    (event,) = kept.told
    assert isinstance(event, ev.LeaseRefused)
    assert event.reason is Reason.UNAUTHENTICATED
    await kept.keeper.close()


async def test_a_keeper_that_is_killed_is_noticed_as_a_lost_lease(store: FakeStore, kept: Kept) -> None:
    await kept.granted()
    assert kept.keeper.pid is not None
    os.kill(kept.keeper.pid, signal.SIGKILL)
    assert "ended on its own" in (await kept.lost()).message


async def test_a_keeper_that_is_stopped_is_noticed_as_a_lost_lease(store: FakeStore, kept: Kept) -> None:
    await kept.granted()
    assert kept.keeper.pid is not None
    os.kill(kept.keeper.pid, signal.SIGSTOP)
    assert "said nothing" in (await kept.lost()).message


@pytest.mark.parametrize("kept", [False], indirect=True, ids=["keeper-alone"])
@pytest.mark.parametrize("is_renewed", [True, False], ids=["renewed", "refused"])
async def test_a_keeper_that_stood_still_freezes_first_and_asks_once(
    store: FakeStore, kept: Kept, is_renewed: bool
) -> None:
    """As after a laptop's sleep: the keeper is stopped past the end of its lease, and then goes on."""
    await kept.granted()
    assert kept.keeper.pid is not None
    os.kill(kept.keeper.pid, signal.SIGSTOP)
    await until(lambda: "T" in stopped(kept.keeper.pid))
    await asyncio.sleep(2.0)  # the length of the sleep that is played, not a wait for something
    store.is_silent = True
    os.kill(kept.keeper.pid, signal.SIGCONT)
    await until(lambda: set(kept.states()) == {"T"})
    late = kept.start_late()
    await until(lambda: "T" in stopped(late) or len(kept.told) > 1)
    assert "T" in stopped(late), "a launch that was under way: it is stopped as well"
    store.is_silent = False
    store.floor = 3 if is_renewed else 4
    if is_renewed:
        await until(lambda: set(kept.states()) == {"S"})
        assert len(kept.told) == 1
    else:
        assert (await kept.lost()).reason is Reason.STALE_EPOCH
        await until(lambda: kept.states() == [])


async def test_a_member_that_dies_takes_the_tree_with_it_and_the_lease_is_not_released(
    store: FakeStore, kept: Kept, member_process: Callable[[Kept], subprocess.Popen[bytes]]
) -> None:
    member = member_process(kept)
    await until(lambda: store.count("GrantLease") >= 1)
    member.kill()
    await until(lambda: kept.states() == [])
    await until(lambda: not store.connections)
    assert store.count("ReleaseLease") == 0


@pytest.fixture
def member_process() -> Iterator[Callable[[Kept], subprocess.Popen[bytes]]]:
    """A process that starts the keeper and then does nothing, as a member that is about to be killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(kept: Kept) -> subprocess.Popen[bytes]:
        order = kept.keeper._order
        script = (
            "import asyncio\n"
            "from agents.keeper_process import KeeperProcess\n"
            "from mesh.ids import *\n"
            "from mesh.messages import JoinOrder\n"
            "from mesh.plan import Endpoint, RunPlan\n"
            "async def main():\n"
            "    order = JoinOrder(\n"
            f"        incarnation=Incarnation.parse({str(kept.me)!r}),\n"
            "        plan=RunPlan(name=RunName('job'), command=('true',)), machine=MachineName('m0'),\n"
            f"        store=Endpoint(host='127.0.0.1', port={order.store.port}, secret={order.store.secret!r}),\n"
            "        logs=Endpoint(host='127.0.0.1', port=1, secret=''))\n"
            "    await KeeperProcess(order, tell=print).start()\n"
            "    await asyncio.sleep(600)\n"
            "asyncio.run(main())\n"
        )
        process = subprocess.Popen([sys.executable, "-c", script])
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(LIMIT_S)


def stopped(pid: int | None) -> str:
    process = process_tree.read_process(pid or 0)
    return process.state if process else ""


async def test_a_lease_that_is_renewed_no_more_ends_the_tree_before_it_lapses() -> None:
    """Its member is not asked: it may stand still."""
    server = StoreServer(host="127.0.0.1", port=0, admin_secret="a", member_secret="m")
    address = await server.start()
    pushes: list[ms.Push] = []
    was_alive: list[bool] = []
    kept = Kept(Endpoint(host=address.host, port=address.port, secret="m"))

    def on_push(push: ms.Push) -> None:
        pushes.append(push)
        was_alive.append(bool(process_tree.find(str(kept.me))))

    endpoint = Endpoint(host=address.host, port=address.port, secret="a")
    admin = await StoreClient.connect(endpoint, on_push=on_push)
    me = kept.me
    try:
        await admin.set_floor(me.run_uid, me.epoch, 1)
        await admin.watch()
        await kept.granted()
        kept.start_command()
        await until(lambda: len(kept.states()) >= 2)
        assert not await admin.expire(me.run_uid, me.epoch, me.rank, me.token, ttl_s=1.0, guard_s=0.1)
        assert (await kept.lost()).reason is Reason.LEASE_LOST
        await until(lambda: ms.LeaseLapsed in map(type, pushes))
        assert not was_alive[-1], "declared lost while something of it ran"
    finally:
        await kept.end()
        await admin.close()
        await server.stop("the test is over")


@pytest.mark.long
async def test_a_member_that_stands_still_for_minutes_has_lost_its_command_and_its_lease(
    store: FakeStore,
) -> None:
    """It would never tell how the command ended. The terms here make a quarter of it."""
    kept = Kept(store.endpoint, heartbeat_s=0.05)
    keeper = subprocess.Popen(
        keeper_command(),
        env={**keeper_environment(), "PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    try:
        kept.start_command()
        await until(lambda: len(kept.states()) >= 2)
        keeper.stdin.write(json.dumps(keeper_config(kept.order)).encode() + b"\n")
        keeper.stdin.flush()
        await until(lambda: store.count("GrantLease") > 100)
        assert kept.states() != [], "a member that is busy for a while loses nothing"
        await asyncio.to_thread(keeper.wait, 3 * LIMIT_S)
        assert kept.states() == [], "and who stands still loses everything, before the lease is over"
        assert store.count("ReleaseLease") == 0
    finally:
        keeper.kill()
        for pipe in (keeper.stdin, keeper.stdout):
            pipe.close()
        keeper.wait()
        await kept.end()
