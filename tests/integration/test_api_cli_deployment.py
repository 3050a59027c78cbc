"""`mesh up`, `down`, `status` as processes, and what users see of a deployment in trouble."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.deployment import claimed_by, read_record
from tests.fakes.shell import DEADLINE_S, Shell, line_with, until


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A deployment that tests share which leave it as it is."""
    made = Shell(tmp_path_factory.mktemp("shared"))
    done = made.mesh("up", "--machines", "4")
    assert done.returncode == 0, done.stderr
    yield made
    made.stop()


def test_cut_connections_and_a_coordinator_that_restarts_leave_no_gap(shell: Shell) -> None:
    shell.mesh("up", "--machines", "2")
    steps = [step for n in range(40) for step in (f"say:{n}", "sleep:0.03")]
    client = shell.start("run", "--name", "bumpy", "--", "script", *steps, "exit:5")
    record = read_record(shell.state)
    assert record is not None and client.stdout is not None
    lines = [client.stdout.readline() for _ in range(5)]
    os.kill(record.pid, signal.SIGUSR1)
    (shell.state / "outage").touch()
    until(lambda: "cut" in (shell.state / "head.log").read_text())
    (shell.state / "outage").unlink()
    rest, errors = client.communicate(timeout=DEADLINE_S)
    assert client.returncode == 5, errors
    assert "".join(lines) + rest == "".join(f"{n}\n" for n in range(40))


def test_a_deployment_that_dies_under_a_run_is_said(shell: Shell) -> None:
    client = shell.start("run", "--name", "orphan", "--", "script", "say:up", "hang")
    line_with(client.stdout, "up")
    record = read_record(shell.state)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    _, errors = client.communicate(timeout=DEADLINE_S)
    assert client.returncode == 125
    assert "lost sight of orphan" in errors and "has ended" in errors
    status = shell.mesh("status")
    assert (status.returncode, "was killed" in status.stderr) == (3, True)
    up = shell.mesh("up")
    assert (up.returncode, "was killed; starting it again" in up.stderr) == (0, True)


def test_up_is_idempotent_and_grows(shell: Shell) -> None:
    first = shell.mesh("up", "--machines", "2")
    assert (first.returncode, "A deployment runs at http://" in first.stdout) == (0, True)
    second = shell.mesh("up", "--machines", "2", "--gpu", "H100:1")
    assert "was running already" in second.stdout
    assert "--gpu cannot be changed while it runs" in second.stderr
    assert "(3 machines" in shell.mesh("up", "--machines", "3").stdout
    assert "(3 machines" in shell.mesh("up", "--machines", "1").stdout
    assert json.loads(shell.mesh("up", "-o", "json").stdout)["started"] is False
    status = shell.mesh("status")
    assert (status.returncode, "3 Ready" in status.stdout) == (0, True)


def test_of_two_ups_at_once_the_second_waits_for_the_first(shell: Shell) -> None:
    both = [shell.start("up", env={"FAKE_HEAD": "slow"}) for _ in range(2)]
    until(lambda: (shell.state / "head.log").exists())
    (shell.state / "go").touch()
    answers = [up.communicate(timeout=DEADLINE_S) for up in both]
    assert [up.returncode for up in both] == [0, 0], answers
    said = sorted(out.split(" at ")[0] for out, _ in answers)
    assert said == ["A deployment runs", "A deployment was running already"]
    assert len((shell.state / "starts").read_text().split()) == 1


@pytest.mark.parametrize(
    "command",
    [pytest.param("up", marks=pytest.mark.long), pytest.param("down", marks=pytest.mark.long), "run"],
)
def test_a_head_that_comes_up_without_its_client_is_waited_for(shell: Shell, command: str) -> None:
    client = shell.start("up", env={"FAKE_HEAD": "slow"})
    until(lambda: claimed_by(shell.state) is not None)
    client.kill()
    client.communicate()
    status = shell.mesh("status")
    assert (status.returncode, "is starting or stopping" in status.stderr) == (3, True)
    second = shell.start(command, *(("--", "script", "exit:0") if command == "run" else ()))
    until(lambda: _waits_for_starting_lock(shell, second.pid))
    (shell.state / "go").touch()
    output, errors = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, errors
    assert len((shell.state / "starts").read_text().split()) == 1
    if command == "up":
        assert "was running already" in output
    elif command == "down":
        assert "Stopped the deployment" in errors


