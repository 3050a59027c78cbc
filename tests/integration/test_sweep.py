"""The sweep with real processes: whose agents are dead, frozen, or just about to start something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agents.signing_in import SERVES_VARIABLE, sign_in
from agents.sweep import sweep_run
from mesh.ids import Incarnation, RunUid, new_run_uid

LIMIT_S = 10.0
ROOT = Path(__file__).resolve().parents[2]


class Host:
    """One simulated machine's folder and processes that belong to lives on it."""

    def __init__(self, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self.folder = folder
        self._processes = processes

    def life(self, uid: RunUid, rank: int = 0, *, has_folder: bool = True) -> tuple[Incarnation, Path]:
        incarnation = Incarnation.parse(f"{uid}.3.{rank}.00000000000000{rank:02x}")
        folder = self.folder / "runs" / uid / str(rank) / "epochs" / f"3-{incarnation.token}"
        if has_folder:
            folder.mkdir(parents=True)
        return incarnation, folder

    def start(self, *command: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            env={"PATH": os.environ["PATH"], **environment},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def command(self, incarnation: Incarnation) -> subprocess.Popen[bytes]:
        state = self.folder / "runs" / incarnation.run_uid / str(incarnation.rank) / "state"
        return self.start(
            "sleep", "600",
            environment={"NODUS_INCARNATION": str(incarnation), "NODUS_STATE_DIR": str(state)},
        )  # fmt: skip

    def agent(self, life: Path) -> subprocess.Popen[bytes]:
        """A process that has signed in and could still start something."""
        code = (
            "import sys, time; from pathlib import Path; from agents.signing_in import sign_in\n"
            "print(sign_in(Path(sys.argv[1])), flush=True); time.sleep(600)"
        )
        process = self.start(sys.executable, "-c", code, str(life), environment={"PYTHONPATH": str(ROOT)})
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        return process


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    processes: list[subprocess.Popen[bytes]] = []
    yield Host(tmp_path / "m", processes)
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def ended(process: subprocess.Popen[bytes]) -> bool:
    return process.wait(LIMIT_S) == -signal.SIGKILL


def test_all_of_a_run_is_ended_frozen_or_not_and_nothing_else(host: Host, tmp_path: Path) -> None:
    uid, other = new_run_uid(), new_run_uid()
    mine, life = host.life(uid)
    second, _ = host.life(uid, 1)
    agent, commands = host.agent(life), [host.command(mine), host.command(second)]
    servant = host.start("sleep", "600", environment={SERVES_VARIABLE: str(mine)})
    for frozen in (agent, commands[0], servant):
        os.kill(frozen.pid, signal.SIGSTOP)
    neighbours = [host.command(host.life(other)[0])]
    elsewhere = Host(tmp_path / "other machine", host._processes)
    neighbours.append(elsewhere.command(elsewhere.life(uid, 2)[0]))
    assert sweep_run(uid, machine_dir=host.folder, limit_s=LIMIT_S) == []
    assert all(map(ended, [agent, servant, *commands]))
    assert [process.poll() for process in neighbours] == [None, None]


def test_a_life_whose_folder_is_gone_is_found_by_its_processes(host: Host) -> None:
    uid = new_run_uid()
    command = host.command(host.life(uid, has_folder=False)[0])
    assert sweep_run(uid, machine_dir=host.folder, limit_s=LIMIT_S) == []
    assert ended(command)


def test_a_command_that_names_itself_something_else_is_no_end_of_the_sweep(host: Host) -> None:
    """A script may set any variable for what it starts; its machine must not be kept for ever because of it."""
    uid = new_run_uid()
    state = host.folder / "runs" / uid / "0" / "state"
    odd = host.start(
        "sleep", "600", environment={"NODUS_INCARNATION": f"{uid}.x", "NODUS_STATE_DIR": str(state)}
    )
    assert sweep_run(uid, machine_dir=host.folder, limit_s=LIMIT_S) == []
    assert ended(odd)


def test_who_signs_in_after_the_sweep_is_turned_away(host: Host) -> None:
    uid = new_run_uid()
    _, life = host.life(uid)
    assert sweep_run(uid, machine_dir=host.folder, limit_s=LIMIT_S) == []
    assert not sign_in(life)


def test_a_pid_that_is_another_process_by_now_is_left_alone(host: Host) -> None:
    uid = new_run_uid()
    _, life = host.life(uid)
    agent = host.agent(life)
    note = next((life / "processes").iterdir())
    note.rename(note.with_name(f"{agent.pid}-1"))
    assert sweep_run(uid, machine_dir=host.folder, limit_s=LIMIT_S) == []
    assert psutil.pid_exists(agent.pid)
    assert agent.poll() is None


def test_the_sweep_itself_survives_having_signed_in(host: Host) -> None:
    uid = new_run_uid()
    _, life = host.life(uid)
    assert sign_in(life)
    assert sweep_run(uid, machine_dir=host.folder, limit_s=LIMIT_S) == []


def test_nothing_there_is_nothing_to_do(host: Host) -> None:
    assert sweep_run(new_run_uid(), machine_dir=host.folder, limit_s=LIMIT_S) == []
