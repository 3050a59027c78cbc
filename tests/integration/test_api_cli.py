"""The command line as a process: exit codes, signals, pipes, terminals, and deployments that come and go."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from mesh.deployment import process_started, read_record

ROOT = Path(__file__).parents[2]
DEADLINE_S = 40.0


class Shell:
    """Runs `mesh` with a state folder and a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.here = folder / "here"
        self.here.mkdir()
        keep = {
            k: v for k, v in os.environ.items() if not k.startswith(("GANGMESH_U", "GANGMESH_TOKEN", "FAKE_"))
        }
        self.env = {**keep, "GANGMESH_STATE": str(self.state), "HOME": str(folder), "PYTHONPATH": str(ROOT)}
        self.argv = (sys.executable, "-m", "tests.fakes.mesh_cli")

    def mesh(self, *arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.argv, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env={**self.env, **env},
            cwd=self.here,
            timeout=DEADLINE_S,
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        env = {**self.env, **options.pop("env", {})}
        return subprocess.Popen(
            [*self.argv, *arguments], text=True, env=env, cwd=self.here, **{**pipes, **options}
        )

    def run_state(self, name: str) -> dict[str, Any]:
        done = self.mesh("status", name, "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)["status"]
        return status

    def stop(self) -> None:
        """Ends every fake head that was started from this folder."""
        with contextlib.suppress(FileNotFoundError):
            for pid in (self.state / "starts").read_text().split():
                if process_started(int(pid)) is not None:
                    os.kill(int(pid), signal.SIGKILL)


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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def line_with(stream: IO[str] | None, text: str) -> str:
    """Reads lines until one has this text."""
    assert stream is not None
    seen = []
    for line in stream:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came: {seen}")


# -- a first run -----------------------------------------------------------------------------------------------------


def test_a_run_without_a_deployment_starts_one_of_its_shape_and_says_so(shell: Shell) -> None:
    done = shell.mesh("run", "--gpu", "H100:2", "--nodes", "3", "--", "script", "say:hello")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] hello" for rank in range(3)]
    assert "Started a deployment of 3 simulated machines with H100:2 each" in done.stderr
    assert "mesh down" in done.stderr
    for sentence in (
        "at the barrier: 1 of 3",
        "at the barrier: 3 of 3",
        "3 of 3 ranks run",
        "succeeded after",
    ):
        assert sentence in done.stderr
    again = shell.mesh("run", "--", "script", "say:again")
    assert (again.returncode, again.stdout) == (0, "again\n")
    assert "Started" not in again.stderr
    bigger = shell.mesh("run", "--nodes", "4", "--", "script")
    assert "Added 1 machine to the deployment" in bigger.stderr
    assert len((shell.state / "starts").read_text().split()) == 1
    down = shell.mesh("down")
    assert (down.returncode, "Stopped the deployment" in down.stderr) == (0, True)
    assert shell.mesh("status").returncode == 3


@pytest.mark.parametrize(
    ("steps", "code"),
    [(["exit:0"], 0), (["1=exit:42", "hang"], 42), (["signal:9"], 137), (["0=exit:1", "1=exit:1"], 1)],
)
def test_it_exits_with_the_runs_own_exit_code(running: Shell, steps: list[str], code: int) -> None:
    done = running.mesh("run", "--nodes", "2", "--", "script", *steps)
    assert done.returncode == code, done.stderr
    assert ("succeeded" if code == 0 else "mesh describe") in done.stderr


def test_json_on_stdout_is_clean_and_whole(running: Shell) -> None:
    done = running.mesh("run", "-o", "json", "--nodes", "2", "--", "script", "say:noise", "exit:3")
    assert done.returncode == 3
    assert json.loads(done.stdout)["status"]["exitCode"] == 3
    assert "[rank 1] noise" in done.stderr
    detached = running.mesh("run", "-d", "-o", "json", "--", "script")
    assert set(json.loads(detached.stdout)) == {"run", "warnings"}
    for kind in ("runs", "attempts", "machines", "events"):
        assert list(json.loads(running.mesh("get", kind, "-o", "json").stdout)) == [kind]
        assert running.mesh("get", kind, "-o", "yaml").stdout.startswith(f"{kind}:")


def test_a_detached_run_prints_its_name_and_is_followed_later(running: Shell) -> None:
    done = running.mesh(
        "run", "-d", "--name", "later", "--nodes", "2", "--", "script", "say:a", "sleep:0.5", "say:b"
    )
    assert (done.returncode, done.stdout) == (0, "later\n")
    assert "mesh logs -f later" in done.stderr
    assert running.mesh("wait", "later", "--for", "running").returncode == 0
    followed = running.mesh("logs", "-f", "later")
    assert sorted(followed.stdout.splitlines()) == ["[rank 0] a", "[rank 0] b", "[rank 1] a", "[rank 1] b"]
    assert running.mesh("wait", "later").returncode == 0
    assert running.mesh("logs", "later", "--rank", "1", "--tail", "1").stdout == "b\n"
    assert running.mesh("logs", "later", "--rank", "1", "--raw").stdout == "a\nb\n"
    lines = running.mesh("logs", "later", "-o", "json").stdout.splitlines()
    assert {json.loads(line)["text"] for line in lines} == {"a", "b"}
    labels = "nodus.dev/job=later,nodus.dev/rank=1"
    listed = running.mesh("get", "attempts", "-l", labels).stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["later", "1"]]
    story = running.mesh("describe", "later").stdout
    for part in ("Command:", "script say:a", "Ranks:", "Events:", "at the barrier"):
        assert part in story


