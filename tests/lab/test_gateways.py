"""Two hosts, a gateway process on each, real nftables: a plain program reaches another by an overlay address."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.gateway_wire import Counters
from mesh.net import redirect
from tests.lab.gateways import (
    CALL,
    LIMIT_S,
    PORT,
    RELAY,
    SECRET,
    SHOUT,
    TABLE,
    TwoHosts,
    overlay,
    two_hosts,
    wiretap,
)
from tests.lab.network import call, skip_without_redirect
from tests.net_world import DEPLOYMENT, RUN

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.full((2_000_000,), dist.get_rank() + 1.0)
dist.all_reduce(numbers)
assert bool((numbers == numbers[0]).all())
print(f"rank {dist.get_rank()}: {numbers[0]}")
dist.barrier()
dist.destroy_process_group()
"""

FLOWS = 4
FLOW_PORT = PORT + 1
RACED_BYTES = 50_000_000
FLOOD = """
import socket, sys, threading
def flood():
    sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    data = bytes(1 << 20)
    while True:
        sock.sendall(data)
for _ in range(int(sys.argv[3])):
    threading.Thread(target=flood).start()
"""
RACE = """
import json, socket, sys, threading
host, port, flows, goal = sys.argv[1], *map(int, sys.argv[2:5])
counts = [0] * flows
ready, over = threading.Barrier(flows), threading.Event()
def drain(number, sock):
    buffer = bytearray(1 << 20)
    ready.wait()
    while counts[number] < goal and not over.is_set():
        counts[number] += sock.recv_into(buffer)
    over.set()
listener = socket.create_server((host, port))
print("ready", flush=True)
for number in range(flows):
    threading.Thread(target=drain, args=(number, listener.accept()[0]), daemon=True).start()
over.wait()
print(json.dumps(counts), flush=True)
"""
ROUND_TRIPS = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for _ in range(int(sys.argv[3])):
    sock.sendall(b"x")
    assert sock.recv(1) == b"x"
print("there and back")
"""
CROWD = 2000
CROWD_LIMIT_S = 200
ANSWERER = """
import asyncio, sys
async def serve(reader, writer):
    while data := await reader.readexactly(8):
        writer.write(data[::-1])
async def main():
    await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2]), backlog=1024)
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
CROWDING = """
import asyncio, sys
async def ask(stream, number):
    said = b"%08d" % number
    stream[1].write(said)
    assert await stream[0].readexactly(8) == said[::-1]
async def enter(number, door):
    async with door:
        stream = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
        await ask(stream, number)
        return stream
async def main(size):
    door = asyncio.Semaphore(64)
    streams = await asyncio.gather(*(enter(number, door) for number in range(size)))
    print("inside", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(ask(stream, -number) for number, stream in enumerate(streams)))
    print("answered", flush=True)
asyncio.run(main(int(sys.argv[3])))
"""
HOLD = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sock.sendall(b"x")
assert sock.recv(1) == b"x"
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    skip_without_redirect()
    with two_hosts(tmp_path) as made:
        yield made


def test_a_plain_program_reaches_another_and_a_ghost_does_not(hosts: TwoHosts) -> None:
    server = hosts.start_echo("m1", overlay(1)[1])  # on the IPv6 address only; both can be dialled
    assert server.stdout is not None
    said = SECRET * 1000
    with wiretap(hosts.lab.port("m0")) as seen:
        for address in overlay(1):
            done = hosts.run("m0", CALL, address, str(PORT), said)
            assert done.stdout.strip() == said, done.stderr
        done = hosts.run("m0", SHOUT, overlay(1)[0], str(PORT), SECRET)
        assert done.returncode != 0, "what is no TCP must not go anywhere"
    assert len(seen) > 2 * len(said)
    assert SECRET.encode() not in seen
    assert hosts.tell("m1", Counters())["ended"] == {"finished": 2}
    assert [server.stdout.readline() for _ in range(2)] == ["accepted\n"] * 2

    # m1 is at epoch 2; nobody has told m0, on which everything of epoch 1 still runs.
    hosts.brief("m1", epoch=2)
    for address in overlay(1):
        done = hosts.run("m0", CALL, address, str(PORT), "from the grave")
        assert "ConnectionResetError" in done.stderr
    assert hosts.tell("m1", Counters())["refused_in"] == {"StaleEpoch": 2}
    heard, _, _ = select.select([server.stdout], [], [], 0)
    assert not heard, "the member has heard of the ghost"
    hosts.brief("m0", epoch=2)
    assert hosts.run("m0", CALL, overlay(1)[0], str(PORT), "alive").stdout.strip() == "alive"


def test_two_hosts_that_only_dial_out_reach_each_other_by_a_relay(hosts: TwoHosts) -> None:
    hosts.start_echo("m1", overlay(1)[0])
    relay = hosts.start_relay()
    hosts.only_by_relay()
    said = SECRET * 1000
    with wiretap(hosts.lab.port(RELAY)) as seen:
        done = hosts.run("m0", CALL, overlay(1)[0], str(PORT), said)
        assert done.stdout.strip() == said, done.stderr
    assert len(seen) > 4 * len(said)
    assert SECRET.encode() not in seen
    relay.send_signal(signal.SIGTERM)
    assert relay.wait(timeout=LIMIT_S) == 0
    log = (hosts.folder / f"{RELAY}.log").read_text()
    [line] = [line for line in log.splitlines() if "relayed " in line]
    billed = json.loads(line.partition("relayed ")[2])
    assert (billed["run"], billed["from"], billed["to"]) == (RUN, "m0", "m1")
    assert billed["bytes"] > 2 * len(said)


