"""Who serves a life, noted in its folder, so that a sweep (`agents.sweep`) finds whoever could still start something.

Rules of this file:
1. Nothing begins behind a sweep's back: the sweep closes the life before it looks who has signed in, and who signs in
   looks afterwards whether the life is closed. One of the two sees the other.
2. A pid is a process only together with its start time.
"""

from __future__ import annotations

import os
from pathlib import Path

from agents import process_tree

SERVES_VARIABLE = "GANGMESH_SERVES"
"""In the environment of what is started to serve a life and runs none of the user's code: the incarnation."""
_SIGNED_IN = "processes"
_CLOSED = "closed"


def sign_in(life: Path) -> bool:
    """Notes this process in the folder of a life that it is about to serve. False: that life is over.

    Raises OSError when it cannot be noted.
    """
    folder = life / _SIGNED_IN
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    me = process_tree.read_process(os.getpid())
    assert me is not None
    (folder / f"{me.pid}-{me.started}").touch()
    return not (life / _CLOSED).exists()


def close(life: Path) -> None:
    """From now on nobody signs in successfully. Raises OSError."""
    (life / _CLOSED).touch()


def signed_in(life: Path) -> list[int]:
    """The pids of those who have signed in and still run."""
    found = []
    for note in (life / _SIGNED_IN).glob("*-*"):
        pid, _, started = note.name.partition("-")
        if pid.isdigit() and (process := process_tree.read_process(int(pid))):
            found += [process.pid] if str(process.started) == started else []
    return found