def test_of_four_runs_of_one_name_one_is_accepted(running: Shell) -> None:
    twins = [running.start("run", "--name", "twin", "-d", "--", "script", "hang") for _ in range(4)]
    codes = []
    for twin in twins:
        _, errors = twin.communicate(timeout=DEADLINE_S)
        codes.append(twin.returncode)
        assert "Traceback" not in errors
    assert sorted(codes) == [0, 5, 5, 5]
    assert running.mesh("delete", "twin").returncode == 5
    assert running.mesh("cancel", "twin").returncode == 0
    assert "had ended already" in running.mesh("cancel", "twin").stderr
    assert running.mesh("wait", "twin").returncode == 130
    assert running.mesh("delete", "twin").returncode == 0
    assert running.mesh("describe", "twin").returncode == 4


# -- what was typed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "There is nothing to run"),
        (["run", "--"], "There is nothing to run"),
        (["run", "--nodes", "0", "--", "x"], "--nodes"),
        (["run", "--nodes", "1", "--", "x"], "leave it out"),
        (["run", "--nodes", "9", "--", "x"], "at most 8"),
        (["run", "--launcher", "mpirun", "--", "x"], "Torchrun"),
        (["run", "--name", "../x", "--", "x"], "--name"),
        (["run", "-e", "MASTER_PORT=1", "-e", "NODUS_X=1", "--", "x"], "MASTER_PORT, NODUS_X"),
        (["run", "-e", "1BAD=x", "--", "x"], "1BAD"),
        (["run", "torchrun", "--nnodes=2", "x"], "put -- before the command"),
        (["run", "-f", "/nowhere.yaml"], "cannot be read"),
        (["run", "-f", "-", "--nodes", "2"], "--nodes cannot be given"),
        (["get", "things"], "none of runs"),
        (["logs", "x", "--raw"], "--rank"),
        (["wait", "x", "--timeout", "soon"], "duration"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_started(
    shell: Shell, arguments: list[str], words: str
) -> None:
    done = shell.mesh(*arguments)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not shell.state.exists()


def test_a_malformed_document_is_told_with_line_and_column(shell: Shell) -> None:
    done = shell.mesh("run", "-f", "-", stdin="spec:\n  command: [x\n  env: {}\n")
    assert done.returncode == 2
    assert "line 3, column" in done.stderr
    typo = shell.mesh("run", "-f", "-", stdin="spec:\n  comand: [x]\n")
    assert (typo.returncode, "command" in typo.stderr) == (2, True)


def test_a_job_from_a_file_runs(running: Shell) -> None:
    text = "metadata: {name: from-file}\nspec:\n  command: [script, 'say:it runs', 'exit:4']\n"
    done = running.mesh("run", "-f", "-", stdin=text)
    assert (done.returncode, done.stdout) == (4, "it runs\n")


def test_values_with_teeth_arrive_as_they_are(running: Shell) -> None:
    values = {
        "A": "64(x2)",
        "B": "k=v=w",
        "C": "l1\nl2",
        "D": "$PATH",
        "E": "",
        "F": "q'u\"o",
        "G": "ünï",
        "I": "-x",
    }
    flags = [part for name, value in values.items() for part in ("-e", f"{name}={value}")]
    command = ["echo", "two words", "l1\nl2", "-x", "--", "ünï", ""]
    done = running.mesh("run", "--dry-run", "-o", "json", *flags, "--", *command)
    assert done.returncode == 0, done.stderr
    spec = json.loads(done.stdout)["job"]["spec"]
    assert spec["command"] == command
    assert {name: spec["env"][name] for name in values} == values
    assert spec["env"]["PATH"] == running.env["PATH"]
    assert spec["workingDir"] == str(running.here)


def test_a_dry_run_needs_no_deployment_and_starts_none(shell: Shell) -> None:
    documented = [
        "--gpu",
        "H100",
        "--total-gpus",
        "16",
        "--launcher",
        "torchrun",
        "--",
        "torchrun",
        "train.py",
    ]
    done = shell.mesh("run", "--dry-run", *documented)
    assert done.returncode == 0, done.stderr
    assert "world size 16" in done.stdout
    assert "gangHoldUSD     0.00" in done.stdout
    assert not shell.state.exists()


# -- leaving -------------------------------------------------------------------------------------------------------------


def test_ctrl_c_cancels_the_run_and_waits_until_it_has_ended(running: Shell) -> None:
    client = running.start("run", "--name", "ctrl-c", "--", "script", "say:up", "hang")
    line_with(client.stdout, "up")
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=DEADLINE_S)
    assert client.returncode == 130
    assert "Cancelling ctrl-c" in errors and "was cancelled" in errors
    status = running.run_state("ctrl-c")
    assert (status["state"], status["reason"]) == ("Cancelled", "ClientInterrupted")


