"""`mesh` as a process: runs and their exit codes, what was typed, signals, pipes, terminals."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.shell import DEADLINE_S, Shell, line_with


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


def test_the_size_of_a_model_is_for_a_dry_run(shell: Shell) -> None:
    words = ("run", "--model-size", "7B", "--nodes", "2")
    done = shell.mesh(*words, "--dry-run", "--", "true")
    assert done.returncode == 0, done.stderr
    assert "no relayed or wide-area path between the members" in done.stdout
    done = shell.mesh("run", "--model-size", "large", "--dry-run", "--", "true")
    assert done.returncode != 0
    assert "such as 7B" in done.stderr
    done = shell.mesh(*words, "--", "true")
    assert done.returncode != 0
    assert "mesh run --dry-run" in done.stderr
    assert not shell.state.exists()


# -- leaving ---------------------------------------------------------------------------------------------------------


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
