# The supervisor imports this module, and pathlib alone would double its start.
# ruff: noqa: PTH110, PTH115, PTH119, PTH208
"""Which processes belong to an incarnation, and how all of them are ended.

Rules of this file
- Standard library only, and nothing heavy: the supervisor loads this module by path; the keeper and MemberNode
  import it.
- A process belongs to an incarnation when one of three signs says so: it is in the incarnation's control group, its
  environment carries NODUS_INCARNATION with the incarnation's name, or it descends from one that does (or from
  `roots`). Each sign alone can be lost (no cgroup v2; setproctitle overwrites the environment; a daemon loses
  its parent).
- We never signal ourselves or our ancestors, and never a pid that was given to another process in the meantime:
  a process is its pid and its start time, and signals go through a pidfd.
- A zombie does not count: it runs no code and holds no device. One whose other threads still run does.
- Nothing is gone until two looks in a row, after the kill, find nothing: a fork may hide from one look at /proc.

How a tree is ended: everything found is stopped first (a stopped process forks no more), again and again until
no new one turns up, and only then killed. So a fork bomb is caught as long as a look at /proc is faster than it
doubles; a control group, where there is one, ends it for certain (`cgroup.kill`).
"""

from __future__ import annotations

import errno
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    import signal
    from collections.abc import Callable, Iterable, Mapping

    from agents import control_group
    from agents.supervisor_protocol import INCARNATION_VARIABLE
else:
    # The public module makes enums of the same numbers, which costs 7 ms of the supervisor's start.
    import _signal as signal

    import control_group
    from supervisor_protocol import INCARNATION_VARIABLE

KILL_LIMIT_S = 10.0
"""After this long a SIGKILLed process is called unkillable (uninterruptible sleep in a driver or a dead network
disk)."""

PF_EXITING = 0x4
"""include/linux/sched.h: set before anything of an ending process is let go, its open files included."""

FREEZE_ROUNDS_MAX = 64
WAIT_BETWEEN_ROUNDS_MS = 20
WAITED_PIDS_MAX = 64

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "busybox", "rbash"})


class Process:
    """What /proc/<pid>/stat says of a process. `started` (clock ticks since boot) tells it from a later one of
    that pid."""

    __slots__ = ("flags", "parent", "pid", "started", "state", "thread_count")

    def __init__(
        self, *, pid: int, parent: int, started: int, state: str, thread_count: int, flags: int = 0
    ) -> None:
        self.pid = pid
        self.parent = parent
        self.started = started
        self.state = state
        self.thread_count = thread_count
        self.flags = flags

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.started

    @property
    def is_alive(self) -> bool:
        return self.state not in "ZX" or self.thread_count > 1

    @property
    def is_ending(self) -> bool:
        """It runs no code of its own any more, although it may be a while until it is gone: its files may be closed."""
        return bool(self.flags & PF_EXITING)

    @property
    def is_stopped(self) -> bool:
        return self.state == "T"

    def __repr__(self) -> str:
        return f"Process(pid={self.pid}, parent={self.parent}, state={self.state!r})"


class KillOutcome:
    """`killed`: pids that were there and are gone; `remaining`: pids that could not be ended within the limit."""

    __slots__ = ("killed", "remaining")

    def __init__(self, *, killed: list[int], remaining: list[int]) -> None:
        self.killed = killed
        self.remaining = remaining

    @property
    def is_empty(self) -> bool:
        return not self.remaining

    def __repr__(self) -> str:
        return f"KillOutcome(killed={self.killed}, remaining={self.remaining})"


def kill_incarnation(
    incarnation: str, *, roots: Iterable[int] = (), limit_s: float = KILL_LIMIT_S
) -> KillOutcome:
    """End every process of the incarnation (`uid.epoch.rank.token`) and confirm it. Blocking; call it in a thread.

    `roots` are further processes to end with all their descendants: the pid of a supervisor, for one, when it is
    known.
    """
    deadline = time.monotonic() + limit_s
    root_pids = tuple(roots)
    killed: dict[int, Process] = {}
    groups: dict[str, control_group.ControlGroup] = {}
    looks_without_a_find = 0

    def look() -> dict[int, Process]:
        return find(incarnation, roots=root_pids, groups=groups)

    while looks_without_a_find < 2:
        for group in control_group.find(incarnation):
            groups[group.path] = group
        killed.update(_kill_groups(groups.values()))
        found = look()
        if not found:
            looks_without_a_find += 1
            continue
        looks_without_a_find = 0
        killed.update(kill_found(found, look))
        wait_until_one_ends(found.values(), limit_ms=WAIT_BETWEEN_ROUNDS_MS)
        if time.monotonic() >= deadline and (remaining := look()):
            return KillOutcome(killed=sorted(killed.keys() - remaining.keys()), remaining=sorted(remaining))
    for group in groups.values():
        group.remove()
    return KillOutcome(killed=sorted(killed), remaining=[])


