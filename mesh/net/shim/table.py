"""The table that programs with the shim share with their gateway: what each of their connections is meant for.

Rules of this file:
1. A program writes a slot before it connects: the connection's source and port are the key, so the gateway knows what
   is meant when it accepts, and nothing is sent or awaited for it.
2. Whoever can open the file may speak: it is the user's own (0600), and so nobody else's programs can.
3. A slot is good once and for FRESH_S: a port that another program gets later does not inherit what was asked with it.
4. The file stays over restarts: programs that run find the new listener's port in it.

The layout is native/shim.h's: a page of header, then two banks of slots, of which the first is for connections that
come from SOURCE, the other for those that the program has bound itself. Both are indexed by the port.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from ipaddress import IPv4Address
from pathlib import Path

from mesh.errors import DeploymentError
from mesh.net.shim.addresses import SOURCE
from mesh.reasons import Reason

MAGIC = b"gmshim1\0"
HEADER_BYTES = 4096
BANK_SLOTS = 65536
SLOT = struct.Struct("!4s4s4sHBx16s")
"""State and time are the machine's own numbers (`_OWN`), the rest is in network order."""
_OWN = struct.Struct("=I")
TABLE_BYTES = HEADER_BYTES + 2 * BANK_SLOTS * SLOT.size
EMPTY, ASKED, TAKEN = range(3)
FRESH_S = 10
"""The kernel tries a connection to a full listener three times in it."""


def read_slot(slot: bytes, *, source: str, now_s: int) -> tuple[str, int] | None:
    """What a slot asks for, for a connection from `source`; None when it asks for nothing, or for another one."""
    state, when, asked_by, port, family, target = SLOT.unpack(slot)
    age_s = (now_s - _OWN.unpack(when)[0]) % (1 << 32)
    if _OWN.unpack(state)[0] != ASKED or age_s > FRESH_S or asked_by != IPv4Address(source).packed:
        return None
    if family == 4:
        return socket.inet_ntop(socket.AF_INET, target[:4]), port
    return (socket.inet_ntop(socket.AF_INET6, target), port) if family == 6 else None


def slot_offset(source: str, port: int) -> int:
    """Where in the file."""
    bank = 0 if source == SOURCE else 1
    return HEADER_BYTES + (bank * BANK_SLOTS + port) * SLOT.size


class ShimTable:
    """The gateway's end of it. Raises DeploymentError when the file cannot be had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._memory = _open(path)
        except OSError as error:
            raise DeploymentError(
                f"{path} cannot be shared with programs: {error.strerror}.",
                reason=Reason.STATE_NOT_WRITABLE,
                path=str(path),
            ) from error

    def serve(self, port: int) -> None:
        """The gateway listens there now; what was asked before is asked of nobody."""
        asked = _OWN.pack(ASKED)
        for offset in range(HEADER_BYTES, TABLE_BYTES, SLOT.size):
            if self._memory[offset : offset + _OWN.size] == asked:
                self._set(offset, EMPTY)
        self._memory[len(MAGIC) : len(MAGIC) + 2] = port.to_bytes(2, "big")

    def target_of(self, sock: socket.socket) -> tuple[str, int] | None:
        """What an accepted connection is meant for; once."""
        try:
            source, port = sock.getpeername()[:2]
        except OSError:  # it is gone already
            return None
        offset = slot_offset(source, port)
        slot = self._memory[offset : offset + SLOT.size]
        found = read_slot(slot, source=source, now_s=int(time.monotonic()) % (1 << 32))
        if found is not None:
            self._set(offset, TAKEN)
        return found

    def close(self) -> None:
        """The file stays: programs that run will find the next gateway by it."""
        self._memory.close()

    def _set(self, offset: int, state: int) -> None:
        self._memory[offset : offset + _OWN.size] = _OWN.pack(state)


def _open(path: Path) -> mmap.mmap:
    """The file that is there, if it is one of ours, or else a new one. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(file, 0o600)
        if os.fstat(file).st_size != TABLE_BYTES or os.pread(file, len(MAGIC), 0) != MAGIC:
            os.ftruncate(file, 0)
            os.ftruncate(file, TABLE_BYTES)
            os.pwrite(file, MAGIC, 0)
        return mmap.mmap(file, TABLE_BYTES)
    finally:
        os.close(file)
