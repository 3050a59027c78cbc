"""Captures connections to overlay addresses with nftables, and keeps those addresses on this machine.

Rules of this file:
1. One table per deployment, written as one transaction: there is no moment without rules, or with half of them.
2. Nothing else on the machine is touched; what is ours can be told by its name, and is taken away at the end, or, after
   a crash, replaced at the next start.
3. Nothing for an overlay address ever leaves the machine in the clear: what is not TCP is rejected, a dead gateway
   means "connection refused", and without the rules the route ends at a device that leads nowhere. Nor does anything
   come in: what arrives for an overlay address, or for a port that is the mesh's alone, is dropped, and stays so when
   the gateway is killed.
4. Overlay addresses are on a device of their own, since gloo and NCCL are told names of interfaces and pass `lo` by. It
   is a veth pair with both ends here: it carries nothing, is up, and every kernel has it.
5. The text of the rules is pure; `apply` and the others run `nft` and `ip`, each with a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Sequence
from ipaddress import ip_address, ip_network

from mesh.errors import DeploymentError
from mesh.net import other_gateways
from mesh.net.overlay import MEMBERS_V4, MEMBERS_V6
from mesh.net.programs import ProgramFailed, not_installed, run_program
from mesh.reasons import Reason

OVERLAY = ("198.18.0.0/15", "fd67:6d00::/32")
"""Where overlay addresses are taken from. The first is RFC 2544's, for benchmarks: no provider routes it."""
_UNPACED = ("congctl", "reno")
"""Of routes that programs here reach their gateway by, and it them: BBR, where it is the system's, only costs on one
host (see sockets.py). Reno is in every kernel."""
_KERNELS = ("proto", "kernel", "scope", "host")
"""How the kernel's own routes to addresses of this machine are marked."""
_log = logging.getLogger(__name__)


def table_name(deployment: str) -> str:
    """The table of a deployment: nft takes few characters in a name, a deployment's name may have others."""
    return f"gangmesh_{hashlib.sha256(deployment.encode()).hexdigest()[:12]}"


def device_name(deployment: str) -> str:
    """The device that has this machine's overlay addresses; a name has 15 characters at most."""
    return f"gm{hashlib.sha256(deployment.encode()).hexdigest()[:10]}"


def rules(
    table: str, *, overlay: Sequence[str], capture_port: int, closed: Sequence[tuple[int, int]] = ()
) -> str:
    """What `nft -f` is given: the old table goes and the new one comes, or nothing happens.

    Args:
        closed: ports (first, last) that Ray has on every address: from elsewhere nobody connects to them, nor does
            anybody at a member's address, whose streams may come from a peer.
    """
    networks = [ip_network(text) for text in overlay]
    matches = [f"    {'ip' if net.version == 4 else 'ip6'} daddr {net}" for net in networks]
    redirects = "\n".join(f"{match} meta l4proto tcp redirect to :{capture_port}" for match in matches)
    rejects = "\n".join(f"{match} reject with icmpx admin-prohibited" for match in matches)
    outside = "\n".join(f"{match} drop" for match in matches)
    ports = ", ".join(f"{first}-{last}" for first, last in closed)
    begins = "tcp flags & (syn | ack) == syn"
    shut = f"    {begins} tcp dport {{ {ports} }} drop" if closed else ""
    own = "\n".join(
        f"    {family} daddr {net} {begins} tcp dport {{ {ports} }} reject with tcp reset"
        for family, net in (("ip", MEMBERS_V4), ("ip6", MEMBERS_V6))
        if closed
    )
    return f"""table inet {table} {{}}
delete table inet {table}
table inet {table} {{
  chain capture {{
    type nat hook output priority -100; policy accept;
    fib daddr type local return
{redirects}
  }}
  chain keep {{
    type filter hook output priority 0; policy accept;
    fib daddr type local return
{rejects}
  }}
  chain guard {{
    type filter hook input priority -5; policy accept;
{own}
    iifname "lo" accept
{outside}
{shut}
  }}
}}
"""


def removal(table: str) -> str:
    """Takes the table away, also when it is not there."""
    return f"table inet {table} {{}}\ndelete table inet {table}\n"


