"""Two gateways that nobody can dial, and a relay: what passes, what it sees, whom it joins."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import pytest

from mesh.ids import Epoch, MachineName
from mesh.net.authority import new_authority
from mesh.net.dialling import DialRefused
from mesh.net.identity import Identity, PeerCertificate
from mesh.net.probe import probe
from mesh.net.refusals import Refusal
from mesh.net.relay import Relay
from mesh.net.relay_book import RelayLimits
from mesh.net.relay_client import RelayClient, RelayDown, RelayPlace
from mesh.net.relay_ways import RelayWays, preference
from mesh.net.roster import MachinePlace
from mesh.net.tls import client_context
from tests.integration.net.flow import until_stuck
from tests.net_world import (
    DEPLOYMENT,
    RUN,
    MemberServer,
    World,
    at,
    credentials,
    eventually,
    machine,
    member,
    member_server,
    recorder_at,
    relay_identity,
    world,
)

R = MachineName("r")


@contextlib.asynccontextmanager
async def relayed(
    *, limits: RelayLimits | None = None, record: bool = False
) -> AsyncIterator[tuple[World, MemberServer, Relay, bytearray]]:
    """a and b know no address of each other, and have a line each."""
    async with world() as mesh, member_server() as server, contextlib.AsyncExitStack() as stack:
        relay = Relay(identity=relay_identity(R), limits=limits)
        relay.set_identity(credentials(mesh.authority, relay_identity(R)))
        relay.start(listen_on=(("127.0.0.1", 0),))
        stack.push_async_callback(relay.stop)
        address, passed = relay.addresses[0], bytearray()
        if record:
            address, passed = await stack.enter_async_context(recorder_at(address))
        for gateway in mesh.gateways.values():
            gateway.set_machines({MachineName(n): MachinePlace(gateway=()) for n in ("a", "b")})
            await gateway.set_relays([RelayPlace(machine=R, addresses=(address,))])
        await eventually(lambda: relay.counters()["lines"] == 2, "both have a line")
        yield mesh, server, relay, passed


def nobody(peer: PeerCertificate) -> None:
    """Is refused."""


def nothing() -> None:
    """Nobody has to be told."""


def client(mesh: World, relay: Relay) -> RelayClient:
    place = RelayPlace(machine=R, addresses=tuple(relay.addresses))
    return RelayClient(deployment=DEPLOYMENT, place=place, check=lambda peer: None)


async def refusal(mesh: World, relay: Relay, who: Identity, to: str) -> Refusal:
    with pytest.raises(DialRefused) as caught:
        context = client_context(credentials(mesh.authority, who))
        await client(mesh, relay).dial(MachineName(to), context)
    return caught.value.reason


async def test_bytes_pass_both_ways_and_are_counted_and_the_relay_sees_ciphertext_only() -> None:
    there, back = random.Random(0).randbytes(3_000_017), random.Random(1).randbytes(2_000_003)
    secret = b"the gradients of a paying customer"
    async with relayed(record=True) as (mesh, server, relay, passed):
        stream = await mesh.dial(server.port)
        other = await server.next()
        stream.transport.write(secret + there)
        other.transport.write(back + secret)
        assert await other.read(len(secret) + len(there)) == secret + there
        assert await stream.read(len(secret) + len(back)) == back + secret
        assert len(passed) > 5_000_000
        assert secret not in passed
        assert RUN.encode() not in passed, "not even whose they are"
        [(pair, amount)] = relay.book.take_usage().items()
        assert (pair.run, pair.dialler, pair.target) == (RUN, "a", "b")
        assert 5_000_000 < amount <= len(passed)
        assert relay.book.take_usage() == {}


async def test_ends_and_resets_pass_through() -> None:
    async with relayed() as (mesh, server, relay, _):
        stream = await mesh.dial(server.port)
        other = await server.next()
        stream.transport.write(b"last words")
        stream.transport.write_eof()
        await other.until(other.ended.is_set)
        assert other.received == b"last words"
        other.transport.write(b"x" * 1_000_000)
        other.transport.write_eof()
        await stream.until(stream.ended.is_set)
        assert len(stream.received) == 1_000_000
        await eventually(lambda: relay.counters()["streams"] == 0, "the stream is over")
        for which in (0, 1):
            ends = (await mesh.dial(server.port), await server.next(1 + which))
            ends[which].reset()
            assert await ends[1 - which].reset_seen()


async def test_a_reader_that_reads_nothing_stops_its_writer_through_the_relay_too() -> None:
    async with relayed() as (mesh, server, _, _):
        stream = await mesh.dial(server.port)
        other = await server.next()
        other.transport.pause_reading()
        sent = await until_stuck(stream.transport)
        other.transport.resume_reading()
        await other.read(sent)


async def test_a_reset_reaches_the_other_side_when_nobody_reads() -> None:
    async with relayed() as (mesh, server, relay, _):
        stream = await mesh.dial(server.port)
        other = await server.next()
        other.transport.pause_reading()
        await until_stuck(stream.transport)
        stream.reset()
        await eventually(lambda: relay.counters()["streams"] == 0, "the relay has noticed")
        other.transport.resume_reading()
        assert await other.reset_seen()


async def test_a_ghost_is_refused_by_the_gateway_behind_the_relay() -> None:
    async with relayed() as (mesh, server, _, _):
        for_ghost = mesh.gateways["a"]
        mesh.gateways["b"].fence(RUN, Epoch(2))
        stream = await mesh.dial(server.port)
        assert await stream.reset_seen()
        assert server.streams == []
        assert for_ghost.counters()["refused_out"] == {"StaleEpoch": 1}
        assert mesh.gateways["b"].counters()["refused_in"] == {"StaleEpoch": 1}


async def test_a_third_machine_of_a_run_is_refused() -> None:
    async with relayed() as (mesh, server, relay, _):
        await mesh.dial(server.port)
        await server.next()
        assert await refusal(mesh, relay, member(2, "c"), "b") is Refusal.RELAY_MEMBERS
        await mesh.dial(server.port)  # the two go on
        await server.next(1)


async def test_who_cannot_be_joined_is_told_why() -> None:
    async with relayed(limits=RelayLimits(streams_per_machine_max=1)) as (mesh, server, relay, _):
        assert await refusal(mesh, relay, machine("a"), "nobody") is Refusal.NOT_LISTENING
        await mesh.dial(server.port)
        await server.next()
        assert await refusal(mesh, relay, member(0, "a"), "b") is Refusal.STREAM_LIMIT
        relay.revoke(frozenset({MachineName("c")}))
        assert await refusal(mesh, relay, machine("c"), "b") is Refusal.REVOKED
        counted = relay.counters()["refused"]
        assert counted == {"NotListening": 1, "Revoked": 1, "StreamLimit": 1}


async def test_who_is_revoked_loses_line_and_streams() -> None:
    async with relayed() as (mesh, server, relay, _):
        stream = await mesh.dial(server.port)
        other = await server.next()
        relay.revoke(frozenset({MachineName("b")}))
        assert await stream.reset_seen()
        assert await other.reset_seen()
        await eventually(lambda: relay.counters()["lines"] == 1, "b has no line any more")


async def test_a_ticket_is_for_the_machine_that_was_dialled_and_good_once() -> None:
    async with relayed() as (mesh, _server, relay, _):
        tickets: list[str] = []
        context = client_context(credentials(mesh.authority, machine("c")))
        thief = client_context(credentials(mesh.authority, machine("a")))
        line = asyncio.create_task(client(mesh, relay).listen(context, tickets.append, on_open=nothing))
        await eventually(lambda: relay.counters()["lines"] == 3, "c has a line")
        dialling = asyncio.create_task(client(mesh, relay).dial(MachineName("c"), thief))
        await eventually(lambda: len(tickets) == 1, "c is called")
        for stolen in (tickets[0], "0" * 32):
            with pytest.raises(DialRefused) as caught:
                await client(mesh, relay).accept(stolen, thief)
            assert caught.value.reason is Refusal.UNKNOWN_TICKET
        leg = await client(mesh, relay).accept(tickets[0], context)
        far = await dialling
        with pytest.raises(DialRefused):
            await client(mesh, relay).accept(tickets[0], context)
        line.cancel()
        for sock in (leg.socket, far.socket):
            sock.close()
        await asyncio.wait([line])


async def test_a_dialler_that_gives_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.net.relay.ACCEPT_LIMIT_S", 0.2)
    async with relayed() as (mesh, _server, relay, _):
        context = client_context(credentials(mesh.authority, machine("c")))
        line = asyncio.create_task(client(mesh, relay).listen(context, lambda ticket: None, on_open=nothing))
        await eventually(lambda: relay.counters()["lines"] == 3, "c has a line, and does not come")
        assert await refusal(mesh, relay, member(0, "a"), "c") is Refusal.PEER_UNREACHABLE
        assert (relay.book.tickets, relay.book.streams.total(), relay.counters()["waiting"]) == ({}, 0, 0)
        line.cancel()
        await asyncio.wait([line])


async def test_streams_break_with_the_relay_and_lines_come_back_with_it() -> None:
    async with relayed() as (mesh, server, relay, _):
        stream = await mesh.dial(server.port)
        other = await server.next()
        await relay.stop()
        assert await stream.reset_seen()
        assert await other.reset_seen()
        again = Relay(identity=relay_identity(R))
        again.set_identity(credentials(mesh.authority, relay_identity(R)))
        again.start(listen_on=(relay.addresses[0],))
        await eventually(lambda: again.counters()["lines"] == 2, "both came back by themselves")
        fresh = await mesh.dial(server.port)
        fresh.transport.write(b"again")
        assert await (await server.next(1)).read(5) == b"again"
        await again.stop()


def cut_by_relays(mesh: World) -> list[list[str]]:
    """On a and on b, as far as their member's epoch is concerned."""
    return [list(mesh.gateways[name].counters()["cut_by_relays"].get(RUN, {})) for name in ("a", "b")]


