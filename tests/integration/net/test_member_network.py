"""A member's network with a real gateway: what the gateway knows before, while and after the member is there."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents import mesh_network, overlay_line
from agents.core.events import Arrival
from agents.gateway_wire import CONTROL_NAME, Counters, SetRoster
from agents.mesh_network import MeshNetwork
from agents.network import TrustedNetwork
from agents.overlay_line import ask
from mesh.errors import FencedError, MeshTimeoutError, PlacementError, TransportError
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid
from mesh.messages import CauseEvidence, JoinOrder, MemberCertificate
from mesh.net import firewall
from mesh.net.authority import new_authority
from mesh.net.identity import MemberIdentity
from mesh.net.paths import NetworkFacts
from mesh.net.roster import Roster
from mesh.plan import Endpoint, RunPlan
from mesh.reasons import Reason
from mesh.states import FailurePolicy, NetworkScope, Transport, TransportPolicy
from tests.integration.net.processes import command, ready
from tests.net_world import DEPLOYMENT

RUN = RunUid("0123456789abcdef")
OTHER = RunUid("fedcba9876543210")
NOWHERE = Endpoint(host="127.0.0.1", port=1, secret="s")
LIMIT_S = 20.0


def on_mesh(number: int, *, is_dialable: bool = True) -> NetworkFacts:
    return NetworkFacts(
        machine=MachineName(f"m{number}"),
        address=f"198.19.0.{number + 1}",
        is_on_mesh=True,
        is_dialable=is_dialable,
    )


MINE, THEIRS = on_mesh(0), on_mesh(1)


def order(
    epoch: int = 1,
    *,
    run: RunUid = RUN,
    rank: int = 0,
    policy: TransportPolicy = TransportPolicy.DIRECT,
    on_failure: FailurePolicy = FailurePolicy.FAIL,
) -> JoinOrder:
    return JoinOrder(
        incarnation=Incarnation(
            run_uid=run, epoch=Epoch(epoch), rank=Rank(rank), token=IncarnationToken("ab" * 8)
        ),
        plan=RunPlan(
            name=RunName("job"),
            command=("true",),
            nodes=2,
            network=NetworkScope.GLOBAL,
            transport_policy=policy,
            on_process_failure=on_failure,
        ),
        machine=MINE.machine,
        store=NOWHERE,
        logs=NOWHERE,
    )


def arrivals(*machines: NetworkFacts) -> list[Arrival]:
    return [Arrival(address=facts.address, network=facts) for facts in machines]


class Stage:
    """One machine's gateway, and a coordinator that signs what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = new_authority(DEPLOYMENT, now=time.time())
        self.ttl_s: float | None = None
        self.signed: list[MemberIdentity] = []
        self.refusals: list[Exception] = []
        self.lost: list[str] = []
        self.networks: list[MeshNetwork] = []

    def start(self) -> None:
        argv = command("agents.gateway", self.folder, name=MINE.machine)
        self.gateway = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert ready(self.gateway)["addresses"]

    def kill(self) -> None:
        self.gateway.kill()
        self.gateway.wait()
        assert self.gateway.stdout is not None
        self.gateway.stdout.close()

    async def close(self) -> None:
        for network in self.networks:
            await network.close()
        self.kill()

    async def sign(
        self, incarnation: Incarnation, machine: MachineName, request_pem: bytes
    ) -> MemberCertificate:
        if self.refusals:
            raise self.refusals.pop(0)
        identity = MemberIdentity(
            deployment=DEPLOYMENT,
            machine=machine,
            run=incarnation.run_uid,
            epoch=incarnation.epoch,
            rank=incarnation.rank,
        )
        self.signed.append(identity)
        signed = self.authority.sign(request_pem, identity, now=time.time(), ttl_s=self.ttl_s)
        return MemberCertificate(certificate_pem=signed, bundle_pem=self.authority.certificate_pem)

    def network(self, facts: NetworkFacts = MINE) -> MeshNetwork:
        self.networks.append(MeshNetwork(facts, gateway=self.folder / CONTROL_NAME, sign=self.sign))
        return self.networks[-1]

    async def opened(self, asked: JoinOrder | None = None) -> MeshNetwork:
        network, asked = self.network(), asked or order()
        await network.prepare(asked)
        await network.open(asked, arrivals(MINE, THEIRS), on_lost=self.lost.append)
        return network

    async def runs(self) -> dict[str, Any]:
        """What the gateway knows: by run its epoch, and the ranks that streams are let in for."""
        counters: Any = await ask(self.folder / CONTROL_NAME, Counters())
        return dict(counters["runs"])

    async def is_over(self, epoch: int) -> bool:
        """Whether the gateway refuses this epoch."""
        try:
            await ask(
                self.folder / CONTROL_NAME, SetRoster(roster=Roster(run=RUN, epoch=Epoch(epoch), members=()))
            )
        except FencedError:
            return True
        return False


@asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    made = Stage(folder)
    made.start()
    try:
        yield made
    finally:
        await made.close()


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await holds():
            await asyncio.sleep(0.01)


UP = {RUN: {"epoch": 1, "up": [0]}}
COMPLAINT = CauseEvidence(message="connection reset by peer", blames_peer=True)


async def test_from_certificate_to_fence(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        network = here.network()
        assert await network.prepare(order()) == MINE
        assert await here.runs() == {}, "nobody is let in before the barrier"
        opened = await network.open(order(), arrivals(MINE, THEIRS), on_lost=here.lost.append)
        assert opened.addresses == ("198.19.0.1", "198.19.0.2")
        assert opened.taken.transport is Transport.DIRECT
        assert opened.taken.layer == "gateways admit certificates of epoch 1 only"
        assert await here.runs() == UP
        await network.close()
        assert await here.runs() == {}
        assert await here.is_over(1)
        assert not await here.is_over(2)
        assert not here.lost


async def test_a_gateway_that_was_killed_and_is_back_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as here:
        network = await here.opened()
        assert await network.explain(COMPLAINT) == COMPLAINT
        here.kill()
        here.start()

        async def is_told() -> bool:
            return await here.runs() == UP

        await eventually(is_told)
        explained = await network.explain(COMPLAINT)
        assert explained.by_infrastructure and not explained.blames_peer
        assert "the gateway of its machine ended" in explained.message
        own = CauseEvidence(message="ValueError")
        assert (await network.explain(own)).by_infrastructure, "whatever it ended of so soon after"
        monkeypatch.setattr(mesh_network, "BREAK_EXPLAINS_S", 0.0)
        assert await network.explain(COMPLAINT) == explained
        assert await network.explain(own) == own, "its own error is its own all the same"
        assert not here.lost


async def test_a_relay_that_ended_explains_what_its_connections_command_ended_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: dict[str, float] = {}

    async def counters(socket: Path, *requests: object) -> object:
        return {"cut_by_relays": {RUN: cut}}

    async with stage(tmp_path) as here:
        network = await here.opened()
        with monkeypatch.context() as patched:
            patched.setattr(mesh_network, "ask", counters)
            assert await network.explain(COMPLAINT) == COMPLAINT
            cut["relay-1"] = 1.0
            explained = await network.explain(COMPLAINT)
            assert explained.by_infrastructure and not explained.blames_peer
            assert explained.message.startswith("the relay relay-1 ended, and its connections with it; ")
            own = CauseEvidence(message="ValueError")
            assert (await network.explain(own)).by_infrastructure, "whatever it ended of so soon after"
            cut["relay-1"] = mesh_network.BREAK_EXPLAINS_S + 1.0
            assert await network.explain(COMPLAINT) == explained
            assert await network.explain(own) == own, "its own error is its own all the same"


async def test_a_gateway_that_does_not_come_back_loses_the_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlay_line, "AGAIN_LIMIT_S", 0.3)
    async with stage(tmp_path) as here:
        network = await here.opened()
        here.kill()

        async def is_lost() -> bool:
            return bool(here.lost)

        await eventually(is_lost)
        assert here.lost == ["The gateway of this machine ended and was not back within 0.3 s."]
        assert (await network.explain(CauseEvidence())).by_infrastructure


async def test_a_fault_of_ours_while_the_next_gateway_is_told_loses_the_member_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(tmp_path) as here:
        network = await here.opened()

        async def faulty() -> None:
            raise RuntimeError("of ours")

        assert network._line is not None
        monkeypatch.setattr(network._line, "_begin", faulty)
        here.kill()

        async def is_lost() -> bool:
            return bool(here.lost)

        await eventually(is_lost)
        assert "a fault of this program" in here.lost[0]
        assert "line to the gateway: a fault of this program" in caplog.text


async def test_a_member_of_an_epoch_that_is_over_opens_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        ghost = here.network()
        await ghost.prepare(order(1))
        await here.opened(order(2))
        with pytest.raises(FencedError):
            await ghost.open(order(1), arrivals(MINE, THEIRS), on_lost=here.lost.append)
        await ghost.close()
        assert await here.runs() == {RUN: {"epoch": 2, "up": [0]}}


