"""What the ranks print, from their mouths to the user's terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess

import pytest

from tests.e2e.real_mesh import BIN, RealMesh, wait_until

pytestmark = pytest.mark.ray

BYTES = """
import os, sys
out = sys.stdout.buffer
out.write(b"a" * 4095 + "é€🚀".encode() + b"\\n" + b"b" * 65535 + "é€🚀\\n".encode())
out.write(b"\\xff\\xfe\\n" + b"nul\\0nul\\n" + b"\\x1b[31mred\\x1b[0m\\n" + b"crlf\\r\\ncrlf\\r\\n")
out.write(b"".join(b"\\rstep %d of 9" % n for n in range(10)) + b"\\n" + b"no newline at the end")
"""


def test_bytes_that_are_no_text_are_kept_as_they_were_and_shown_sensibly(mesh: RealMesh) -> None:
    """Case 34."""
    script = mesh.script("bytes.py", BYTES)
    expected = subprocess.run(["python3", str(script)], capture_output=True, check=True).stdout
    name = mesh.new_name()
    mesh.cli("run", "--name", name, "--nodes", "2", "--", "python", "bytes.py")
    raw = subprocess.run(
        [str(BIN / "mesh"), "logs", name, "--rank", "1", "--raw"],
        env=mesh.environment(), capture_output=True, check=True, stdin=subprocess.DEVNULL,
    ).stdout  # fmt: skip
    assert raw == expected
    shown = mesh.cli("logs", name, "--rank", "1").stdout.splitlines()
    assert shown[0] == "a" * 4095 + "é€🚀"
    assert [line for line in shown if line.startswith("crlf")] == ["crlf", "crlf"]
    assert [line for line in shown if "step" in line] == ["step 9 of 9"]
    assert shown[-1] == "no newline at the end"


def test_the_last_words_reach_the_follower_the_fetch_and_the_reason(mesh: RealMesh) -> None:
    """Case 37: rank 1 says FATAL without a newline and kills itself in the next instruction."""
    name = mesh.new_name()
    command = (
        "if [ $NODE_RANK = 1 ]; then echo first; printf 'FATAL xyz' >&2; kill -KILL $$; fi; exec sleep 600"
    )
    followed = mesh.cli("run", "--name", name, "--nodes", "2", "--", "sh", "-c", command, code=137)
    assert "[rank 1] FATAL xyz" in followed.stdout
    assert mesh.cli("logs", name).stdout == followed.stdout
    assert "FATAL xyz" in mesh.cli("describe", name).stdout


@pytest.mark.timeout(180)
def test_a_flood_on_one_rank_does_not_hide_the_other_nor_fill_the_heads_memory(mesh: RealMesh) -> None:
    """Rank 0 prints as fast as it is let, rank 1 a line now and then; cancel works meanwhile."""
    command = (
        "if [ $NODE_RANK = 0 ]; then exec yes 'a flood of words that nobody will ever read, again and again'; fi; "
        "for n in 1 2 3 4 5 6; do echo slow $n; sleep 0.3; done; echo slow end; exec sleep 600"
    )
    before = mesh.head.memory_info().rss
    name = mesh.submit("--nodes", "2", "--grace-period", "5s", "--", "sh", "-c", command)
    slow = mesh.client("logs", "-f", name, "--rank", "1")
    slow.expect("slow end")
    assert slow.stdout.splitlines() == [*[f"slow {n}" for n in range(1, 7)], "slow end"]
    assert "a flood of words" in mesh.cli("logs", name, "--rank", "0", "--tail", "3").stdout
    grown = max(mesh.head.memory_info().rss - before, 0)
    assert grown < 400 * 1024 * 1024, f"{grown:,} bytes more in the head"
    mesh.cli("cancel", name)
    run = mesh.ended(name)
    assert run["status"]["state"] == "Cancelled"
    assert slow.wait() == 0, slow.stderr
    mesh.no_process_left(run)
    # up to a gigabyte on the disk, of no use to anybody
    wait_until(lambda: mesh.cli("delete", name, code=None).returncode == 0, "the machines to be given back")


def test_the_lid_is_closed_and_the_run_goes_on(mesh: RealMesh) -> None:
    """Case 31: a terminal that hangs up, a reader that leaves (`| head -1`); re-attached without gap or duplicate."""
    gate = mesh.gate("lid")
    command = f"echo one $NODE_RANK; while [ ! -e {gate} ]; do echo . $NODE_RANK; sleep 0.1; done; echo two $NODE_RANK"
    name = mesh.new_name()
    master, terminal = pty.openpty()
    try:
        client = subprocess.Popen(
            [str(BIN / "mesh"), "run", "--name", name, "--nodes", "2", "--", "sh", "-c", command],
            cwd=mesh.work, env=mesh.environment(), stdin=terminal, stdout=terminal, stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(terminal)
        seen = b""
        while not (b"one 0" in seen and b"one 1" in seen):
            seen += os.read(master, 65536)
        client.send_signal(signal.SIGSTOP)  # Ctrl-Z, and then the lid
    finally:
        os.close(master)  # the kernel sends SIGHUP to the session
    assert client.wait(60) == 128 + signal.SIGHUP
    assert mesh.run(name)["status"]["state"] == "Running"
    leaver = mesh.shell(f"mesh logs -f {name} | head -1")
    assert leaver.returncode == 0 and leaver.stdout.count("\n") == 1, leaver
    follower = mesh.client("logs", "-f", name)
    follower.expect("one 1")
    gate.touch()
    assert follower.wait() == 0
    lines = follower.stdout.splitlines()
    for rank in ("0", "1"):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}]")]
        assert "\n".join(mine) + "\n" == mesh.printed(name, int(rank))
        assert (mine[0], mine[-1]) == (f"one {rank}", f"two {rank}")
    assert mesh.ended(name)["status"]["state"] == "Succeeded"
