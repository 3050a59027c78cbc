"""`mesh` as a process: runs that are suspended, restarted, moved and harmed, as their users see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.shell import DEADLINE_S, Shell


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """One deployment of six machines; a test takes away what it takes away."""
    made = Shell(tmp_path_factory.mktemp("recovery"))
    done = made.mesh("up", "--machines", "6")
    assert done.returncode == 0, done.stderr
    yield made
    made.stop()


def submitted(shell: Shell, name: str, *words: str) -> None:
    """`words`: options, `--`, and the command."""
    done = shell.mesh("run", "-d", "--name", name, *words)
    assert done.returncode == 0, done.stderr
    assert shell.mesh("wait", name, "--for", "running").returncode == 0


def test_a_suspended_run_is_left_by_its_clients_and_goes_on_when_it_is_resumed(shell: Shell) -> None:
    attached = shell.start(
        "run", "--name", "pause", "--nodes", "2", "--", "script", "say:on", "@1:hang", "sleep:0.3"
    )
    assert shell.mesh("wait", "pause", "--for", "running", "--timeout", "20s").returncode in (0, 4)
    while shell.mesh("wait", "pause", "--for", "running", "--timeout", "20s").returncode == 4:
        pass  # it is not submitted yet
    follower = shell.start("logs", "-f", "pause")
    done = shell.mesh("suspend", "pause")
    assert done.returncode == 0, done.stderr
    assert "mesh resume pause" in done.stderr
    _, told = attached.communicate(timeout=DEADLINE_S)
    assert attached.returncode == 123, told
    assert "pause is suspended, not ended" in told
    assert "mesh resume pause" in told
    printed, told = follower.communicate(timeout=DEADLINE_S)
    assert (follower.returncode, sorted(printed.splitlines())) == (123, ["[rank 0] on", "[rank 1] on"])
    assert "mesh resume pause" in told
    assert shell.mesh("wait", "pause", "--for", "suspended").returncode == 0
    assert shell.mesh("wait", "pause", "--timeout", "300ms").returncode == 124
    assert json.loads(shell.mesh("suspend", "pause", "-o", "json").stdout)["status"]["state"] == "Suspended"
    resumed = shell.mesh("resume", "pause")
    assert resumed.returncode == 0, resumed.stderr
    assert "2 of 2 ranks run again, in epoch 2" in resumed.stderr
    assert shell.mesh("wait", "pause").returncode == 0
    assert shell.mesh("resume", "pause").returncode == 5
    assert shell.mesh("suspend", "pause").returncode == 5


def test_an_attached_client_tells_of_restarts_and_ends_with_the_runs_code(shell: Shell) -> None:
    done = shell.mesh(
        *("run", "--name", "stumbles", "--nodes", "2", "--on-process-failure", "restart"),
        *("--", "script", "1=@1:exit:7", "@1:hang", "say:again"),
    )
    assert done.returncode == 0, done.stderr
    for sentence in ("Restart 1 of 3", "2 of 2 ranks run again, in epoch 2", "(2 ranks, 1 restart)"):
        assert sentence in done.stderr
    story = shell.mesh("describe", "stumbles").stdout
    for part in (
        "Restarts:",
        "1 of 3 for a command that failed",
        "Epochs:",
        "Epoch 1 ended: Rank 1 on",
        "kept",
    ):
        assert part in story, story
    lives = shell.mesh(
        "get", "attempts", "-l", "nodus.dev/job=stumbles,nodus.dev/rank=1", "-o", "wide"
    ).stdout
    assert [line.split()[:3] for line in lines_of(lives)] == [["stumbles", "1", "1"], ["stumbles", "1", "2"]]
    assert "CommandFailed" in lines_of(lives)[0]


def lines_of(table: str) -> list[str]:
    return table.splitlines()[1:]


def test_restarts_end_with_the_budget(shell: Shell) -> None:
    done = shell.mesh(
        *("run", "--on-process-failure", "restart", "--max-attempts", "1", "--", "script", "exit:9")
    )
    assert done.returncode == 9, done.stderr
    assert "Restart 1 of 1" in done.stderr


def test_chaos_takes_a_machine_away_and_gives_a_verdict(shell: Shell) -> None:
    submitted(shell, "loses", "--nodes", "2", "--", "script", "say:go", "checkpoint:40", "hang")
    done = shell.mesh("chaos", "loses", "--lose-machine", "1", "--at-step", "30")
    assert done.returncode == 0, done.stderr
    assert "loses resumed in epoch 2, from step 40" in done.stdout
    for part in ("MachineLost", "detected", "first line", "rank 1", "->", "kept"):
        assert part in done.stdout
    assert "A rehearsed fault: LoseMachine of rank 1" in done.stderr
    again = shell.mesh("chaos", "loses", "--lose-machine", "0", "-o", "json")
    told = json.loads(again.stdout)
    assert (told["outcome"], told["epoch"], told["resumedFrom"]["step"]) == ("Resumed", 3, 40)
    assert (told["replaced"][0]["rank"], told["kept"], told["chargedTo"]) == (0, [1], "Loss")
    assert "on purpose" in shell.mesh("describe", "loses").stdout
    assert shell.mesh("cancel", "loses").returncode == 0
    assert shell.mesh("chaos", "loses", "--lose-machine", "0").returncode == 5


@pytest.mark.long
def test_what_a_deployment_never_does_is_refused_before_anything_is_waited_for(tmp_path: Path) -> None:
    """There is no run at all: whoever waited for one would say that."""
    harm = ("chaos", "r", "--lose-machine", "1")
    shell = Shell(tmp_path)
    try:
        assert shell.mesh("up", FAKE_HEAD="open").returncode == 0
        refused = shell.mesh(*harm, "--at-step", "10")
        assert refused.returncode == 5, refused.stderr
        again = f"mesh up --listen 0.0.0.0:8471 --allow-chaos --state {shell.state}"
        assert "cannot be changed while it runs" in refused.stderr and again in refused.stderr
        late = shell.mesh("up", "--allow-chaos", "--listen", "0.0.0.0:8471")
        assert "warning: --allow-chaos cannot be changed while it runs" in late.stderr, late.stderr
        assert again in late.stderr
        assert "warning" not in shell.mesh("up", "--listen", "0.0.0.0:8471").stderr
        status = shell.mesh("status").stdout
        assert "mesh port   0.0.0.0:8471" in status and "mesh join https://HOST:8471" in status, status
        assert "restores nothing" in status and "not allowed" in status
        down = shell.mesh("down", "-y")
        assert (down.returncode, "2 machines that joined keep running" in down.stderr) == (0, True), (
            down.stderr
        )
        assert shell.mesh("up", "--allow-chaos", FAKE_HEAD="open").returncode == 0
        refused = shell.mesh(*harm, "--at-step", "10")
        assert (refused.returncode, "no checkpoint store" in refused.stderr) == (5, True), refused.stderr
        assert "--checkpoints URL" in refused.stderr
        assert shell.mesh(*harm).returncode == 4
    finally:
        shell.stop()


def test_chaos_says_when_a_run_does_not_resume(shell: Shell) -> None:
    submitted(shell, "dies", "--", "script", "hang")
    done = shell.mesh("chaos", "dies", "--kill-rank", "0", "--after", "100ms")
    assert (done.returncode, "dies did not resume, it is Failed" in done.stdout) == (1, True), done.stdout
    for words in ([], ["--kill-rank", "0", "--freeze", "0"], ["--kill-rank", "0", "--for", "3s"]):
        assert shell.mesh("chaos", "dies", *words).returncode == 2


def test_a_machine_is_drained_and_its_run_moves(shell: Shell) -> None:
    submitted(shell, "moves", "--", "script", "hang")
    machine = json.loads(shell.mesh("get", "attempts", "moves", "-o", "json").stdout)["attempts"][0][
        "machine"
    ]
    done = shell.mesh("drain", machine, "--grace", "5s", "-m", "Maintenance.")
    assert done.returncode == 0, done.stderr
    assert f"{machine} leaves: moves saves there" in done.stderr
    assert "nobody gets it any more" in done.stderr
    assert "Leaving" in next(
        line for line in shell.mesh("get", "machines").stdout.splitlines() if machine in line
    )
    assert shell.mesh("wait", "moves", "--for", "running").returncode == 0
    assert shell.mesh("drain", "nobody").returncode == 4
    assert shell.mesh("cancel", "moves").returncode == 0


def test_help_names_the_codes_and_the_commands(shell: Shell) -> None:
    text = shell.mesh("--help").stdout
    for word in ("suspend", "resume", "chaos", "drain", "123"):
        assert word in text


def test_the_wait_for_a_moment_that_does_not_come_ends(shell: Shell, tmp_path: Path) -> None:
    submitted(shell, "waits", "--", "script", "hang")
    done = shell.mesh("chaos", "waits", "--kill-rank", "0", "--at-step", "5", "--timeout", "500ms")
    assert (done.returncode, "nothing was done to waits" in done.stderr) == (124, True), done.stderr
    assert "waits: waiting for a checkpoint of step 5 or later; none is committed yet." in done.stderr
    assert shell.mesh("cancel", "waits").returncode == 0
