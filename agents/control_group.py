# The supervisor imports this module, and pathlib alone would double its start.
# ruff: noqa: PTH102, PTH106, PTH112, PTH116, PTH119
"""A control group (cgroup v2) per incarnation, where the machine lets us have one.

Rules of this file
- Standard library only, and nothing heavy: the supervisor loads this module by path.
- A group is a help, never a need: whatever the kernel refuses here means "no group", and the process tree is
  then found by descent and by its environment alone (`process_tree`).
- A name is `gangmesh-<incarnation>`, so that a survivor finds the group of a supervisor that was killed.

The group is made below our own, because that is what a delegated unit (systemd, a container) may do and because
an outer run's group then contains an inner one's; else directly below the mount. No controller is switched on in
it: it limits nothing. A group makes a kill complete: `cgroup.kill` (Linux 5.14) ends all of it at once, forks in
flight included.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NAME_PREFIX = "gangmesh-"
LEFTOVER_AGE_S = 60.0
"""A younger empty group may be one whose command is just being started."""


class ControlGroup:
    """One group that exists (or did): every method answers for a group that is gone as for an empty one."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def pids(self) -> set[int]:
        """Every process in it and in the groups below it; zombies may be among them."""
        found: set[int] = set()
        for path in _with_groups_below(self.path):
            found.update(int(pid) for pid in _read(f"{path}/cgroup.procs").split())
        found.discard(0)
        return found

    def kill(self) -> bool:
        """SIGKILL to everything in it, at once. False when this kernel cannot, or the group is gone."""
        return _write(f"{self.path}/cgroup.kill", "1")

    def join_by(self, pid: int) -> bool:
        """Move the process there."""
        return _write(f"{self.path}/cgroup.procs", str(pid))

    def remove(self) -> bool:
        """Remove it and what lies below it. False while a process (or a zombie that nobody reaps) is in it."""
        for path in sorted(_with_groups_below(self.path), key=len, reverse=True):
            try:
                os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


def create(incarnation: str) -> ControlGroup | None:
    """A group for the incarnation, or None where this machine gives us none."""
    for base in bases():
        path = f"{base}/{NAME_PREFIX}{incarnation}"
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            return ControlGroup(path)
        except OSError:
            continue
        if os.access(f"{path}/cgroup.procs", os.W_OK):
            return ControlGroup(path)
        os.rmdir(path)
    return None


def find(incarnation: str) -> list[ControlGroup]:
    """The groups of the incarnation that exist where we would make one. Another place is found by its processes."""
    paths = [f"{base}/{NAME_PREFIX}{incarnation}" for base in bases()]
    return [ControlGroup(path) for path in paths if os.path.isdir(path)]


def of_process(pid: int, incarnation: str) -> ControlGroup | None:
    """The incarnation's group, when the process is in it or below it."""
    own = parse_own_group(_read(f"/proc/{pid}/cgroup"))
    name = f"/{NAME_PREFIX}{incarnation}"
    head, found, tail = own.partition(name)
    if not found or (tail and not tail.startswith("/")):
        return None
    mount = _mount()
    inside = mount and _inside_mount(head + name, mount[1])
    return ControlGroup(mount[0] + inside) if mount and inside else None


def remove_leftovers() -> None:
    """Remove the empty groups that dead supervisors left."""
    for base in bases():
        for path in _groups_in(base):
            if not os.path.basename(path).startswith(NAME_PREFIX):
                continue
            try:
                is_old = time.time() - os.stat(path).st_mtime >= LEFTOVER_AGE_S
            except OSError:
                continue
            if is_old:
                ControlGroup(path).remove()


def bases() -> list[str]:
    """The directories in which a group may be made, best first; empty without cgroup v2."""
    mount = _mount()
    if mount is None:
        return []
    point, root = mount
    own = _inside_mount(parse_own_group(_read("/proc/self/cgroup")), root)
    return list(dict.fromkeys([point + own.rstrip("/"), point]))


def memory_events() -> str:
    """`memory.events` of everything that this mount shows: a container's own. Empty on a whole machine's root."""
    mount = _mount()
    return "" if mount is None else _read(f"{mount[0]}/memory.events")


def parse_own_group(text: str) -> str:
    """The cgroup v2 path in the text of /proc/<pid>/cgroup ("0::/a/b"), or an empty string."""
    for line in text.splitlines():
        if line.startswith("0::"):
            return line[3:].removesuffix(" (deleted)")
    return ""


def parse_mount(text: str) -> tuple[str, str] | None:
    """(mount point, root inside the hierarchy) of cgroup v2 in the text of /proc/self/mountinfo.

    On a hybrid machine v2 lies beside the v1 hierarchies (/sys/fs/cgroup/unified); the type tells, not the place.
    """
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if after.startswith("cgroup2 ") and len(fields) >= 5:
            return _unescaped(fields[4]).rstrip("/"), _unescaped(fields[3])
    return None


def _mount() -> tuple[str, str] | None:
    return parse_mount(_read("/proc/self/mountinfo"))


def _inside_mount(group: str, root: str) -> str:
    """The group's path below the mount point; empty when it lies outside (a container that sees only its own
    part).
    """
    root = root.rstrip("/")
    if root and (group == root or group.startswith(root + "/")):
        group = group[len(root) :]
    return "" if group.startswith("/..") else group


def _with_groups_below(path: str) -> Iterator[str]:
    yield path
    for below in _groups_in(path):
        yield from _with_groups_below(below)


def _groups_in(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _unescaped(path: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal."""
    for octal, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(octal, character)
    return path


def read_bytes(path: str) -> bytes:
    """The file's bytes; empty when it cannot be read: the process or the group has gone, or is not ours to see."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        pieces = []
        while piece := os.read(file, 65536):
            pieces.append(piece)
        return b"".join(pieces)
    except OSError:
        return b""
    finally:
        os.close(file)


def _read(path: str) -> str:
    return read_bytes(path).decode("utf-8", "surrogateescape")


def _write(path: str, text: str) -> bool:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(file, text.encode())
    except OSError:
        return False
    finally:
        os.close(file)
    return True
