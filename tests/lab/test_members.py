"""Members of a gang on hosts with a gateway each: their commands reach each other by the overlay, and ghosts do not.

Cases 1, 2 and 6 of the field's failures, on the overlay: names that resolve to nothing or to loopback, IPv6 only.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.gateway_wire import Counters
from agents.overlay_line import ask
from mesh.ids import RunName
from mesh.net import redirect
from mesh.plan import RunPlan
from mesh.states import LauncherKind, NetworkScope, TransportPolicy
from tests.lab.gateways import wiretap
from tests.lab.members import LIMIT_S, RELAY, LabGang, LabMember, MeshHosts, lab_gang, mesh_hosts
from tests.lab.network import skip_without_redirect
from tests.lab.scripts import GHOST, OK
from tests.net_world import DEPLOYMENT

ONES = struct.pack("<f", 1.0) * 64
"""What the yardstick's numbers are on a wire in clear text."""
SECRET = "gradients of a paying customer"
TALK = f"""
import json, os, socket, sys, time
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
names = ("NODUS_GANG_TRANSPORT", "NODUS_NODE_IPS", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
print(json.dumps({{name: os.environ[name] for name in names}}), flush=True)
if rank == 0:
    sock, _ = socket.create_server(("0.0.0.0", port)).accept()
else:
    while True:
        try:
            sock = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=20)
            sock.sendall(b"hello")
            assert sock.recv(100) == b"hello"
            break
        except OSError:
            time.sleep(0.1)
    print("connected", flush=True)
while True:
    if rank:
        sock.sendall({SECRET.encode()!r} * 100)
        time.sleep(0.05)
    data = sock.recv(1 << 20)
    if not data:
        sys.exit("connection closed by peer")
    if not rank:
        sock.sendall(data)
"""


@pytest.fixture(autouse=True)
def _redirects() -> None:
    skip_without_redirect()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[MeshHosts]:
    with mesh_hosts(tmp_path, "m0", "m1", "m2") as hosts:
        yield hosts


def plan(*command: str, launcher: LauncherKind = LauncherKind.PLAIN) -> RunPlan:
    return RunPlan(
        name=RunName("job"),
        command=command,
        nodes=2,
        launcher=launcher,
        network=NetworkScope.GLOBAL,
        transport_policy=TransportPolicy.AUTO,
    )


TALKING = plan(sys.executable, "-c", TALK)


async def talking(gang: LabGang, epoch: int, *hosts: str) -> list[LabMember]:
    """Both ranks have started, and rank 1 has an answer of rank 0."""
    members = await gang.epoch(epoch, *hosts)
    for member in members:
        await member.report("MemberStarted")
    async with asyncio.timeout(LIMIT_S):
        while "connected" not in members[1].output():
            await asyncio.sleep(0.05)
    return members


async def refused_in(hosts: MeshHosts, host: str) -> dict[str, int]:
    """What others asked of the gateway in vain, by reason."""
    found = await ask(hosts.socket(host), Counters())
    assert isinstance(found, dict)
    return dict(found["refused_in"])


@pytest.mark.timeout(200)
async def test_the_next_epoch_runs_and_the_ghost_of_the_one_before_is_refused(three: MeshHosts) -> None:
    async with lab_gang(three, TALKING) as gang:
        with wiretap(three.lab.port("m0")) as seen:
            first = await talking(gang, 1, "m0", "m1")
            await asyncio.sleep(0.5)
        assert len(seen) > 5000
        assert SECRET.encode() not in seen
        told = json.loads(first[1].output().splitlines()[0])
        device = redirect.device_name(DEPLOYMENT)
        assert told == {
            "NODUS_GANG_TRANSPORT": "direct",
            "NODUS_NODE_IPS": "198.19.0.1,198.19.0.2",
            "MASTER_ADDR": "198.19.0.1",
            "GLOO_SOCKET_IFNAME": device,
            "NCCL_SOCKET_IFNAME": f"={device}",
        }
        path = (await first[0].report("MemberStarted"))["path"]
        assert (path["transport"], path["address"], path["lacks"]) == ("direct", "198.19.0.1", "")

        # m1 is lost: its agent and its command are gone, and what somebody left there dials on in epoch 1's name.
        await first[1].kill()
        argv = three.inside("m1", sys.executable, "-c", GHOST, "198.19.0.1", "29500")
        ghost = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        three.others.append(ghost)
        await first[0].end()
        second = await talking(gang, 2, "m0", "m2")
        assert ghost.stdout is not None
        ghost.send_signal(signal.SIGSTOP)  # what it has said so far may be of the time between the epochs
        before = await refused_in(three, "m0")
        ghost.send_signal(signal.SIGCONT)
        async with asyncio.timeout(LIMIT_S):
            while (refused := await refused_in(three, "m0")) == before:
                await asyncio.sleep(0.1)
        assert refused == before | {"StaleEpoch": refused["StaleEpoch"]}
        ghost.kill()
        words = set(ghost.stdout.read().split())
        assert "ConnectionResetError" in words
        assert "heard" not in words
        assert "from the grave" not in second[0].output()
        for member in second:
            await member.end()


