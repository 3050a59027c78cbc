"""How everything ends: whatever dies first, nothing of the command is left, and a stop gives it its grace.

Each test of a death watches the processes themselves, not what the supervisor says of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents import control_group, process_tree
from agents.spool import STDERR
from agents.supervisor_protocol import INCARNATION_VARIABLE
from tests.integration.supervised import (
    LIMIT_S,
    PLAIN_ENVIRONMENT,
    SUPERVISOR,
    Supervised,
    is_running,
    new_incarnation,
    supervised_fixture,  # noqa: F401
    the_pid_in,
    wait_until,
)

HIDING = """
import os, signal, sys, time
# A daemon by the book: double fork, own session, no parent, deaf to whatever can be ignored.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        for file in (0, 1, 2):
            os.close(file)
        with open("daemon.new", "w") as file:
            file.write(f"{os.getpid()}\\n")
        os.rename("daemon.new", "daemon")
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists("daemon"):
    time.sleep(0.01)
"""
"""Leaves a daemon behind, whose pid is in the file `daemon`."""

SAVING = r"""
import os, signal, sys, time
heard = 0
def save(*_):
    global heard
    heard += 1
    os.write(1, f"heard {heard}\n".encode())  # print is not for handlers: it may interrupt another print
signal.signal(signal.SIGTERM, save)
print("ready", os.getpid(), flush=True)
deadline = time.monotonic() + 300
while not heard and time.monotonic() < deadline:
    time.sleep(0.01)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    time.sleep(0.01)
print("saved", heard, flush=True)
"""
"""Saves for as many seconds as its argument says once it is told to stop."""

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"


def script(folder: Path, name: str, program: str) -> str:
    (folder / name).write_text(program)
    return f"{sys.executable} -I -S {folder / name}"


# Left behind


def test_a_daemon_that_the_command_leaves_behind_is_ended_and_named(supervised, tmp_path: Path) -> None:
    one = supervised()
    one.start_python(HIDING + "sys.exit(7)")
    assert one.end() == {"ev": "exited", "code": 7, "signal": None}
    daemon = the_pid_in(tmp_path / "daemon")
    assert one.event("empty")["leftover"] == [daemon]
    assert not is_running(daemon)


def test_what_is_left_behind_but_ends_by_itself_is_not_killed(supervised) -> None:
    one = supervised()
    one.start("bash", "-c", 'exec > >(while read line; do echo "tee: $line"; done); echo last words')
    assert one.end()["code"] == 0
    assert one.output() == b"tee: last words\n"
    assert one.event("empty")["leftover"] == []


def test_children_that_nobody_waits_for_are_reaped(supervised) -> None:
    one = supervised()
    one.start("bash", "-c", "for i in $(seq 50); do (true &) ; done; sleep 0.2; echo done; exec sleep 600")
    one.wait_for_output(b"done")
    wait_until(lambda: len(process_tree.find_descendants(one.process.pid)) == 1, "only sleep is left")
    below = process_tree.descendants(process_tree.snapshot(), {one.process.pid})
    assert len(below) == 1, "zombies of others are left"
    one.send(op="kill")
    one.end()


FORKING = """
import os, time
# Bounded by itself, whatever the test does: 300 sleepers at most, one process that makes them, and over in 20 s.
print("ready", flush=True)
until = time.monotonic() + 20
for _ in range(300):
    if os.fork() == 0:
        os.setsid()
        time.sleep(max(0, until - time.monotonic()))
        os._exit(0)
    time.sleep(0.005)
    if os.fork():
        os._exit(0)  # the maker flees: its successor goes on
