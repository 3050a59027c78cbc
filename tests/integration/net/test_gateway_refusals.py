"""What a gateway refuses, and that the member's port never hears of it. Every refusal is counted by its reason."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator

import pytest

from mesh.ids import Epoch, MachineName, Rank, RunUid
from mesh.net.authority import new_authority
from mesh.net.dialling import Dialled, Dialler, DialRefused, Leg, connect_to_any
from mesh.net.gateway import Gateway, Limits
from mesh.net.identity import Identity
from mesh.net.preface import MemberTarget, Preface
from mesh.net.refusals import Refusal
from mesh.net.sockets import has_ipv6
from mesh.net.tls import Credentials, client_context, server_context
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
    roster,
    world,
)


async def ask(
    gateway: Gateway,
    who: Credentials,
    *,
    port: int,
    rank: int = 1,
    epoch: int = 1,
    run: str = RUN,
    meant: str = "b",
    clock: float | None = None,
    service: bool = False,
) -> Dialled:
    """Dials a gateway as somebody who follows no rules but those of the protocol."""

    async def route(name: MachineName, context: ssl.SSLContext) -> Leg:
        return Leg(socket=await connect_to_any(name, gateway.addresses))

    target = MemberTarget(run=RunUid(run), epoch=Epoch(epoch), rank=Rank(rank))
    preface = Preface(
        machine=MachineName(meant),
        member=None if service else target,
        port=port,
        clock=time.time() if clock is None else clock,
    )
    dialler = Dialler(deployment=DEPLOYMENT, route=route, check=lambda peer: None)
    return await dialler.dial(context=client_context(who), preface=preface)


async def refused(mesh: World, server: MemberServer, who: Credentials, **how: object) -> DialRefused:
    """It is refused, the gateway counts it, and the member has heard nothing."""
    gateway = mesh.gateways["b"]
    before = gateway.gate.counts.copy()
    with pytest.raises(DialRefused) as caught:
        await ask(gateway, who, **{"port": server.port, **how})  # type: ignore[arg-type]
    counted = gateway.gate.counts - before
    assert counted == {caught.value.reason: 1} or caught.value.reason in (
        Refusal.PEER_NOT_TRUSTED,
        Refusal.PEER_UNREACHABLE,
    )
    assert server.streams == []
    return caught.value


@contextlib.asynccontextmanager
async def scene() -> AsyncIterator[tuple[World, MemberServer]]:
    async with world() as mesh, member_server() as server:
        yield mesh, server


async def test_who_is_in_the_roster_is_admitted() -> None:
    async with scene() as (mesh, server):
        dialled = await ask(mesh.gateways["b"], credentials(mesh.authority, member(0, "a")), port=server.port)
        await dialled.channel.write(b"hello")
        assert await (await server.next()).read(5) == b"hello"
        dialled.channel.socket.close()


async def test_a_member_of_an_older_epoch_is_refused_before_a_byte_reaches_the_member() -> None:
    async with scene() as (mesh, server):
        ghost = credentials(mesh.authority, member(0, "a", epoch=1))
        mesh.assemble(epoch=2)
        why = await refused(mesh, server, ghost, epoch=1)
        assert why.reason is Refusal.STALE_EPOCH
        assert "Epoch 1" in why.message
        assert "epoch 2" in why.message
        # Nor by meaning a member of the epoch that it is not of.
        why = await refused(mesh, server, ghost, epoch=2)
        assert why.reason is Refusal.STALE_EPOCH


async def test_streams_of_an_older_epoch_are_cut_the_moment_it_is_over() -> None:
    async with scene() as (mesh, server):
        stream = await mesh.dial(server.port)
        stream.transport.write(b"a")
        other = await server.next()
        await other.read(1)
        mesh.gateways["b"].fence(RUN, Epoch(2))
        assert await other.reset_seen()
        assert await stream.reset_seen()
        assert mesh.gateways["b"].counters()["streams"] == 0


async def test_the_gateway_of_the_ghost_cuts_too() -> None:
    async with scene() as (mesh, server):
        stream = await mesh.dial(server.port)
        await server.next()
        mesh.gateways["a"].set_roster(roster(2))
        assert await stream.reset_seen()
        again = await mesh.dial(server.port)  # the ghost dials on: it is nobody any more
        assert await again.reset_seen()
        assert mesh.gateways["a"].counters()["refused_out"] == {"UnknownTarget": 1}
        assert len(server.streams) == 1


@pytest.mark.parametrize(
    ("identity", "how", "reason"),
    [
        (member(0, "a", run="fedcba9876543210"), {}, Refusal.OTHER_RUN),
        (member(0, "c"), {}, Refusal.UNKNOWN_MACHINE),
        (member(7, "a"), {}, Refusal.UNKNOWN_MACHINE),
        (machine("a"), {}, Refusal.OTHER_RUN),
        (machine("a"), {"service": True}, Refusal.PORT_NOT_OFFERED),
        (member(0, "a"), {"port": 22}, Refusal.PORT_NOT_OFFERED),
        (member(0, "a"), {"service": True}, Refusal.OTHER_RUN),
    ],
    ids=str,
)
async def test_who_has_no_business_here(identity: Identity, how: dict[str, object], reason: Refusal) -> None:
    async with scene() as (mesh, server):
        assert (await refused(mesh, server, credentials(mesh.authority, identity), **how)).reason is reason


async def test_a_stream_for_another_machine_is_not_delivered_here() -> None:
    async with scene() as (mesh, server):
        mesh.gateways["a"].set_machines(at("b", *mesh.gateways["a"].addresses))
        why = await mesh.dial(server.port)  # a dials "b" and reaches itself
        assert await why.reset_seen()
        assert mesh.gateways["a"].counters()["refused_out"] == {"PeerNotTrusted": 1}


async def test_an_expired_certificate_is_refused_by_name_and_a_wrong_clock_too() -> None:
    async with scene() as (mesh, server):
        day_ago = time.time() - 86400
        old = credentials(mesh.authority, member(0, "a"), now=day_ago, ttl_s=3600)
        why = await refused(mesh, server, old)
        assert why.reason is Refusal.EXPIRED
        why = await refused(mesh, server, old, clock=time.time() - 3600)
        assert why.reason is Refusal.CLOCK_SKEW
        assert "This machine's clock is 60 min behind b's." in why.message
        early = credentials(mesh.authority, member(0, "a"), now=time.time() + 10800)
        why = await refused(mesh, server, early, clock=time.time() + 10800)
        assert why.reason is Refusal.CLOCK_SKEW
        assert "3.0 h ahead of b's" in why.message


async def test_who_dials_with_a_wrong_clock_is_told_so_by_its_own_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of a is 40 days ahead: to it the certificate of b has expired."""
    async with scene() as (mesh, server):
        ahead = time.time() + 40 * 86400
        monkeypatch.setattr("mesh.net.dialling.wall_clock", lambda: ahead)
        monkeypatch.setattr("mesh.net.gateway.wall_clock", lambda: ahead)
        stream = await mesh.dial(server.port)
        assert await stream.reset_seen()
        assert mesh.gateways["a"].counters()["refused_out"] == {"ClockSkew": 1}
        assert server.streams == []


