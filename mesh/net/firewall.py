"""Who may open a connection to a member where its packets travel as they are: on the private and the public path.

Rules of this file:
1. One nftables table for each run and machine, written as one transaction: an epoch's members replace those of the one
   before, and there is no moment without rules, or with half of them. Its name says whose life it is, so that one that
   ends late takes away its own and not its successor's.
2. Only what would open something new towards this machine is looked at, only on ports from MEMBER_PORT_MIN on, and only
   when nobody listened on that port before the gang came: ssh, the mesh port and the owner's services stay as they
   are. What the machine itself opens is never touched, nor its answers.
3. Connections of a removed member are cut by their own ends: the processes of an epoch are dead before the next one
   opens, and nothing that an older epoch had open can reach a new process, which has to be dialled anew. So nothing
   here needs the kernel's connection tracking for TCP. Datagrams are told apart by it, and where it is missing they
   are let alone (`has_tracking`).
4. The text of the rules is pure. The functions that run `nft` block.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterable
from ipaddress import ip_address
from pathlib import Path

from mesh.errors import DeploymentError
from mesh.ids import Incarnation, RunUid
from mesh.net.gate import MEMBER_PORT_MIN
from mesh.net.programs import ProgramFailed, run_program
from mesh.net.redirect import removal, table_name
from mesh.reasons import Reason

BEFORE_OTHERS = -5
"""The hook's priority: what is dropped here, no later table gets to see."""
_LISTENING = "0A"
_TABLE = re.compile(r"^table inet (gangmesh_[0-9a-f]{12}_([0-9a-f]{16})_[0-9a-f]{16})$", re.MULTILINE)


def life_table(deployment: str, life: Incarnation) -> str:
    """The table of one life of a run on a machine."""
    return f"{table_name(deployment)}_{life.run_uid}_{life.token}"


def rules(
    table: str,
    *,
    members: Iterable[str],
    instead_of: Iterable[str] = (),
    open_tcp: Collection[int] = (),
    open_udp: Collection[int] = (),
    has_tracking: bool = True,
) -> str:
    """What `nft -f` is given: the old table goes and the new one comes, or nothing happens.

    Args:
        members: addresses of the epoch's members on this path.
        instead_of: tables of the run's earlier lives, which go in the same moment.
        open_tcp, open_udp: ports of the machine's own, which stay open to everybody.
        has_tracking: the kernel tracks connections; without it datagrams are let alone.
    """
    addresses = [ip_address(text) for text in members]
    sets = [
        _set(f"members{family}", f"ipv{family}_addr", [a for a in addresses if a.version == family])
        for family in (4, 6)
    ]
    sets += [
        _set("open_tcp", "inet_service", sorted(open_tcp)),
        _set("open_udp", "inet_service", sorted(open_udp)),
    ]
    datagrams = "ct state != new return" if has_tracking else "return"
    before = "".join(removal(name) for name in dict.fromkeys((table, *instead_of)))
    return f"""{before}table inet {table} {{
{"".join(sets)}  chain arriving {{
    type filter hook input priority {BEFORE_OTHERS}; policy accept;
    iifname "lo" return
    meta l4proto != {{ tcp, udp }} return
    th dport < {MEMBER_PORT_MIN} return
    ip saddr @members4 return
    ip6 saddr @members6 return
    meta l4proto tcp tcp flags & (syn | ack) != syn return
    tcp dport @open_tcp return
    udp dport @open_udp return
    meta l4proto udp {datagrams}
    counter drop
  }}
}}
"""


def tables_in(listing: str) -> dict[str, RunUid]:
    """The tables of runs that `nft list tables` has printed, and whose they are."""
    return {table: RunUid(run) for table, run in _TABLE.findall(listing)}


def ports_in(table: str, *, listening: bool) -> frozenset[int]:
    """The local ports in a table of /proc/net, from MEMBER_PORT_MIN on; only those that listen, or all."""
    found = set()
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) > 3 and (not listening or words[3] == _LISTENING):
            found.add(int(words[1].rpartition(":")[2], 16))
    return frozenset(port for port in found if port >= MEMBER_PORT_MIN)


def _set(name: str, kind: str, elements: Iterable[object]) -> str:
    text = ", ".join(map(str, elements))
    inside = f" elements = {{ {text} }};" if text else ""
    return f"  set {name} {{ type {kind};{inside} }}\n"


# ---- on the machine -----------------------------------------------------------------------------------


def admit_only(deployment: str, life: Incarnation, members: Iterable[str]) -> str:
    """In force when it returns; what there was for the run before is replaced. Returns what it does not cover, or "".

    Raises DeploymentError when this machine's firewall cannot be set: then nothing has changed.
    """
    members = list(members)
    tcp, udp = ports_in_use()

    def apply(*, has_tracking: bool) -> None:
        there = tables_in(run_program("nft", "list", "tables"))
        text = rules(
            life_table(deployment, life),
            members=members,
            instead_of=[table for table, owner in there.items() if owner == life.run_uid],
            open_tcp=tcp,
            open_udp=udp,
            has_tracking=has_tracking,
        )
        run_program("nft", "-f", "-", given=text)

    try:
        try:
            apply(has_tracking=True)
        except ProgramFailed as error:
            if "No such file" not in str(error):  # what nft says of an expression that the kernel has not
                raise
            apply(has_tracking=False)
            return "datagrams are not covered: the kernel tracks no connections"
    except ProgramFailed as error:
        lacking = "" if shutil.which("nft") else " It is in Debian's package nftables."
        raise DeploymentError(
            f"The firewall of this machine cannot be set: {error}.{lacking}",
            hint="It needs root (CAP_NET_ADMIN) and a kernel with nf_tables.",
            reason=Reason.FORBIDDEN,
        ) from error
    return ""


def ports_in_use() -> tuple[frozenset[int], frozenset[int]]:
    """Ports of this network namespace on which somebody listens (TCP), or that somebody has bound (UDP)."""
    tcp, udp = (
        frozenset[int]().union(
            *(ports_in(_read(Path("/proc/net", f"{kind}{v}")), listening=kind == "tcp") for v in ("", "6"))
        )
        for kind in ("tcp", "udp")
    )
    return tcp, udp


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # a kernel without this family
        return ""


def admit_all(deployment: str, life: Incarnation) -> None:
    """Takes away what this life has set; what a later one has set stays. No table, rights or `nft` is no error."""
    own = life_table(deployment, life)
    _remove(lambda table, owner: table == own)


def sweep_run(run: RunUid) -> None:
    """Takes away what there is for the run, of whatever deployment and life."""
    _remove(lambda table, owner: owner == run)


def sweep(deployment: str) -> None:
    """Takes away what runs of this deployment have left here after a crash; a machine has one member at a time."""
    prefix = f"{table_name(deployment)}_"
    _remove(lambda table, owner: table.startswith(prefix))


def _remove(is_meant: Callable[[str, RunUid], bool]) -> None:
    try:
        for table, owner in tables_in(run_program("nft", "list", "tables")).items():
            if is_meant(table, owner):
                run_program("nft", "-f", "-", given=removal(table))
    except ProgramFailed:
        return  # who may not look has made none