async def test_both_gateways_know_which_streams_a_relay_broke_by_ending() -> None:
    async with relayed() as (mesh, server, relay, _):
        stream = await mesh.dial(server.port)
        other = await server.next()
        await relay.stop()
        assert await stream.reset_seen()
        assert await other.reset_seen()
        await eventually(lambda: cut_by_relays(mesh) == [[R], [R]], "both know")
        for gateway in mesh.gateways.values():
            gateway.fence(RUN, Epoch(2))
        mesh.assemble(2)
        assert cut_by_relays(mesh) == [[], []], "of the next epoch it has broken none"


async def test_a_stream_that_its_peer_broke_is_not_the_relay_s() -> None:
    async with relayed() as (mesh, server, _, _):
        stream = await mesh.dial(server.port)
        (await server.next()).reset()
        assert await stream.reset_seen()
        assert cut_by_relays(mesh) == [[], []]


async def test_a_relay_was_lost_from_its_line_s_break_until_the_line_is_back() -> None:
    async with relayed() as (mesh, _, _, _):
        ways = mesh.gateways["a"]._relays
        [way] = ways._ways.values()
        assert not ways.was_lost(R, 100.0), "it never broke"
        assert not ways.was_lost(MachineName("unknown"), 100.0)
        way.line.broke_at, way.line.opened_at = 100.0, 0.0
        assert [ways.was_lost(R, at) for at in (96.0, 98.0, 101.0, 900.0)] == [False, True, True, True]
        way.line.opened_at = 110.0
        assert [ways.was_lost(R, at) for at in (96.0, 98.0, 109.0, 111.0)] == [False, True, True, False]
        way.line.opened_at = 100.5
        assert [ways.was_lost(R, at) for at in (102.0, 104.0)] == [True, False]