"""


def test_a_command_that_keeps_forking_and_fleeing_is_caught(supervised) -> None:
    one = supervised()
    one.start_python(FORKING)
    one.wait_for_output(b"ready")
    one.send(op="kill")
    one.event("empty")
    assert one.tree() == []


def test_a_kill_ends_a_deaf_command_at_once(supervised) -> None:
    one = supervised()
    one.start_python(DEAF)
    one.wait_for_output(b"ready")
    one.send(op="kill")
    assert one.end() == {"ev": "exited", "code": None, "signal": signal.SIGKILL}


@pytest.mark.root
def test_the_control_group_is_removed_and_so_are_those_of_the_dead(supervised) -> None:
    if control_group.create(probe := new_incarnation()) is None:
        pytest.skip("no control groups here")
    (empty,) = control_group.find(probe)
    os.utime(empty.path, (0, 0))
    one = supervised()
    one.start("sleep", "600")
    one.event("started")
    assert control_group.find(probe) == []
    (group,) = control_group.find(one.incarnation)
    assert group.pids() == set(one.tree())
    one.send(op="kill")
    one.end()
    wait_until(lambda: not control_group.find(one.incarnation), "the group is removed")


# Stop


def test_a_command_that_obeys_sigterm_ends_before_the_grace_is_over(supervised) -> None:
    one = supervised()
    one.start_python(SAVING, "0")
    one.wait_for_output(b"ready")
    one.send(op="stop", grace_s=300)
    assert one.end() == {"ev": "exited", "code": 0, "signal": None}
    assert one.output().endswith(b"saved 1\n")


def test_a_command_that_ignores_sigterm_is_killed_when_the_grace_is_over(supervised) -> None:
    one = supervised()
    one.start_python(DEAF)
    one.wait_for_output(b"ready")
    one.send(op="stop", grace_s=0.3)
    assert one.end() == {"ev": "exited", "code": None, "signal": signal.SIGKILL}


def test_a_second_stop_never_prolongs_the_first_and_is_not_heard_again(supervised) -> None:
    one = supervised()
    one.start_python(SAVING, "300")
    one.wait_for_output(b"ready")
    one.send(op="stop", grace_s=1)
    one.wait_for_output(b"heard 1")
    for _ in range(5):
        one.send(op="stop", grace_s=300)
    assert one.end()["signal"] == signal.SIGKILL
    assert b"heard 2" not in one.output()


def test_a_second_stop_may_shorten_the_first(supervised) -> None:
    one = supervised()
    one.start_python(DEAF)
    one.wait_for_output(b"ready")
    one.send(op="stop", grace_s=300)
    one.send(op="stop", grace_s=0)
    assert one.end()["signal"] == signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_supervisor_is_a_stop_with_the_grace_of_the_start(supervised, number: int) -> None:
    one = supervised()
    one.start_python(SAVING, "0.2", grace_s=300)
    one.wait_for_output(b"ready")
    os.kill(one.process.pid, number)
    assert one.end()["code"] == 0
    assert one.output().endswith(b"saved 1\n")


def test_a_stopped_command_is_continued_to_hear_its_stop(supervised) -> None:
    one = supervised()
    one.start_python(SAVING, "0")
    one.wait_for_output(b"ready")
    pid = one.event("started")["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: process_tree.read_process(pid).is_stopped, "the command is stopped")
    one.send(op="stop", grace_s=300)
    assert one.end()["code"] == 0


@pytest.mark.parametrize(
    "line",
    [
        "{saving}; echo never",
        "trap 'echo cleaned up' EXIT; {saving}; echo after",
        "trap 'echo trapped' TERM; {saving}; echo after",
        "trap '' TERM; {saving}; echo after",
        "bash -c '{saving}; true'; true",
        "setsid {saving}; true",
        "{saving} | cat; true",
        "{saving} | cat | tee log",
        "exec > >(tee log); {saving}; true",
        "{python} -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' {saving}",
    ],
)
def test_a_wrapper_does_not_keep_the_stop_from_the_program(supervised, tmp_path: Path, line: str) -> None:
    saving = script(tmp_path, "saving.py", SAVING) + " 0.3"
    one = supervised()
    one.start("bash", "-c", line.format(saving=saving, python=sys.executable))
    one.wait_for_output(b"ready")
    one.send(op="stop", grace_s=300)
    one.event("exited")
    one.end()
    assert b"heard 1\n" in one.output(), one.output(STDERR)
    assert b"saved 1\n" in one.output(), one.output(STDERR)


def test_a_program_that_handles_the_stop_decides_what_its_children_hear(supervised, tmp_path: Path) -> None:
    child = script(tmp_path, "child.py", "import time; time.sleep(600)")
    one = supervised()
    one.start_python(
        "import subprocess, sys\n"
        f"child = subprocess.Popen({child.split()!r})\n"
        + SAVING
        + "\nprint('child', child.poll(), flush=True)",
        "0.3",
    )
    one.wait_for_output(b"ready")
    one.send(op="stop", grace_s=300)
    one.end()
    assert one.output().endswith(b"saved 1\nchild None\n")


def test_what_is_orphaned_during_a_stop_is_told_too(supervised, tmp_path: Path) -> None:
    saving = script(tmp_path, "saving.py", SAVING)
    one = supervised()
    one.start_python(
        "import os, signal, subprocess, time\n"
        f"subprocess.Popen({saving.split()!r} + ['0.3'], start_new_session=True)\n"
        "signal.signal(15, lambda *_: os._exit(3))\n"
        "time.sleep(600)"
    )
    one.wait_for_output(b"ready")
    one.send(op="stop", grace_s=300)
    assert one.end()["code"] == 3
    assert one.output().endswith(b"saved 1\n")
    assert one.event("empty")["leftover"] == []


# Deaths


LAUNCHER = """
import json, subprocess, sys, time
order = json.loads(sys.argv[2])
supervisor = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.PIPE, stdout=open("events", "wb"))
supervisor.stdin.write(json.dumps(order).encode() + b"\\n")
supervisor.stdin.flush()
open("supervisor.new", "w").write(f"{supervisor.pid}\\n")
import os
os.rename("supervisor.new", "supervisor")
if len(sys.argv) > 3:
    # A fork that knows nothing of supervisors keeps the other end of the pipe open.
    holder = os.fork()
    if holder == 0:
        open("holder.new", "w").write(f"{os.getpid()}\\n")
        os.rename("holder.new", "holder")
        time.sleep(600)
        os._exit(0)
