"""How a command is started: what it finds around it, and what is said when it cannot be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents.process_tree import INCARNATION_VARIABLE
from tests.integration.supervised import PLAIN_ENVIRONMENT, Supervised, supervised_fixture  # noqa: F401


def start_failure(one: Supervised) -> tuple[str, str]:
    failure = one.event("start_failed")
    assert one.event("empty")["leftover"] == []
    assert one.process.wait(30) == 0
    assert [event["ev"] for event in one.events] == ["start_failed", "empty"]
    return failure["reason"], failure["message"]


@pytest.mark.parametrize(
    "program, code, number",
    [
        ("raise SystemExit(0)", 0, None),
        ("raise SystemExit(42)", 42, None),
        ("import os; os.kill(os.getpid(), 11)", None, signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 9)", None, signal.SIGKILL),
    ],
)
def test_the_true_exit_code_or_signal_is_reported(supervised, program, code, number) -> None:
    one = supervised()
    one.start_python(program)
    assert one.end() == {"ev": "exited", "code": code, "signal": number}
    assert [event["ev"] for event in one.events] == ["started", "exited", "empty"]


def test_the_environment_is_exactly_what_was_given_and_the_incarnation(supervised) -> None:
    given = {"PATH": "/usr/bin:/bin", "EMPTY": "", "TEXT": "a 'b' \"c\"\nd=e é🚀", "RAW": "\udcff\udcfe"}
    one = supervised(env={**os.environ, "LEAKED": "by the launcher", "OMP_NUM_THREADS": "1"})
    one.start("env", "-0", env=given)
    one.end()
    entries = dict(entry.split(b"=", 1) for entry in one.output().split(b"\0") if entry)
    expected = {**given, INCARNATION_VARIABLE: one.incarnation}
    assert entries == {k.encode(): v.encode("utf-8", "surrogateescape") for k, v in expected.items()}


def test_arguments_arrive_byte_by_byte(supervised) -> None:
    arguments = ["two words", "it's", '"quoted"', "new\nline", "--dash", "", "é🚀", "\udcff", "$HOME", "*"]
    one = supervised()
    one.start("printf", "%s\\0", *arguments)
    one.end()
    assert one.output().split(b"\0")[:-1] == [a.encode("utf-8", "surrogateescape") for a in arguments]


def test_a_megabyte_of_environment_is_passed_on(supervised) -> None:
    given = {**PLAIN_ENVIRONMENT, **{f"BIG_{i}": "x" * 125_000 for i in range(8)}}
    one = supervised()
    one.start("sh", "-c", "echo ${#BIG_0} ${#BIG_7}", env=given)
    assert one.end()["code"] == 0
    assert one.output() == b"125000 125000\n"


def _bad_start() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


_GLIBC_OWN = 1 << 31 | 1 << 32
"""Signals 32 and 33, glibc's own: a process that was started by posix_spawn (by make, say) ignores them, and no
program can change that."""


def test_no_signal_is_blocked_or_ignored_whatever_the_launcher_left(supervised) -> None:
    one = supervised(preexec_fn=_bad_start)
    one.start("grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status")
    one.end()
    values = [int(line.split(b":")[1], 16) & ~_GLIBC_OWN for line in one.output().splitlines()]
    assert values == [0, 0]


def test_no_file_is_leaked_to_the_command_and_it_reads_from_nothing(supervised) -> None:
    read, write = os.pipe()
    one = supervised(pass_fds=(read, write))
    one.start_python(
        "import os; print(sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')) - 1,"
        " os.readlink('/proc/self/fd/0'))"
    )
    one.end()
    os.close(read)
    os.close(write)
    assert one.output() == b"['0', '1', '2'] 3 /dev/null\n"


def test_the_command_leads_a_session_of_its_own(supervised) -> None:
    one = supervised()
    one.start_python("import os; print(os.getpid() == os.getsid(0) == os.getpgid(0))")
    one.end()
    assert one.output() == b"True\n"


def test_the_working_directory_is_the_one_asked_for(supervised, tmp_path: Path) -> None:
    (tmp_path / "här").mkdir()
    one = supervised()
    one.start("pwd", cwd=str(tmp_path / "här"))
    one.end()
    assert one.output().decode() == f"{tmp_path}/här\n"


def test_the_program_is_looked_up_on_the_commands_own_path(supervised, tmp_path: Path) -> None:
    tool = tmp_path / "tools" / "mytool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho mine\n")
    tool.chmod(0o755)
    one = supervised()
    one.start("mytool", env={"PATH": f"/nowhere:{tool.parent}"})
    one.end()
    assert one.output() == b"mine\n"

    other = supervised(env={"PATH": str(tool.parent)})
    other.start("mytool", env=PLAIN_ENVIRONMENT)
    assert start_failure(other)[0] == "CommandNotFound"


def test_a_relative_program_is_found_in_the_working_directory(supervised, tmp_path: Path) -> None:
    script = tmp_path / "go.sh"
    script.write_text("#!/bin/sh\necho gone\n")
    script.chmod(0o755)
    one = supervised()
    one.start("./go.sh")
    one.end()
    assert one.output() == b"gone\n"

    other = supervised()
    other.start("go.sh")
    reason, message = start_failure(other)
    assert reason == "CommandNotFound"
    assert "write ./go.sh" in message


def _plain_file(folder: Path) -> str:
    (folder / "prog").write_text("#!/bin/sh\n")
    return "./prog"


def _no_shebang(folder: Path) -> str:
    (folder / "prog").write_text("echo hello\n")
    (folder / "prog").chmod(0o755)
    return "./prog"


def _interpreter_missing(folder: Path) -> str:
    (folder / "prog").write_text("#!/usr/bin/no-such-python\n")
    (folder / "prog").chmod(0o755)
    return "./prog"


def _carriage_return(folder: Path) -> str:
    (folder / "prog").write_bytes(b"#!/bin/sh\r\necho\r\n")
    (folder / "prog").chmod(0o755)
    return "./prog"


@pytest.mark.parametrize(
    "make, reason, words",
    [
        (lambda folder: "no-such-program", "CommandNotFound", "command not found: 'no-such-program'"),
        (lambda folder: "./no-such-program", "CommandNotFound", "does not exist on this machine"),
        (lambda folder: "", "CommandNotFound", "the command is empty"),
        (_plain_file, "CommandNotExecutable", "chmod +x ./prog"),
        (lambda folder: "/tmp", "CommandNotExecutable", "is a directory"),
        (_no_shebang, "CommandNotExecutable", "#!/bin/bash"),
        (_interpreter_missing, "CommandNotExecutable", "/usr/bin/no-such-python"),
        (_carriage_return, "CommandNotExecutable", "carriage return"),
    ],
)
def test_a_command_that_cannot_start_says_why(supervised, tmp_path, make, reason, words) -> None:
    one = supervised()
    one.start(make(tmp_path))
    got, message = start_failure(one)
    assert got == reason
    assert words in message


@pytest.mark.parametrize("make", ["missing", "a file"])
def test_a_working_directory_that_is_not_there_is_named(supervised, tmp_path: Path, make: str) -> None:
    place = tmp_path / "place"
    if make == "a file":
        place.write_text("")
    one = supervised()
    one.start("true", cwd=str(place))
    reason, message = start_failure(one)
    assert reason == "WorkingDirMissing"
    assert str(place) in message


def test_a_variable_that_is_too_large_is_named(supervised) -> None:
    one = supervised()
    one.start("true", env={**PLAIN_ENVIRONMENT, "SMALL": "x", "HUGE": "x" * 200_000})
    reason, message = start_failure(one)
    assert reason == "CommandStartFailed"
    assert "environment variable HUGE is too large: 200006 bytes" in message


def test_an_environment_that_is_too_large_as_a_whole_names_the_largest(supervised) -> None:
    one = supervised()
    one.start("true", env={**PLAIN_ENVIRONMENT, **{f"V{i:03}": "x" * 100_000 for i in range(70)}})
    reason, message = start_failure(one)
    assert reason == "CommandStartFailed"
    assert "too large together" in message
    assert "environment variable V0" in message


def test_an_argument_that_no_program_can_receive_is_refused(supervised) -> None:
    one = supervised()
    one.start("echo", "a\0b")
    assert start_failure(one) == (
        "CommandStartFailed",
        "argument 1 holds a NUL character, which no program can receive",
    )


@pytest.mark.parametrize(
    "line", [b"{not json\n", b"[]\n", b'{"op":"start","argv":"ls"}\n', b'{"op":"dance"}\n']
)
def test_a_start_that_is_not_understood_fails_and_leaves_nothing(supervised, line: bytes) -> None:
    one = supervised()
    one.process.stdin.write(line)
    reason, message = start_failure(one)
    assert reason == "CommandStartFailed"
    assert "did not understand" in message


def test_a_command_of_the_launcher_may_come_in_pieces(supervised) -> None:
    one = supervised()
    line = json.dumps(
        {
            "op": "start",
            "argv": ["true"],
            "env": PLAIN_ENVIRONMENT,
            "cwd": None,
            "spool": str(one.spool),
            "incarnation": one.incarnation,
        }
    ).encode()
    for place in range(0, len(line), 40):
        one.process.stdin.write(line[place : place + 40])
    one.process.stdin.write(b'\n{"op":"acked","offset":0}\n')
    assert one.end()["code"] == 0


def test_a_supervisor_that_is_not_needed_any_more_ends_with_its_stdin() -> None:
    ended = subprocess.run(
        [sys.executable, "-I", "-S", str(Path(__file__).parents[2] / "agents" / "supervisor.py")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
    )
    assert ended.returncode == 0
    assert json.loads(ended.stdout) == {"ev": "empty", "leftover": [], "lost": 0}


def test_a_stop_before_the_start_means_that_nothing_will_start(supervised) -> None:
    one = supervised()
    one.send(op="stop", grace_s=5)
    assert one.event("empty")["leftover"] == []
    assert one.process.wait(30) == 0
