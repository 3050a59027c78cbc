"""Deployments of their own: the head killed, and disks that are full."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.real_mesh import WAIT_FOR, RealMesh, real_mesh, wait_until

pytestmark = pytest.mark.ray


@contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[None]:
    """A file system of its own at the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True, text=True
    )  # fmt: skip
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Writes until the disk is full; the file that has to go to make room."""
    filler = folder / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            if file.write(b"x" * 4096) < 4096:
                file.write(b"x")
    return filler


@pytest.mark.root
@pytest.mark.long
@pytest.mark.timeout(240)
def test_full_disks_cost_output_and_new_work_but_no_running_gang(tmp_path: Path) -> None:
    """Case 49, end to end: first under a rank's log spool, then under the journal."""
    state, journal = tmp_path / "state", tmp_path / "journal"
    with ExitStack() as disks:
        disks.enter_context(small_disk(state / "machines" / "local-2", megabytes=8))
        disks.enter_context(small_disk(journal, megabytes=4))
        db = f"sqlite+aiosqlite:///{journal}/journal.db"
        with real_mesh(tmp_path, "--machines", "2", "--db", db, state=state) as mesh:
            _spool_full(mesh)
            _journal_full(mesh, journal)


def _spool_full(mesh: RealMesh) -> None:
    gate, room, end = mesh.gate("spool"), mesh.gate("spool-room"), mesh.gate("spool-end")
    name = mesh.submit(
        "--nodes", "2", "--", "sh", "-c",
        f"echo before; {WAIT_FOR.format(gate)}; yes lost words | head -c 3000000; "
        f"{WAIT_FOR.format(room)}; "
        f"while [ ! -e {end} ]; do echo after; sleep 0.2; done",
    )  # fmt: skip
    mesh.running(name)
    mesh.wait_for_print(name, "before", 0, 1)
    filler = fill(mesh.state / "machines" / "local-2")
    gate.touch()
    wait_until(lambda: len(mesh.printed(name, 0)) > 3_000_000, "the other rank's output")
    assert mesh.run(name)["status"]["state"] == "Running"
    filler.unlink()
    room.touch()
    mesh.wait_for_print(name, "after", 0, 1)
    end.touch()
    assert mesh.ended(name)["status"]["state"] == "Succeeded"
    shown = mesh.cli("logs", name, "--rank", "1").stdout
    assert shown.startswith("before") and shown.endswith("after\n")
    assert "lost" in shown.replace("lost words", ""), "the loss is marked"


def _journal_full(mesh: RealMesh, journal: Path) -> None:
    gate = mesh.gate("journal")
    name = mesh.submit("--", "sh", "-c", f"{WAIT_FOR.format(gate)}; echo done")
    mesh.running(name)
    command = mesh.command(name, 0)
    filler = fill(journal)

    def refused() -> str:
        done = mesh.cli("run", "-d", "-e", f"X={'x' * 100_000}", "--", "true", code=None)
        return done.stderr if done.returncode != 0 else ""

    said = wait_until(refused, "new work to be refused")
    assert "full" in said or "space" in said, said
    assert mesh.cli("get", "runs").stdout.count(name) == 1, "what there is stays readable"
    assert command.is_running()
    gate.touch()
    wait_until(lambda: not command.is_running(), "the command to end")
    filler.unlink()
    assert mesh.ended(name)["status"]["state"] == "Succeeded"
    assert mesh.cli("run", "--", "echo", "room again").stdout == "room again\n"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_killed_head_leaves_no_process_and_the_next_one_restarts_what_it_ran(tmp_path: Path) -> None:
    with real_mesh(tmp_path, "--machines", "2") as mesh:
        name = mesh.submit("--nodes", "2", "--", "sh", "-c", "setsid sleep 600 & echo alive; exec sleep 600")
        run = mesh.running(name)
        mesh.wait_for_print(name, "alive", 1)
        before = mesh.everything()
        mesh.head.kill()
        mesh.no_process_left(run, limit_s=30)
        wait_until(lambda: not any(p.is_running() for p in before), "everything of the deployment to end")
        again = mesh.cli("up", "--machines", "2")
        assert "killed" in again.stderr
        wait_until(lambda: mesh.running(name)["status"]["epoch"] == 2, "the second epoch", limit_s=90)
        restart = [event for event in mesh.events(name) if event["kind"] == "Restarting"]
        assert [event["reason"] for event in restart] == ["MachineLost"], restart
        assert "alive" in mesh.cli("logs", name).stdout
        mesh.cli("cancel", name)
        mesh.no_process_left(mesh.ended(name))
        assert mesh.cli("run", "--nodes", "2", "--", "echo", "new life").stdout.count("new life") == 2