async def test_silence_is_bounded_before_and_after_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.net.greeting.HANDSHAKE_LIMIT_S", 0.3)
    monkeypatch.setattr("mesh.net.reception.PREFACE_LIMIT_S", 0.3)
    async with scene() as (mesh, _):
        gateway = mesh.gateways["b"]
        slow = socket.create_connection(gateway.addresses[0])
        slow.send(b"\x16\x03\x01\x02\x00\x01")  # the first bytes of a ClientHello, and no more
        context = client_context(credentials(mesh.authority, member(0, "a")))
        reader, writer = await asyncio.open_connection(*gateway.addresses[0], ssl=context)
        writer.write(b"\0\0")  # half a header
        with contextlib.suppress(OSError):
            await reader.read()
        wanted = {Refusal.HANDSHAKE_TIMEOUT: 1, Refusal.PREFACE_TIMEOUT: 1}
        await eventually(lambda: dict(gateway.gate.counts) == wanted, f"{gateway.gate.counts}")
        slow.close()
        await eventually(lambda: gateway.counters()["in_the_door"] == 0, "both have left the door")
        writer.transport.abort()


async def test_a_member_that_is_replaced_here_loses_the_streams_that_reach_it() -> None:
    async with scene() as (mesh, server):
        stream = await mesh.dial(server.port)
        other = await server.next()
        mesh.gateways["b"].set_roster(roster(1, on=("a", "c")))
        assert await other.reset_seen()
        assert await stream.reset_seen()


