"""The harm itself, on real processes: what is hit, what is spared, and that a time comes to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agents import chaos
from agents.core import events as ev
from agents.keeper_process import KeeperProcess
from agents.machine import from_here
from agents.signing_in import SERVES_VARIABLE
from agents.supervisor_protocol import INCARNATION_VARIABLE
from mesh.ids import Epoch, Incarnation, IncarnationToken, MachineName, Rank, RunName, RunUid, new_run_uid
from mesh.messages import JoinOrder
from mesh.plan import Endpoint, RunPlan
from mesh.states import HarmKind
from mesh.store.local import local_name
from tests.fakes.store import FakeStore

DEADLINE_S = 20.0
ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.02)


class Machine:
    """Processes as a machine has them, and one that is none of its business."""

    def __init__(self) -> None:
        uid = new_run_uid()
        self.rank = self._life(uid, 0)
        self._children: list[subprocess.Popen[bytes]] = []
        self.raylet = self._start("sh", "-c", "sleep 600 & sleep 600 & wait", wanted=2)
        self.keeper = self._start("sleep", "600", environment={SERVES_VARIABLE: str(self.rank)})
        self.supervisor = self._start("sleep", "600", environment={SERVES_VARIABLE: str(self.rank)})
        self.command = self._start(
            "sh",
            "-c",
            "setsid sleep 600 & wait",
            wanted=1,
            environment={INCARNATION_VARIABLE: str(self.rank)},
        )
        other = self._life(RunUid(uid), 1)
        self.bystander = self._start("sleep", "600", environment={INCARNATION_VARIABLE: str(other)})

    @staticmethod
    def _life(uid: RunUid, rank: int) -> Incarnation:
        return Incarnation(run_uid=uid, epoch=Epoch(1), rank=Rank(rank), token=IncarnationToken("abc"))

    def _start(
        self, *argv: str, wanted: int = 0, environment: dict[str, str] | None = None
    ) -> psutil.Process:
        child = subprocess.Popen(
            argv, env={"PATH": os.environ["PATH"], **(environment or {})}, start_new_session=True
        )
        self._children.append(child)
        process = psutil.Process(child.pid)
        until(lambda: len(process.children(recursive=True)) == wanted, "its children")
        return process

    def order(self, kind: HarmKind, seconds: float | None = None) -> chaos.HarmOrder:
        return chaos.HarmOrder(
            kind=kind,
            machine=MachineName("m0"),
            address="127.0.1.1",
            incarnation=self.rank,
            lives=(self.rank,),
            seconds=seconds,
        )

    def trees(self, *roots: psutil.Process) -> list[psutil.Process]:
        return [p for root in roots for p in (root, *root.children(recursive=True))]

    @property
    def everything(self) -> list[psutil.Process]:
        return self.trees(self.raylet, self.keeper, self.supervisor, self.command)

    def close(self) -> None:
        for child in self._children:
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(child.pid).children(recursive=True):
                    process.kill()
            child.kill()
            child.wait()


def is_gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.close()


def test_a_lost_machine_loses_everything_and_nobody_else_loses_anything(machine: Machine) -> None:
    everything = machine.everything
    assert len(everything) == 7
    chaos.kill_machine(machine.order(HarmKind.LOSE_MACHINE), raylet=machine.raylet.pid)
    until(lambda: all(map(is_gone, everything)), "everything to be gone")
    assert not is_gone(machine.bystander)


def test_a_killed_rank_loses_its_command_only(machine: Machine) -> None:
    command = machine.trees(machine.command)
    chaos.perform(machine.order(HarmKind.KILL_RANK))
    until(lambda: all(map(is_gone, command)), "the command to be gone")
    assert not any(map(is_gone, machine.trees(machine.raylet, machine.keeper, machine.supervisor)))
    assert not is_gone(machine.bystander)


def test_a_frozen_machine_stands_still_for_its_time_and_goes_on(machine: Machine) -> None:
    everything = machine.everything
    chaos.start_undoer(machine.order(HarmKind.FREEZE, 1.0), raylet=machine.raylet.pid)
    until(lambda: all(map(is_stopped, everything)), "everything to stand still")
    assert not is_stopped(machine.bystander)
    until(lambda: not any(map(is_stopped, everything)), "everything to go on")


def test_what_undoes_a_freeze_undoes_it_at_once_when_it_is_told_to_end(machine: Machine) -> None:
    machine.keeper.suspend()  # by somebody else: it is not ours to let go on
    mine = machine.trees(machine.raylet, machine.supervisor, machine.command)
    before = {p.pid for p in psutil.process_iter()}
    chaos.start_undoer(machine.order(HarmKind.FREEZE, 500.0), raylet=machine.raylet.pid)
    until(lambda: all(map(is_stopped, mine)), "everything to stand still")
    (undoer,) = [p for p in psutil.process_iter() if p.pid not in before and chaos.__file__ in _words_of(p)]
    assert machine.raylet.pid not in {p.pid for p in undoer.parents()}
    undoer.send_signal(signal.SIGTERM)
    until(lambda: not any(map(is_stopped, mine)), "everything to go on")
    until(lambda: is_gone(undoer), "the process that did it to end")
    assert is_stopped(machine.keeper)


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_task_finds_the_raylet_that_it_descends_from() -> None:
    inner = "from agents import chaos; print(chaos.find_raylet('m7'), chaos.find_raylet('m8'))"
    outer = (
        "import os, subprocess, sys; print(os.getpid(), flush=True); "
        f"subprocess.run([sys.executable, '-c', {inner!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", outer, "--node-name=m7"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=DEADLINE_S,
    )
    pid, found, not_found = done.stdout.split()
    assert (found, not_found) == (pid, "None")


def test_an_order_survives_its_way_as_json(machine: Machine) -> None:
    order = machine.order(HarmKind.CUT, 5.0)
    assert chaos.HarmOrder.from_record(order.to_record()) == order


def test_what_is_cut() -> None:
    both = chaos.cut_script(table="t", address="127.0.1.1", is_one_way=False)
    assert both.splitlines() == [
        "add table inet t",
        "add chain inet t input { type filter hook input priority -300 ; }",
        "add rule inet t input ip saddr 127.0.1.1 ip daddr 127.0.1.1 accept",
        "add rule inet t input ip saddr 127.0.1.1 drop",
        "add rule inet t input ip daddr 127.0.1.1 drop",
    ]
    assert "daddr 127.0.1.1 drop" not in chaos.cut_script(table="t", address="127.0.1.1", is_one_way=True)
    real = chaos.cut_script(table="t", address="10.0.0.7", is_one_way=False)
    assert "hook input" in real
    assert "hook output" in real
    assert "ip6 saddr fd00::1 drop" in chaos.cut_script(table="t", address="fd00::1", is_one_way=True)


def test_a_machine_that_cannot_be_cut_off_says_what_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    refusal = chaos.why_not(machine.order(HarmKind.CUT, 5.0))
    assert refusal is not None
    assert "nft" in refusal
    assert chaos.why_not(machine.order(HarmKind.FREEZE, 5.0)) is None


async def test_a_keeper_that_is_cut_off_leaves_the_way_that_no_filter_sees() -> None:
    store = FakeStore()
    await store.start()
    short_way = await asyncio.start_unix_server(store._serve, local_name("127.0.0.1", store.port))
    me = Machine._life(new_run_uid(), 0)
    order = JoinOrder(
        incarnation=me,
        plan=RunPlan(name=RunName("job"), command=("true",)),
        machine=MachineName("m0"),
        store=from_here(store.endpoint, "127.0.77.1"),
        logs=store.endpoint,
    )
    told: list[ev.MemberEvent] = []
    keeper = KeeperProcess(order, tell=told.append)

    def sources() -> list[str]:
        return [str(writer.get_extra_info("peername")[:1]) for writer in store.connections]

    try:
        async with asyncio.timeout(DEADLINE_S):
            await keeper.start()
            while not told:
                await asyncio.sleep(0.01)
            assert isinstance(told[0], ev.LeaseGranted)
            assert "127.0.77.1" not in str(sources())
            assert keeper.pid is not None
            os.kill(keeper.pid, signal.SIGUSR1)
            while "127.0.77.1" not in str(sources()):
                await asyncio.sleep(0.01)
            renewed = store.count("GrantLease")
            while store.count("GrantLease") < renewed + 3:
                await asyncio.sleep(0.01)
            assert len(told) == 1
            await keeper.release()
    finally:
        await keeper.close()
        short_way.close()
        await store.stop()


def test_a_simulated_machine_connects_from_its_own_address_and_a_real_one_as_the_kernel_likes() -> None:
    head = Endpoint(host="127.0.0.1", port=1, secret="s")
    assert from_here(head, "127.0.77.1").source == "127.0.77.1"
    assert from_here(head, "127.0.0.1").source is None
    assert from_here(head, "10.0.0.7").source is None
    assert from_here(Endpoint(host="10.0.0.2", port=1, secret="s"), "10.0.0.7").source is None
    assert from_here(Endpoint(host="head", port=1, secret="s"), "127.0.77.1").source is None


CUT = """
import os, pathlib, socket, subprocess, sys, tempfile
from agents import chaos
from mesh.ids import Incarnation, MachineName
from mesh.states import HarmKind

