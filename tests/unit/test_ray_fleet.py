"""The fleet over Ray, without Ray: what its exceptions become."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RpcError

from agents.raylet import MACHINE_LABEL
from coordinator import ray_fleet, reach
from coordinator.fleet import MemberGoneError
from coordinator.ray_call import ask_ray
from coordinator.ray_fleet import RayFleet
from mesh.errors import TransportError
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.messages import FenceOrder, JoinOrder
from mesh.plan import Endpoint, RunPlan

FLEET = RayFleet(namespace="n", member_config={}, used_by=dict)
MEMBER = Incarnation(run_uid=RunUid("run"), epoch=Epoch(1), rank=Rank(0), token=IncarnationToken("t"))


@pytest.mark.parametrize("error", [RpcError("unavailable"), RuntimeError("not connected"), OSError("broken")])
async def test_a_ray_that_cannot_be_asked_may_be_asked_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(ray, "nodes", fail)
    with pytest.raises(TransportError, match="cannot be asked now"):
        await FLEET.machines()


async def test_an_actor_that_is_not_there_is_a_member_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", fail)
    with pytest.raises(MemberGoneError):
        await FLEET.fence(FenceOrder(incarnation=MEMBER, grace_s=1.0))


ALIVE = {
    "NodeID": "1", "Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 7, "Resources": {},
    "Labels": {MACHINE_LABEL: "m1"},
}  # fmt: skip


def waiting_fleet(monkeypatch: pytest.MonkeyPatch, joined: asyncio.Future[None]) -> RayFleet:
    """Its only member joins when `joined` is done."""
    fleet = RayFleet(namespace="n", member_config={}, used_by=dict)
    member = SimpleNamespace(join=SimpleNamespace(remote=lambda _: joined))

    async def group(*_: object) -> object:
        return object()

    monkeypatch.setattr(ray_fleet, "LOOK_S", 0.01)
    monkeypatch.setattr(fleet._reservations, "group", group)
    monkeypatch.setattr(fleet, "_create_member", lambda *_: member)
    monkeypatch.setattr(fleet._workers, "used", lambda *_: None)
    monkeypatch.setattr(fleet._workers, "seen", list)
    return fleet


async def test_a_machine_that_is_lost_while_its_member_comes_up_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray lets the actor wait for another machine; a call to it answers nothing for as long as one waits."""
    looks = iter([[ALIVE], [{**ALIVE, "Alive": False}]])
    never = asyncio.get_running_loop().create_future()
    fleet = waiting_fleet(monkeypatch, never)
    monkeypatch.setattr(ray, "nodes", lambda: next(looks))
    with pytest.raises(MemberGoneError, match="m1 is lost"):
        async with asyncio.timeout(5.0):
            await fleet.order(join_order(), 1)
    assert never.cancelled()


async def test_a_machine_whose_network_is_silent_is_given_up_long_before_ray_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = asyncio.get_running_loop().create_future()
    fleet = waiting_fleet(monkeypatch, never)
    asked: list[tuple[str, int]] = []

    async def nothing(address: str, port: int) -> bool:
        asked.append((address, port))
        return False

    monkeypatch.setattr(ray, "nodes", lambda: [ALIVE])
    monkeypatch.setattr(reach, "answers", nothing)
    with pytest.raises(MemberGoneError, match="m1 does not answer"):
        async with asyncio.timeout(5.0):
            await fleet.order(join_order(), 1)
    assert asked == [("10.0.0.1", 7)] * reach.SILENCES


async def test_one_that_answers_in_between_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow, and packets are lost."""
    joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fleet = waiting_fleet(monkeypatch, joined)
    silences = reach.SILENCES - 1
    said = iter([*[False] * silences, True, *[False] * silences])

    async def now_and_then(*_: object) -> bool:
        if (answer := next(said, None)) is None:
            joined.set_result(None)
        return answer is not False

    monkeypatch.setattr(ray, "nodes", lambda: [ALIVE])
    monkeypatch.setattr(reach, "answers", now_and_then)
    async with asyncio.timeout(5.0):
        await fleet.order(join_order(), 1)


async def test_a_kernel_answers_whether_somebody_listens_or_not_and_who_says_nothing_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reach, "TRY_S", 0.2)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await reach.answers("127.0.0.1", port)
    server.close()
    await server.wait_closed()
    assert await reach.answers("127.0.0.1", port), "refused"
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first:
        first.connect(full.getsockname())  # the queue of its listener is full: the kernel drops what comes
        second = socket.socket()
        second.setblocking(False)
        second.connect_ex(full.getsockname())
        assert not await reach.answers(*full.getsockname())
        second.close()


def join_order() -> JoinOrder:
    nowhere = Endpoint(host="127.0.0.1", port=1, secret="")
    return JoinOrder(
        incarnation=MEMBER,
        plan=RunPlan(name=RunName("run"), command=("true",)),
        machine=MachineName("m1"),
        store=nowhere,
        logs=nowhere,
    )


async def test_what_takes_long_in_other_threads_holds_up_no_question_to_ray() -> None:
    """All of the loop's own threads wait; an order or a fence must not."""
    may_end = threading.Event()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as only_thread:
        loop.set_default_executor(only_thread)
        busy = asyncio.create_task(asyncio.to_thread(may_end.wait, 10.0))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5.0):
                assert await ask_ray(lambda: "an answer") == "an answer"
        finally:
            may_end.set()
            await busy
