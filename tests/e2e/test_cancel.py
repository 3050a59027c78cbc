"""Stopping a run: the grace period, the deaf, the impatient, the silent."""

from __future__ import annotations

import pytest

from tests.e2e.real_mesh import RealMesh

pytestmark = pytest.mark.ray

SAVES = "trap 'sleep 1; echo saved > {file}; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
"""Obeys SIGTERM, after a second of saving."""
DEAF = "trap '' TERM; echo ready; while :; do sleep 0.1; done"


def started(mesh: RealMesh, *arguments: str) -> str:
    name = mesh.submit("--nodes", "2", *arguments)
    mesh.wait_for_print(name, "ready", 0, 1)
    return name


def test_a_rank_that_obeys_sigterm_finishes_its_save_also_behind_a_shell(mesh: RealMesh) -> None:
    """Case 27: the grace period is long enough, the file is complete. The shell in front has no exec."""
    inner = mesh.script("saves.sh", SAVES.format(file="saved-$NODE_RANK"))
    name = started(mesh, "--grace-period", "60s", "--", "bash", "-c", f"bash {inner}; true")
    mesh.cli("cancel", name)
    run = mesh.ended(name)
    assert run["status"]["state"] == "Cancelled"
    assert [(mesh.work / f"saved-{rank}").read_text() for rank in (0, 1)] == ["saved\n", "saved\n"]
    mesh.no_process_left(run)


def test_a_deaf_rank_is_killed_after_its_grace_and_a_second_cancel_changes_nothing(mesh: RealMesh) -> None:
    """Case 27: too short a grace, a worker that ignores SIGTERM, a user without patience."""
    name = started(mesh, "--grace-period", "2s", "--", "sh", "-c", DEAF)
    clients = [mesh.client("cancel", name) for _ in range(2)]
    assert [client.wait() for client in clients] == [0, 0]
    run = mesh.ended(name)
    assert run["status"]["state"] == "Cancelled"
    assert [rank["exit"]["signal"] for rank in run["status"]["ranks"]] == [9, 9]
    assert [event["kind"] for event in mesh.events(name)].count("CancelRequested") == 1
    mesh.no_process_left(run)
    assert mesh.cli("cancel", name).returncode == 0, "a third one, after the end"


@pytest.mark.long
def test_a_silent_hang_is_seen_by_the_age_of_the_last_output_and_can_be_stopped(mesh: RealMesh) -> None:
    """Case 25: both ranks live, and nothing happens."""
    name = started(mesh, "--", "sh", "-c", "echo ready; exec sleep 1000000")
    ranks = mesh.run(name)["status"]["ranks"]
    assert all(rank["lastOutputAt"] is not None for rank in ranks), ranks
    assert "ago" in mesh.cli("describe", name).stdout.partition("LAST OUTPUT")[2]
    mesh.cli("cancel", name)
    run = mesh.ended(name)
    assert (run["status"]["state"], run["status"]["reason"]) == ("Cancelled", "Cancelled")
    mesh.no_process_left(run)