async def test_a_relay_that_was_taken_off_the_list_before_it_ended_is_known_too() -> None:
    async with relayed() as (mesh, server, relay, _):
        stream = await mesh.dial(server.port)
        await server.next()
        for gateway in mesh.gateways.values():
            await gateway.set_relays([])
        await relay.stop()
        assert await stream.reset_seen()
        await eventually(lambda: cut_by_relays(mesh) == [[R], [R]], "both know")


async def test_a_newer_line_of_a_machine_takes_the_place_of_the_older_one() -> None:
    async with relayed() as (mesh, _server, relay, _):
        tickets: list[str] = []
        context = client_context(credentials(mesh.authority, machine("c")))
        older = asyncio.create_task(client(mesh, relay).listen(context, lambda ticket: None, on_open=nothing))
        await eventually(lambda: relay.counters()["lines"] == 3, "c has a line")
        newer = asyncio.create_task(client(mesh, relay).listen(context, tickets.append, on_open=nothing))
        await asyncio.wait([older])
        assert isinstance(older.exception(), ConnectionError)
        dialling = asyncio.create_task(
            client(mesh, relay).dial(
                MachineName("c"), client_context(credentials(mesh.authority, machine("a")))
            )
        )
        await eventually(lambda: len(tickets) == 1, "the newer one is called")
        for task in (newer, dialling):
            task.cancel()
        await asyncio.wait([newer, dialling])