@pytest.mark.long
def test_a_damaged_row_of_the_journal_costs_its_run_and_nobody_else(tmp_path: Path) -> None:
    """The coordinator that comes back cannot read it: what runs there is ended, and the machine is another's."""
    with real_mesh(tmp_path, "--machines", "2") as mesh:
        broken = mesh.submit("--", "sleep", "600")
        gate = mesh.gate("damaged-row")
        well = mesh.submit("--", "sh", "-c", f"{WAIT_FOR.format(gate)}; echo whole")
        mesh.running(broken)
        mesh.running(well)
        uid = mesh.run(broken)["metadata"]["uid"]
        with contextlib.closing(sqlite3.connect(mesh.state / "journal.db", timeout=30)) as database:
            database.execute("UPDATE runs SET record = substr(record, 1, 100) WHERE name = ?", (broken,))
            database.commit()
        victim = mesh.one("ray::CoordinatorActor")
        victim.kill()
        wait_until(
            lambda: [p for p in mesh.named("ray::CoordinatorActor") if p.pid != victim.pid],
            "another coordinator",
        )
        run = mesh.ended(broken)
        assert (run["status"]["state"], run["status"]["reason"]) == ("Failed", "Unreadable"), run["status"]
        assert "cannot be read" in mesh.cli("describe", broken).stdout
        wait_until(lambda: not mesh.tree(uid), "everything of it to be ended")
        mesh.ended(mesh.submit("--", "true"))
        gate.touch()
        done = mesh.ended(well)
        assert (done["status"]["state"], done["status"]["epoch"]) == ("Succeeded", 1)
        mesh.cli("delete", broken)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_damaged_journal_is_said_and_costs_no_run_once_it_is_put_back(tmp_path: Path) -> None:
    """The coordinator that comes back waits for it, and says so to whoever asks; the ranks run on meanwhile."""
    with real_mesh(tmp_path, "--machines", "2") as mesh:
        gate = mesh.gate("damaged-journal")
        name = mesh.submit("--nodes", "2", "--", "sh", "-c", f"{WAIT_FOR.format(gate)}; echo whole")
        mesh.running(name)
        victim = mesh.one("ray::CoordinatorActor")
        victim.suspend()
        kept = tmp_path / "kept"
        kept.mkdir()
        for file in ("journal.db-wal", "journal.db"):
            shutil.copy(mesh.state / file, kept)
            (mesh.state / file).write_bytes(b"?" * 8192)
        victim.kill()

        def said() -> str:
            return mesh.cli("get", "runs", code=None).stderr

        wait_until(lambda: "journal is damaged" in said(), "the damage to be said")
        assert "Put a copy of it back" in said()
        (mesh.state / "journal.db-shm").unlink(missing_ok=True)
        for file in ("journal.db-wal", "journal.db"):  # it looks again and again: last what makes it one
            os.replace(kept / file, mesh.state / file)
        wait_until(lambda: not said(), "it to be read again")
        gate.touch()
        done = mesh.ended(name)
        assert (done["status"]["state"], done["status"]["epoch"]) == ("Succeeded", 1)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_run_that_the_journal_has_lost_is_ended_and_told(tmp_path: Path) -> None:
    """Its ranks would run for ever on machines that nobody else gets."""
    with real_mesh(tmp_path, "--machines", "2") as mesh:
        name = mesh.submit("--nodes", "2", "--", "sh", "-c", "setsid sleep 600 & echo alive; exec sleep 600")
        run = mesh.running(name)
        mesh.wait_for_print(name, "alive", 0, 1)
        victim = mesh.one("ray::CoordinatorActor")
        victim.suspend()
        for file in mesh.state.glob("journal.db*"):
            file.unlink()
        victim.kill()
        mesh.no_process_left(run, limit_s=60)
        assert f"run {run['metadata']['uid']} is not in the journal" in mesh.cli("status").stdout
        assert mesh.cli("run", "--nodes", "2", "--", "echo", "free").stdout.count("free") == 2
