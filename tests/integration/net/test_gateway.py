"""Two gateways on loopback, real TLS: what passes, how it ends, what is refused before a byte reaches the member."""

from __future__ import annotations

import asyncio
import random

from tests.integration.net.flow import until_stuck
from tests.net_world import World, eventually, machine_overlay, member_server, recorder, world


async def test_bytes_arrive_as_they_were_sent_in_both_directions_at_once() -> None:
    there, back = random.Random(0).randbytes(3_000_017), random.Random(1).randbytes(2_000_003)
    async with world() as mesh, member_server() as server:
        stream = await mesh.dial(server.port)
        other = await server.next()
        stream.transport.write(there)
        other.transport.write(back)
        assert await other.read(len(there)) == there
        assert await stream.read(len(back)) == back


async def test_one_side_ends_and_the_other_goes_on() -> None:
    async with world() as mesh, member_server() as server:
        stream = await mesh.dial(server.port)
        stream.transport.write(b"last words")
        stream.transport.write_eof()
        other = await server.next()
        await other.until(other.ended.is_set)
        assert other.received == b"last words"
        for part in range(50):
            other.transport.write(bytes([part]) * 10_000)
        other.transport.write_eof()
        await stream.until(stream.ended.is_set)
        assert len(stream.received) == 500_000
        assert not stream.lost.done()
        assert not other.lost.done()
        await eventually(
            lambda: ends(mesh, "a") == ends(mesh, "b") == {"finished": 1}, "both gateways finished"
        )


async def test_an_end_while_the_other_direction_is_in_full_flow_loses_nothing() -> None:
    """TLS is told of the end between two halves of a record of the other direction."""
    amount = 8_000_000
    async with world() as mesh, member_server() as server:
        stream = await mesh.dial(server.port)
        other = await server.next()
        other.transport.write(b"x" * amount)
        await stream.read(1)
        stream.transport.write(b"y" * 70_000)
        stream.transport.write_eof()
        await other.until(other.ended.is_set)
        assert len(other.received) == 70_000
        await stream.read(amount)


async def test_a_reset_is_a_reset_on_the_other_side_whoever_does_it() -> None:
    async with world() as mesh, member_server() as server:
        stream = await mesh.dial(server.port)
        other = await server.next()
        stream.reset()
        assert await other.reset_seen()
        stream = await mesh.dial(server.port)
        other = await server.next(1)
        other.reset()
        assert await stream.reset_seen()


async def test_a_reset_is_noticed_also_while_its_side_is_not_read() -> None:
    async with world() as mesh, member_server() as server:
        stream = await mesh.dial(server.port)
        other = await server.next()
        other.transport.pause_reading()
        await until_stuck(stream.transport)
        stream.reset()
        other_again = asyncio.create_task(other.reset_seen())
        await eventually(lambda: ends(mesh, "a").get("member reset") == 1, "gateway a noticed")
        other.transport.resume_reading()
        assert await other_again


async def test_a_reader_that_reads_nothing_stops_its_writer() -> None:
    async with world() as mesh, member_server() as server:
        stream = await mesh.dial(server.port)
        other = await server.next()
        other.transport.pause_reading()
        sent = await until_stuck(stream.transport)
        other.transport.resume_reading()
        await other.read(sent)
        assert set(other.received) == {0x7A}


async def test_nothing_of_what_members_say_is_on_the_wire_as_it_is() -> None:
    secret = b"the gradients of a paying customer" * 40
    async with world() as mesh, member_server() as server, recorder(mesh, "b") as wire:
        stream = await mesh.dial(server.port)
        stream.transport.write(secret)
        other = await server.next()
        assert await other.read(len(secret)) == secret
        assert len(wire) > len(secret)
        assert b"gradients" not in wire
        assert (
            str(mesh.authority.deployment).encode() not in wire
        )  # not even who they are: certificates are encrypted


async def test_machines_reach_each_others_services_and_no_other_port() -> None:
    async with world() as mesh, member_server() as server:
        mesh.gateways["b"].offer({server.port}, deliver_to=("127.0.0.1",))
        stream = await mesh.dial(server.port, to=machine_overlay("b"))
        stream.transport.write(b"a raylet")
        assert await (await server.next()).read(8) == b"a raylet"
        other = await mesh.dial(server.port + 1, to=machine_overlay("b"))
        assert await other.reset_seen()
        assert mesh.gateways["b"].counters()["refused_in"] == {"PortNotOffered": 1}


async def test_hundreds_of_streams_do_not_get_mixed_up() -> None:
    async with world() as mesh, member_server() as server:
        streams = [await mesh.dial(server.port) for _ in range(150)]
        for number, stream in enumerate(streams):
            stream.transport.write(number.to_bytes(4, "big") * 500)
        await server.next(len(streams) - 1)
        numbers = set()
        for other in server.streams:
            said = await other.read(2000)
            assert said == said[:4] * 500
            numbers.add(int.from_bytes(said[:4], "big"))
            other.transport.write(said[:4])
        assert numbers == set(range(150))
        for number, stream in enumerate(streams):
            assert await stream.read(4) == number.to_bytes(4, "big")


def ends(mesh: World, name: str) -> dict[str, int]:
    found: dict[str, int] = mesh.gateways[name].counters()["ended"]
    return found
