"""The head process with real Ray, a stand-in for the coordinator: what is up, what is left, what it survives."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator import leftovers
from mesh.deployment import live_record
from mesh.reasons import Reason
from tests.deployment_fixture import (
    ROOT,
    RunningDeployment,
    StartDeployment,
    StartFailedError,
    deployment,
    start_deployment,
    wait_until,
)
from tests.integration.small_ray import ray_environment

STAND_IN = "tests.integration.stand_in_head"
GONE_LIMIT_S = 20.0

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
__all__ = ["deployment"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDeployment]:
    """A deployment of one machine for the tests that leave it as it is."""
    running = start_deployment(tmp_path_factory.mktemp("calm") / "state", machines=1, module=STAND_IN)
    yield running
    assert running.stop() == 0
    running.assert_nothing_left(limit_s=5.0)


def _names(running: RunningDeployment, state: str = "Ready") -> list[str]:
    machines = running.call("GET", "/v1/machines")["machines"]
    return sorted(m["name"] for m in machines if m["state"] == state)


def _raylet_of(running: RunningDeployment, machine: str) -> psutil.Process:
    return next(
        child
        for child in psutil.Process(running.process.pid).children()
        if f"--node-name={machine}" in child.cmdline()
    )


def _files_outside(running: RunningDeployment) -> set[Path]:
    """What a running deployment has outside its folder: files that it writes to, and what bears its id."""
    written = {
        Path(file.path)
        for pid in [running.process.pid, *running.processes()]
        for file in psutil.Process(pid).open_files()
        if file.mode != "r"
    }
    named = {p for p in Path(tempfile.gettempdir()).iterdir() if running.owner.deployment_id in p.name}
    return {p for p in written | named if not p.is_relative_to(running.state) and p.exists()}


@pytest.mark.long
def test_it_starts_serves_and_leaves_nothing_twice_over_the_second_time_from_another_folder(
    deployment: StartDeployment,
) -> None:
    first = deployment(machines=2, options=("--gpu", "H100:8"), module=STAND_IN)
    assert first.stages[0] == "cleaning up after the last one"
    assert first.record.is_alive
    assert (first.state / "deployment.json").stat().st_mode & 0o777 == 0o600
    machines = first.call("GET", "/v1/machines")["machines"]
    assert sorted(m["name"] for m in machines) == ["local-1", "local-2"]
    assert len({m["address"] for m in machines} | {"127.0.0.1"}) == 3
    assert {m["labels"]["provider"] for m in machines} == {"local"}
    assert all(m["gpus"] == {"type": "H100", "count": 8} for m in machines)
    token, addresses = first.record.token, {m["name"]: m["address"] for m in machines}
    outside = _files_outside(first)

    assert first.stop() == 0
    first.assert_nothing_left()
    assert not [p for p in outside if p.exists()]
    assert live_record(first.state) is None
    assert not (first.state / "deployment.json").exists()

    elsewhere = first.state.rename(first.state.with_name("elsewhere"))
    second = deployment(state=elsewhere, machines=2, module=STAND_IN)
    machines = second.call("GET", "/v1/machines")["machines"]
    assert {m["name"]: m["address"] for m in machines} == addresses
    assert second.record.token == token


def test_the_real_parts_serve_an_empty_deployment(deployment: StartDeployment) -> None:
    running = deployment(machines=1)
    status = running.call("GET", "/v1/status")
    assert (status["state"], status["local"]) == ("Ready", True)
    assert status["machines"] == {"Ready": 1, "InUse": 0, "Leaving": 0, "Lost": 0}
    assert running.call("GET", "/v1/runs")["runs"] == []
    assert running.stop() == 0
    assert {p.name for p in running.state.iterdir()} >= {
        "journal.db",
        "head.log",
        "logs",
        "ray",
        "machines",
        "token",
    }


def test_every_option_of_serve_is_explained() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "coordinator", "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in (
        "--state",
        "--machines",
        "--gpu",
        "--listen",
        "--api",
        "--db",
        "--ready-fd",
        "--foreground",
    ):
        assert option in told


def test_every_port_of_ray_is_for_this_host_only(calm: RunningDeployment) -> None:
    processes = psutil.Process(calm.process.pid).children(recursive=True)
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert listening


def test_neither_the_users_environment_nor_a_foreign_ray_gets_in(deployment: StartDeployment) -> None:
    folder = tempfile.TemporaryDirectory(prefix="foreign", dir="/tmp")  # short, for its sockets
    foreign = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("foreign_ray.py")), folder.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**ray_environment(), "RAY_AUTH_MODE": "disabled"},
    )
    assert foreign.stdin is not None
    assert foreign.stdout is not None
    try:
        address = foreign.stdout.readline().decode().strip()
        assert address.count(":") == 1, "the foreign Ray did not start"
        mine = {
            "RAY_ADDRESS": address,
            "RAY_NAMESPACE": "theirs",
            "PYTHONSTARTUP": "/nowhere",
            "MARKED": "yes",
        }
        running = deployment(machines=1, module=STAND_IN, environment=mine)
        facts = running.call("GET", "/v1/status")["details"]
        assert not {"RAY_ADDRESS", "RAY_NAMESPACE", "PYTHONSTARTUP", "MARKED"} & facts["environment"].keys()
        assert facts["nice"] == os.nice(0)
        assert facts["config"]["member"]["environment"]["MARKED"] == "yes"
        assert facts["config"]["member"]["environment"]["RAY_ADDRESS"] == address
        assert _names(running) == ["local-1"]
        foreign.stdin.write(b"nodes\n")
        foreign.stdin.flush()
        assert foreign.stdout.readline() == b"1\n"
    finally:
        foreign.stdin.close()
        assert foreign.wait(60) == 0
        foreign.stdout.close()
        folder.cleanup()


def test_ray_refuses_who_has_no_token_or_a_wrong_one(calm: RunningDeployment, tmp_path: Path) -> None:
    gcs = next(c for c in psutil.Process(calm.process.pid).children() if c.name().startswith("gcs_server"))
    port = next(c.laddr.port for c in gcs.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN)
    (tmp_path / "wrong").write_text(secrets.token_hex(32))
    tokens = {"none": None, "wrong": tmp_path / "wrong", "right": calm.state / "ray-token"}
    code = f"from ray._raylet import GcsClient; print(GcsClient(address='127.0.0.1:{port}').cluster_id.hex())"
    results = {}
    for name, path in tokens.items():
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        if path is not None:
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
        results[name] = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
    assert results["right"].returncode == 0
    for name in ("none", "wrong"):
        assert results[name].returncode != 0
        assert "AuthenticationError" in results[name].stderr


def test_what_prevents_a_start_is_told_with_its_reason(
    calm: RunningDeployment, deployment: StartDeployment, tmp_path: Path
) -> None:
    with pytest.raises(StartFailedError) as busy:
        deployment(state=calm.state, machines=1, module=STAND_IN)
    assert busy.value.error is not None
    assert busy.value.error.reason is Reason.DEPLOYMENT_BUSY
    assert str(calm.process.pid) in busy.value.error.message
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartFailedError) as port:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        deployment(state=tmp_path / "other", options=("--api", listen), module=STAND_IN)
    assert port.value.error is not None
    assert port.value.error.reason is Reason.PORT_TAKEN
    (tmp_path / "file").write_text("")
    with pytest.raises(StartFailedError) as folder:
        deployment(state=tmp_path / "file" / "state", module=STAND_IN)
    assert folder.value.error is not None
    assert folder.value.error.reason is Reason.STATE_NOT_WRITABLE
    with pytest.raises(urllib.error.HTTPError, match="401"):
        calm.call("GET", "/v1/machines", token="wrong")
    assert _names(calm) == ["local-1"]


@pytest.mark.long
def test_a_lost_machine_is_replaced_under_a_new_name_and_more_come_when_asked(
    deployment: StartDeployment,
) -> None:
    running = deployment(machines=2, module=STAND_IN)
    _raylet_of(running, "local-2").kill()
    wait_until(
        lambda: _names(running) == ["local-1", "local-3"],
        limit_s=60,
        what="another one in the place of local-2",
    )
    wait_until(lambda: _names(running, "Lost") == ["local-2"], limit_s=60, what="the loss to be seen")
    for _ in range(2):
        running.call("POST", "/v1/machines", {"count": 3})
        assert _names(running) == ["local-1", "local-3", "local-4"]
    running.call("POST", "/v1/machines", {"count": 1})
    assert _names(running) == ["local-1", "local-3", "local-4"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_machine_that_ray_holds_for_dead_is_ended_and_replaced(deployment: StartDeployment) -> None:
    running = deployment(machines=1, module=STAND_IN)
    frozen = _raylet_of(running, "local-1")
    frozen.suspend()
    wait_until(lambda: _names(running) == ["local-2"], limit_s=180, what="another one in its place")
    wait_until(lambda: not frozen.is_running(), limit_s=30, what="the frozen one to be ended")


def test_a_killed_head_takes_its_processes_along_and_the_next_one_starts(
    deployment: StartDeployment, tmp_path: Path
) -> None:
    """In a folder whose path is too long for sockets."""
    first = deployment(state=tmp_path / ("x" * 100), machines=2, module=STAND_IN)
    first.process.kill()
    first.process.wait()
    first.assert_nothing_left(limit_s=GONE_LIMIT_S)
    second = deployment(state=first.state, machines=2, module=STAND_IN)
    assert _names(second) == ["local-1", "local-2"]
    outside = _files_outside(second)
    assert outside, "sockets must lie elsewhere when the path is this long"
    assert second.stop() == 0
    assert not [p for p in outside if p.exists()]


def test_a_stop_in_the_middle_of_the_start_leaves_nothing(deployment: StartDeployment) -> None:
    running = deployment(machines=2, module=STAND_IN, until_ready=False)
    wait_until(lambda: (running.state / "id").exists() and bool(running.processes()), limit_s=60, what="Ray")
    assert running.stop() == 0
    running.assert_nothing_left()
    assert not (running.state / "deployment.json").exists()


def test_the_end_of_the_terminal_is_not_the_end_of_the_deployment(calm: RunningDeployment) -> None:
    calm.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "terminal" in calm.log, limit_s=10, what="the head to take notice")
    assert _names(calm) == ["local-1"]


@pytest.mark.parametrize("part", ["gcs_server", pytest.param("--head", marks=pytest.mark.long)])
def test_a_deployment_whose_ray_is_lost_begins_again_in_the_same_place(
    deployment: StartDeployment, part: str
) -> None:
    running = deployment(machines=2, module=STAND_IN)
    before = running.record
    victim = next(
        child
        for child in psutil.Process(running.process.pid).children()
        if child.name().startswith(part) or part in child.cmdline()
    )
    victim.kill()
    wait_until(lambda: "Beginning again" in running.log, limit_s=30, what="the head to take notice")
    wait_until(lambda: running.log.count("ready at") == 2, limit_s=90, what="the second life")
    assert (running.record.url, running.record.pid) == (before.url, before.pid)
    assert running.record.is_alive
    assert _names(running) == ["local-1", "local-2"]
    assert str(ROOT) in running.call("GET", "/v1/status")["details"]["path"]


@pytest.mark.long
def test_a_deployment_whose_folder_is_removed_ends(deployment: StartDeployment, tmp_path: Path) -> None:
    running = deployment(machines=1, module=STAND_IN)
    owner = running.owner
    (running.state).rename(tmp_path / "elsewhere")
    running.process.wait(60)
    wait_until(lambda: not leftovers.find(owner), limit_s=GONE_LIMIT_S, what="nothing of it to be left")