@pytest.mark.parametrize("is_relayed", [False, True], ids=["direct", "relayed"])
def test_streams_in_full_flow_share_the_way_and_let_a_small_one_through(
    hosts: TwoHosts, is_relayed: bool
) -> None:
    if is_relayed:
        hosts.start_relay()
        hosts.only_by_relay()
    address = overlay(1)[0]
    hosts.start_echo("m1", address)
    race = start(hosts, "m1", RACE, address, FLOW_PORT, FLOWS, RACED_BYTES, says="ready")
    flood = start(hosts, "m0", FLOOD, address, FLOW_PORT, FLOWS)
    done = hosts.run("m0", ROUND_TRIPS, address, str(PORT), "100")
    assert done.stdout.strip() == "there and back", done.stderr
    counts = json.loads(race.communicate(timeout=LIMIT_S)[0])
    assert min(counts) > max(counts) / 10, counts
    flood.kill()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2 * CROWD_LIMIT_S)
def test_thousands_of_streams_run_at_once_and_are_not_mixed_up(hosts: TwoHosts) -> None:
    address = overlay(1)[0]
    start(hosts, "m1", ANSWERER, address, PORT, says="ready")
    crowd = start(hosts, "m0", CROWDING, address, PORT, CROWD, says="inside")
    assert [hosts.tell(host, Counters())["streams"] for host in ("m0", "m1")] == [CROWD] * 2
    assert crowd.communicate("\n", timeout=CROWD_LIMIT_S)[0] == "answered\n"


def test_no_hop_of_a_stream_within_one_site_is_sent_by_timers(hosts: TwoHosts) -> None:
    address = overlay(1)[0]
    hosts.start_echo("m1", address)
    start(hosts, "m0", HOLD, address, PORT, says="held")
    for host in ("m0", "m1"):
        shown = call(*hosts.inside(host, "ss", "-Htin", "state", "established"))
        assert shown.count("cwnd:") == 3, shown  # the program's, and the gateway's two
        assert "bbr" not in shown.split(), shown


def start(
    hosts: TwoHosts, host: str, program: str, *arguments: object, says: str | None = None
) -> subprocess.Popen[str]:
    """A program that runs beside the test; `says` is its first line, which is waited for."""
    argv = hosts.inside(host, sys.executable, "-c", program, *map(str, arguments))
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    hosts.others.append(process)
    assert process.stdout is not None
    assert says is None or process.stdout.readline() == f"{says}\n"
    return process


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torch_with_gloo_all_reduces_over_the_direct_and_the_relayed_path(hosts: TwoHosts) -> None:
    assert all_reduce(hosts) == ["rank 0: 3.0", "rank 1: 3.0"]
    assert hosts.tell("m1", Counters())["ended"].keys() == {"finished"}
    hosts.start_relay()
    hosts.only_by_relay()
    assert all_reduce(hosts) == ["rank 0: 3.0", "rank 1: 3.0"]


def all_reduce(hosts: TwoHosts) -> list[str]:
    """What both ranks print, which know each other by their overlay addresses."""
    ranks = []
    for rank, host in enumerate(("m0", "m1")):
        environment = os.environ | {
            "MASTER_ADDR": overlay(0)[0],
            "MASTER_PORT": str(PORT),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "GLOO_SOCKET_IFNAME": redirect.device_name(DEPLOYMENT),
        }
        argv = hosts.inside(host, sys.executable, "-c", ALL_REDUCE)
        ranks.append(subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True))
    hosts.others += ranks
    return [rank.communicate(timeout=100)[0].strip() for rank in ranks]


def test_what_a_gateway_leaves_when_it_is_killed_and_when_it_ends(hosts: TwoHosts) -> None:
    namespace = hosts.lab.namespace("m0")
    hosts.start_echo("m1", overlay(1)[0])
    hosts.gateways["m0"].send_signal(signal.SIGKILL)
    hosts.gateways["m0"].communicate()
    with wiretap(hosts.lab.port("m0")) as seen:
        done = hosts.run("m0", CALL, overlay(1)[0], str(PORT), SECRET)
        assert "ConnectionRefusedError" in done.stderr
    assert SECRET.encode() not in seen

    hosts.start_gateway("m0")
    left = call("ip", "-n", namespace, "address", "show")
    assert not any(address in left for address in overlay(0)), "an address of the one that was killed"
    hosts.brief("m0")
    assert hosts.run("m0", CALL, overlay(1)[0], str(PORT), "again").stdout.strip() == "again"
    tables = call("ip", "netns", "exec", namespace, "nft", "list", "tables").split()
    assert tables.count(TABLE) == 1

    hosts.gateways["m0"].send_signal(signal.SIGTERM)
    assert hosts.gateways["m0"].wait(timeout=LIMIT_S) == 0
    assert call("ip", "netns", "exec", namespace, "nft", "list", "ruleset").strip() == ""
    left = call("ip", "-n", namespace, "address", "show")
    assert not any(address in left for address in overlay(0))
    assert redirect.device_name(DEPLOYMENT) not in left
    for family in ("-4", "-6"):
        assert redirect.device_name(DEPLOYMENT) not in call("ip", family, "-n", namespace, "route")