def kill_found(found: dict[int, Process], look_again: Callable[[], dict[int, Process]]) -> dict[int, Process]:
    """Stop all of `found` and whatever further looks find, then kill them all; answers all of them by pid."""
    stopped: dict[tuple[int, int], Process] = {}
    for _ in range(FREEZE_ROUNDS_MAX):
        new = [process for process in found.values() if process.identity not in stopped]
        if not new:
            break
        for process in new:
            send_signal(process, signal.SIGSTOP)
            stopped[process.identity] = process
        found = look_again()
    for process in stopped.values():
        send_signal(process, signal.SIGKILL)
    return {process.pid: process for process in stopped.values()}


def find(
    incarnation: str,
    *,
    roots: Iterable[int] = (),
    groups: dict[str, control_group.ControlGroup] | None = None,
) -> dict[int, Process]:
    """The living processes of the incarnation, by pid. Control groups that are met on the way are added to
    `groups`.
    """
    processes = snapshot()
    ours = lineage(processes, os.getpid())
    tree = processes.keys() & set(roots)
    tree |= descendants(processes, tree)
    for pid in processes.keys() - tree - ours:
        group = control_group.of_process(pid, incarnation)
        if group is not None and groups is not None:
            groups[group.path] = group
        if group is not None or carries_incarnation(pid, incarnation):
            tree.add(pid)
    tree |= descendants(processes, tree - ours)
    return {pid: processes[pid] for pid in tree - ours if processes[pid].is_alive}


def find_descendants(root: int) -> dict[int, Process]:
    """The living descendants of `root`, by pid: the whole tree, when `root` is a child subreaper."""
    processes = snapshot()
    return {pid: processes[pid] for pid in descendants(processes, {root}) if processes[pid].is_alive}


