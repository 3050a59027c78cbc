"""Names, twins, and gangs that wait for machines."""

from __future__ import annotations

import pytest

from tests.e2e.real_mesh import WAIT_FOR, RealMesh, wait_until

pytestmark = pytest.mark.ray


@pytest.mark.long
def test_of_four_twins_at_once_one_is_accepted_and_an_earlier_run_of_the_name_is_never_mixed(
    mesh: RealMesh,
) -> None:
    """Case 51."""
    gate = mesh.gate("twin")
    command = ("--", "sh", "-c", f"echo first life; {WAIT_FOR.format(gate)}")
    clients = [mesh.client("run", "--name", "twin", "--nodes", "2", "-d", *command) for _ in range(4)]
    codes = sorted(client.wait() for client in clients)
    assert codes == [0, 5, 5, 5], [client.stderr for client in clients]
    assert sum("twin" in client.stderr for client in clients if client.process.returncode == 5) == 3
    mesh.running("twin")
    assert [m["run"] for m in mesh.machines().values() if m["state"] == "InUse"] == ["twin", "twin"]
    gate.touch()
    first = mesh.ended("twin")
    # ended, and still not overwritten by a newcomer
    mesh.cli("run", "--name", "twin", "--nodes", "2", "-d", "--", "echo", "second life", code=5)
    assert mesh.run("twin")["metadata"]["uid"] == first["metadata"]["uid"]
    wait_until(lambda: mesh.cli("delete", "twin", code=None).returncode == 0, "its machines to be given back")
    done = mesh.cli("run", "--name", "twin", "--nodes", "2", "--", "echo", "second life")
    assert "first life" not in done.stdout
    assert mesh.cli("logs", "twin").stdout == done.stdout


@pytest.mark.parametrize("name", ["../x", "a b", "Ünï", "n" * 300, ""])
def test_a_name_that_is_none_is_refused_and_leaves_no_trace(mesh: RealMesh, name: str) -> None:
    """Case 51."""
    before = {path.name for path in mesh.state.iterdir()}, {path.name for path in mesh.state.parent.iterdir()}
    done = mesh.cli("run", "--name", name, "--nodes", "2", "-d", "--", "true", code=2)
    assert "name" in done.stderr
    after = {path.name for path in mesh.state.iterdir()}, {path.name for path in mesh.state.parent.iterdir()}
    assert after == before


@pytest.mark.long
def test_a_gang_waits_until_all_its_machines_are_free_and_says_why_machine_by_machine(mesh: RealMesh) -> None:
    gate = mesh.gate("wait")
    first = mesh.submit("--nodes", "3", "--", "sh", "-c", WAIT_FOR.format(gate))
    mesh.running(first)
    second = mesh.client("run", "--name", "patient", "--nodes", "2", "--", "echo", "at last")
    wait_until(lambda: "Waiting for 2 machines" in second.stderr, "the reason on stderr")
    status = mesh.run("patient")["status"]
    assert (status["state"], status["reason"]) == ("Pending", "NoCapacity")
    uses = [part.strip(" .") for part in status["message"].partition(": ")[2].split(";")]
    why = sorted(use.partition(" ")[2] for use in uses if not use.endswith(" lost"))
    assert why == ["free", *[f"in use by {first}"] * 3], status
    assert [m["run"] for m in mesh.machines().values() if m["run"]] == [first] * 3, (
        "it holds no half of a gang"
    )
    gate.touch()
    assert second.wait() == 0, second.stderr
    assert second.stdout.count("at last") == 2
