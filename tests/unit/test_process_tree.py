"""Which processes belong together, who must be told, and that killing one incarnation kills all of it and no more."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from agents import control_group, process_tree
from agents.process_tree import Manners, Process, who_must_be_told
from agents.supervisor_protocol import INCARNATION_VARIABLE

LIMIT_S = 30.0


def process(pid: int, parent: int, state: str = "S", threads: int = 1) -> Process:
    return Process(pid=pid, parent=parent, started=pid * 10, state=state, thread_count=threads)


def table(*pairs: tuple[int, int]) -> dict[int, Process]:
    return {pid: process(pid, parent) for pid, parent in pairs}


# Reading /proc


def test_a_name_with_brackets_and_spaces_does_not_confuse_the_reading() -> None:
    tail = " ".join(["S", "7", "1", "1", *["0"] * 13, "3", "0", "4711"])
    found = process_tree.parse_stat(f"42 (a) b (c) {tail} 0 0\n".encode())
    assert found is not None
    assert (found.pid, found.parent, found.state, found.thread_count, found.started) == (42, 7, "S", 3, 4711)
    assert not found.is_ending


def test_a_process_that_is_ending_is_told_from_one_that_runs() -> None:
    tail = " ".join(["R", "7", "1", "1", "0", "-1", "4195340", *["0"] * 10, "1", "0", "4711"])
    found = process_tree.parse_stat(f"42 (a) {tail} 0 0\n".encode())
    assert found is not None and found.is_alive and found.is_ending


@pytest.mark.parametrize("text", [b"", b"42 (a) S 7", b"nonsense"])
def test_a_process_that_goes_while_it_is_read_is_no_process(text: bytes) -> None:
    assert process_tree.parse_stat(text) is None


def test_a_zombie_does_not_count_unless_other_threads_of_it_run() -> None:
    assert not process(1, 0, "Z").is_alive
    assert not process(1, 0, "X").is_alive
    assert process(1, 0, "Z", threads=2).is_alive
    assert process(1, 0, "D").is_alive


def test_we_read_ourselves() -> None:
    me = process_tree.snapshot()[os.getpid()]
    assert me.parent == os.getppid()
    assert me.is_alive
    assert process_tree.read_process(2**22 + 1) is None


def test_descendants_are_found_at_any_depth_and_a_loop_ends() -> None:
    processes = table((1, 0), (10, 1), (11, 10), (12, 11), (20, 1), (30, 31), (31, 30))
    assert process_tree.descendants(processes, {10}) == {11, 12}
    assert process_tree.descendants(processes, {10, 20}) == {11, 12}
    assert process_tree.descendants(processes, {30}) == {31, 30}
    assert process_tree.lineage(processes, 12) == {12, 11, 10, 1, 0}


@pytest.mark.parametrize(
    "mask, handled",
    [
        (b"SigBlk:\t0000000000000000\nSigCgt:\t0000000000004000\n", True),
        (b"SigBlk:\t0000000000004000\nSigCgt:\t0000000000000000\n", True),
        (b"SigIgn:\t0000000000004000\nSigCgt:\t0000000000000002\n", False),
        (b"", False),
    ],
)
def test_a_stop_is_handled_when_it_is_caught_or_blocked(mask: bytes, handled: bool) -> None:
    assert process_tree.handles_signal(mask, signal.SIGTERM) is handled


# Who must be told


def told(children: dict[int, list[int]], **manners: Manners) -> tuple[list[int], set[int]]:
    """Process 1 is the main one; `p2=…` gives the manners of process 2. Whoever is not given just dies."""
    return who_must_be_told(children, [1], lambda pid: manners.get(f"p{pid}", Manners(handles_stop=False)))


HANDLES = Manners(handles_stop=True)


def test_a_program_that_handles_the_stop_is_told_alone() -> None:
    assert told({1: [2, 3], 2: [4]}, p1=HANDLES) == ([1], set())


def test_children_of_one_that_just_dies_are_told_after_it() -> None:
    assert told({1: [2, 3], 2: [4], 4: [5]}, p4=HANDLES) == ([1, 2, 3, 4], set())


def test_a_filter_behind_one_that_still_writes_is_spared_and_so_is_the_next() -> None:
    pipeline = {
        "p2": Manners(handles_stop=True, writes_to=["pipe:[1]"]),
        "p3": Manners(handles_stop=False, reads_from="pipe:[1]", writes_to=["pipe:[2]"]),
        "p4": Manners(handles_stop=False, reads_from="pipe:[2]"),
    }
    assert told({1: [4, 3, 2]}, **pipeline) == ([1, 2], {3, 4})


def test_a_filter_behind_one_that_just_dies_is_told() -> None:
    pipeline = {
        "p2": Manners(handles_stop=False, writes_to=["pipe:[1]"]),
        "p3": Manners(handles_stop=False, reads_from="pipe:[1]"),
    }
    assert told({1: [2, 3]}, **pipeline) == ([1, 2, 3], set())


def test_who_reads_from_nothing_is_never_spared() -> None:
    pipeline = {
        "p2": Manners(handles_stop=True, writes_to=[]),
        "p3": Manners(handles_stop=False, reads_from=""),
    }
    assert told({1: [2, 3]}, **pipeline) == ([1, 2, 3], set())


# Killing


@pytest.fixture
def incarnation() -> Iterator[str]:
    name = f"{secrets.token_hex(8)}.1.0.{secrets.token_hex(8)}"
    yield name
    assert process_tree.kill_incarnation(name).is_empty


@pytest.fixture
def start(incarnation: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a program of this incarnation, in a session of its own, and waits until it says something."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(program: str, *, marked: bool = True) -> subprocess.Popen[bytes]:
        env = {INCARNATION_VARIABLE: incarnation} if marked else {}
        command = [sys.executable, "-I", "-S", "-c", program]
        made.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True))
        assert made[-1].stdout is not None
        assert made[-1].stdout.readline() == b"ready\n"
        return made[-1]

    yield begin
    for one in made:
        one.kill()
        one.wait(LIMIT_S)
        assert one.stdout is not None
        one.stdout.close()


SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
# Moving targets: each forks a successor and goes away. Their number stays small, and they end by themselves
# after a while: a test that fails must never leave a machine full of processes.
FLEEING = """
import os, time
# Bounded by itself, whatever the test does: four chains at most, each with one living process, and over in 20 s.
# Every process lives for a moment, has a successor in a session of its own, and leaves no parent behind.
until = time.monotonic() + 20
for _ in range(3):
    if os.fork() == 0:
        break