async def apply(
    deployment: str,
    *,
    overlay: Sequence[str],
    capture_port: int,
    closed: Sequence[tuple[int, int]] = (),
) -> None:
    """Device, routes and rules are in force when it returns; what was there before is gone, addresses too.

    Raises DeploymentError; then nothing of ours is there. Where another gateway runs it is left as it is.
    """
    lacking = not_installed()
    if lacking is not None:
        raise DeploymentError(
            f"Connections cannot be redirected: {lacking}.", hint=_OTHERWISE, reason=Reason.FORBIDDEN
        )
    await asyncio.to_thread(other_gateways.clear, overlay)
    try:
        await _make_device(device_name(deployment))
        await _lead_to_device(deployment, overlay)
        text = rules(table_name(deployment), overlay=overlay, capture_port=capture_port, closed=closed)
        await _run("nft", "-f", "-", given=text)
    except ProgramFailed as error:
        await remove(deployment)
        raise DeploymentError(
            f"Connections cannot be redirected: {error}", hint=_OTHERWISE, reason=Reason.FORBIDDEN
        ) from error


async def remove(deployment: str) -> None:
    """Takes rules, device, routes and addresses away. May be called again."""
    try:
        await _run("nft", "-f", "-", given=removal(table_name(deployment)))
    except ProgramFailed as error:
        _log.warning("the rules of %s stay: %s", deployment, error)
    with contextlib.suppress(ProgramFailed):  # it was not there
        await _run("ip", "link", "del", device_name(deployment))


async def _make_device(name: str) -> None:
    with contextlib.suppress(ProgramFailed):  # it was not there
        await _run("ip", "link", "del", name)
    far = f"{name}p"
    # The largest packets: what is captured goes over `lo`, with the segment size of this device.
    await _run(*f"ip link add {name} mtu 65535 type veth peer name {far} mtu 65535".split())
    for end in (name, far):
        await _run("ip", "link", "set", end, "up")


async def give_address(deployment: str, address: str) -> None:
    """This overlay address is this machine's. Raises DeploymentError."""
    try:
        await _run(
            "ip", "address", "replace", _host(address), "dev", device_name(deployment), *_no_dad(address)
        )
        if ip_address(address).version == 4:  # of IPv6 the kernel lets its own routes not be changed
            route = ("local", address, "dev", device_name(deployment), "src", address)
            await _run(*("ip", "route", "change", "table", "local", *_KERNELS, *route, *_UNPACED))
    except ProgramFailed as error:
        raise DeploymentError(
            f"{address} cannot be made an address of this machine: {error}", reason=Reason.FORBIDDEN
        ) from error


async def take_address(deployment: str, address: str, *, overlay: Sequence[str]) -> None:
    """It is not any more. May be called again.

    With the last IPv4 address of a device the kernel takes the routes to it away.
    """
    with contextlib.suppress(ProgramFailed):  # it was not there
        await _run("ip", "address", "del", _host(address), "dev", device_name(deployment))
    try:
        await _lead_to_device(deployment, overlay)
    except ProgramFailed as error:
        raise DeploymentError(
            f"Overlay addresses have no route any more: {error}", reason=Reason.FORBIDDEN
        ) from error


async def _lead_to_device(deployment: str, overlay: Sequence[str]) -> None:
    for text in overlay:
        route = (str(ip_network(text)), "dev", device_name(deployment))
        await _run("ip", "route", "replace", *route, *_UNPACED)


_OTHERWISE = "It needs root (CAP_NET_ADMIN) and a kernel with nf_tables."


async def _run(*command: str, given: str = "") -> None:
    """In a thread: uvloop's own subprocesses lose a stdin whose reader has ended."""
    await asyncio.to_thread(run_program, *command, given=given)


def _host(address: str) -> str:
    ip = ip_address(address)
    return f"{ip}/{ip.max_prefixlen}"


def _no_dad(address: str) -> tuple[str, ...]:
    """Without it a new IPv6 address cannot be used for a second, while nobody is asked whether it is taken."""
    return ("nodad",) if ip_address(address).version == 6 else ()