async def test_who_comes_takes_away_what_another_run_has_left(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        left = await here.opened(order(run=OTHER))
        await here.opened()
        assert await here.runs() == UP
        await left.close()  # late, and about its own run only
        assert await here.runs() == UP


async def test_a_rank_that_may_start_again_alone_leaves_its_epoch_open(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        alone = order(rank=1, on_failure=FailurePolicy.RESTART_RANK)
        for _ in range(2):
            network = here.network()
            await network.prepare(alone)
            await network.open(alone, arrivals(THEIRS, MINE), on_lost=here.lost.append)
            assert await here.runs() == {RUN: {"epoch": 1, "up": [1]}}
            await network.close()
        assert not await here.is_over(1)


async def test_the_certificate_is_renewed_while_the_member_runs(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        here.ttl_s = 1.0
        await here.opened()

        async def is_renewed() -> bool:
            return len(here.signed) > 2

        await eventually(is_renewed)
        assert set(here.signed) == {here.signed[0]}
        assert await here.runs() == UP
        assert not here.lost


async def test_a_fault_of_ours_in_a_renewal_is_told_and_it_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(tmp_path) as here:
        here.ttl_s = 1.0
        await here.opened()
        here.refusals = [RuntimeError("can't start new thread")]

        async def is_renewed() -> bool:
            return len(here.signed) > 2

        await eventually(is_renewed)
        assert "can't start new thread" in caplog.text
        assert not here.lost


async def test_a_coordinator_that_is_away_is_waited_for_and_one_that_refuses_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_network, "SIGN_AGAIN_S", 0.01)
    async with stage(tmp_path) as here:
        here.refusals = [TransportError("restarting"), TransportError("restarting")]
        await here.network().prepare(order())
        assert len(here.signed) == 1
        here.refusals = [FencedError("over")]
        with pytest.raises(FencedError):
            await here.network().prepare(order())
        monkeypatch.setattr(mesh_network, "SIGN_LIMIT_S", 0.0)
        here.refusals = [TransportError("restarting")]
        with pytest.raises(TransportError):
            await here.network().prepare(order())


async def test_without_a_gateway_nothing_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay_line, "AGAIN_LIMIT_S", 0.3)
    network = MeshNetwork(MINE, gateway=tmp_path / CONTROL_NAME, sign=Stage(tmp_path).sign)
    with pytest.raises(MeshTimeoutError, match="not back within"):
        await network.prepare(order())


async def test_a_gateway_that_is_just_being_started_again_is_waited_for(tmp_path: Path) -> None:
    async with stage(tmp_path) as here:
        network = here.network()
        here.kill()
        preparing = asyncio.create_task(network.prepare(order()))
        await asyncio.sleep(0)
        here.start()
        assert await preparing == MINE
        here.kill()
        opening = asyncio.create_task(network.open(order(), arrivals(MINE, THEIRS), on_lost=here.lost.append))
        await asyncio.sleep(0)
        here.start()
        await opening
        assert await here.runs() == UP


async def test_members_without_an_allowed_path_are_not_started(tmp_path: Path) -> None:
    hidden = replace(THEIRS, is_dialable=False)
    async with stage(tmp_path) as here:
        network = here.network()
        await network.prepare(order())
        with pytest.raises(PlacementError, match="m1 cannot be dialled by the others") as caught:
            await network.open(order(), arrivals(MINE, hidden), on_lost=here.lost.append)
        assert caught.value.reason is Reason.NETWORK_FAILED
        relayed = await network.open(
            order(policy=TransportPolicy.AUTO), arrivals(MINE, hidden), on_lost=here.lost.append
        )
        assert relayed.taken.transport is Transport.RELAYED


async def test_on_the_private_path_the_firewall_is_set_and_an_address_of_no_interface_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(firewall, "sweep", lambda deployment: done.append("swept"))
    monkeypatch.setattr(
        firewall, "admit_only", lambda deployment, life, members: done.append(tuple(members)) or ""
    )
    monkeypatch.setattr(firewall, "admit_all", lambda deployment, life: done.append("open"))
    facts = replace(MINE, private_network="rack", private_address="127.0.0.1", public_address="203.0.113.77")
    async with stage(tmp_path) as here:
        network = here.network(facts)
        told = await network.prepare(order())
        assert told == replace(facts, public_address=None)
        peer = replace(THEIRS, private_network="rack", private_address="127.0.0.2")
        opened = await network.open(order(), arrivals(told, peer), on_lost=here.lost.append)
        assert opened.taken.transport is Transport.PRIVATE
        assert opened.addresses == ("127.0.0.1", "127.0.0.2")
        assert opened.interface == "lo"
        assert opened.taken.layer and not opened.taken.lacks
        assert await here.runs() == {}
        await network.close()
        assert done == ["swept", ("127.0.0.1", "127.0.0.2"), "open"]


async def test_a_trusted_network_needs_nothing_and_is_private() -> None:
    network = TrustedNetwork()
    assert await network.prepare(order()) is None
    ends = [Arrival(address="127.0.0.3"), Arrival(address="127.0.0.2")]
    opened = await network.open(order(), ends, on_lost=lambda why: None)
    assert (opened.taken.transport, opened.addresses) == (Transport.PRIVATE, ("127.0.0.3", "127.0.0.2"))
    assert opened.taken.layer == opened.taken.lacks == ""
    with pytest.raises(PlacementError, match="rank 0 joined by --address"):
        await network.open(order(), [ends[0], *arrivals(THEIRS)], on_lost=lambda why: None)
