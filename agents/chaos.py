"""Harm that is done to a machine, or to one rank on it, on purpose: `mesh chaos` rehearses a recovery with it.

    python -S -P agents/chaos.py        with PYTHONPATH naming our packages; a HarmOrder as JSON on stdin

What each kind does, on the machine itself:

| LoseMachine | SIGKILL, as good as at once, to the raylet, everything below it, and everything that serves or is a   |
|             | life on this machine: keepers, supervisors, commands. Whoever does it goes last                       |
| KillRank    | SIGKILL to the processes of the rank's command; its supervisor lives and tells                        |
| Freeze      | SIGSTOP to what LoseMachine would kill, SIGCONT after the time                                        |
| Cut         | nftables drop what comes to the machine's address and leaves it. Of a machine that is simulated on    |
|             | this host that is: its leases, its barrier, its logs, and what its ranks say to others. Ray's own     |
|             | calls go over 127.0.0.1 there and are not cut                                                         |

Rules of this file:
1. Standard library only, apart from our modules that import nothing else.
2. What is undone after a time is undone by a process of its own, which belongs to nobody on the machine: it lives on
   while everything stands still, undoes at once when it is told to end, and never waits longer than SECONDS_MAX.
3. A process is its pid and its start time: no other process is ever hit.
4. A cut is a table of its own, named after the deployment. `remove_cuts` takes away what a killed process left.
5. Nobody hears the process that cuts and mends: what it could not do it leaves as a note, and `left_of` tells it, and
   mends what a killed one left, to whoever asks once the time is over.
"""

from __future__ import annotations

import ipaddress
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents import control_group, process_tree
from agents.freeze import freeze, thaw
from agents.ray_environment import MARK
from agents.signing_in import SERVES_VARIABLE
from agents.supervisor_protocol import INCARNATION_VARIABLE
from mesh.ids import Incarnation, MachineName
from mesh.states import HarmKind