os.environ[chaos.MARK] = "lab"
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
life = Incarnation.parse("u.1.0.t")
server = socket.create_server(("127.0.0.1", 0))

def reaches(source):
    try:
        socket.create_connection(server.getsockname(), timeout=0.5, source_address=(source, 0)).close()
        return True
    except TimeoutError:
        return False

assert reaches("127.0.1.1")
order = chaos.HarmOrder(
    kind=HarmKind.CUT, machine=MachineName("m-0"), address="127.0.1.1", incarnation=life, lives=(life,), seconds=3.0
)
assert chaos.why_not(order) is None, chaos.why_not(order)
table = chaos.table_name("m-0")
assert table == "gangmesh_chaos_lab_m_0"
chaos._nft("-f", "-", script=chaos.cut_script(table=table, address="127.0.1.1", is_one_way=False))
assert not reaches("127.0.1.1") and reaches("127.0.1.2") and reaches("127.0.0.1")
chaos.remove_cuts("another")
assert not reaches("127.0.1.1")
chaos.remove_cuts("lab")
assert reaches("127.0.1.1")

# one way only: what is sent to the machine arrives, what it sends does not

def arrives(source, target):
    with socket.socket(type=socket.SOCK_DGRAM) as ear, socket.socket(type=socket.SOCK_DGRAM) as mouth:
        ear.bind((target, 0))
        ear.settimeout(0.5)
        mouth.bind((source, 0))
        try:
            mouth.sendto(b"x", ear.getsockname())
            return ear.recv(1) == b"x"
        except (TimeoutError, PermissionError):  # dropped where it arrives, or where it leaves
            return False

