"""What a mesh deployment survives: killed gateways, a killed head, cut cables, copies, other addresses. `make lab`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import psutil
import pytest

from agents.raylet import CHECK_WORKERS, MEMBER_WORKERS
from tests.e2e.real_mesh import wait_until
from tests.lab.hosts import Host
from tests.lab.mesh_deployment import MESH_PORT, MeshLab, mesh_lab
from tests.lab.network import call, skip_without_redirect

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(300)]

TICK = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
while not (folder / "done").exists():
    with (folder / "said").open("a") as file:
        file.write(f"{time.time()}\\n")
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def the_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshLab]:
    skip_without_redirect()
    with mesh_lab(tmp_path_factory.mktemp("mesh"), hosts=2) as made:
        hidden, open_ = made.hosts
        made.wall(hidden)
        made.join(hidden)
        made.join(open_)
        yield made


@pytest.fixture
def lab(the_lab: MeshLab) -> Iterator[MeshLab]:
    yield the_lab
    the_lab.end_runs()
    for host in the_lab.hosts:
        if host.name not in the_lab._agents:
            the_lab.start_agent(host, token=the_lab.token())
        the_lab.until_joined(host)


def hidden(lab: MeshLab) -> Host:
    return lab.hosts[0]


def test_gateways_that_are_killed_are_back_by_themselves_and_the_run_ends_well(lab: MeshLab) -> None:
    """Whether the run's lease outlasts it or the run begins again is a matter of how long a start takes here."""
    host = hidden(lab)
    run = lab.new_name()
    folder = lab.work / run
    folder.mkdir()
    script = lab.script(f"{run}.py", TICK)
    lab.submit("--label", "x=1", "--", "python", str(script), str(folder), name=run)
    lab.running(run)
    killed = [lab.gateway(host), lab.gateway(lab.head_host)]
    for victim in killed:
        victim.kill()
        victim.wait(10)
    wait_until(lambda: lab.gateways_up(), "both gateways to be back")
    (folder / "done").touch()
    assert lab.ended(run, limit_s=120.0)["status"]["state"] == "Succeeded"
    assert "hello" in lab.cli("run", "--", "echo", "hello").stdout


def test_a_raylet_that_is_killed_costs_the_machine_its_name_and_no_more(lab: MeshLab) -> None:
    host = hidden(lab)
    name = lab.machine_on(host)
    [raylet] = host.processes("raylet/raylet")
    raylet.kill()
    wait_until(lambda: lab.machine_on(host) not in (None, name), "the machine to join again")
    assert "hello" in lab.cli("run", "--", "echo", "hello").stdout


def test_machines_join_again_by_themselves_when_the_head_was_killed(lab: MeshLab) -> None:
    before = {host.name: lab.machine_on(host) for host in lab.hosts}
    os.kill(lab.record.pid, signal.SIGKILL)
    wait_until(lambda: not lab.head_host.processes("coordinator"), "the head to be gone")
    lab.start_head()
    for host in lab.hosts:
        assert lab.until_joined(host) not in before.values()
    assert "hello" in lab.cli("run", "--", "echo", "hello").stdout


def test_a_machine_that_was_cut_off_is_given_up_and_comes_back(lab: MeshLab) -> None:
    host = lab.hosts[1]
    name = lab.machine_on(host)
    assert name is not None
    host.cut()
    try:
        wait_until(lambda: lab.machines()[name]["state"] == "Lost", "it to be given up")
    finally:
        host.heal()
    wait_until(lambda: lab.machine_on(host) not in (None, name), "it to come back", limit_s=120.0)


def test_a_machine_that_leaves_is_gone_and_needs_a_token(lab: MeshLab) -> None:
    host = lab.hosts[1]
    state = str(lab.folder / host.name)
    name = lab.machine_on(host)
    assert name is not None
    done = host.run(*lab.program, "leave", "--state", state, environment=lab.environment())
    assert done.returncode == 0, done.stdout
    assert lab._agents.pop(host.name).wait(10) == 0
    assert lab.machines().get(name, {"state": "Lost"})["state"] == "Lost"
    assert call(*lab.inside(host, "nft", "list", "tables")).strip() == ""
    done = host.run(*lab.program, "join", lab.head_url, "--state", state, environment=lab.environment())
    assert done.returncode != 0
    assert "needs a token" in done.stdout


def test_a_copied_disk_is_refused_while_the_machine_is_there(lab: MeshLab) -> None:
    first, second = lab.hosts
    lab.stop_agent(second)
    copy = lab.folder / "copy"
    shutil.copytree(lab.folder / first.name, copy, ignore=shutil.ignore_patterns("ray", "sockets"))
    done = second.run(
        *lab.program, "join", lab.head_url, "--state", str(copy), environment=lab.environment(), limit_s=120.0
    )
    assert done.returncode != 0
    assert "copy" in done.stdout
    shutil.rmtree(copy)


def test_a_head_that_has_moved_is_found_by_who_is_told_where(lab: MeshLab) -> None:
    host, head = lab.hosts[1], lab.head_host
    before = lab.machine_on(host)
    address = lab.network.address(77)
    inside = ("-n", lab.network.namespace(head.name))
    call("ip", *inside, "addr", "add", f"{address}/24", "dev", "eth0")
    try:
        lab.stop_agent(host)
        state = ("--state", str(lab.folder / host.name), "--label", f"lab={host.name}")
        with lab.agent_log(host).open("ab") as log:
            lab._agents[host.name] = host.start(
                *(*lab.program, "join", f"https://{address}:{MESH_PORT}", *state),
                environment=lab.environment(),
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: lab.machine_on(host) not in (None, before), "it to join at the new address")
        lab.stop_agent(host)
    finally:
        call("ip", *inside, "addr", "del", f"{address}/24", "dev", "eth0")
    lab.start_agent(host)
    lab.until_joined(host)


def test_nothing_is_left_on_a_machine_whose_agent_was_killed(lab: MeshLab) -> None:
    host = lab.hosts[1]
    wait_until(
        lambda: len(host.processes("ray::IDLE")) >= MEMBER_WORKERS + CHECK_WORKERS,
        "its workers to have started",
    )
    agent = lab.agent(host)
    below = agent.children(recursive=True)
    agent.kill()
    lab._agents.pop(host.name).wait(10)
    gone, alive = psutil.wait_procs(below, timeout=60)
    assert not [process.cmdline() for process in alive if process.is_running()]
    assert gone
