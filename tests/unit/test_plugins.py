"""The plugins of the test run itself: a leak is found and named, a failure prints how to repeat it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.plugins.leaks import TOKEN_VARIABLE, Leak, find_leaks, wait_for_none
from tests.plugins.parallel import APART, LONGEST_FIRST, TOGETHER, scope_of

ROOT = Path(__file__).parents[2]


@contextmanager
def sleeper(**variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that only waits, with exactly these variables."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, env=variables
    )
    try:
        yield process
    finally:
        process.communicate()


def test_a_process_with_the_token_and_a_mark_is_a_leak_until_it_ends(tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    began_at = time.time()
    with sleeper(**{TOKEN_VARIABLE: token, "GANGMESH_DEPLOYMENT": "/somewhere"}) as process:
        leaks = wait_for(token, tmp_path, began_at)
        assert [leak.pid for leak in leaks] == [process.pid]
        assert leaks[0].mark == "GANGMESH_DEPLOYMENT=/somewhere"
    assert wait_for_none(token=token, temporary_folder=tmp_path, began_at=began_at, limit_s=10) == []


def test_a_rank_with_a_clean_environment_is_known_by_its_folder(tmp_path: Path) -> None:
    began_at = time.time()
    with sleeper(NODUS_INCARNATION="a.1.0.b", NODUS_STATE_DIR=str(tmp_path / "state")) as process:
        leaks = wait_for("no-such-token", tmp_path, began_at)
        assert [leak.pid for leak in leaks] == [process.pid]


def test_other_sessions_processes_are_not_counted(tmp_path: Path) -> None:
    began_at = time.time()
    token = secrets.token_hex(8)
    with (
        sleeper(**{TOKEN_VARIABLE: "another", "GANGMESH_DEPLOYMENT": "/elsewhere"}),
        sleeper(**{TOKEN_VARIABLE: token}),
        sleeper(**{TOKEN_VARIABLE: token, "GANGMESH_DEPLOYMENT": "/somewhere"}) as ours,
    ):
        assert [leak.pid for leak in wait_for(token, tmp_path, began_at)] == [ours.pid]


def wait_for(token: str, folder: Path, began_at: float) -> list[Leak]:
    """The leaks, once there is one: a new process shows its environment a moment after it is born."""
    deadline = time.monotonic() + 20
    while True:
        leaks = find_leaks(token=token, temporary_folder=folder, began_at=began_at)
        if leaks:
            return leaks
        assert time.monotonic() < deadline, "the process never showed"


INNER = """
import os, subprocess, sys
pytest_plugins = ["tests.plugins.leaks", "tests.plugins.repeat"]
"""
LEAKING = """
import os, subprocess, sys
def test_that_leaks():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True,
                     env={**os.environ, "GANGMESH_DEPLOYMENT": "/inner"}, stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""
LEAKING_BESIDE_ANOTHER = """
def test_of_another_file_at_the_same_time():
    pass
"""
LEAKING_AND_INTERRUPTED = (
    LEAKING
    + """
import pytest
@pytest.fixture(scope="session", autouse=True)
def torn_down_in_vain():
    yield
    raise KeyboardInterrupt
"""
)
FAILING = """
import random
def test_that_fails(seed):
    assert False, f"seed is {seed}"
"""


def run_inner(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(INNER)
    (folder / "test_inner.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def test_a_leaking_session_fails_names_the_test_and_leaves_nothing(tmp_path: Path) -> None:
    ended = run_inner(tmp_path, LEAKING, f"--basetemp={tmp_path / 'inner'}", "--leak-limit-s", "1")
    assert ended.returncode == 1, ended.stdout
    assert "1 passed" in ended.stdout
    assert "processes left behind" in ended.stdout
    assert "began during: test_inner.py::test_that_leaks" in ended.stdout


def test_on_workers_one_look_after_the_last_of_them_names_the_workers_own_test(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(LEAKING_BESIDE_ANOTHER)
    ended = run_inner(
        tmp_path,
        LEAKING,
        f"--basetemp={tmp_path / 'inner'}",
        "--leak-limit-s",
        "1",
        "-n",
        "2",
        "--dist",
        "loadfile",
    )
    assert ended.returncode == 1, ended.stdout
    assert "2 passed" in ended.stdout
    assert ended.stdout.count("(killed now)") == 1, ended.stdout
    assert ended.stdout.count("processes left behind") == 1
    assert "began during: test_inner.py::test_that_leaks\n" in ended.stdout, ended.stdout


def test_on_workers_a_test_has_the_seed_and_the_repeat_command_that_it_has_alone(tmp_path: Path) -> None:
    alone, spread = (
        run_inner(tmp_path, FAILING, "--seed", "7", "-n", workers).stdout for workers in ("0", "2")
    )
    for output in (alone, spread):
        assert "-m pytest test_inner.py::test_that_fails --seed 7\n" in output
    assert [seed_line(output) for output in (alone, spread)] == [seed_line(alone)] * 2


def test_what_the_plan_for_the_workers_names_is_there() -> None:
    places = {*APART, *LONGEST_FIRST, *(place for group in TOGETHER.values() for place in group)} - {
        *TOGETHER
    }
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_what_shares_a_deployment_is_one_piece_and_what_shares_nothing_is_many() -> None:
    assert scope_of("tests/e2e/test_ends.py::test_a") == scope_of("tests/e2e/test_names.py::test_b[x::y]")
    assert scope_of("tests/e2e/test_ends.py::test_a") != scope_of("tests/e2e/test_deaths.py::test_a")
    assert scope_of(f"{APART[0]}::test_a[1]") != scope_of(f"{APART[0]}::test_a[2]")
    assert scope_of("tests/unit/test_wire.py::test_a") == scope_of("tests/unit/test_wire.py::test_b")


def seed_line(output: str) -> str:
    [line] = {line for line in output.splitlines() if line.startswith("E  ") and "seed is" in line}
    return line


def test_a_teardown_that_is_interrupted_does_not_keep_the_leak_alive(tmp_path: Path) -> None:
    began_at = time.time()
    run_inner(tmp_path, LEAKING_AND_INTERRUPTED, f"--basetemp={tmp_path / 'inner'}", "--leak-limit-s", "0.2")
    left = [p for p in psutil.process_iter() if p.create_time() >= began_at - 1 and is_the_inner_leak(p)]
    assert left == []


def is_the_inner_leak(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        is_alive = process.status() != psutil.STATUS_ZOMBIE
        return is_alive and process.environ().get("GANGMESH_DEPLOYMENT") == "/inner"
    return False


def test_a_failure_prints_the_command_that_repeats_it(tmp_path: Path) -> None:
    first = run_inner(tmp_path, FAILING, "--seed", "7")
    assert "-m pytest test_inner.py::test_that_fails --seed 7" in first.stdout
    again = run_inner(tmp_path, FAILING, "--seed", "7")
    assert seed_line(again.stdout) == seed_line(first.stdout)
