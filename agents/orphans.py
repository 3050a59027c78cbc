"""What comes to the head or to a machine's agent because its parents died: zombies are reaped, strangers ended.

Rules of this file:
1. A zombie that is nobody's is reaped only after it was seen twice: until then whoever started it may still ask.
2. A living child that is none of ours came from a command whose supervisor was killed together with everything that
   could have ended it. It is ended, with all below it. Ours are those that carry the deployment's mark, and the
   keepers, which outlive their members on purpose. Twice seen here, too: a child of ours has our own environment
   until it becomes another program.
"""

from __future__ import annotations

import contextlib
import logging
import os

import psutil

import agents.keeper
from agents import process_tree
from agents.ray_environment import MARK

_log = logging.getLogger(__name__)


class OrphanReaper:
    """Reaps and ends children that came to us because their parents died. Call `look` every few seconds."""

    def __init__(self) -> None:
        self._zombies: set[psutil.Process] = set()
        self._strangers: set[psutil.Process] = set()

    def look(self) -> None:
        zombies: set[psutil.Process] = set()
        strangers: set[psutil.Process] = set()
        try:
            children = psutil.Process().children()
        except (psutil.Error, OSError) as error:  # no more open files, for one: the next look sees them
            _log.warning("what is below this process cannot be looked at now: %s", error)
            return
        for child in children:
            with contextlib.suppress(psutil.Error, OSError):
                if child.status() == psutil.STATUS_ZOMBIE:
                    zombies.add(child)
                elif not _is_ours(child):
                    strangers.add(child)
        for zombie in zombies & self._zombies:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(zombie.pid, os.WNOHANG)
        for stranger in strangers & self._strangers:
            with contextlib.suppress(psutil.Error, OSError):
                _end(stranger)
        self._zombies = zombies - self._zombies
        self._strangers = strangers


def _end(stranger: psutil.Process) -> None:
    """The process and all below it. Raises psutil.Error when it has ended meanwhile."""
    _log.warning("ending %d (%s), which a command has left", stranger.pid, stranger.name())

    def look() -> dict[int, process_tree.Process]:
        found = process_tree.find_descendants(stranger.pid)
        root = process_tree.read_process(stranger.pid)
        return {**found, root.pid: root} if root is not None and root.is_alive else found

    process_tree.kill_found(look(), look)


def _is_ours(child: psutil.Process) -> bool:
    if str(agents.keeper.__file__) in child.cmdline():
        return True
    try:
        return MARK in child.environ()
    except psutil.AccessDenied:  # it has become another user's, which nothing of ours does
        return False
