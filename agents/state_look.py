"""A look at a rank's state directory: every entry, the helper's whole checkpoints, and who writes to it.

Rules of this file:
1. Blocking: call it in a thread. What changes under the look is no error: the next look sees it.
2. Nothing is opened but the helper's lists; links are not followed.
3. Writers are looked for only while some file is not sure, after the entries; processes are listed after that.
4. Writers are found by inode, not by name: a process in a container of its own sees other names. A file that is mapped
   for writing counts too. Only processes that we may look into are seen, so the user's own always.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from agents import process_tree
from agents.core.checkpoint_events import KEPT, Entry, EntryKind, Look, ProcessKey
from mesh.checkpoint_format import STEP_MARKER, TEMPORARY_PREFIX, is_inside, step_of_folder

ENTRIES_MAX = 20_000
MARKER_BYTES_MAX = 16 << 20
_WRITING = os.O_WRONLY | os.O_RDWR


class _TooManyError(Exception):
    pass


def look(state_dir: Path, *, sure: tuple[Entry, ...] | None = (), root: int | None = None) -> Look:
    """What is there now.

    Args:
        sure: while the entries (without logs) are these, nobody looks for writers; None: somebody always does.
        root: the process below which all of the command's are.
    """
    began_at = time.monotonic()
    found: list[Entry] = []
    try:
        device = state_dir.stat().st_dev
        is_saving = _walk(state_dir, found)
    except _TooManyError:
        return _refused(
            f"No checkpoint is taken of this rank: its state directory has more than {ENTRIES_MAX} entries. "
            "Keep data, caches and environments elsewhere.",
            began_at,
        )
    except OSError as error:
        return _refused(
            f"No checkpoint is taken of this rank: its state directory cannot be read ({error.strerror}: "
            f"{os.fsdecode(error.filename or b'')!r}).",
            began_at,
        )
    entries = tuple(sorted(found, key=lambda entry: entry.path))
    firm = tuple(entry for entry in entries if entry.kind in KEPT and not entry.is_log)
    return Look(
        entries=entries,
        steps=tuple(sorted(_whole_steps(state_dir, entries))),
        is_saving=is_saving,
        writers=() if firm == sure else tuple(_open_files(firm, device, root)),
        processes=frozenset() if root is None else processes_below(root),
        cost_s=time.monotonic() - began_at,
    )


def _refused(why: str, began_at: float) -> Look:
    return Look(entries=(), trouble=why, cost_s=time.monotonic() - began_at)


def _walk(state_dir: Path, found: list[Entry]) -> bool:
    """Fills `found`; returns whether the helper is writing a checkpoint."""
    is_saving = False
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            listing = list(os.scandir(state_dir / folder))
        except FileNotFoundError:
            if not folder:
                raise
            continue  # removed since it was seen: the next look tells
        for item in listing:
            path = f"{folder}/{item.name}" if folder else item.name
            if not folder and item.name.startswith(TEMPORARY_PREFIX):
                is_saving = True
                continue
            with suppress(FileNotFoundError):
                entry = _entry(path, item)
                found.append(entry)
                if entry.kind is EntryKind.DIRECTORY:
                    waiting.append(path)
            if len(found) > ENTRIES_MAX:
                raise _TooManyError
    return is_saving


def _entry(path: str, item: os.DirEntry[str]) -> Entry:
    facts = item.stat(follow_symlinks=False)
    mode = stat.S_IMODE(facts.st_mode)
    if stat.S_ISDIR(facts.st_mode):
        return Entry(path=path, kind=EntryKind.DIRECTORY, mode=mode)
    if stat.S_ISLNK(facts.st_mode):
        target = os.readlink(item.path)  # noqa: PTH115 - as it is written: Path would tidy it
        kind = EntryKind.LINK if is_inside(path, target) else EntryKind.OUTSIDE_LINK
        return Entry(path=path, kind=kind, mode=mode, target=target)
    if not stat.S_ISREG(facts.st_mode):
        return Entry(path=path, kind=EntryKind.OTHER, mode=mode)
    return file_entry(path, facts)


def file_entry(path: str, facts: os.stat_result) -> Entry:
    """A regular file's."""
    return Entry(
        path=path,
        kind=EntryKind.FILE,
        mode=stat.S_IMODE(facts.st_mode),
        size=facts.st_size,
        mtime_ns=facts.st_mtime_ns,
        inode=facts.st_ino,
    )