time.sleep(600)
"""


class Launched:
    """A launcher process that we kill, its supervisor, and a command with a daemon that hides."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.incarnation = new_incarnation()
        order = {
            "op": "start",
            "argv": [sys.executable, "-I", "-S", "-c", HIDING + DEAF],
            "env": PLAIN_ENVIRONMENT,
            "cwd": str(folder),
            "spool": str(folder / "spool"),
            "incarnation": self.incarnation,
        }
        command = [sys.executable, "-I", "-S", str(SUPERVISOR)]
        self.launcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCHER, json.dumps(command), json.dumps(order), *options],
            cwd=folder,
        )
        self.supervisor = the_pid_in(folder / "supervisor")
        self.daemon = the_pid_in(folder / "daemon")
        self.holder = the_pid_in(folder / "holder") if options else 0
        wait_until(lambda: len(self.tree()) == 2, "the command and its daemon run")
        self.command = next(pid for pid in self.tree() if pid != self.daemon)

    def tree(self) -> list[int]:
        return sorted(process_tree.find(self.incarnation))

    def close(self) -> None:
        roots = [pid for pid in (self.supervisor, self.holder) if pid and is_running(pid)]
        process_tree.kill_incarnation(self.incarnation, roots=roots)
        self.launcher.kill()
        self.launcher.wait(LIMIT_S)


