"""Rules for the overlay that are on this machine already: of a gateway that was killed, or of one that runs.

Rules of this file:
1. What is ours can be told by its name (`redirect.table_name`); nothing else is looked at.
2. Whose gateway is dead, goes: its rules would lead every connection to the overlay to a port that nobody has.
3. Beside one that runs no other can be: both would capture the same addresses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.errors import DeploymentError
from mesh.net.programs import ProgramFailed, run_program
from mesh.reasons import Reason

GATEWAY_MODULE = "agents.gateway"
_TABLE = re.compile(r"table inet (gangmesh_([0-9a-f]{10})[0-9a-f]{2})$")
_CAPTURE = re.compile(r"ip6? daddr (\S+) .*redirect to :(\d+)")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTable:
    """Rules of some gateway."""

    name: str
    device: str
    networks: tuple[str, ...]
    capture_port: int | None
    """None when the rules are not whole."""


def tables_in(listed: str) -> list[tuple[str, str]]:
    """Names of tables and devices of gateways, from `nft list tables`."""
    found = [_TABLE.fullmatch(line.strip()) for line in listed.splitlines()]
    return [(match[1], f"gm{match[2]}") for match in found if match]


def read_table(name: str, device: str, text: str) -> OtherTable:
    """From `nft list chain inet NAME capture`."""
    matches = _CAPTURE.findall(text)
    return OtherTable(
        name=name,
        device=device,
        networks=tuple(network for network, _ in matches),
        capture_port=int(matches[0][1]) if matches else None,
    )


def overlaps(table: OtherTable, overlay: Sequence[str]) -> bool:
    """Whether it captures some of these addresses."""
    ours = [ipaddress.ip_network(text) for text in overlay]
    theirs = [ipaddress.ip_network(text, strict=False) for text in table.networks]
    return any(a.version == b.version and a.overlaps(b) for a in ours for b in theirs) or not theirs


def clear(overlay: Sequence[str]) -> None:
    """Takes away what dead gateways have left. Blocking.

    Raises DeploymentError when one runs whose addresses are some of these.
    """
    try:
        listed = run_program("nft", "list", "tables")
    except ProgramFailed as error:
        _log.warning("rules of other gateways are not looked for: %s", error)
        return
    for name, device in tables_in(listed):
        with contextlib.suppress(ProgramFailed):  # it went away meanwhile
            text = run_program("nft", "list", "chain", "inet", name, "capture")
            _clear_one(read_table(name, device, text), overlay)


def _clear_one(table: OtherTable, overlay: Sequence[str]) -> None:
    if not overlaps(table, overlay):
        return
    pid = None if table.capture_port is None else gateway_at(table.capture_port)
    if pid is not None:
        raise DeploymentError(
            f"Another gateway has the mesh's addresses on this machine (process {pid}).",
            hint="One machine is a head, or one machine of one deployment: end the other one first (`mesh leave`, "
            "`mesh down`).",
            reason=Reason.CONFLICT,
            pid=pid,
        )
    _log.warning("taking away the rules %s of a gateway that is dead", table.name)
    run_program("nft", "delete", "table", "inet", table.name)
    run_program("ip", "link", "del", table.device)


def gateway_at(port: int) -> int | None:
    """The pid of the gateway that captures at this port; None when nobody listens there, or somebody else."""
    import psutil

    for connection in psutil.net_connections(kind="tcp"):
        where = tuple(connection.laddr)  # empty where there is none
        if connection.status == psutil.CONN_LISTEN and where[1:] == (port,) and connection.pid is not None:
            with contextlib.suppress(psutil.Error):
                if GATEWAY_MODULE in psutil.Process(connection.pid).cmdline():
                    return int(connection.pid)
    return None