async def test_a_gateway_listens_and_dials_on_ipv6() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    async with scene() as (mesh, server):
        second = Gateway(deployment=DEPLOYMENT, machine=MachineName("b"))
        second.set_identity(credentials(mesh.authority, machine("b")))
        second.set_roster(roster())
        second.host(credentials(mesh.authority, member(1, "b")), deliver_to=("127.0.0.1",))
        second.start(listen_on=(("::1", 0),), capture_port=None)
        mesh.gateways["a"].set_machines(at("b", *second.addresses))
        stream = await mesh.dial(server.port)
        stream.transport.write(b"six")
        assert await (await server.next()).read(3) == b"six"
        await second.stop()


async def test_revoked_by_the_machine_s_name_also_while_it_streams() -> None:
    async with scene() as (mesh, server):
        stream = await mesh.dial(server.port)
        await server.next()
        mesh.gateways["b"].revoke(frozenset({MachineName("a")}))
        assert await stream.reset_seen()
        server.streams.clear()
        who = credentials(mesh.authority, member(0, "a"))
        assert (await refused(mesh, server, who)).reason is Refusal.REVOKED
        mesh.gateways["b"].revoke(frozenset())
        (await ask(mesh.gateways["b"], who, port=server.port)).channel.socket.close()


async def test_a_certificate_of_another_authority_is_worth_nothing() -> None:
    async with scene() as (mesh, server):
        stranger = new_authority(DEPLOYMENT, now=time.time())
        who = credentials(stranger, member(0, "a"), bundle_pem=mesh.authority.certificate_pem)
        await refused(mesh, server, who)
        await eventually(
            lambda: mesh.gateways["b"].gate.counts[Refusal.HANDSHAKE_FAILED] == 1, "it is counted"
        )


async def test_no_certificate_tls_1_2_and_no_tls_at_all_are_counted_apart() -> None:
    async with scene() as (mesh, server):
        gateway = mesh.gateways["b"]
        host, port = gateway.addresses[0]
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port, ssl=bare)
            await reader.read(1)
        bare.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):
            await asyncio.open_connection(host, port, ssl=bare)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"SSH-2.0-OpenSSH_9.2\r\n"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(garbage)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        counts = gateway.gate.counts
        wanted = {Refusal.NO_CERTIFICATE: 1, Refusal.TLS_VERSION: 1, Refusal.NOT_TLS: 3}
        await eventually(lambda: dict(counts) == wanted, f"{counts}")
        assert server.streams == []


async def test_garbage_inside_tls_is_refused() -> None:
    async with scene() as (mesh, server):
        gateway = mesh.gateways["b"]
        context = client_context(credentials(mesh.authority, member(0, "a")))
        for words in (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x05hello", b"\0\0\0\x01\x80"):
            reader, writer = await asyncio.open_connection(*gateway.addresses[0], ssl=context)
            writer.write(words)
            with contextlib.suppress(OSError):
                assert len(await reader.read()) < 1024
            writer.transport.abort()
        counts = gateway.gate.counts
        await eventually(
            lambda: counts[Refusal.BAD_PREFACE] + counts[Refusal.WRONG_VERSION] == 4, f"{counts}"
        )
        assert server.streams == []


async def test_an_early_stream_waits_until_its_epoch_is_here() -> None:
    async with scene() as (mesh, server):
        b = mesh.gateways["b"]
        who = credentials(mesh.authority, member(0, "a", epoch=2))
        early = asyncio.create_task(ask(b, who, port=server.port, epoch=2))
        await eventually(lambda: b.counters()["waiting"] == 1, "it waits")
        b.set_roster(roster(2))
        assert b.counters()["waiting"] == 1
        mesh.host(1, "b", epoch=2)
        dialled = await early
        await dialled.channel.write(b"now")
        assert await (await server.next()).read(3) == b"now"
        dialled.channel.socket.close()


async def test_an_early_stream_is_refused_at_once_when_its_epoch_is_over_before_it_came() -> None:
    async with scene() as (mesh, server):
        b = mesh.gateways["b"]
        who = credentials(mesh.authority, member(0, "a", epoch=2))
        early = asyncio.create_task(ask(b, who, port=server.port, epoch=2))
        await eventually(lambda: b.counters()["waiting"] == 1, "it waits")
        b.set_roster(roster(3))
        with pytest.raises(DialRefused) as caught:
            await early
        assert caught.value.reason is Refusal.STALE_EPOCH
        assert server.streams == []


async def test_nobody_listens_is_told_as_such_and_a_member_sees_a_reset() -> None:
    async with world() as mesh:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            stream = await mesh.dial(port)
            assert await stream.reset_seen()
        assert mesh.gateways["a"].counters()["refused_out"] == {"TargetRefused": 1}
        assert mesh.gateways["b"].counters()["refused_in"] == {"TargetRefused": 1}


async def test_the_certificate_of_a_member_cannot_answer_for_a_machine() -> None:
    """Who has stolen a member's key still cannot stand in for the machine that others dial."""
    async with scene() as (mesh, server):
        stolen = credentials(mesh.authority, member(1, "b"))
        impostor = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0, ssl=server_context(stolen))
        address = impostor.sockets[0].getsockname()[:2]
        mesh.gateways["a"].set_machines(at("b", address))
        stream = await mesh.dial(server.port)
        assert await stream.reset_seen()
        assert mesh.gateways["a"].counters()["refused_out"] == {"PeerNotTrusted": 1}
        impostor.close()


