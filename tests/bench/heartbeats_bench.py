"""What 10,000 members' heartbeats cost the store: its share of one core, over 8,000 real sockets.

Each socket holds a lease of its own and renews it as often as makes 10,000 members' two renewals a second together. The
store is alone in its process; its processor time is the kernel's figure for that process, network included. There is
nothing to compare with: TCPStore has no leases. The second figure is how many renewals were answered a second, against
how many were sent.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from pathlib import Path
from typing import Any

from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.messages import HEARTBEAT_S, LEASE_GUARD_S
from mesh.plan import Endpoint
from mesh.store import messages as ms
from mesh.store.client import StoreClient
from mesh.store.protocol import ReplyEncoder, encode_request
from tests.bench import raw_clients as raw
from tests.bench import store_bench as sb

MEMBERS = 10_000
SOCKETS = 8_000
RANKS = 4_000
"""Of one gang; there are two."""
EPOCH = Epoch(1)
TARGET_CORE = 0.5
DONE_BYTES = 11
TTL_S = 60.0
"""None is to lapse only because this machine is busy."""
SLICE_S = 0.02


def run(quick: bool) -> list[dict[str, Any]]:
    """The rows, taken in a process of its own."""
    return sb.in_own_process(lambda: take_rows(quick))


def take_rows(quick: bool) -> list[dict[str, Any]]:
    raw.allow_sockets(SOCKETS)
    with sb.process(sb.serve_ours) as port:
        pid = _server_pid()
        instance = asyncio.run(_set_floors(port))
        clients = raw.RawClients(port, SOCKETS)
        welcome = len(ReplyEncoder().encode(ms.Welcome(1, instance, ms.Role.MEMBER)))
        hello = encode_request(ms.Hello(1, sb.SECRET_MEMBER, ms.PROTOCOL_VERSION))
        clients.ask_all([hello] * SOCKETS, welcome)
        frames = [_renewal(place) for place in range(SOCKETS)]
        for _ in range(2):  # the leases, and the frames that the store knows from then on
            clients.ask_all(frames, DONE_BYTES)
        seconds = 4.0 if quick else 15.0
        wanted = MEMBERS / HEARTBEAT_S
        before, began = cpu_s(pid), time.perf_counter()
        answered = beat(clients, frames, rate=wanted, seconds=seconds)
        passed = time.perf_counter() - began
        share = (cpu_s(pid) - before) / passed * (wanted / (answered / passed))
        clients.close()
    return [
        {
            "name": f"heartbeats: {MEMBERS:,} members, share of a core", "ours": share, "theirs": None,
            "ratio": None, "unit": "cores", "target": f"≤ {TARGET_CORE:g}", "ok": share <= TARGET_CORE,
        },
        {
            "name": "heartbeats: answered a second, of those sent", "ours": answered / passed, "theirs": wanted,
            "ratio": answered / passed / wanted, "unit": "1/s", "target": None, "ok": None,
        },
    ]  # fmt: skip


def beat(clients: raw.RawClients, frames: list[bytes], *, rate: float, seconds: float) -> int:
    """Sends that many renewals a second, evenly, one client after the other; how many were answered."""
    poll = select.epoll()
    for file in clients.files:
        poll.register(file, select.EPOLLIN)
    sent, answered_bytes = 0, 0
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds or answered_bytes < sent * DONE_BYTES:
        due = min(int(passed * rate), int(seconds * rate)) - sent
        for _ in range(min(due, int(rate * SLICE_S))):
            place = sent % len(frames)
            os.write(clients.files[place], frames[place])
            sent += 1
        for file, _ in poll.poll(SLICE_S / 10, 4096):
            answered_bytes += len(os.read(file, 4096))
        if passed > seconds + raw.ANSWER_LIMIT_S:
            raise RuntimeError("the store does not answer")
    poll.close()
    return answered_bytes // DONE_BYTES


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, its own and the kernel's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _server_pid() -> int:
    """The one child that this process has."""
    (pid,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return int(pid)


def _renewal(place: int) -> bytes:
    gang, rank = RunUid(f"heartbeats-{place // RANKS}"), Rank(place % RANKS)
    token = IncarnationToken(f"{place:016x}")
    return encode_request(ms.GrantLease(1, gang, EPOCH, rank, token, TTL_S, LEASE_GUARD_S))


async def _set_floors(port: int) -> str:
    admin = await StoreClient.connect(Endpoint(host="127.0.0.1", port=port, secret=sb.SECRET_ADMIN))
    for number in range(SOCKETS // RANKS):
        await admin.set_floor(RunUid(f"heartbeats-{number}"), EPOCH, RANKS, is_first=True)
    await admin.close()
    return admin.instance
