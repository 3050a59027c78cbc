"""Looks at the lab's processes every few milliseconds, as a process of its own; standard library only.

    python -S watcher.py <the lab's control group> <output file> <pause in ms>

It believes nothing that the product says: a process is a user's when its environment names an incarnation, and it is on
the host whose control group it is in. What changes is written as one JSON object a line, with CLOCK_MONOTONIC:
`born` and `died` (pid, host, run, epoch, rank), `stopped` and `continued` (SIGSTOP), `frozen` and `thawed` (host), and
`looked` with the longest pause between two looks, once a second.
"""

from __future__ import annotations

import json
import os
import sys
import time

INCARNATION = b"NODUS_INCARNATION="
NEWBORN_S = 2.0
"""A process may become another program: for so long its environment is looked at again."""


class Watcher:
    def __init__(self, group: str, output: str) -> None:
        self._group = group
        self._prefix = "/" + os.path.basename(group) + "/"
        self._output = open(output, "a", buffering=1)  # noqa: SIM115 - for life
        self._strangers: dict[int, float] = {}
        """Not a user's; when first seen."""
        self._users: dict[int, str] = {}
        """A user's living processes, and their states."""
        self._frozen: set[str] = set()
        self._told_at = self._looked_at = time.monotonic()
        self._longest_s = 0.0

    def look(self) -> None:
        began = time.monotonic()
        self._longest_s = max(self._longest_s, began - self._looked_at)
        self._looked_at = began
        self._look_at_hosts()
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in self._strangers.keys() - present:
            del self._strangers[pid]
        for pid in present - self._users.keys():
            seen_at = self._strangers.setdefault(pid, began)
            if began - seen_at < NEWBORN_S:
                self._look_at_stranger(pid)
        for pid in list(self._users):
            self._look_at_user(pid)
        if began - self._told_at >= 1.0:
            self._tell("looked", longest_s=self._longest_s)
            self._told_at, self._longest_s = began, 0.0

    def _look_at_hosts(self) -> None:
        for host in os.listdir(self._group):
            events = _read(f"{self._group}/{host}/cgroup.events")
            if not events:
                continue
            is_frozen = b"frozen 1" in events
            if is_frozen != (host in self._frozen):
                (self._frozen.add if is_frozen else self._frozen.discard)(host)
                self._tell("frozen" if is_frozen else "thawed", host=host)

    def _look_at_stranger(self, pid: int) -> None:
        group = _read(f"/proc/{pid}/cgroup").rpartition(b"0::")[2].decode().strip()
        if not group.startswith(self._prefix):
            return
        entries = _read(f"/proc/{pid}/environ").split(b"\0")
        marks = [entry for entry in entries if entry.startswith(INCARNATION)]
        state = _state(pid)
        if not marks or state in "ZX":
            return
        run, epoch, rank = marks[0].removeprefix(INCARNATION).decode().split(".")[:3]
        self._strangers.pop(pid, None)
        self._users[pid] = state
        host = group.removeprefix(self._prefix).partition("/")[0]
        self._tell("born", pid=pid, host=host, run=run, epoch=int(epoch), rank=int(rank), state=state)

    def _look_at_user(self, pid: int) -> None:
        before, state = self._users[pid], _state(pid)
        if state in "ZX":
            del self._users[pid]
            self._tell("died", pid=pid)
            return
        self._users[pid] = state
        if (before in "Tt") != (state in "Tt"):
            self._tell("stopped" if state in "Tt" else "continued", pid=pid)

    def _tell(self, event: str, **facts: object) -> None:
        self._output.write(json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _state(pid: int) -> str:
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return fields[0].decode() if fields else "X"


def main() -> None:
    group, output, pause_ms = sys.argv[1:]
    watcher = Watcher(group, output)
    os.write(1, b"watching\n")
    while os.getppid() != 1:
        watcher.look()
        time.sleep(int(pause_ms) / 1000)


if __name__ == "__main__":
    main()
