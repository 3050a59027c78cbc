"""Watches a command that is to have the shim: nothing of it may go past, and none may hang for want of it.

Rules of this file:
1. Proof is what the kernel says: the library is mapped into the command's process. No word of the process is needed.
2. The command's own process must have it: a wrapper that becomes a static program is found when it has become one.
3. Programs that the command starts beside itself may be without it as long as they dial nobody: a build tool may be
   static. A socket of the tree that goes to an overlay address by itself is proof that one does: with the shim there is
   none.
4. `look` reads /proc, in a thread; it finds nothing wrong with processes that end meanwhile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_network
from pathlib import Path

from agents import process_tree
from agents.shim_program import refusal_of
from mesh.net.shim.addresses import OVERLAY

LOOKS_S = (0.02, 0.05, 0.1, 0.2, 0.4, *([0.5] * 20))
"""When it is looked at first: most that is wrong is wrong at once."""
LOOK_EVERY_S = 2.0
"""The kernel tries a connection that nobody answers for two minutes."""
LOAD_LIMIT_S = 10.0
"""From its start until a program that can have the library has it; a cold network disk may be slow."""
_V4, _V6 = (ip_network(text) for text in OVERLAY)
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class ShimWatch:
    """One command's. `look` again and again, from one thread at a time."""

    def __init__(self, *, pid: int, incarnation: str, library: str) -> None:
        self._pid = pid
        self._incarnation = incarnation
        self._library = library.encode()
        self._program = ""
        self._image = ""
        """What tells the program that runs from the one that the process was before, though it may be the same file."""
        self._since = time.monotonic()
        """When it was seen for the first time what the process is now."""
        self._is_proven = False

    def look(self) -> str | None:
        """What is wrong, in a sentence. Blocking."""
        return self._look_at_the_command() or self._look_for_sockets()

    def _look_at_the_command(self) -> str | None:
        program, image = _program_of(self._pid), _image_of(self._pid)
        if (program, image) != (self._program, self._image):
            self._program, self._image = program, image
            self._since, self._is_proven = time.monotonic(), False
        if not program or self._is_proven:
            return None  # it has ended, or is as it should be
        why = refusal_of(Path(f"/proc/{self._pid}/exe"))
        if why is not None:
            return f"{program} {why}"
        self._is_proven = self._is_loaded()
        if self._is_proven or time.monotonic() - self._since < LOAD_LIMIT_S:
            return None
        return f"{program} was started without it"

    def _is_loaded(self) -> bool:
        try:
            return self._library in Path(f"/proc/{self._pid}/maps").read_bytes()
        except OSError:
            return False

    def _look_for_sockets(self) -> str | None:
        inodes = set(overlay_sockets(_tables(self._pid)))
        if not inodes:
            return None
        for pid in process_tree.find(self._incarnation, roots=(self._pid,)):
            if inodes & set(_sockets_of(pid)):
                program = _program_of(pid) or f"process {pid}"
                why = refusal_of(Path(f"/proc/{pid}/exe")) or "goes past it"
                return f"{program} has dialled a member itself: it {why}"
        return None


def overlay_sockets(lines: Iterable[str]) -> Iterator[int]:
    """The inodes of TCP sockets to overlay addresses, in lines of /proc/net/tcp and tcp6 (proc(5))."""
    for line in lines:
        words = line.split()
        if len(words) < 10 or not words[9].isdecimal():
            continue
        address = read_address(words[2].partition(":")[0])
        if address is not None and address in (_V4 if address.version == 4 else _V6):
            yield int(words[9])


def read_address(text: str) -> IPv4Address | IPv6Address | None:
    """As the kernel writes it: words of four bytes, each as a number of this machine's; a mapped one as IPv4."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    if len(raw) not in (4, 16):
        return None
    ordered = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    if len(ordered) == 4:
        return IPv4Address(ordered)
    address = IPv6Address(ordered)
    return address.ipv4_mapped or address


def _tables(pid: int) -> Iterator[str]:
    """Of the command's network; of ours when the command's process has ended before its children."""
    process = f"/proc/{pid}" if Path(f"/proc/{pid}/net/tcp").exists() else "/proc/self"
    for name in ("tcp", "tcp6"):
        try:
            yield from Path(f"{process}/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue  # it has ended now, or there is no IPv6


def _program_of(pid: int) -> str:
    """Empty when the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except PermissionError:
        return "a program of another user"
    except OSError:
        return ""


def _image_of(pid: int) -> str:
    """Where its code lies in memory (proc(5), field 26 of stat): somewhere else after each start of a program."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[23]
    except (OSError, IndexError):
        return ""


def _sockets_of(pid: int) -> Iterator[int]:
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for file in files:
        try:
            found = _SOCKET.fullmatch(str(file.readlink()))
        except OSError:
            continue
        if found:
            yield int(found[1])
