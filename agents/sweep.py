"""The sweep: ends whatever of a run still runs on one machine, and says what it could not end.

It is for a machine whose agent nobody can rely on any more: dead, frozen, or cut off and back again. Several machines
may be simulated on one host, so a run's name is not enough: what is swept are the lives that began on this machine.

How they are found: each life has its folder (`agents.preparation`), in which the processes that could still start
something have signed in (`agents.signing_in`: the member's agent, its launcher); what they started to serve it bears
its name in GANGMESH_SERVES (the keeper, the supervisor), and the command's own processes in NODUS_INCARNATION.

Rules of this file:
1. It ends the lives that were there when it began, and no later ones.
2. Blocking: call it in a thread or a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from agents import control_group, process_tree
from agents.machine_folder import GATEWAY_VARIABLE, machine_folder
from agents.preparation import remove_run
from agents.signing_in import SERVES_VARIABLE, close, signed_in
from agents.supervisor_protocol import INCARNATION_VARIABLE
from mesh.ids import Incarnation, RunUid
from mesh.net import firewall

_STATE_VARIABLE = "NODUS_STATE_DIR"


def sweep_run(uid: RunUid, *, machine_dir: Path, limit_s: float) -> list[str]:
    """Ends everything of the run on this machine; what remains after `limit_s` for each life, in words."""
    run_dir = machine_dir / "runs" / uid
    lives = {str(incarnation): folder for incarnation, folder in _lives(uid, run_dir)}
    for folder in lives.values():
        close(folder)
    names = {*lives, *_names_in_environments(uid, run_dir)}
    remains = []
    for name in sorted(names):
        roots = [*_serving(name), *(signed_in(lives[name]) if name in lives else ())]
        outcome = process_tree.kill_incarnation(name, roots=roots, limit_s=limit_s)
        remains += [f"process {pid} ({process_tree.executable_name(pid)})" for pid in outcome.remaining]
    return remains


def sweep_here(machines_dir: str, machine: str, uid: RunUid, limit_s: float) -> list[str]:
    """`sweep_run` as Ray runs it on the machine, and whatever the run has left in its firewall."""
    remains = sweep_run(uid, machine_dir=machine_folder(machines_dir, machine), limit_s=limit_s)
    if GATEWAY_VARIABLE in os.environ:
        firewall.sweep_run(uid)
    return remains


def remove_run_here(machines_dir: str, machine: str, uid: RunUid) -> None:
    """`remove_run` as Ray runs it on the machine."""
    remove_run(uid, machine_dir=machine_folder(machines_dir, machine))


def _lives(uid: RunUid, run_dir: Path) -> Iterator[tuple[Incarnation, Path]]:
    """The lives of the run that have a folder here."""
    for folder in run_dir.glob("*/epochs/*"):
        epoch, _, token = folder.name.partition("-")
        try:
            yield Incarnation.parse(f"{uid}.{epoch}.{folder.parents[1].name}.{token}"), folder
        except ValueError:
            continue


def _names_in_environments(uid: RunUid, run_dir: Path) -> set[str]:
    """The lives of the run whose processes say that they began here."""
    here = os.fsencode(run_dir) + b"/"
    found = set()
    for environment in _environments().values():
        name = os.fsdecode(environment.get(INCARNATION_VARIABLE.encode(), b""))
        if name.startswith(f"{uid}.") and environment.get(_STATE_VARIABLE.encode(), b"").startswith(here):
            found.add(name)
    return found


def _serving(name: str) -> list[int]:
    wanted = name.encode()
    return [pid for pid, e in _environments().items() if e.get(SERVES_VARIABLE.encode()) == wanted]


def _environments() -> dict[int, dict[bytes, bytes]]:
    """Of every process that we may look into, as it was started."""
    found = {}
    for pid in process_tree.snapshot():
        block = control_group.read_bytes(f"/proc/{pid}/environ")
        if b"NODUS_" in block or SERVES_VARIABLE.encode() in block:
            found[pid] = dict(entry.split(b"=", 1) for entry in block.split(b"\0") if b"=" in entry)
    return found