SECONDS_MAX = 600.0
KILL_LIMIT_S = 5.0
ANSWER_LEAVES_S = 0.2
"""Between the order and what silences the machine: so long has its answer to get away."""
NFT_LIMIT_S = 10.0
NOTES = Path("/run")
"""Only root cuts, and only root writes there."""
TABLE_PREFIX = "gangmesh_chaos"
_RAYLET_OF = "--node-name="
_KEEPER = b"keeper.py"
_DETACHING_SHELL = ("/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- >/dev/null 2>&1 &', "sh")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmOrder:
    """What is done, to whom."""

    kind: HarmKind
    machine: MachineName
    address: str
    incarnation: Incarnation
    """The rank that is meant."""
    lives: tuple[Incarnation, ...]
    """Every life on the machine, that one too, of whatever run."""
    seconds: float | None = None
    """After which it is undone; set exactly for kinds that are for a time."""
    is_one_way: bool = False
    """Of a cut: only what leaves the machine is lost."""

    def to_record(self) -> dict[str, Any]:
        """Plain JSON-able data; `from_record` is the inverse."""
        return {
            "kind": str(self.kind),
            "machine": self.machine,
            "address": self.address,
            "incarnation": str(self.incarnation),
            "lives": [str(life) for life in self.lives],
            "seconds": self.seconds,
            "is_one_way": self.is_one_way,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> HarmOrder:
        return cls(
            kind=HarmKind(record["kind"]),
            machine=MachineName(record["machine"]),
            address=record["address"],
            incarnation=Incarnation.parse(record["incarnation"]),
            lives=tuple(Incarnation.parse(life) for life in record["lives"]),
            seconds=record["seconds"],
            is_one_way=record["is_one_way"],
        )


# ---- on the machine, in a process that the machine's own raylet started ------------------------------


def why_not(order: HarmOrder) -> str | None:
    """Why this machine cannot do it, in a sentence; None when it can. Changes nothing."""
    if order.kind is not HarmKind.CUT:
        return None
    if os.geteuid() != 0:
        return f"{order.machine} cannot be cut off: that takes root there (nftables)."
    if shutil.which("nft") is None:
        return f"{order.machine} cannot be cut off: the program nft is not there (package nftables)."
    script = cut_script(table=table_name(order.machine), address=order.address, is_one_way=order.is_one_way)
    done = _nft("--check", "-f", "-", script=script)
    return None if done.returncode == 0 else f"{order.machine} cannot be cut off: {done.stderr.strip()}"


def left_of(order: HarmOrder) -> str | None:
    """What is still wrong once it should be over, in a sentence without its subject; None when nothing is."""
    if order.kind is not HarmKind.CUT:
        return None
    table, note = table_name(order.machine), note_file(order.machine)
    if note.is_file():
        said = note.read_text(errors="replace")
        note.unlink(missing_ok=True)
        return said
    if _nft("list", "table", "inet", table).returncode != 0:
        return None  # it is not there
    done = _nft("delete", "table", "inet", table)
    return None if done.returncode == 0 else _still_cut(table, done)


def perform(order: HarmOrder) -> None:
    """Does it. After LoseMachine there is nobody left to return."""
    match order.kind:
        case HarmKind.KILL_RANK:
            process_tree.kill_incarnation(str(order.incarnation), limit_s=KILL_LIMIT_S)
        case HarmKind.LOSE_MACHINE:
            kill_machine(order, raylet=find_raylet(order.machine))
            os.kill(os.getpid(), signal.SIGKILL)
        case HarmKind.FREEZE | HarmKind.CUT:
            start_undoer(order, raylet=find_raylet(order.machine))


def find_raylet(machine: MachineName) -> int | None:
    """The machine's raylet, which this process descends from; None when it does not."""
    name = os.fsencode(f"{_RAYLET_OF}{machine}")
    processes = process_tree.snapshot()
    for pid in process_tree.lineage(processes, os.getpid()):
        if name in control_group.read_bytes(f"/proc/{pid}/cmdline").split(b"\0"):
            return pid
    return None


def find_machine(order: HarmOrder, *, raylet: int | None) -> dict[int, process_tree.Process]:
    """Everything of the machine, by pid."""
    processes = process_tree.snapshot()
    names = {os.fsencode(str(life)) for life in order.lives}
    roots = {pid for pid in processes if _names_of(pid) & names}
    if raylet is not None:
        roots.add(raylet)
    found = (roots | process_tree.descendants(processes, roots)) - {os.getpid()}
    return {pid: processes[pid] for pid in found & processes.keys() if processes[pid].is_alive}


def kill_machine(order: HarmOrder, *, raylet: int | None) -> None:
    """Everything of it is stopped, so that nobody sees another one die, and then killed; this process is spared."""
    deadline = time.monotonic() + KILL_LIMIT_S
    while found := find_machine(order, raylet=raylet):
        process_tree.kill_found(found, lambda: find_machine(order, raylet=raylet))
        process_tree.wait_until_one_ends(found.values(), limit_ms=process_tree.WAIT_BETWEEN_ROUNDS_MS)
        if time.monotonic() >= deadline:
            return


def _names_of(pid: int) -> set[bytes]:
    """The lives that the process says it is of, or serves."""
    block = control_group.read_bytes(f"/proc/{pid}/environ")
    marks = (os.fsencode(INCARNATION_VARIABLE) + b"=", os.fsencode(SERVES_VARIABLE) + b"=")
    return {entry.partition(b"=")[2] for entry in block.split(b"\0") if entry.startswith(marks)}


# ---- for a time --------------------------------------------------------------------------------------


def start_undoer(order: HarmOrder, *, raylet: int | None) -> None:
    """Starts the process that does it and undoes it. Returns when that has its order."""
    roots = dict.fromkeys(str(Path(module).resolve().parents[1]) for module in (__file__, _mesh_file()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
    command = [*_DETACHING_SHELL, sys.executable, "-S", "-P", __file__]
    record = {**order.to_record(), "raylet": raylet}
    subprocess.run(
        command,
        input=json.dumps(record).encode(),
        env=environment,
        check=True,
        start_new_session=True,
        timeout=KILL_LIMIT_S,
    )


def _mesh_file() -> str:
    import mesh

    return str(mesh.__file__)


def send_keepers_the_long_way(order: HarmOrder) -> None:
    """A keeper on its store's own machine talks to it by a Unix socket, which no filter sees."""
    names = {os.fsencode(str(life)) for life in order.lives}
    for pid, process in process_tree.snapshot().items():
        words = control_group.read_bytes(f"/proc/{pid}/cmdline").split(b"\0")
        if any(word.rpartition(b"/")[2] == _KEEPER for word in words) and _names_of(pid) & names:
            process_tree.send_signal(process, signal.SIGUSR1)


def cut_script(*, table: str, address: str, is_one_way: bool) -> str:
    """What nft is told. Dropped where it arrives when that is this host, since a drop where it leaves is seen there."""
    ip = ipaddress.ip_address(address)
    family = "ip" if ip.version == 4 else "ip6"
    hooks = ["input"] if ip.is_loopback else ["input", "output"]
    rules = [f"{family} saddr {ip} {family} daddr {ip} accept", f"{family} saddr {ip} drop"]
    if not is_one_way:
        rules.append(f"{family} daddr {ip} drop")
    lines = [f"add table inet {table}"]
    for hook in hooks:
        lines.append(f"add chain inet {table} {hook} {{ type filter hook {hook} priority -300 ; }}")
        lines += [f"add rule inet {table} {hook} {rule}" for rule in rules]
    return "\n".join(lines) + "\n"


def table_name(machine: str) -> str:
    """Of this deployment's cut of a machine."""
    letters = "".join(c if c.isalnum() else "_" for c in machine)
    return f"{TABLE_PREFIX}_{os.environ.get(MARK, 'none')}_{letters}"


def note_file(machine: str) -> Path:
    """Where the process that cuts a machine off writes what it could not do."""
    return NOTES / f"{table_name(machine)}.failed"


def _still_cut(table: str, done: subprocess.CompletedProcess[str]) -> str:
    return f"is still cut off ({done.stderr.strip()}). There, as root: nft delete table inet {table}"


def remove_cuts(deployment_id: str) -> None:
    """Takes away every cut that this deployment has left on this host. Nothing to do, or no right to, is no error."""
    if os.geteuid() != 0 or shutil.which("nft") is None:
        return
    for line in _nft("list", "tables").stdout.splitlines():
        words = line.split()
        if words[:2] == ["table", "inet"] and words[2].startswith(f"{TABLE_PREFIX}_{deployment_id}_"):
            _nft("delete", "table", "inet", words[2])


def _nft(*arguments: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["nft", *arguments],
        input=script,
        stdin=subprocess.DEVNULL if script is None else None,
        capture_output=True,
        text=True,
        timeout=NFT_LIMIT_S,
        check=False,
    )


def _wait(wakeup: int, seconds: float) -> None:
    """Returns early when somebody wants this process to end."""
    select.select([wakeup], [], [], min(seconds, SECONDS_MAX))


def main() -> int:
    """Does it, waits, undoes it."""
    wakeup, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    record = json.loads(sys.stdin.buffer.read())
    raylet = record.pop("raylet")
    order = HarmOrder.from_record(record)
    assert order.seconds is not None, "only what is undone after a time comes here"
    _wait(wakeup, ANSWER_LEAVES_S)
    if order.kind is HarmKind.FREEZE:
        stopped = freeze(lambda: find_machine(order, raylet=raylet))
        _wait(wakeup, order.seconds)
        thaw(stopped)
        return 0
    return _cut_for_a_time(order, wakeup, order.seconds)


def _cut_for_a_time(order: HarmOrder, wakeup: int, seconds: float) -> int:
    table = table_name(order.machine)
    script = cut_script(table=table, address=order.address, is_one_way=order.is_one_way)
    done = _nft("-f", "-", script=script)
    if done.returncode != 0:
        note_file(order.machine).write_text(f"was not cut off: {done.stderr.strip()}")
        return done.returncode
    send_keepers_the_long_way(order)
    _wait(wakeup, seconds)
    done = _nft("delete", "table", "inet", table)
    if done.returncode != 0:
        note_file(order.machine).write_text(_still_cut(table, done))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
