"""Whatever dies, dies with kill -9 while a run is running: what must go on goes on, and nothing is left behind."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

from coordinator.core.ending import EXPIRY_LIMIT_S
from coordinator.core.gang_base import FENCE_TAKEN_LIMIT_S
from mesh.messages import LEASE_TTL_S
from tests.e2e.real_mesh import INCARNATION, RealMesh, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
RECOVERY_LIMIT_S = 90.0

COUNTS = "n=0; while [ ! -e {gate} ]; do echo line $n; n=$((n+1)); sleep 0.05; done; echo end $n"
LEAVES_DAEMONS = (
    "setsid sleep 600 & (trap '' TERM HUP; while :; do sleep 1; done) & nohup sleep 600 2>/dev/null & "
    "echo ready; exec sleep 600"
)


def counted(output: str, rank: int) -> None:
    """Every line of a rank that counts is there, once, in order, up to its last word."""
    lines = re.findall(rf"^\[rank {rank}\] (.*)$", output, re.MULTILINE)
    last = len(lines) - 1
    assert lines == [*[f"line {n}" for n in range(last)], f"end {last}"], lines[-5:]


def living(mesh: RealMesh, name: str) -> list[int]:
    return [mesh.command(name, rank).pid for rank in (0, 1)]


@pytest.mark.parametrize("actor", ["ray::RendezvousStore", "ray::CoordinatorActor"])
def test_a_killed_coordinator_or_store_disturbs_no_rank_and_no_follower(mesh: RealMesh, actor: str) -> None:
    """The actor comes back by itself; the run is not restarted, its logs have no gap and no duplicate."""
    gate = mesh.gate("counts")
    name = mesh.new_name()
    client = mesh.client("run", "--name", name, "--nodes", "2", "--", "sh", "-c", COUNTS.format(gate=gate))
    mesh.running(name)
    follower = mesh.client("logs", "-f", name)
    follower.expect("line 3")
    before = living(mesh, name)
    victim = mesh.one(actor)
    victim.kill()
    wait_until(lambda: not victim.is_running(), "the actor to die")
    wait_until(lambda: [p for p in mesh.named(actor) if p.pid != victim.pid], "the actor to come back")
    seen = len(follower.stdout)
    wait_until(lambda: len(follower.stdout) > seen + 500, "lines after the death")
    # past every lease that the death could have cost
    alive_at = time.monotonic()
    wait_until(lambda: time.monotonic() - alive_at > LEASE_TTL_S + 1, "the length of a lease")
    assert mesh.run(name)["status"]["state"] == "Running"
    assert living(mesh, name) == before
    gate.touch()
    assert client.wait() == 0, client.stderr
    assert follower.wait() == 0, follower.stderr
    run = mesh.ended(name)
    assert (run["status"]["state"], run["status"]["epoch"]) == ("Succeeded", 1)
    for output in (client.stdout, follower.stdout):
        counted(output, 0)
        counted(output, 1)
    kinds = [event["kind"] for event in mesh.events(name)]
    assert kinds.count("Started") == 2 and kinds.count("Running") == 1, kinds


def _launcher(mesh: RealMesh, name: str, rank: int) -> psutil.Process:
    launcher = mesh.command(name, rank).parent().parent()  # type: ignore[union-attr]
    assert launcher is not None and "Launcher" in launcher.cmdline()[0], launcher
    return launcher


def _supervisor(mesh: RealMesh, name: str, rank: int) -> psutil.Process:
    supervisor = mesh.command(name, rank).parent()
    assert supervisor is not None and "supervisor.py" in " ".join(supervisor.cmdline()), supervisor
    return supervisor


def _member(mesh: RealMesh, name: str, rank: int) -> psutil.Process:
    machine = mesh.run(name)["status"]["ranks"][rank]["machine"]
    raylet = mesh.raylet(machine).pid
    return next(p for p in mesh.named("ray::MemberNodeActor") if p.ppid() == raylet)


def _keeper(mesh: RealMesh, name: str, rank: int) -> psutil.Process:
    """One of the two; a keeper does not say whose it is."""
    return mesh.named("keeper.py")[rank]


def _raylet(mesh: RealMesh, name: str, rank: int) -> psutil.Process:
    return mesh.raylet(mesh.run(name)["status"]["ranks"][rank]["machine"])


def _epochs(mesh: RealMesh, uid: str) -> set[str]:
    """Of whatever runs of a run; a process that ends while it is looked at is none."""
    found = set()
    for process in mesh.tree(uid).values():
        with suppress(psutil.NoSuchProcess):
            found.add(process.environ()[INCARNATION].split(".")[1])
    return found


@pytest.mark.parametrize(
    "find",
    [
        pytest.param(_launcher, marks=pytest.mark.long),
        _supervisor,
        pytest.param(_member, marks=pytest.mark.long),
        pytest.param(_keeper, marks=pytest.mark.long),
        pytest.param(_raylet, marks=pytest.mark.long),
    ],
)
def test_a_death_on_a_machine_restarts_the_gang_and_leaves_no_orphan_of_the_epoch_before(
    mesh: RealMesh, find: Any
) -> None:
    """The command has daemons, one deaf to SIGTERM. The other rank keeps its machine."""
    name = mesh.submit("--nodes", "2", "--grace-period", "2s", "--", "bash", "-c", LEAVES_DAEMONS)
    before = mesh.running(name)["status"]
    mesh.wait_for_print(name, "ready", 0, 1)
    find(mesh, name, 1).kill()
    run = wait_until(lambda: _running_again(mesh, name), "the second epoch", limit_s=RECOVERY_LIMIT_S)
    status = run["status"]
    machines = [[rank["machine"] for rank in s["ranks"]] for s in (before, status)]
    kept = [old == new for old, new in zip(*machines, strict=True)]
    assert any(kept), machines
    assert _epochs(mesh, run["metadata"]["uid"]) == {"2"}
    ends = [e for e in mesh.events(name) if e["kind"] == "Restarting"]
    assert len(ends) == 1 and re.search(r"[Rr]ank [01]", ends[0]["message"]), ends
    mesh.cli("cancel", name)
    mesh.no_process_left(mesh.ended(name))


@pytest.mark.long
def test_an_agent_that_stands_still_holds_no_cancel_up(mesh: RealMesh) -> None:
    """Its keeper goes on renewing the lease: the fence has to come to its end without either's word."""
    name = mesh.submit("--nodes", "2", "--grace-period", "1s", "--", "bash", "-c", LEAVES_DAEMONS)
    mesh.running(name)
    mesh.wait_for_print(name, "ready", 0, 1)
    _member(mesh, name, 1).send_signal(signal.SIGSTOP)
    mesh.cli("cancel", name)
    limit_s = 1.0 + FENCE_TAKEN_LIMIT_S + EXPIRY_LIMIT_S + 30.0
    run = mesh.wait_for(name, "Cancelled", limit_s=limit_s)
    kinds = [event["kind"] for event in mesh.events(name)]
    assert kinds.index("FenceOverdue") < kinds.index("MemberLost") < kinds.index("Cancelled"), kinds
    mesh.no_process_left(run)


