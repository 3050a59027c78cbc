"""`mesh` whose standard streams are closed or cannot take what it writes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.shell import DEADLINE_S, Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.stop()


def redirected(shell: Shell, redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`mesh ARGUMENTS` with its streams as a shell makes them."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *shell.argv, *arguments],
        capture_output=True,
        text=True,
        env=shell.env,
        cwd=shell.here,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_takes_nothing_and_gives_nothing(shell: Shell, closed: str) -> None:
    done = redirected(shell, closed, "run", "--name", "quiet", "--", "script", "say:hello", "exit:3")
    assert done.returncode == 3, done.stderr
    assert done.stdout == ("hello\n" if closed == "2>&-" else "")
    assert "Traceback" not in done.stderr
    assert (shell.state / "starting.lock").read_bytes() == b""
    assert redirected(shell, closed, "get", "nope").returncode == 2


def test_an_output_that_is_full_is_said(shell: Shell) -> None:
    shell.mesh("up")
    done = redirected(shell, "> /dev/full", "get", "machines")
    assert (done.returncode, "No space left on device" in done.stderr) == (1, True)