for real in ("10.9.0.1/32", "10.9.0.2/32"):
    subprocess.run(["ip", "addr", "add", real, "dev", "lo"], check=True)
for address, other in (("127.0.1.1", "127.0.1.2"), ("10.9.0.1", "10.9.0.2")):
    for is_one_way in (True, False):
        assert arrives(address, other) and arrives(other, address)
        chaos._nft("-f", "-", script=chaos.cut_script(table=table, address=address, is_one_way=is_one_way))
        assert not arrives(address, other)
        assert arrives(other, address) is is_one_way
        assert arrives(address, address), "what a machine says to itself"
        chaos.remove_cuts("lab")

# whoever cuts and mends says what he could not do

chaos.NOTES = pathlib.Path(tempfile.mkdtemp())
wakeup, written = os.pipe()
os.write(written, b"x")  # nothing is waited for
assert chaos._cut_for_a_time(order, wakeup, 60.0) == 0 and chaos.left_of(order) is None
nft = chaos._nft
chaos._nft = lambda *words, **more: nft(*(("delete", "nothing") if words[0] == "delete" else words), **more)
assert chaos._cut_for_a_time(order, wakeup, 60.0) != 0
assert "is still cut off" in chaos.left_of(order) and table in chaos.left_of(order)
chaos._nft = nft
assert chaos.left_of(order) is None and reaches("127.0.1.1"), "mended by whoever asked"
chaos.cut_script = lambda **_: "no such words"
assert chaos._cut_for_a_time(order, wakeup, 60.0) != 0
assert "was not cut off" in chaos.left_of(order) and chaos.left_of(order) is None
print("done")
"""


@pytest.mark.root
def test_a_cut_drops_what_is_from_and_for_the_machine_s_address_until_it_is_removed() -> None:
    if shutil.which("nft") is None or shutil.which("ip") is None:
        pytest.skip("needs the programs nft and ip (packages nftables and iproute2)")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", CUT],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=DEADLINE_S * 2,
    )
    assert done.stdout == "done\n", done.stderr
