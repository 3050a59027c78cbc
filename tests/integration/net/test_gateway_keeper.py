"""A gateway that dies is started again and knows everything that it was told. Real processes; no redirect, no root."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agents.gateway_client import GatewayClient
from agents.gateway_keeper import GatewayKeeper, GatewayPlan
from agents.gateway_wire import Counters, Offer, Probe, SetIdentity, SetMachines, SourceOf
from mesh.errors import AuthenticationError, DeploymentError, MeshTimeoutError
from mesh.ids import MachineName
from mesh.net.authority import new_authority
from mesh.net.clock import wall_clock
from mesh.net.roster import MachinePlace
from tests.net_world import DEPLOYMENT, credentials, eventually, machine

ROOT = Path(__file__).parents[3]
ME = MachineName("a")


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithoutRules(GatewayPlan):
    def command(self) -> list[str]:
        return [*super(_WithoutRules, self).command(), "--no-redirect"]


@pytest.fixture
async def keeper(tmp_path: Path) -> AsyncIterator[GatewayKeeper]:
    plan = _WithoutRules(
        folder=tmp_path / "g",
        deployment=DEPLOYMENT,
        machine=ME,
        listen=("127.0.0.1:0",),
        closed=(31000, 31001),
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        log=tmp_path / "gateway.log",
    )
    made = GatewayKeeper(plan)
    yield made
    await made.stop()


async def know_everything(keeper: GatewayKeeper) -> None:
    authority = new_authority(DEPLOYMENT, now=wall_clock())
    await keeper.tell(SetIdentity(credentials=credentials(authority, machine(ME))))
    await keeper.tell(SetMachines(machines={ME: MachinePlace(gateway=())}))
    await keeper.tell(Offer(ports=frozenset({31000}), deliver_to=("127.0.0.1",)))


async def test_a_gateway_that_is_killed_is_back_and_knows_who_it_is(keeper: GatewayKeeper) -> None:
    await keeper.start()
    await know_everything(keeper)
    first = keeper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    addresses = [tuple(address) for address in (await keeper.ask(Counters()))["addresses"]]
    await eventually(lambda: keeper.restarts == 1, "it to be started again")
    assert keeper.pid not in (None, first)
    # It answers at its port as itself, which takes its certificate, and it believes its own authority.
    found = await keeper.ask(Probe(machine=ME, addresses=tuple(addresses)))
    assert [tuple(address) for address in found] == addresses


async def test_after_a_fault_of_ours_the_next_one_is_begun_all_the_same(
    keeper: GatewayKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await keeper.start()
    await know_everything(keeper)
    tell_all = keeper._tell_all

    async def faulty(client: GatewayClient) -> None:
        monkeypatch.setattr(keeper, "_tell_all", tell_all)
        raise RuntimeError("of ours")

    monkeypatch.setattr(keeper, "_tell_all", faulty)
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGKILL)
    await eventually(lambda: keeper.restarts == 1, "it to be started again")
    assert "addresses" in await keeper.ask(Counters())
    assert "a fault of this program" in caplog.text and "of ours" in caplog.text


async def test_one_that_does_not_answer_twice_is_ended_and_another_one_is_asked(
    keeper: GatewayKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keeper.start()
    await know_everything(keeper)
    first = keeper.pid
    assert first is not None
    monkeypatch.setattr("agents.gateway_client.ANSWER_LIMIT_S", 0.5)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(MeshTimeoutError):
        await keeper.ask(Counters())
    assert keeper.pid == first
    monkeypatch.setattr("agents.gateway_client.ANSWER_LIMIT_S", 5.0)
    await keeper.ask(Counters())
    assert keeper.pid not in (None, first)


async def test_one_that_answers_late_lives_and_its_late_answer_is_nobody_else_s(
    keeper: GatewayKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keeper.start()
    await know_everything(keeper)
    first = keeper.pid
    assert first is not None
    monkeypatch.setattr("agents.gateway_client.ANSWER_LIMIT_S", 0.5)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(MeshTimeoutError):
        await keeper.ask(Counters())
    monkeypatch.setattr("agents.gateway_client.ANSWER_LIMIT_S", 30.0)
    given_up = asyncio.create_task(keeper.ask(Counters()))
    await asyncio.sleep(0.1)  # it has been written
    given_up.cancel()
    await asyncio.wait([given_up])
    os.kill(first, signal.SIGCONT)
    assert await keeper.ask(SourceOf(port=1)) is None
    assert "addresses" in await keeper.ask(Counters())
    assert (keeper.pid, keeper.restarts) == (first, 0)


async def test_one_that_cannot_be_told_everything_is_ended_before_the_next_one_is_begun(
    keeper: GatewayKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keeper.start()
    await know_everything(keeper)
    given_up: list[GatewayClient] = []
    tell_all = keeper._tell_all

    async def tell(client: GatewayClient) -> None:
        if not given_up:
            given_up.append(client)
            raise MeshTimeoutError("It does not answer.", timeout_s=30.0)
        await tell_all(client)

    monkeypatch.setattr(keeper, "_tell_all", tell)
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGKILL)
    await eventually(lambda: keeper.restarts == 1, "it to be started again")
    assert "addresses" in await keeper.ask(Counters())
    assert given_up[0].is_closed


async def test_what_it_refuses_is_the_asker_s_to_hear(keeper: GatewayKeeper) -> None:
    await keeper.start()
    authority = new_authority(DEPLOYMENT, now=wall_clock())
    with pytest.raises(AuthenticationError):
        await keeper.tell(SetIdentity(credentials=credentials(authority, machine("b"))))


async def test_a_port_that_is_taken_is_said_to_be_so(keeper: GatewayKeeper, tmp_path: Path) -> None:
    [(_, port)] = await keeper.start()
    plan = replace(
        keeper.plan, folder=tmp_path / "h", listen=(f"127.0.0.1:{port}",), log=tmp_path / "other.log"
    )
    with pytest.raises(DeploymentError, match=f"127.0.0.1:{port} cannot be had: Address already in use"):
        await GatewayKeeper(plan).start()


async def test_it_is_gone_when_it_was_stopped(keeper: GatewayKeeper) -> None:
    await keeper.start()
    pid = keeper.pid
    await keeper.stop()
    await keeper.stop()
    assert keeper.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)