@pytest.mark.long
@pytest.mark.timeout(360)
def test_an_agent_that_stands_still_while_its_run_goes_on_is_found_by_its_keeper(mesh: RealMesh) -> None:
    """Nobody would ever hear how its command ended."""
    name = mesh.submit("--nodes", "2", "--grace-period", "1s", "--", "bash", "-c", LEAVES_DAEMONS)
    mesh.running(name)
    mesh.wait_for_print(name, "ready", 0, 1)
    _member(mesh, name, 1).send_signal(signal.SIGSTOP)
    run = wait_until(lambda: _running_again(mesh, name), "the second epoch", limit_s=240.0)
    assert _epochs(mesh, run["metadata"]["uid"]) == {"2"}
    [restart] = [e for e in mesh.events(name) if e["kind"] == "Restarting"]
    assert (restart["reason"], restart["rank"]) == ("MachineLost", 1), restart
    mesh.cli("cancel", name)
    mesh.no_process_left(mesh.ended(name))


def _running_again(mesh: RealMesh, name: str) -> dict[str, Any] | None:
    run = mesh.run(name)
    status = run["status"]
    assert status["state"] not in ("Failed", "Succeeded"), status
    return run if (status["state"], status["epoch"]) == ("Running", 2) else None


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Those that have ended meanwhile (the command's own short sleeps) need none."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _send_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # one that was about to end anyway
            process.send_signal(number)


@pytest.mark.long
def test_the_laptop_sleeps_longer_than_a_lease_and_the_run_goes_on(mesh: RealMesh) -> None:
    """Everything stands still, then everything goes on, in no particular order."""
    gate = mesh.gate("sleep")
    name = mesh.new_name()
    client = mesh.client("run", "--name", name, "--nodes", "2", "--", "sh", "-c", COUNTS.format(gate=gate))
    mesh.running(name)
    client.expect("line 3")
    before = living(mesh, name)
    stopped = mesh.everything()
    try:
        _signal(stopped, signal.SIGSTOP)
        asleep_at = time.monotonic()
        wait_until(lambda: time.monotonic() - asleep_at > 2 * LEASE_TTL_S, "two leases to pass")
    finally:
        _signal(stopped, signal.SIGCONT)
    seen = len(client.stdout)
    wait_until(lambda: len(client.stdout) > seen + 500, "lines after the sleep")
    assert living(mesh, name) == before
    awake_at = time.monotonic()
    wait_until(lambda: time.monotonic() - awake_at > LEASE_TTL_S + 1, "the length of a lease")
    gate.touch()
    assert client.wait() == 0, client.stderr
    assert mesh.ended(name)["status"]["epoch"] == 1
    counted(client.stdout, 0)
    counted(client.stdout, 1)