print("ready", flush=True)
while time.monotonic() < until:
    time.sleep(0.05)
    if os.fork():
        os._exit(0)
    os.setsid()
"""


def test_an_incarnation_that_has_no_process_is_empty(incarnation: str) -> None:
    outcome = process_tree.kill_incarnation(incarnation)
    assert (outcome.killed, outcome.remaining) == ([], [])


def test_every_marked_process_is_killed_and_no_other(incarnation: str, start: Callable) -> None:
    ours, other = start(SLEEP), start(SLEEP, marked=False)
    outcome = process_tree.kill_incarnation(incarnation)
    assert (outcome.killed, outcome.remaining) == ([ours.pid], [])
    assert ours.wait(LIMIT_S) == -signal.SIGKILL
    assert other.poll() is None


def test_an_incarnation_whose_name_begins_alike_is_another(incarnation: str, start: Callable) -> None:
    ours = start(SLEEP)
    assert process_tree.kill_incarnation(incarnation[:-1]).killed == []
    assert process_tree.kill_incarnation(incarnation + "0").killed == []
    assert ours.poll() is None


def test_a_child_without_the_mark_is_found_by_descent(incarnation: str, start: Callable) -> None:
    ours = start(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.execve('/bin/sh', ['sh', '-c', 'echo ready; sleep 600; true'], {})\n"
        "time.sleep(600)"
    )
    outcome = process_tree.kill_incarnation(incarnation)
    assert ours.pid in outcome.killed
    assert len(outcome.killed) >= 2


def test_roots_are_killed_with_all_that_is_below_them(incarnation: str, start: Callable) -> None:
    other = start(SLEEP, marked=False)
    assert process_tree.kill_incarnation(incarnation, roots=[other.pid]).killed == [other.pid]


def test_we_ourselves_are_never_killed_though_we_carry_the_mark(incarnation: str) -> None:
    program = (
        "from agents.process_tree import kill_incarnation\n"
        f"outcome = kill_incarnation({incarnation!r})\n"
        "print(outcome.killed, outcome.remaining)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={INCARNATION_VARIABLE: incarnation, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (0, b"[] []\n"), done.stderr


def test_a_program_that_flees_from_fork_to_fork_is_caught_without_a_control_group(
    incarnation: str, start: Callable
) -> None:
    start(FLEEING)
    outcome = process_tree.kill_incarnation(incarnation)
    assert outcome.is_empty
    assert process_tree.find(incarnation) == {}


def test_a_stopped_process_is_killed_too(incarnation: str, start: Callable) -> None:
    ours = start(SLEEP)
    os.kill(ours.pid, signal.SIGSTOP)
    assert process_tree.kill_incarnation(incarnation).killed == [ours.pid]


def test_what_cannot_be_killed_is_reported(
    incarnation: str, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = start(SLEEP)
    with monkeypatch.context() as deaf:
        # As a process in uninterruptible sleep: signals are sent and change nothing.
        deaf.setattr(process_tree, "send_signal", lambda process, number: True)
        outcome = process_tree.kill_incarnation(incarnation, limit_s=0.1)
    assert (outcome.killed, outcome.remaining) == ([], [ours.pid])


def test_a_pid_that_was_given_to_another_process_is_not_signalled(incarnation: str, start: Callable) -> None:
    ours = start(SLEEP)
    earlier = Process(pid=ours.pid, parent=1, started=1, state="S", thread_count=1)
    assert not process_tree.send_signal(earlier, signal.SIGKILL)
    assert ours.poll() is None


# Control groups


HYBRID = """31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:7 - cgroup2 cgroup2 rw
"""


@pytest.mark.parametrize(
    "text, mount",
    [
        (HYBRID, ("/sys/fs/cgroup/unified", "/")),
        ("30 23 0:26 /docker/ab /sys/fs/cgroup ro - cgroup2 cgroup rw\n", ("/sys/fs/cgroup", "/docker/ab")),
        ("30 23 0:26 / /odd\\040place rw - cgroup2 cgroup rw\n", ("/odd place", "/")),
        ("31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw\n", None),
        ("", None),
    ],
)
def test_the_mount_of_control_groups_is_found_wherever_it_is(
    text: str, mount: tuple[str, str] | None
) -> None:
    assert control_group.parse_mount(text) == mount


@pytest.mark.parametrize(
    "text, path",
    [
        ("9:name=systemd:/a\n0::/user.slice/x\n", "/user.slice/x"),
        ("0::/gone (deleted)\n", "/gone"),
        ("4:memory:/m\n", ""),
    ],
)
def test_our_own_group_is_read_from_its_version_2_line(text: str, path: str) -> None:
    assert control_group.parse_own_group(text) == path


@pytest.mark.root
def test_a_control_group_ends_all_that_is_in_it(incarnation: str, start: Callable) -> None:
    group = control_group.create(incarnation)
    if group is None:
        pytest.skip("no control groups here")
    fleeing = start(
        "import time\nprint('ready', flush=True)\n"
        "until = time.monotonic() + 20\n"
        "while 'gangmesh-' not in open('/proc/self/cgroup').read() and time.monotonic() < until: time.sleep(0.01)\n"
        + FLEEING,
        marked=False,
    )
    assert group.join_by(fleeing.pid)
    in_it = control_group.of_process(fleeing.pid, incarnation)
    assert in_it is None or in_it.path == group.path
    fleeing.wait(LIMIT_S)
    outcome = process_tree.kill_incarnation(incarnation)
    assert outcome.is_empty
    assert outcome.killed
    assert control_group.find(incarnation) == []