def test_a_second_ctrl_c_leaves_at_once_and_says_how_to_look(running: Shell) -> None:
    client = running.start("run", "--name", "twice", "--", "script", "say:up", "stubborn:5", "hang")
    line_with(client.stdout, "up")
    client.send_signal(signal.SIGINT)
    line_with(client.stderr, "Cancelling")
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=DEADLINE_S)
    assert client.returncode == 130
    assert "mesh describe twice" in errors
    assert running.mesh("wait", "twice").returncode == 130


def test_sigterm_cancels_as_ctrl_c_does(running: Shell) -> None:
    client = running.start("run", "--name", "sigterm", "--", "script", "say:up", "hang")
    line_with(client.stdout, "up")
    client.send_signal(signal.SIGTERM)
    client.communicate(timeout=DEADLINE_S)
    assert client.returncode == 143
    assert running.run_state("sigterm")["state"] == "Cancelled"


def test_a_hangup_ends_the_client_and_not_the_run(running: Shell) -> None:
    client = running.start("run", "--name", "hangup", "--", "script", "say:up", "hang")
    line_with(client.stdout, "up")
    client.send_signal(signal.SIGHUP)
    client.communicate(timeout=DEADLINE_S)
    assert client.returncode == 129
    assert running.run_state("hangup")["state"] == "Running"
    running.mesh("cancel", "hangup")


def test_a_reader_that_leaves_ends_the_client_quietly_and_not_the_run(running: Shell) -> None:
    client = running.start(
        *(
            "run",
            "--name",
            "headed",
            "--",
            "script",
            "say:1",
            "sleep:0.3",
            "say:2",
            "sleep:0.3",
            "say:3",
            "hang",
        )
    )
    assert client.stdout is not None and client.stderr is not None
    assert client.stdout.readline() == "1\n"
    client.stdout.close()
    errors = client.stderr.read()
    assert client.wait(DEADLINE_S) == 141
    client.stderr.close()
    assert "Traceback" not in errors and "Broken" not in errors
    assert running.run_state("headed")["state"] == "Running"
    running.mesh("cancel", "headed")
    assert running.mesh("logs", "headed").stdout == "1\n2\n3\n"


def test_a_reader_that_never_reads_does_not_keep_ctrl_c_from_working(running: Shell) -> None:
    client = running.start("run", "--name", "stuck", "--", "script", "flood:50000", "hang")
    assert client.stdout is not None
    client.stdout.readline()
    line_with(client.stderr, "ranks run")
    client.send_signal(signal.SIGINT)
    line_with(client.stderr, "Cancelling")
    client.send_signal(signal.SIGINT)
    assert client.wait(DEADLINE_S) == 130
    client.stdout.close()
    assert client.stderr is not None
    client.stderr.close()


def test_a_closed_terminal_ends_the_client_and_not_the_run(running: Shell) -> None:
    pid, terminal = pty.fork()
    if pid == 0:  # the child: a session of its own, with this terminal
        os.chdir(running.here)
        command = [*running.argv, "run", "--name", "lid", "--nodes", "2", "--", "script", "say:up", "hang"]
        os.execve(command[0], command, running.env)
    seen = b""
    deadline = time.monotonic() + DEADLINE_S
    while seen.count(b"up") < 2 and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            seen += os.read(terminal, 65536)
    assert b"\x1b[" in seen, "a person at a terminal gets colours"
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert running.run_state("lid")["state"] == "Running"
    running.mesh("cancel", "lid")
    assert sorted(running.mesh("logs", "lid").stdout.splitlines()) == ["[rank 0] up", "[rank 1] up"]


# -- a deployment in trouble -------------------------------------------------------------------------------------------


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
    assert str(crashes[0]) in done.stderr


def test_it_is_the_same_program_by_both_names_and_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mesh.cli", "version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("gangmesh ")