def _waits_for_starting_lock(shell: Shell, pid: int) -> bool:
    """It has the lock, so it has looked for a deployment or is about to."""
    return any(
        os.path.samefile(f"/proc/{pid}/fd/{fd}", shell.state / "starting.lock")
        for fd in os.listdir(f"/proc/{pid}/fd")
        if os.path.exists(f"/proc/{pid}/fd/{fd}")
    )


def test_what_the_head_says_about_its_start_is_passed_on(shell: Shell) -> None:
    refused = shell.mesh("up", FAKE_HEAD="refuse")
    assert (refused.returncode, "Port 7788 is taken" in refused.stderr) == (3, True)
    crashed = shell.mesh("run", "--", "script", FAKE_HEAD="crash")
    assert crashed.returncode == 3
    assert "exit code 7" in crashed.stderr and "the fake crashes now" in crashed.stderr
    assert "Traceback" not in crashed.stderr


def test_ctrl_c_during_the_start_leaves_no_deployment(shell: Shell) -> None:
    client = shell.start("run", "--", "script", env={"FAKE_HEAD": "slow"})
    until(lambda: (shell.state / "head.log").exists())
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=DEADLINE_S)
    assert (client.returncode, "before anything was submitted" in errors) == (130, True)
    assert shell.mesh("status").returncode == 3
    (shell.state / "go").touch()
    assert shell.mesh("up").returncode == 0


def test_a_state_folder_that_cannot_be_is_said(shell: Shell, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    done = shell.mesh("up", "--state", str(blocker / "state"))
    assert (done.returncode, "cannot be written to" in done.stderr) == (3, True)
    shell.state.mkdir()
    (shell.state / "deployment.json").write_text("{")
    broken = shell.mesh("status")
    assert (broken.returncode, "is damaged" in broken.stderr) == (3, True)


def test_which_deployment_is_meant_may_be_said_before_the_command(shell: Shell, tmp_path: Path) -> None:
    said = shell.mesh("--state", str(tmp_path / "elsewhere"), "status")
    assert (said.returncode, str(tmp_path / "elsewhere") in said.stderr) == (3, True)
    refused = shell.mesh("--url", "http://127.0.0.1:1", "down")
    assert (refused.returncode, "`mesh down` takes no --url" in refused.stderr) == (2, True)


def test_down_says_what_it_ended_and_is_idempotent(shell: Shell) -> None:
    assert "nothing to stop" in shell.mesh("down").stderr
    shell.mesh("run", "-d", "--name", "busy", "--", "script", "hang")
    done = shell.mesh("down")
    assert (done.returncode, "Cancelled: busy" in done.stderr) == (0, True)
    assert "nothing to stop" in shell.mesh("down").stderr
    assert read_record(shell.state) is None


def test_tokens_are_asked_for_and_wrong_ones_refused(running: Shell) -> None:
    record = read_record(running.state)
    assert record is not None
    elsewhere = {"GANGMESH_STATE": str(running.here / "none"), "GANGMESH_URL": record.url}
    assert running.mesh("get", "runs", **elsewhere).returncode == 6
    wrong = running.mesh("get", "runs", **elsewhere, GANGMESH_TOKEN="wrong")
    assert (wrong.returncode, "deployment.json" in wrong.stderr) == (6, True)
    assert running.mesh("get", "runs", **elsewhere, GANGMESH_TOKEN=record.token).returncode == 0
    nobody = running.mesh("get", "runs", "--url", "http://127.0.0.1:9", GANGMESH_TOKEN="x")
    assert (nobody.returncode, "cannot be reached" in nobody.stderr) == (3, True)


def test_a_fault_of_ours_is_one_line_and_a_file(running: Shell) -> None:
    done = running.mesh("get", "runs", FAKE_CLI="fault")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    crashes = list(running.state.glob("crash-*.log"))
    assert "KeyError" in crashes[0].read_text()
    assert crashes[0].stat().st_mode & 0o077 == 0, "the command line is in it, with the values of -e"
    assert str(crashes[0]) in done.stderr


def test_it_is_the_same_program_by_both_names_and_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mesh.cli", "version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("gangmesh ")
