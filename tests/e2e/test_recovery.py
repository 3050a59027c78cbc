"""A run that is harmed on purpose recovers; one that is suspended goes on. As a user does it, on a real deployment."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.e2e.real_mesh import RealMesh, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

COUNTS = "echo epoch $NODUS_GANG_EPOCH; while [ ! -e {gate} ]; do sleep 0.1; done; echo done; exit 0"


def started(mesh: RealMesh, name: str, *options: str) -> Any:
    """A run of two ranks that an attached client is with; it ends when its gate is there."""
    gate = mesh.gate(name)
    command = ("bash", "-c", COUNTS.format(gate=gate))
    client = mesh.client(
        "run", "--name", name, "--nodes", "2", "--grace-period", "2s", *options, "--", *command
    )
    mesh.running(name)
    mesh.wait_for_print(name, "epoch 1", 0, 1)
    return client, gate


def chaos(mesh: RealMesh, name: str, *options: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(mesh.cli("chaos", name, *options, "-o", "json").stdout)
    return told


def lives(mesh: RealMesh, name: str, rank: int) -> list[dict[str, Any]]:
    labels = f"nodus.dev/job={name},nodus.dev/rank={rank}"
    attempts: list[dict[str, Any]] = json.loads(
        mesh.cli("get", "attempts", "-l", labels, "-o", "json").stdout
    )["attempts"]
    return attempts


def only_epoch_lives(mesh: RealMesh, run: dict[str, Any]) -> None:
    """No process of an earlier epoch is left anywhere."""
    uid, epoch = run["metadata"]["uid"], run["status"]["epoch"]

    def ghosts() -> list[str]:
        environments = [p.environ().get("NODUS_INCARNATION", "") for p in mesh.tree(uid).values()]
        return [name for name in environments if name and int(name.split(".")[1]) < epoch]

    wait_until(lambda: not ghosts(), "the older epochs' processes to be gone")


def test_a_lost_machine_is_replaced_the_other_rank_keeps_its_own_and_the_client_stays(mesh: RealMesh) -> None:
    name = mesh.new_name()
    client, gate = started(mesh, name)
    places = {r["rank"]: r["machine"] for r in mesh.run(name)["status"]["ranks"]}
    told = chaos(mesh, name, "--lose-machine", "1")
    assert (told["outcome"], told["epoch"], told["chargedTo"], told["ofTheHarm"]) == (
        "Resumed",
        2,
        "Loss",
        True,
    )
    assert (told["kept"], [r["rank"] for r in told["replaced"]]) == ([0], [1])
    run = mesh.run(name)
    now = {r["rank"]: r["machine"] for r in run["status"]["ranks"]}
    assert now[0] == places[0]
    assert now[1] != places[1]
    only_epoch_lives(mesh, run)
    first, second = lives(mesh, name, 1)
    assert (first["machine"], first["reason"], second["reason"]) == (places[1], "MachineLost", None)
    gate.touch()
    assert client.wait() == 0, client.stderr
    for sentence in (
        "A rehearsed fault",
        "was lost",
        "Restart 1 of 3 for lost machines",
        "run again, in epoch 2",
    ):
        assert sentence in client.stderr, client.stderr
    story = mesh.cli("describe", name).stdout
    assert re.search(r"Epoch 1 ended: Rank 1: .* was lost", story), story
    assert "on purpose: A rehearsed fault" in story
    mesh.no_process_left(mesh.ended(name))


@pytest.mark.long
def test_a_killed_command_starts_the_gang_again_when_the_run_wants_it(mesh: RealMesh) -> None:
    name = mesh.new_name()
    client, gate = started(mesh, name, "--on-process-failure", "restart")
    before = mesh.run(name)["status"]["ranks"]
    told = chaos(mesh, name, "--kill-rank", "1")
    assert (told["outcome"], told["chargedTo"], told["kept"]) == ("Resumed", "Failure", [0, 1])
    assert told["cause"]["reason"] == "CommandKilled"
    assert told["cause"]["exit"] == {"code": None, "signal": 9}
    run = mesh.run(name)
    assert [r["machine"] for r in run["status"]["ranks"]] == [r["machine"] for r in before]
    story = mesh.cli("describe", name).stdout
    assert "on purpose: A rehearsed fault" in story
    assert "Nobody here sent that signal" not in story
    only_epoch_lives(mesh, run)
    gate.touch()
    assert client.wait() == 0, client.stderr


def test_a_killed_command_starts_again_alone_when_the_run_wants_that(mesh: RealMesh) -> None:
    name = mesh.new_name()
    client, gate = started(mesh, name, "--on-process-failure", "restart-rank")
    rank_0 = mesh.command(name, 0)
    told = chaos(mesh, name, "--kill-rank", "1")
    assert (told["outcome"], told["alone"], told["epoch"]) == ("Resumed", True, 1)
    assert (told["chargedTo"], told["kept"], told["replaced"]) == ("Failure", [0, 1], [])
    assert mesh.command(name, 0) == rank_0, "rank 0 was not touched"
    assert [(life["epoch"], life["state"], life["reason"]) for life in lives(mesh, name, 1)] == [
        (1, "Exited", "CommandKilled"),
        (1, "Running", None),
    ]
    assert re.search(r"^ *1 +Running, life 2 ", mesh.cli("describe", name).stdout, re.MULTILINE)
    gate.touch()
    assert client.wait() == 0, client.stderr
    for sentence in ("Rank 1 starts again alone", "Restart 1 of 3 for a command that failed: rank 1"):
        assert sentence in client.stderr, client.stderr
    assert client.stdout.count("[rank 1] epoch 1") == 2, "each life's output is followed"
    assert mesh.cli("logs", name, "--rank", "1").stdout.splitlines() == ["epoch 1", "epoch 1", "done"]
    mesh.no_process_left(mesh.ended(name))


@pytest.mark.long
def test_a_coordinator_that_is_killed_while_a_rank_is_away_brings_it_back(mesh: RealMesh) -> None:
    name = mesh.new_name()
    client, gate = started(mesh, name, "--on-process-failure", "restart-rank")
    rank_0 = mesh.command(name, 0)
    mesh.command(name, 1).kill()
    wait_until(lambda: "RankRestarting" in [event["kind"] for event in mesh.events(name)], "the pause")
    mesh.one("ray::CoordinatorActor").kill()

    def runs_again() -> bool:
        rank_1 = mesh.run(name)["status"]["ranks"][1]
        return bool(rank_1["lives"] == 2 and rank_1["state"] == "Running")

    wait_until(runs_again, "rank 1's next life")
    assert mesh.command(name, 0) == rank_0
    gate.touch()
    assert client.wait() == 0, client.stderr
    ended = mesh.ended(name)["status"]
    assert (ended["epoch"], ended["restarts"]["failure"], ended["restarts"]["total"]) == (1, 1, 1)


@pytest.mark.long
def test_a_machine_that_stood_still_past_its_lease_finds_every_door_closed(mesh: RealMesh) -> None:
    name = mesh.new_name()
    client, gate = started(mesh, name)
    told = chaos(mesh, name, "--freeze", "1", "--for", "6s")
    assert (told["outcome"], told["chargedTo"]) == ("Resumed", "Loss")
    only_epoch_lives(mesh, mesh.run(name))
    gate.touch()
    assert client.wait() == 0, client.stderr
    mesh.no_process_left(mesh.ended(name))


@pytest.mark.long
def test_a_suspended_run_gives_its_machines_back_and_goes_on(mesh: RealMesh) -> None:
    name = mesh.new_name()
    client, gate = started(mesh, name)
    follower = mesh.client("logs", "-f", name)
    follower.expect("[rank 0] epoch 1")
    mesh.cli("suspend", name)
    run = mesh.run(name)
    assert run["status"]["state"] == "Suspended"
    mesh.no_process_left(run)
    assert (client.wait(), follower.wait()) == (123, 123)
    assert f"mesh resume {name}" in client.stderr
    assert f"mesh resume {name}" in follower.stderr
    wait_until(
        lambda: not [m for m in mesh.machines().values() if m["run"] == name], "its machines to be free"
    )
    told = mesh.cli("resume", name)
    assert "run again, in epoch 2" in told.stderr
    gate.touch()
    ended = mesh.ended(name)["status"]
    assert (ended["state"], ended["epoch"], ended["restarts"]["total"]) == ("Succeeded", 2, 0)


@pytest.mark.long
def test_a_drained_machine_is_left_and_then_is_gone(mesh: RealMesh) -> None:
    name = mesh.submit("--nodes", "2", "--grace-period", "2s", "--", "sleep", "600")
    left = mesh.running(name)["status"]["ranks"][1]["machine"]
    before = set(mesh.machines())
    mesh.cli("drain", left, "--grace", "2s", limit_s=120)
    machine = mesh.machines().get(left)
    assert machine is None or (machine["state"], machine["waitsFor"]) == ("Leaving", "its end")
    wait_until(lambda: left not in mesh.machines(), "the machine to be gone")
    run = wait_until(lambda: _running_at(mesh, name, 2), "the second epoch")
    assert left not in {rank["machine"] for rank in run["status"]["ranks"]}
    assert len(mesh.machines()) == len(before), "another one came instead"
    mesh.cli("cancel", name)
    mesh.no_process_left(mesh.ended(name))


def _running_at(mesh: RealMesh, name: str, epoch: int) -> dict[str, Any] | None:
    run = mesh.run(name)
    status = run["status"]
    return run if (status["state"], status["epoch"]) == ("Running", epoch) else None


@pytest.mark.long
@pytest.mark.root
def test_a_machine_that_nobody_hears_any_more_is_replaced_and_mended_in_time(mesh: RealMesh) -> None:
    """One way: what is sent to it arrives. Its keeper's renewals do not, so its rank ends by itself."""
    if shutil.which("nft") is None:
        pytest.skip("needs the program nft (package nftables)")
    name = mesh.submit("--nodes", "2", "--grace-period", "2s", "--", "sleep", "600")
    before = mesh.running(name)["status"]["ranks"]
    told = chaos(mesh, name, "--cut", "1", "--one-way", "--for", "8s")
    assert (told["outcome"], told["ofTheHarm"], told["chargedTo"]) == ("Resumed", True, "Loss"), told
    assert told["kept"] == [0] and told["replaced"][0]["from"] == before[1]["machine"], told

    def tables() -> str:
        return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout

    wait_until(lambda: mesh.owner.deployment_id not in tables(), "the cut to be undone")
    mesh.cli("cancel", name)
    mesh.no_process_left(mesh.ended(name))
