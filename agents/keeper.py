"""The keeper: a small process that holds one member's lease, and ends the member's command when the lease is over.

    python -S -P agents/keeper.py        with PYTHONPATH naming our packages and msgpack

It is a process of its own so that no busy interpreter, no garbage collection and no Ray call can delay a heartbeat.

What it is told (stdin, JSON lines)
    {"store": {"host", "port", "secret"}, "incarnation": "uid.epoch.rank.token",
     "ttl_s", "guard_s", "heartbeat_s"}       once, first
    {"op": "release"}                         nothing runs any more: give the lease back and end
    end of file                               the member is dead: kill its tree, release nothing, end
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
3. It never waits for its parent: a pipe that is full loses "alive", and the lease is renewed all the same.
4. Only CLOCK_MONOTONIC counts, which a suspended machine does not advance: so CLOCK_BOOTTIME is read beside it, and
   the time that was slept away is counted as passed.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import time
from typing import Any

from agents import lease_wire, process_tree
from agents.core import lease as ls
from agents.freeze import freeze_incarnation, thaw
from mesh.errors import RemoteProtocolError
from mesh.ids import Incarnation
from mesh.store.protocol import ReplyStream

KILL_ROUND_S = 5.0
KILL_ROUNDS_MAX = 12
"""A minute: what cannot be killed by then waits in the kernel, and its member (if it lives) goes on telling so."""
READ_BYTES = 64 * 1024
CONFIG_BYTES_MAX = 64 * 1024
REPLY_BYTES_MAX = 1024 * 1024


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
        self._address = (str(store["host"]), int(store["port"]))
        self._secret = str(store["secret"])
        self._incarnation = Incarnation.parse(config["incarnation"])
        self._terms = ls.LeaseTerms(
            ttl_s=config["ttl_s"], guard_s=config["guard_s"], heartbeat_s=config["heartbeat_s"]
        )
        self._commands = commands
        self._events = events
        self._command_line = bytearray()
        self._lease = ls.Lease(terms=self._terms, started_at=now())
        self._socket: socket.socket | None = None
        self._is_connecting = False
        self._stream = ReplyStream(bytes_max=REPLY_BYTES_MAX)
        self._frozen: list[process_tree.Process] = []
        self._alive_told_at = float("-inf")
        self._is_over = False
        os.set_blocking(events, False)
        os.set_blocking(commands, False)

    def run(self) -> int:
        """Until the lease is over. Answers the exit code."""
        self._perform(self._lease.start())
        while not self._is_over:
            self._wait()
            for event in self._happened():
                self._perform(self._lease.handle(event, now()))
            self._tell_alive()
        self._disconnect()
        return 0

    # --- waiting --------------------------------------------------------------------------------

    def _wait(self) -> None:
        deadline = self._lease.next_deadline()
        wait_s = self._terms.heartbeat_s
        if deadline is not None:
            wait_s = min(wait_s, max(0.0, deadline - now()))
        poll = select.poll()
        poll.register(self._commands, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket, select.POLLOUT if self._is_connecting else select.POLLIN)
        poll.poll(wait_s * 1000 + 1)  # a whole millisecond more, so that the deadline has passed

    def _happened(self) -> list[ls.LeaseEvent]:
        """What the store said comes first: it may be the very renewal that the clock asks for."""
        return [*self._from_store(), *self._from_parent(), ls.Woke()]

    # --- the store ------------------------------------------------------------------------------

    def _from_store(self) -> list[ls.LeaseEvent]:
        if self._socket is None:
            return []
        if self._is_connecting:
            return self._finish_connecting(self._socket)
        events: list[ls.LeaseEvent] = []
        try:
            while data := self._socket.recv(READ_BYTES):
                told = map(lease_wire.event_of, self._stream.feed(data))
                events += [event for event in told if event is not None]
            events.append(ls.ConnectionLost())
        except BlockingIOError:
            return events
        except (OSError, RemoteProtocolError):
            events.append(ls.ConnectionLost())
        self._disconnect()
        return events

    def _connect(self) -> list[ls.LeaseEvent]:
        self._disconnect()
        host, port = self._address
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            self._socket = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self._socket.connect_ex(target)
        except OSError:
            return [ls.ConnectionLost()]
        if code not in (0, errno.EINPROGRESS):
            self._disconnect()
            return [ls.ConnectionLost()]
        self._is_connecting = True
        return []

    def _finish_connecting(self, connection: socket.socket) -> list[ls.LeaseEvent]:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        if not poll.poll(0):
            return []
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._disconnect()
            return [ls.ConnectionLost()]
        self._is_connecting = False
        self._stream = ReplyStream(bytes_max=REPLY_BYTES_MAX)
        return self._send(lease_wire.hello(secret=self._secret))

    def _send(self, frame: bytes) -> list[ls.LeaseEvent]:
        """A few hundred bytes into an empty socket buffer: whole, or the connection is of no use."""
        if self._socket is None:
            return [ls.ConnectionLost()]
        try:
            if self._socket.send(frame) == len(frame):
                return []
        except OSError:
            pass
        self._disconnect()
        return [ls.ConnectionLost()]

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._is_connecting = False

    # --- the parent -----------------------------------------------------------------------------

    def _from_parent(self) -> list[ls.LeaseEvent]:
        try:
            piece = os.read(self._commands, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            piece = b""
        if not piece:
            return [ls.ParentDied()]
        self._command_line += piece
        *lines, rest = bytes(self._command_line).split(b"\n")
        self._command_line = bytearray(rest)
        return [ls.ReleaseAsked() for line in lines if json.loads(line).get("op") == "release"]

    def _tell(self, word: str, **facts: str) -> None:
        line = json.dumps({"ev": word, **facts}).encode() + b"\n"
        try:
            os.write(self._events, line)
        except OSError:
            return  # the parent does not read, or is dead: the end of stdin says so

    def _tell_alive(self) -> None:
        if now() - self._alive_told_at >= self._terms.heartbeat_s / 2:
            self._alive_told_at = now()
            self._tell("alive")

    # --- effects --------------------------------------------------------------------------------

    def _perform(self, effects: list[ls.LeaseEffect]) -> None:
        for effect in effects:
            follow_ups: list[ls.LeaseEvent] = []
            match effect:
                case ls.Connect():
                    follow_ups = self._connect()
                case ls.Request():
                    follow_ups = self._send(
                        lease_wire.request(
                            effect.op,
                            request_id=effect.request_id,
                            incarnation=self._incarnation,
                            terms=self._terms,
                        )
                    )
                case ls.Tell():
                    facts = {} if effect.reason is None else {"reason": str(effect.reason)}
                    self._tell(effect.word, message=effect.message, **facts)
                case ls.FreezeTree():
                    self._frozen = freeze_incarnation(str(self._incarnation))
                case ls.ThawTree():
                    thaw(self._frozen)
                    self._frozen = []
                case ls.KillTree():
                    self._kill_tree()
                case ls.End():
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
    config = read_config(0)
    if config is None:
        return 1
    return Keeper(config, commands=0, events=1).run()


if __name__ == "__main__":
    sys.exit(main())