@pytest.fixture
def launched(tmp_path: Path):
    made: list[Launched] = []

    def make(*options: str) -> Launched:
        made.append(Launched(tmp_path, *options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_launcher_that_is_killed_takes_everything_with_it(launched) -> None:
    one = launched()
    one.launcher.kill()
    wait_until(lambda: not one.tree(), "nothing of the command is left")
    wait_until(lambda: not is_running(one.supervisor), "the supervisor has ended too")


def test_a_launchers_death_is_noticed_though_a_fork_of_it_keeps_the_pipe_open(launched) -> None:
    one = launched("with a holder")
    one.launcher.kill()
    wait_until(lambda: not one.tree(), "nothing of the command is left")
    wait_until(lambda: not is_running(one.supervisor), "the supervisor has ended too")
    assert is_running(one.holder)


def test_a_supervisor_that_is_killed_takes_the_command_and_its_survivor_takes_the_rest(launched) -> None:
    one = launched()
    os.kill(one.supervisor, signal.SIGKILL)
    wait_until(lambda: not is_running(one.command), "the command died with its supervisor")
    assert one.tree() == [one.daemon]
    outcome = process_tree.kill_incarnation(one.incarnation)
    assert (outcome.killed, outcome.remaining) == ([one.daemon], [])
    assert not is_running(one.daemon)


def test_launcher_and_supervisor_killed_together_leave_what_kill_incarnation_finds(launched) -> None:
    one = launched()
    os.kill(one.supervisor, signal.SIGSTOP)  # so that it cannot act on the launcher's death
    one.launcher.kill()
    os.kill(one.supervisor, signal.SIGKILL)
    outcome = process_tree.kill_incarnation(one.incarnation)
    assert one.daemon in outcome.killed
    assert outcome.is_empty
    assert not is_running(one.command)
    assert not is_running(one.daemon)


def test_a_supervisor_that_hangs_is_ended_with_its_tree(launched) -> None:
    one = launched()
    os.kill(one.supervisor, signal.SIGSTOP)
    outcome = process_tree.kill_incarnation(one.incarnation, roots=[one.supervisor])
    assert outcome.is_empty
    assert {one.command, one.daemon, one.supervisor} <= set(outcome.killed)
    assert not any(is_running(pid) for pid in (one.command, one.daemon, one.supervisor))


@pytest.mark.root
def test_a_daemon_without_its_environment_is_found_by_its_control_group(supervised, tmp_path: Path) -> None:
    one = supervised()
    one.start("env", "-i", sys.executable, "-I", "-S", "-c", HIDING + DEAF)
    daemon = the_pid_in(tmp_path / "daemon")
    if not control_group.find(one.incarnation):
        pytest.skip("no control groups here")
    assert not process_tree.carries_incarnation(daemon, one.incarnation)
    one.process.kill()
    outcome = process_tree.kill_incarnation(one.incarnation)
    assert daemon in outcome.killed
    assert not is_running(daemon)
    assert control_group.find(one.incarnation) == []


def test_a_launcher_that_stops_listening_does_not_disturb_the_command(supervised: type[Supervised]) -> None:
    one = supervised()
    one.process.stdout.close()
    one.start("sh", "-c", "echo still here; exit 5")
    one.process.wait(LIMIT_S)
    assert one.output() == b"still here\n"
    assert (one.spool / "end").exists()


def test_processes_of_another_incarnation_are_left_alone(supervised) -> None:
    one, other = supervised(), supervised()
    for each in (one, other):
        each.start("sleep", "600")
        each.event("started")
    assert process_tree.kill_incarnation(one.incarnation).is_empty
    one.event("empty")
    assert other.tree() == [other.event("started")["pid"]]
    assert INCARNATION_VARIABLE not in os.environ


# Our own faults, and the kernel's


REPOSITORY = SUPERVISOR.parents[1]
UNKILLABLE = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from agents import control_group, process_tree, supervisor
# As for processes in uninterruptible sleep: what is sent changes nothing.
control_group.create = lambda incarnation: None
process_tree.send_signal = lambda process, number: True
process_tree.KILL_LIMIT_S = 0.2
sys.exit(supervisor.main())
"""
FAULTY = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from agents import spool, supervisor
def append(*arguments, **options):
    raise RuntimeError("a fault of our own")
spool.SpoolWriter.append = append
sys.exit(supervisor.main())
"""


def test_what_sigkill_does_not_end_is_reported_and_tried_again(supervised) -> None:
    one = supervised(program=UNKILLABLE)
    one.start("sleep", "600")
    pid = one.event("started")["pid"]
    one.send(op="kill")
    assert one.event("fence_failed")["pids"] == [pid]
    os.kill(pid, signal.SIGKILL)  # the kernel lets it go at last
    assert one.end()["signal"] == signal.SIGKILL


def test_a_supervisor_without_a_launcher_does_not_wait_for_ever_for_what_cannot_be_ended(supervised) -> None:
    one = supervised(program=UNKILLABLE)
    one.start("sleep", "600")
    pid = one.event("started")["pid"]
    one.process.stdin.close()
    assert one.process.wait(LIMIT_S) == 1
    wait_until(lambda: not is_running(pid), "the command died with its supervisor")


def test_a_fault_of_the_supervisor_itself_takes_the_command_with_it(supervised, tmp_path: Path) -> None:
    one = supervised(program=FAULTY)
    one.start_python(HIDING + DEAF)
    assert one.process.wait(LIMIT_S) == 2
    assert one.tree() == []
    assert "a fault of our own" in one.complaints.read_text()
