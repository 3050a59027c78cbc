"""The keeper: a small process that holds one member's lease, and ends the member's command when the lease is over.

    python -S -P agents/keeper.py        with PYTHONPATH naming our packages and msgpack

It is a process of its own so that no busy interpreter, no garbage collection and no Ray call can delay a heartbeat.

What it is told (stdin, JSON lines)
    {"store": {"host", "port", "secret", "source"}, "incarnation": "uid.epoch.rank.token",
     "ttl_s", "guard_s", "heartbeat_s"}       once, first
    {"op": "release"}                         nothing runs any more: give the lease back and end
    end of file                               the member is dead: kill its tree, release nothing, end
    (nothing is read of what it says, for so long that the pipe is full and then PARENT_STILL_LEASES leases more: the
    member stands still, which is the same)
    SIGUSR1                                   its machine is being cut off (`agents.chaos`): talk to the store by TCP
What it says (stdout, JSON lines)
    {"ev": "granted"} | {"ev": "refused", "reason", "message"}      one of the two, first
    {"ev": "alive"}                           about every heartbeat: this process runs
    {"ev": "frozen" | "thawed", "message"}    this machine stood still past the end of the lease
    {"ev": "lost", "reason", "message"}       the lease is over and the tree is being killed
    {"ev": "released"}

Rules of this file
1. `agents.core.lease` decides; this file moves bytes, looks at the clock, and kills.
2. It imports the standard library, msgpack, and our modules that import nothing else: it must be there in a
   tenth of a second.
3. It never waits for its parent: a pipe that is full loses "alive", and the lease is renewed all the same, for a while.
   A member that reads nothing for minutes would never tell how its command ended, nor hear that it is to be stopped.
4. Only CLOCK_MONOTONIC counts, which a suspended machine does not advance: so CLOCK_BOOTTIME is read beside it, and
   the time that was slept away is counted as passed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
from typing import Any

from agents import lease_wire, process_tree
from agents.core import lease as ls
from agents.core import lease_events as le
from agents.freeze import freeze_incarnation, thaw
from agents.keeper_line import StoreLine
from mesh.ids import Incarnation

KILL_ROUND_S = 5.0
KILL_ROUNDS_MAX = 12
"""A minute: what cannot be killed by then waits in the kernel, and its member (if it lives) goes on telling so."""
FREEZE_AGAIN_S = 0.02
"""While the tree is frozen: how often what was started meanwhile is looked for. A launch may have been under way when
this machine stood still, and nobody has told its launcher yet."""
PARENT_STILL_LEASES = 10
"""A member that reads nothing for so many leases' lengths stands still. Counted in this process's own ticks: where both
stood still, the member reads first."""
PIPE_BYTES = 4096
"""Of what this process says: 250 times "alive", two minutes of it by the usual terms. A page is the least there is."""
READ_BYTES = 64 * 1024
CONFIG_BYTES_MAX = 64 * 1024


def now() -> float:
    """Seconds that passed, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Keeper:
    """One lease of one incarnation.

    Args:
        config: the first line of stdin.
        commands, events: file descriptors of the pipes from and to the member.
    """

    def __init__(self, config: dict[str, Any], *, commands: int, events: int) -> None:
        store = config["store"]
        self._line = StoreLine(
            (str(store["host"]), int(store["port"])),
            str(store["secret"]),
            now=now,
            source=store.get("source"),
        )
        self._is_cut_off = False
        """Told by a signal, and not acted upon yet."""
        self._incarnation = Incarnation.parse(config["incarnation"])
        self._terms = ls.LeaseTerms(
            ttl_s=config["ttl_s"], guard_s=config["guard_s"], heartbeat_s=config["heartbeat_s"]
        )
        self._commands = commands
        self._events = events
        self._command_line = bytearray()
        self._lease = ls.Lease(terms=self._terms, started_at=now())
        self._frozen: list[process_tree.Process] = []
        self._alive_told_at = float("-inf")
        self._unread_ticks = 0
        """How often in a row "alive" found the pipe full."""
        self._is_over = False
        with contextlib.suppress(OSError):  # not a pipe: it is as large as it is
            fcntl.fcntl(events, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(events, False)
        os.set_blocking(commands, False)

    def run(self) -> int:
        """Until the lease is over. Answers the exit code."""
        signal.signal(signal.SIGUSR1, self._on_cut)
        self._perform(self._lease.start())
        while not self._is_over:
            self._wait()
            for event in self._happened():
                self._perform(self._lease.handle(event, now()))
            if self._is_asking:
                self._frozen += freeze_incarnation(str(self._incarnation))
            self._tell_alive()
        self._line.close()
        return 0

    @property
    def _is_asking(self) -> bool:
        return self._lease.state.phase is ls.LeasePhase.ASKING

    def _on_cut(self, number: int, frame: object) -> None:
        self._is_cut_off = True

    # --- waiting --------------------------------------------------------------------------------

    def _wait(self) -> None:
        deadline = self._lease.next_deadline()
        wait_s = self._terms.heartbeat_s
        if deadline is not None:
            wait_s = min(wait_s, max(0.0, deadline - now()))
        if self._is_asking:
            wait_s = min(wait_s, FREEZE_AGAIN_S)
        poll = select.poll()
        poll.register(self._commands, select.POLLIN)
        self._line.register(poll)
        poll.poll(wait_s * 1000 + 1)  # a whole millisecond more, so that the deadline has passed

    def _happened(self) -> list[le.LeaseEvent]:
        """What the store said comes first: it may be the very renewal that the clock asks for."""
        events = self._line.happened()
        if self._is_cut_off:
            self._is_cut_off = False
            events += self._line.leave_short_way()
        return [*events, *self._from_parent(), *self._of_a_still_parent(), le.Woke()]

    # --- the parent -----------------------------------------------------------------------------

    def _from_parent(self) -> list[le.LeaseEvent]:
        try:
            piece = os.read(self._commands, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            piece = b""
        if not piece:
            return [le.ParentDied()]
        self._command_line += piece
        *lines, rest = bytes(self._command_line).split(b"\n")
        self._command_line = bytearray(rest)
        return [le.ReleaseAsked() for line in lines if json.loads(line).get("op") == "release"]

    def _of_a_still_parent(self) -> list[le.LeaseEvent]:
        ticks_max = PARENT_STILL_LEASES * self._terms.ttl_s / self._terms.heartbeat_s
        return [le.ParentDied()] if self._unread_ticks > ticks_max else []

    def _tell(self, word: str, **facts: str) -> bool:
        """False when the parent does not read; or is dead, which the end of stdin says."""
        line = json.dumps({"ev": word, **facts}).encode() + b"\n"
        try:
            os.write(self._events, line)
        except OSError:
            return False
        return True

    def _tell_alive(self) -> None:
        if now() - self._alive_told_at >= self._terms.heartbeat_s / 2:
            self._alive_told_at = now()
            self._unread_ticks = 0 if self._tell("alive") else self._unread_ticks + 1

    # --- effects --------------------------------------------------------------------------------

    def _perform(self, effects: list[le.LeaseEffect]) -> None:
        for effect in effects:
            follow_ups: list[le.LeaseEvent] = []
            match effect:
                case le.Connect():
                    follow_ups = self._line.connect()
                case le.Request():
                    follow_ups = self._line.send(
                        lease_wire.request(
                            effect.op,
                            request_id=effect.request_id,
                            incarnation=self._incarnation,
                            terms=self._terms,
                        )
                    )
                case le.Tell():
                    facts = {} if effect.reason is None else {"reason": str(effect.reason)}
                    self._tell(effect.word, message=effect.message, **facts)
                case le.FreezeTree():
                    self._frozen = freeze_incarnation(str(self._incarnation))
                case le.ThawTree():
                    thaw(self._frozen)
                    self._frozen = []
                case le.KillTree():
                    self._kill_tree()
                case le.End():
                    self._is_over = True
            for event in follow_ups:
                self._perform(self._lease.handle(event, now()))

    def _kill_tree(self) -> None:
        for _ in range(KILL_ROUNDS_MAX):
            outcome = process_tree.kill_incarnation(str(self._incarnation), limit_s=KILL_ROUND_S)
            if outcome.is_empty:
                return


def read_config(commands: int) -> dict[str, Any] | None:
    """The first line of stdin; None when the member died before it had said what to keep."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(commands, 1)
        if not piece or len(line) > CONFIG_BYTES_MAX:
            return None
        line += piece
    config: dict[str, Any] = json.loads(line)
    return config


def main() -> int:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a line that it is about
    config = read_config(0)
    if config is None:
        return 1
    return Keeper(config, commands=0, events=1).run()


if __name__ == "__main__":
    sys.exit(main())