async def test_a_crowd_of_silent_connections_takes_its_share_of_the_door_and_no_more() -> None:
    limits = Limits(door_places=12, door_places_per_source=8)
    async with world(limits=limits) as mesh, member_server() as server:
        b = mesh.gateways["b"]
        crowd = [socket.create_connection(b.addresses[0]) for _ in range(40)]
        await eventually(lambda: b.gate.counts[Refusal.SOURCE_LIMIT] == 32, "the rest is closed")
        assert b.counters()["in_the_door"] == 8
        for sock in crowd:
            sock.close()
        await eventually(lambda: b.gate.counts[Refusal.HANDSHAKE_FAILED] == 8, "those inside have failed")
        assert b.counters()["in_the_door"] == 8, "who fails keeps the place for a while"
        await eventually(lambda: b.counters()["in_the_door"] == 0, "and then gives it back")
        stream = await mesh.dial(server.port)
        stream.transport.write(b"still open")
        assert await (await server.next()).read(10) == b"still open"


async def test_when_the_door_is_full_who_comes_waits_and_is_served_later() -> None:
    limits = Limits(door_places=4, door_places_per_source=4)
    async with world(limits=limits) as mesh, member_server() as server:
        b = mesh.gateways["b"]
        crowd = [socket.create_connection(b.addresses[0]) for _ in range(4)]
        await eventually(lambda: b.counters()["in_the_door"] == 4, "the door is full")
        stream = await mesh.dial(server.port)
        stream.transport.write(b"patient")
        crowd.append(socket.create_connection(b.addresses[0]))  # the kernel takes it, nobody else does
        assert b.gate.counts[Refusal.SOURCE_LIMIT] == 0
        for sock in crowd:
            sock.close()
        assert await (await server.next()).read(7) == b"patient"


async def test_streams_are_bounded_too() -> None:
    async with world(limits=Limits(streams_max=3)) as mesh, member_server() as server:
        streams = [await mesh.dial(server.port) for _ in range(5)]
        await server.next(2)
        await eventually(
            lambda: mesh.gateways["a"].counters()["refused_out"] == {"StreamLimit": 2}, "two are refused"
        )
        assert len(server.streams) == 3
        assert len(streams) == 5


async def test_an_identity_is_replaced_while_streams_run_and_a_new_authority_takes_over() -> None:
    async with scene() as (mesh, server):
        stream = await mesh.dial(server.port)
        other = await server.next()
        new = new_authority(DEPLOYMENT, now=time.time())
        both = mesh.authority.certificate_pem + new.certificate_pem
        for signing, bundle in ((mesh.authority, both), (new, both), (new, new.certificate_pem)):
            for name, gateway in mesh.gateways.items():
                gateway.set_identity(credentials(signing, machine(name), bundle_pem=bundle))
            for rank, name in enumerate(("a", "b")):
                mesh.gateways[name].host(
                    credentials(signing, member(rank, name), bundle_pem=bundle), deliver_to=("127.0.0.1",)
                )
            fresh = await mesh.dial(server.port)
            fresh.transport.write(b"new")
            assert await (await server.next(len(server.streams))).read(3) == b"new"
        stream.transport.write(b"old stream")
        assert await other.read(10) == b"old stream"
        retired = credentials(mesh.authority, member(0, "a"), bundle_pem=both)
        with pytest.raises(DialRefused):
            await ask(mesh.gateways["b"], retired, port=server.port)