def _whole_steps(state_dir: Path, entries: Iterable[Entry]) -> Iterator[int]:
    """The helper's checkpoints whose list agrees with the files that are there."""
    sizes: dict[str, dict[str, int]] = {}
    for entry in entries:
        top, _, rest = entry.path.partition("/")
        if entry.kind is EntryKind.FILE and rest and step_of_folder(top) is not None:
            sizes.setdefault(top, {})[rest] = entry.size
    for top, files in sizes.items():
        step = step_of_folder(top)
        if step is None or files.get(STEP_MARKER, MARKER_BYTES_MAX) >= MARKER_BYTES_MAX:
            continue
        if _agrees(state_dir / top / STEP_MARKER, step, files):
            yield step


def _agrees(marker: Path, step: int, files: dict[str, int]) -> bool:
    try:
        said = json.loads(marker.read_bytes())
        return (
            said["format"] == 1
            and said["step"] == step
            and all(files.get(name) == fact["size"] for name, fact in said["files"].items())
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def writers(state_dir: Path, entries: Iterable[Entry], *, root: int | None = None) -> tuple[str, ...]:
    """The files among these, logs left out, that a process has open, or mapped, for writing."""
    try:
        device = state_dir.stat().st_dev
    except OSError:
        return ()  # the directory is gone: the next look tells
    return tuple(sorted({path for path, _ in _open_files(entries, device, root)}))


def _open_files(entries: Iterable[Entry], device: int, root: int | None) -> Iterator[tuple[str, ProcessKey]]:
    """By the processes below `root`; without one, by any that we may look into."""
    wanted = {
        (device, entry.inode): entry.path
        for entry in entries
        if entry.kind is EntryKind.FILE and not entry.is_log
    }
    if not wanted:
        return
    for pid, started in _everybody() if root is None else processes_below(root):
        with suppress(OSError):  # it has ended, or is none of ours
            for path in {path for key in _written_by(pid) if (path := wanted.get(key)) is not None}:
                yield path, (pid, started)


def _everybody() -> Iterator[ProcessKey]:
    for pid, process in process_tree.snapshot().items():
        if pid != os.getpid():
            yield pid, process.started


def processes_below(root: int) -> frozenset[ProcessKey]:
    """The living processes below one, that one left out. One that is ending is none: the kernel closes its files, and
    nobody has."""
    found: set[ProcessKey] = set()
    waiting = [root]
    while waiting:
        for pid in _children(waiting.pop()):
            process = process_tree.read_process(pid)
            if process is not None:
                waiting.append(pid)
                if process.is_alive and not process.is_ending:
                    found.add((pid, process.started))
    return frozenset(found)


def _children(pid: int) -> Iterator[int]:
    """Of all its threads."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(OSError):
                listed = Path(f"/proc/{pid}/task/{thread}/children").read_bytes()
                yield from map(int, listed.split())


def _written_by(pid: int) -> Iterator[tuple[int, int]]:
    """(device, inode) of what a process has open or mapped for writing."""
    for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        place = f"/proc/{pid}/fd/{number}"
        with suppress(OSError, ValueError):
            if not os.readlink(place).startswith("/"):  # noqa: PTH115 - a socket, a pipe
                continue
            if _flags(Path(f"/proc/{pid}/fdinfo/{number}").read_bytes()) & _WRITING:
                facts = os.stat(place)  # noqa: PTH116
                if stat.S_ISREG(facts.st_mode):
                    yield facts.st_dev, facts.st_ino
    with Path(f"/proc/{pid}/maps").open("rb") as maps:
        for line in maps:
            words = line.split(None, 5)
            if len(words) > 5 and words[1][1:2] == b"w" and words[1][3:4] == b"s":
                major, _, minor = words[3].partition(b":")
                yield os.makedev(int(major, 16), int(minor, 16)), int(words[4])


def _flags(fdinfo: bytes) -> int:
    for line in fdinfo.splitlines():
        if line.startswith(b"flags:"):
            return int(line.split()[1], 8)
    return 0
