"""The shim on a machine of the mesh whose agent may not use nftables: in the agent, in Ray's processes, in commands.

Theory of operation. The agent has to have the library from its start, so it starts itself again with it (`load`). When
the head has told it who it is, it takes its place (`take`): from then on it, and all that it starts, reach the overlay.
What a command is given is another place on the same machine: that of the member (`of_command`).

Rules of this file:
1. nftables where they can be used: they are transparent to every program.
2. The user's own LD_PRELOAD is for the user's commands, and in none of our processes.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mesh.errors import DeploymentError
from mesh.net.overlay import member_overlay, number_of
from mesh.net.programs import not_installed
from mesh.net.shim.library import (
    CONFIG_VARIABLE,
    LIBRARY,
    PRELOAD_VARIABLE,
    ShimPlace,
    missing,
    read_place,
    shim_environment,
)
from mesh.reasons import Reason

VARIABLES = (CONFIG_VARIABLE, PRELOAD_VARIABLE)
NONE = {CONFIG_VARIABLE: ""}
"""For a program that is started by one with the shim, and has to do without it."""
_CAP_NET_ADMIN = 12  # linux/capability.h


def why_no_redirect() -> str | None:
    """What this process lacks to use nftables; None when it may."""
    lacks = list(filter(None, [not_installed()]))
    if os.geteuid() != 0:
        lacks.insert(0, "the agent does not run as root")
    elif not may_administer_network(Path("/proc/self/status").read_text()):
        lacks.insert(0, "the agent has not the right to administer the network (CAP_NET_ADMIN)")
    return "; ".join(lacks) or None


def may_administer_network(status: str) -> bool:
    """By the text of /proc/self/status (proc(5))."""
    held = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(held) and bool(int(held[0], 16) & 1 << _CAP_NET_ADMIN)


def check() -> None:
    """Raises DeploymentError when this machine can carry the mesh in neither way; says what each lacks."""
    lacking = why_no_redirect()
    if lacking is not None and missing() is not None:
        raise DeploymentError(
            f"This machine cannot carry the mesh: {lacking}.",
            hint=f"With root (CAP_NET_ADMIN), nft, ip and a kernel with nf_tables it can. Without: {missing()}",
            reason=Reason.FORBIDDEN,
        )


def load() -> None:
    """The library is in this process when it returns, where it is needed. Call it first: it may start anew.

    Raises DeploymentError when the loader does not take it.
    """
    if why_no_redirect() is None or missing() is not None:
        return
    preloaded = os.environ.get(PRELOAD_VARIABLE, "")
    if not _is_loaded():
        if preloaded.partition(":")[0] == str(LIBRARY):  # it has started anew already
            raise DeploymentError(
                f"The loader of this machine's programs does not take the shim ({LIBRARY}).",
                hint="What it says stands above. Install gangmesh on this machine, or run as root with nftables.",
                reason=Reason.SHIM_NOT_LOADED,
            )
        own = ":".join(filter(None, (str(LIBRARY), preloaded)))
        os.execve(sys.executable, sys.orig_argv, {**os.environ, PRELOAD_VARIABLE: own})
    others = preloaded.removeprefix(str(LIBRARY)).removeprefix(":")
    if others:
        os.environ[PRELOAD_VARIABLE] = others
    else:
        os.environ.pop(PRELOAD_VARIABLE, None)


def _is_loaded() -> bool:
    return str(LIBRARY) in Path("/proc/self/maps").read_text()


def take(place: ShimPlace) -> None:
    """This process, and what it starts from now on, is there. Raises DeploymentError."""
    told = shim_environment({}, place)
    library = ctypes.CDLL(str(LIBRARY))
    if library.gangmesh_shim_take(told[CONFIG_VARIABLE].encode()) != 0:
        raise DeploymentError("The gateway's table cannot be used by this agent.", reason=Reason.INTERNAL)
    os.environ.update(told)


def is_in(environment: Mapping[str, str]) -> bool:
    """Whether a program with this environment has the shim."""
    return bool(environment.get(CONFIG_VARIABLE))


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """For the gateway, which is the other end: what it sees of its sockets has to be what the kernel says."""
    return {name: value for name, value in environment.items() if name not in VARIABLES} | NONE


def of_command(environment: Mapping[str, str], *, machine: Mapping[str, str], address: str) -> dict[str, str]:
    """What a member's command gets beside its environment; nothing on a machine that needs no shim.

    Args:
        environment: the command's own.
        machine: that of a process of the machine's agent, as Ray's are.
        address: the member's overlay address.
    """
    number = number_of(address)
    if not is_in(machine) or number is None:
        return {}
    place = read_place(machine[CONFIG_VARIABLE])
    own = member_overlay(number)
    others = tuple(other for other in place.addresses if other not in own)
    return shim_environment(environment, replace(place, addresses=(*own, *others)))
