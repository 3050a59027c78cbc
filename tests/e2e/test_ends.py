"""How runs end: the true cause, early leavers, late ones, and commands that cannot start."""

from __future__ import annotations

import json

import pytest

from tests.e2e.real_mesh import WAIT_FOR, RealMesh, wait_until

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("exit 42", 42, "exit code 42"),
        ("kill -SEGV $$", 139, "SIGSEGV (signal 11)"),
    ],
)
def test_the_run_ends_with_the_failed_ranks_own_code_or_signal(
    mesh: RealMesh, end: str, code: int, words: str
) -> None:
    """Case 16, plain. SIGKILL is the story of the last words (test_output.py)."""
    done = mesh.cli(
        "run", "--nodes", "2", "-o", "json", "--", "bash", "-c", f"[ $NODE_RANK = 0 ] && exec sleep 600; {end}",
        code=code,
    )  # fmt: skip
    status = json.loads(done.stdout)["status"]
    assert (status["state"], status["exitCode"]) == ("Failed", code)
    assert "Rank 1" in status["message"] and words in status["message"]
    assert status["ranks"][0]["state"] == "Fenced"


@pytest.mark.torch
def test_torchrun_returns_1_for_everything_and_the_truth_is_told_all_the_same(mesh: RealMesh) -> None:
    """Case 16, torchrun: both numbers are there, the worker's and the launcher's. Signals: test_launcher_real.py."""
    mesh.script(
        "fails.py",
        "import os, sys, time\nif os.environ['NODUS_NODE_RANK'] == '1': sys.exit(42)\ntime.sleep(600)\n",
    )
    done = mesh.cli(
        "run", "--nodes", "2", "--launcher", "torchrun", "-o", "json", "--", "torchrun", "fails.py", code=42
    )
    status = json.loads(done.stdout)["status"]
    assert status["exitCode"] == 42
    assert status["ranks"][1]["exit"] == {"code": 1, "signal": None}, "what torchrun returned"
    assert "its launcher returned exit code 1" in status["message"]


@pytest.mark.torch
def test_a_rank_that_leaves_early_with_zero_is_named_beside_the_victim(mesh: RealMesh) -> None:
    """Case 19: rank 1 leaves after init; rank 0 complains about a connection closed by its peer."""
    mesh.script(
        "early.py",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1: os._exit(0)\n"
        "dist.all_reduce(torch.ones(8))\n",
    )
    name = mesh.new_name()
    mesh.cli("run", "--name", name, "--nodes", "2", "--", "python", "early.py", code=1)
    status = mesh.run(name)["status"]
    assert status["state"] == "Failed"
    assert status["message"].startswith("Rank 0")
    assert "Rank 1 had already exited 0." in status["message"]


def test_a_run_with_a_slow_rank_goes_on_says_who_has_finished_and_succeeds_with_the_last(
    mesh: RealMesh,
) -> None:
    """Cases 19 (variant) and 21: rank 0 slow and, at the same time on other machines, the mirror."""
    gate = mesh.gate("slow")
    names = [
        mesh.submit(
            "--nodes", "2", "--", "sh", "-c", f"[ $NODE_RANK != {slow} ] || {{ {WAIT_FOR.format(gate)}; }}"
        )
        for slow in (0, 1)
    ]
    for name in names:
        mesh.running(name)
        wait_until(
            lambda name=name: "1 of 2 ranks finished" in mesh.run(name)["status"]["message"], "the early one"
        )
    wait_until(
        lambda: "1 of 2 ranks finished" in mesh.cli("describe", names[0]).stdout, "the same in describe"
    )
    gate.touch()
    for name in names:
        status = mesh.ended(name)["status"]
        assert (status["state"], status["exitCode"]) == ("Succeeded", 0)
        assert [rank["exit"]["code"] for rank in status["ranks"]] == [0, 0]


@pytest.mark.long
@pytest.mark.torch
def test_a_torchrun_rank_that_needs_longer_after_the_group_is_gone_is_left_to_finish(mesh: RealMesh) -> None:
    """Case 21, torchrun: the rank that hosts the rendezvous is done first."""
    gate = mesh.gate("torchrun-slow")
    mesh.script(
        "uneven.py",
        "import os, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo'); dist.barrier(); dist.destroy_process_group()\n"
        f"while os.environ['NODUS_NODE_RANK'] == '1' and not os.path.exists({str(gate)!r}): time.sleep(0.1)\n"
        "print('done', flush=True)\n",
    )
    name = mesh.submit("--nodes", "2", "--launcher", "torchrun", "--", "torchrun", "uneven.py")
    mesh.wait_for_print(name, "done", 0)
    assert mesh.run(name)["status"]["state"] == "Running"
    gate.touch()
    assert mesh.ended(name)["status"]["state"] == "Succeeded"


def test_a_command_that_exists_on_one_machine_only_is_told_with_the_rank_that_lacks_it(
    mesh: RealMesh,
) -> None:
    """The working directory is each rank's own state folder, four levels below its machine's folder."""
    tool = mesh.state / "machines" / "local-1" / "only-here"
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    tool.chmod(0o755)
    name = mesh.new_name()
    job = {
        "apiVersion": "nodus.dev/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"command": ["../../../../only-here"], "distributed": {"nodes": 4}},
    }
    mesh.call("POST", "/v1/runs", job)
    run = mesh.ended(name)
    assert (run["status"]["state"], run["status"]["reason"]) == ("Failed", "CommandNotFound")
    assert "Rank 0" not in run["status"]["message"] and "only-here" in run["status"]["message"]
    mesh.cli("wait", name, "--for", "ended", code=127)
    mesh.no_process_left(run)


def test_a_command_that_is_not_executable_is_told_and_exits_with_126(mesh: RealMesh) -> None:
    mesh.script("plain-text.sh", "echo never\n")
    done = mesh.cli("run", "--nodes", "2", "--", "./plain-text.sh", code=126)
    assert "plain-text.sh" in done.stderr and "never" not in done.stdout
