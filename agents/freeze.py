"""Stand still without dying: every process of an incarnation is stopped, and can be let go on.

For the keeper that wakes up past the end of its lease (a laptop that slept): its command may not go on before the store
has said whether it still may, and need not die when it may. And for `agents.chaos`.

Rules of this file
- Standard library only: the keeper must start fast.
- What was stopped before (by the user, by a debugger) is not let go.
- Freezing is not fencing: a stopped process holds its devices and ports. Only a kill ends it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from agents import process_tree

FREEZE_ROUNDS_MAX = 16
"""A look may miss a fork in flight; a stopped process forks no more, so a few looks find them all."""


def freeze(look: Callable[[], dict[int, process_tree.Process]]) -> list[process_tree.Process]:
    """Stops every process that a look finds; answers those that were running."""
    stopped: dict[tuple[int, int], process_tree.Process] = {}
    for _ in range(FREEZE_ROUNDS_MAX):
        new = [p for p in look().values() if p.identity not in stopped and not p.is_stopped]
        if not new:
            break
        for process in new:
            if process_tree.send_signal(process, signal.SIGSTOP):
                stopped[process.identity] = process
    return list(stopped.values())


def freeze_incarnation(incarnation: str) -> list[process_tree.Process]:
    """Stops every process of the incarnation; answers those that were running."""
    return freeze(lambda: process_tree.find(incarnation))


def thaw(processes: list[process_tree.Process]) -> None:
    """Lets go on what `freeze` stopped. One that has gone meanwhile is no error."""
    for process in processes:
        process_tree.send_signal(process, signal.SIGCONT)