async def test_a_relay_s_certificate_opens_nothing_of_anybody_s() -> None:
    async with relayed() as (mesh, server, relay, _):
        mesh.gateways["a"].offer([server.port], deliver_to=("127.0.0.1",))
        context = client_context(credentials(mesh.authority, relay_identity(R)))
        at_a = at("a", *mesh.gateways["a"].addresses)[MachineName("a")]
        assert await probe(DEPLOYMENT, MachineName("a"), at_a.gateway, context=context, check=nobody) == []
        with pytest.raises(DialRefused):
            await client(mesh, relay).dial(MachineName("b"), context)
        assert mesh.gateways["a"].counters()["refused_in"] == {"HandshakeFailed": 1}
        assert relay.counters()["refused"] == {"HandshakeFailed": 1}


async def test_a_machine_s_certificate_does_not_make_a_relay_nor_a_relay_s_a_gateway_s() -> None:
    async with world() as mesh:
        for shown, is_gateway in ((machine("r"), False), (relay_identity(R), True)):
            fake = Relay(identity=shown)
            fake.set_identity(credentials(mesh.authority, shown))
            fake.start(listen_on=(("127.0.0.1", 0),))
            place = RelayPlace(machine=R, addresses=tuple(fake.addresses), is_gateway=is_gateway)
            dialling = RelayClient(deployment=DEPLOYMENT, place=place, check=nobody)
            with pytest.raises(RelayDown) as caught:
                await dialling.dial(
                    MachineName("b"), client_context(credentials(mesh.authority, machine("a")))
                )
            assert caught.value.reason is Refusal.PEER_NOT_TRUSTED
            await fake.stop()


# ---- several ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def relays(mesh: World, *names: str) -> AsyncIterator[dict[str, Relay]]:
    """The last one takes the part of the head's. a and b have a line to each."""
    made: dict[str, Relay] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            is_head = name == names[-1]
            relay = made[name] = Relay(identity=machine(name) if is_head else relay_identity(name))
            relay.set_identity(credentials(mesh.authority, relay.identity))
            relay.start(listen_on=(("127.0.0.1", 0),))
            stack.push_async_callback(relay.stop)
        for gateway in mesh.gateways.values():
            gateway.set_machines({MachineName(n): MachinePlace(gateway=()) for n in ("a", "b")})
            await gateway.set_relays(places(made))
        await eventually(lambda: all(r.counters()["lines"] == 2 for r in made.values()), "every line")
        yield made


def places(made: dict[str, Relay]) -> list[RelayPlace]:
    return [
        RelayPlace(
            machine=relay.identity.machine,
            addresses=tuple(relay.addresses),
            is_gateway=relay.identity == machine(relay.identity.machine),
        )
        for relay in made.values()
    ]


