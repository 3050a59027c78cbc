"""Whether a program can have the shim in it, by what its file says. Reads files and nothing else.

Rules of this file:
1. The shim is a library that the loader of the GNU C library puts into a program: a program without that loader has
   no shim, and one that gets rights from its file is not given it (ld.so(8), secure-execution mode).
2. Go programs do their own system calls: the library would be in them, and see nothing.
3. What cannot be read or understood is no refusal here: whoever starts it finds out, and the watch (shim_watch.py)
   looks at what runs.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agents.command_start import StartError, find_program

HEADERS_MAX = 128
NOTE_BYTES_MAX = 4096
PATH_BYTES_MAX = 4096
INTERPRETERS_MAX = 4
"""Scripts whose interpreter is a script, and so on: the kernel gives up there as well."""
_PT_INTERP, _PT_NOTE = 3, 4
_64_BIT_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_GNU_LOADER = "ld-linux"
Read = Callable[[int, int], bytes]
"""(offset, size): what is there in a file, perhaps less."""


def refusal_of_command(argv: Sequence[str], environment: Mapping[str, str], working_dir: str) -> str | None:
    """Why a command cannot have the shim, in a sentence; None when it can, or is not there to be looked at."""
    try:
        found = Path(working_dir, find_program(argv[0] if argv else "", environment))
    except StartError:
        return None
    for _ in range(INTERPRETERS_MAX):
        interpreter = interpreter_of(found)
        if interpreter is None:
            break
        found = interpreter
    why = refusal_of(found)
    return None if why is None else f"{found} {why}"


def interpreter_of(path: Path) -> Path | None:
    """Of a script, by its first line."""
    try:
        with path.open("rb") as file:
            first_line = file.read(256).split(b"\n")[0]
    except OSError:
        return None
    words = first_line[2:].split()
    return Path(os.fsdecode(words[0])) if first_line.startswith(b"#!") and words else None


def refusal_of(path: Path) -> str | None:
    """Why the program in this file cannot have the shim, in words that its name goes before."""
    try:
        with path.open("rb") as file:
            number = file.fileno()
            found = os.fstat(number)
            if found.st_mode & stat.S_ISUID and found.st_uid != os.geteuid():
                return "runs with the rights of its owner (setuid)"
            if found.st_mode & stat.S_ISGID and found.st_gid != os.getegid():
                return "runs with the rights of its group (setgid)"
            if os.geteuid() != 0 and "security.capability" in os.listxattr(number):
                return "gets rights from its file (capabilities)"
            return refusal_of_program(lambda offset, size: os.pread(number, size, offset))
    except OSError:
        return None


def refusal_of_program(read: Read) -> str | None:
    """The same of a file's content (elf(5)). Never raises for what is in it."""
    head = read(0, _FILE_HEADER.size)
    if head[:4] != b"\x7fELF":
        return None
    if head[:6] != _64_BIT_LITTLE_ENDIAN or len(head) < _FILE_HEADER.size:
        return "is a program of another kind of machine"
    segments = _segments(head, read)
    loaders = [
        read(offset, min(size, PATH_BYTES_MAX)) for kind, offset, size in segments if kind == _PT_INTERP
    ]
    notes = [read(offset, min(size, NOTE_BYTES_MAX)) for kind, offset, size in segments if kind == _PT_NOTE]
    if any(b"\x04\0\0\0Go\0\0" in note for note in notes):
        return "is a Go program, which makes its system calls itself"
    if not loaders:
        return "is linked statically"
    loader = os.fsdecode(loaders[0].partition(b"\0")[0])
    if not Path(loader).name.startswith(_GNU_LOADER):
        return f"is for another C library ({loader})"
    return None


def _segments(head: bytes, read: Read) -> list[tuple[int, int, int]]:
    """Kind, place in the file and size."""
    _, _, _, _, _, start, _, _, _, size, count, _, _, _ = _FILE_HEADER.unpack(head)
    if size != _PROGRAM_HEADER.size:
        return []
    table = read(start, min(count, HEADERS_MAX) * size)
    whole = len(table) // size * size
    return [
        (kind, offset, length)
        for kind, _, offset, _, _, length, _, _ in _PROGRAM_HEADER.iter_unpack(table[:whole])
    ]