def snapshot() -> dict[int, Process]:
    """Every process that /proc shows us, by pid. Not one moment: processes come and go while it is read."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := read_process(int(name))):
            found[process.pid] = process
    return found


def read_process(pid: int) -> Process | None:
    """None when there is no such process (any more)."""
    return parse_stat(control_group.read_bytes(f"/proc/{pid}/stat"))


def parse_stat(text: bytes) -> Process | None:
    """The text of /proc/<pid>/stat. The name in it may hold spaces and brackets, so we count from its last
    bracket.
    """
    head, bracket, tail = text.rpartition(b")")
    fields = tail.split()
    if not bracket or len(fields) < 20:
        return None
    return Process(
        pid=int(head.partition(b" ")[0]),
        parent=int(fields[1]),
        started=int(fields[19]),
        state=fields[0].decode("ascii", "replace"),
        thread_count=int(fields[17]),
        flags=int(fields[6]),
    )


def descendants(processes: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """The pids below `roots`, without the roots that are not below another one."""
    children = children_by_parent(processes)
    found: set[int] = set()
    open_ends = list(roots)
    while open_ends:
        for pid in children.get(open_ends.pop(), ()):
            if pid not in found:
                found.add(pid)
                open_ends.append(pid)
    return found


def children_by_parent(processes: Mapping[int, Process]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    return children


def children_of(pid: int) -> list[int]:
    """The direct children of a process with one thread."""
    listed = f"/proc/{pid}/task/{pid}/children"
    if os.path.exists(listed):
        return [int(child) for child in control_group.read_bytes(listed).split()]
    return children_by_parent(snapshot()).get(pid, [])


def lineage(processes: Mapping[int, Process], pid: int) -> set[int]:
    """The process and its ancestors."""
    found = {pid}
    while (process := processes.get(pid)) and process.parent not in found:
        pid = process.parent
        found.add(pid)
    return found


def carries_incarnation(pid: int, incarnation: str) -> bool:
    """Whether the environment that the process was started with names the incarnation."""
    entry = f"{INCARNATION_VARIABLE}={incarnation}".encode("utf-8", "surrogateescape")
    return entry in control_group.read_bytes(f"/proc/{pid}/environ").split(b"\0")


class Manners:
    """How a process takes a SIGTERM, and which pipes it holds (`pipe:[inode]`, as /proc names them)."""

    __slots__ = ("handles_stop", "reads_from", "writes_to")

    def __init__(self, *, handles_stop: bool, reads_from: str = "", writes_to: Iterable[str] = ()) -> None:
        self.handles_stop = handles_stop
        self.reads_from = reads_from
        self.writes_to = frozenset(writes_to)


def who_must_be_told(
    children: Mapping[int, Iterable[int]], roots: Iterable[int], manners_of: Callable[[int], Manners]
) -> tuple[list[int], set[int]]:
    """Whom to send SIGTERM so that all below `roots` learn of it and nobody hears it twice; and whom to spare it.

    A process that handles SIGTERM decides itself what its children hear (torchrun forwards it; a trainer does not
    want its data loaders killed while it saves). One that does not handle it just dies, and nobody would tell its
    children. Parents come first, or a shell would go on to its next command.

    Spared is who reads what one that handles the stop still writes: in `torchrun … | tee log` a tee that dies takes
    the workers with it while they save. It ends with its input.
    """
    to_tell = list(dict.fromkeys(roots))
    manners = {}
    for pid in to_tell:  # grows while we walk
        manners[pid] = manners_of(pid)
        if not manners[pid].handles_stop:
            to_tell += [child for child in children.get(pid, ()) if child not in to_tell]
    living_pipes: set[str] = set()
    for pid in to_tell:
        if manners[pid].handles_stop:
            living_pipes |= manners[pid].writes_to
    spared: set[int] = set()
    while True:
        readers = {
            pid
            for pid in to_tell
            if pid not in spared and not manners[pid].handles_stop and manners[pid].reads_from in living_pipes
        }
        if not readers:
            return [pid for pid in to_tell if pid not in spared], spared
        spared |= readers
        for pid in readers:
            living_pipes |= manners[pid].writes_to


def manners_of(pid: int) -> Manners:
    """As the process is now.

    It handles the stop when it catches SIGTERM (or blocks it, to take it with sigwait as tini does). A shell does not,
    even with a trap: it runs the trap only after its foreground command has ended, and that has not heard anything.
    """
    status = control_group.read_bytes(f"/proc/{pid}/status")
    handles_stop = handles_signal(status, signal.SIGTERM) and executable_name(pid) not in SHELLS
    reads_from, *writes_to = (_pipe_at(pid, file) for file in (0, 1, 2))
    return Manners(
        handles_stop=handles_stop, reads_from=reads_from, writes_to=[pipe for pipe in writes_to if pipe]
    )


def handles_signal(status: bytes, number: int) -> bool:
    """Whether the text of /proc/<pid>/status says that the signal is caught or blocked."""
    for line in status.splitlines():
        name, _, value = line.partition(b":")
        if name in (b"SigCgt", b"SigBlk") and int(value, 16) & (1 << (number - 1)):
            return True
    return False


def executable_name(pid: int) -> str:
    """The file name of the program; empty when it cannot be told."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""


def send_signal(process: Process, number: int) -> bool:
    """Whether the signal was sent: not to one that has gone, and not to one that is not ours to signal."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EMFILE, errno.ENFILE, errno.EPERM):
            return False
        return _is_same(process) and _kill(process.pid, number)
    try:
        if not _is_same(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def wait_until_one_ends(processes: Iterable[Process], *, limit_ms: int) -> None:
    """Until the first of them has ended (not all are watched when they are many), or the limit."""
    poll = select.poll()
    handles = []
    for process in list(processes)[:WAITED_PIDS_MAX]:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        except OSError:
            break
        handles.append(handle)
        poll.register(handle, select.POLLIN)
    poll.poll(limit_ms)
    for handle in handles:
        os.close(handle)


def _kill_groups(groups: Iterable[control_group.ControlGroup]) -> dict[int, Process]:
    """Kill all in them at once, where the kernel can; answers who was alive there."""
    found = {}
    for group in groups:
        for pid in group.pids():
            if (process := read_process(pid)) and process.is_alive:
                found[pid] = process
        group.kill()
    return found


def _pipe_at(pid: int, file: int) -> str:
    try:
        target = os.readlink(f"/proc/{pid}/fd/{file}")
    except OSError:
        return ""
    return target if target.startswith("pipe:") else ""


def _is_same(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.started == process.started


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True