@pytest.mark.timeout(200)
async def test_a_gateway_that_is_killed_in_the_middle_is_to_blame_and_the_next_epoch_runs(
    three: MeshHosts,
) -> None:
    async with lab_gang(three, TALKING) as gang:
        first = await talking(gang, 1, "m0", "m1")
        three.kill_gateway("m1")
        exits = [await member.report("MemberExited") for member in first]
        assert exits[1]["evidence"]["by_infrastructure"], exits
        assert "the gateway of its machine ended" in exits[1]["evidence"]["message"]
        assert not exits[0]["evidence"]["by_infrastructure"], exits[0]
        assert exits[0]["evidence"]["blames_peer"], exits[0]
        await asyncio.to_thread(three.start_gateway, "m1")  # as its agent would
        await asyncio.to_thread(three.introduce, "m1")
        for member in first:
            await member.end()
        for member in await talking(gang, 2, "m0", "m1"):
            await member.end()


# ---- with torch -------------------------------------------------------------------------------------


async def all_reduced(hosts: MeshHosts) -> list[str]:
    """The field's yardstick, by torchrun: what both ranks said."""
    script = hosts.folder / "ok.py"
    script.write_text(OK)
    async with lab_gang(hosts, plan("torchrun", str(script), launcher=LauncherKind.TORCHRUN)) as gang:
        members = await gang.epoch(1, "m0", "m1")
        for member in members:
            exited = await member.report("MemberExited")
            assert exited["exit"] == {"code": 0, "signal": None}, member.output()
        said = [line for m in members for line in m.output().splitlines() if line.startswith("ok")]
        for member in members:
            await member.end()
    return said


EVERYBODY = ["ok world=2 mesh=0 rank=0", "ok world=2 mesh=1 rank=1"]
NOTHING = "127.0.0.1 localhost\n"
LOOPBACK = f"{NOTHING}127.0.1.1 {socket.gethostname()}\n"


@pytest.fixture
def two(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MeshHosts]:
    with mesh_hosts(tmp_path, "m0", "m1", **request.param) as hosts:
        yield hosts


@pytest.mark.soak
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "two",
    [{"hosts_file": NOTHING}, {"hosts_file": LOOPBACK}, {"hosts_file": NOTHING, "is_ipv6_only": True}],
    ids=["1: names resolve to nothing", "2: names resolve to loopback", "6: IPv6 only"],
    indirect=True,
)
async def test_cases_1_2_and_6_on_the_direct_path(two: MeshHosts) -> None:
    with wiretap(two.lab.port("m0")) as seen:
        assert await all_reduced(two) == EVERYBODY
    assert ONES not in seen
    assert len(seen) > 1_000_000, "the numbers did cross this wire"


@pytest.mark.soak
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("two", [{}], indirect=True, ids=[""])
async def test_two_that_only_dial_out_train_by_a_relay(two: MeshHosts) -> None:
    await asyncio.to_thread(two.hide, "m0", "m1")
    with wiretap(two.lab.port(RELAY)) as seen:
        assert await all_reduced(two) == EVERYBODY
    assert ONES not in seen
    assert len(seen) > 1_000_000, "the numbers did cross this wire"