def carried(made: dict[str, Relay]) -> dict[str, int]:
    return {name: relay.counters()["streams"] for name, relay in made.items()}


async def test_the_head_s_own_relay_is_what_is_left_when_the_others_are_gone() -> None:
    async with world() as mesh, member_server() as server, relays(mesh, "r", "s", "head") as made:
        first, second = sorted(("r", "s"), key=lambda name: preference(MachineName(name), MachineName("b")))
        streams = [await mesh.dial(server.port)]
        await server.next()
        assert carried(made) == {first: 1, second: 0, "head": 0}
        await made[first].stop()  # it takes its own streams with it
        assert await streams[0].reset_seen()
        streams.append(await mesh.dial(server.port))
        await server.next(1)
        assert carried(made) == {first: 0, second: 1, "head": 0}
        await made[second].stop()
        assert await streams[1].reset_seen()
        stream = await mesh.dial(server.port)
        stream.transport.write(b"still here")
        assert await (await server.next(2)).read(10) == b"still here"
        assert carried(made) == {first: 0, second: 0, "head": 1}
        await made["head"].stop()
        assert await stream.reset_seen()
        await eventually(lambda: cut_by_relays(mesh) == [[first, second, "head"]] * 2, "both know of all")


async def test_a_relay_that_has_no_line_of_the_target_leads_to_the_next_and_a_third_member_to_none() -> None:
    async with world() as mesh, member_server() as server, relays(mesh, "r", "head") as made:
        await mesh.gateways["b"].set_relays(places({"head": made["head"]}))
        await eventually(lambda: made["r"].counters()["lines"] == 1, "b has left r")
        await mesh.dial(server.port)
        await server.next()
        assert carried(made) == {"r": 0, "head": 1}
        assert made["r"].counters()["refused"] == {"NotListening": 1}
        ways = RelayWays(
            deployment=DEPLOYMENT,
            machine=MachineName("c"),
            check=nobody,
            context=lambda: client_context(credentials(mesh.authority, machine("c"))),
            on_leg=lambda leg: leg.socket.close(),
        )
        await ways.set_places(places({"head": made["head"], "r": made["r"]}))
        with pytest.raises(DialRefused) as caught:
            await ways.dial(MachineName("b"), client_context(credentials(mesh.authority, member(2, "c"))))
        assert caught.value.reason is Refusal.RELAY_MEMBERS
        await ways.stop()


async def test_lines_to_relays_that_stay_are_not_broken_when_others_come_and_go() -> None:
    async with world() as mesh, relays(mesh, "r", "s", "head") as made:
        gateway = mesh.gateways["a"]
        await gateway.set_relays(places({"s": made["s"], "head": made["head"]}))
        await eventually(lambda: made["r"].counters()["lines"] == 1, "a has left r")
        await gateway.set_relays(places(made))
        await eventually(lambda: gateway.counters()["relay_lines"] == ["head", "r", "s"], "a is back")
        assert gateway.counters()["relay_line_breaks"] == 0


async def test_a_stranger_gets_nothing_from_a_relay() -> None:
    async with relayed() as (mesh, _server, relay, _):
        stranger = new_authority(DEPLOYMENT, now=time.time())
        who = credentials(stranger, machine("a"), bundle_pem=mesh.authority.certificate_pem)
        with pytest.raises(DialRefused):
            await client(mesh, relay).dial(MachineName("b"), client_context(who))
        await eventually(lambda: relay.gate.counts[Refusal.HANDSHAKE_FAILED] == 1, "it is counted")
        fake = Relay(identity=relay_identity("x"))
        fake.set_identity(credentials(mesh.authority, relay_identity("x")))
        fake.start(listen_on=(("127.0.0.1", 0),))
        with pytest.raises(DialRefused) as caught:
            await client(mesh, fake).dial(
                MachineName("b"), client_context(credentials(mesh.authority, machine("a")))
            )
        assert caught.value.reason is Refusal.PEER_NOT_TRUSTED
        await fake.stop()
