"""A barrier of 1,024 and of 4,096 clients, beside torch.distributed.TCPStore's (libuv backend).

Like with like:
- both servers run alone in a process of their own on 127.0.0.1; the clients are real sockets of one process and one
  driver for both (`tests.bench.raw_clients`), which speaks each store's own frames;
- TCPStore's barrier is the one of torch's `_store_based_barrier`: everybody counts up, the last one sets a key, and
  everybody waits for it. Ours is one request: `Arrive`;
- after ours, everybody has everybody's address. For that, with TCPStore, everybody first sets its address, the last one
  reads them all (`multi_get`) and sets them as one key, and everybody waits for that key and gets it: the cheapest way
  that it has. That is another row, and the honest one to look at;
- a figure is the median of its rounds, which the two take in turns; a ratio is the median of neighbouring rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mesh.ids import Epoch, IncarnationToken, Rank
from mesh.plan import Endpoint
from mesh.store import messages as ms
from mesh.store.client import StoreClient
from mesh.store.protocol import ReplyEncoder, encode_request
from tests.bench import raw_clients as raw
from tests.bench import store_bench as sb

SIZES = (1024, 4096)
ADDRESS = b"10.123.123.123:29500"
TARGET_RATIO = 0.8
DONE_BYTES = 11


class Ours:
    """The store's clients; each round is an epoch of its own."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._count = count
        self._epochs = itertools.count(2)
        self._clients = raw.RawClients(port, count)
        hello = encode_request(ms.Hello(1, sb.SECRET_MEMBER, ms.PROTOCOL_VERSION))
        instance = asyncio.run(self._floor(1))
        welcome = len(ReplyEncoder().encode(ms.Welcome(1, instance, ms.Role.MEMBER)))
        self._clients.ask_all([hello] * count, welcome)

    async def _floor(self, epoch: int) -> str:
        admin = await StoreClient.connect(Endpoint(host="127.0.0.1", port=self._port, secret=sb.SECRET_ADMIN))
        await admin.set_floor(sb.GANG, Epoch(epoch), self._count, is_first=True)
        await admin.close()
        return admin.instance

    def round(self, payload: bytes) -> float:
        """Seconds. That everybody has a lease is not part of it."""
        epoch = Epoch(next(self._epochs))
        asyncio.run(self._floor(epoch))
        who = [(sb.GANG, epoch, Rank(rank), IncarnationToken(f"{rank:016x}")) for rank in range(self._count)]
        self._clients.ask_all([encode_request(ms.GrantLease(1, *me, 60.0, 1.0)) for me in who], DONE_BYTES)
        frames = [encode_request(ms.Arrive(2, *me, ms.START_BARRIER, payload)) for me in who]
        opened = len(ReplyEncoder().encode(ms.Opened(2, (payload,) * self._count)))
        return self._clients.ask_all(frames, opened)

    def close(self) -> None:
        self._clients.close()


class Theirs:
    """TCPStore's clients; each round has keys of its own."""

    def __init__(self, port: int, count: int) -> None:
        self._count = count
        self._rounds = itertools.count()
        self._clients = raw.RawClients(port, count)
        frame, answer_bytes = raw.tcpstore_hello()
        self._clients.ask_all([frame] * count, answer_bytes)

    def round(self, *, with_addresses: bool) -> float:
        prefix = b"/%d/" % next(self._rounds)
        barrier, last = prefix + b"barrier", prefix + b"last"
        addresses = [prefix + b"%d" % rank for rank in range(self._count)]
        together = ADDRESS * self._count if with_addresses else b"1"
        gather = raw.tcpstore_multi_get(addresses, len(ADDRESS))
        gatherer: list[int] = []

        def step(place: int, number: int, told: bytes) -> raw.Step | None:
            if number == 0:
                frame, answer_bytes = raw.tcpstore_add(barrier)
                own = raw.tcpstore_set(addresses[place], ADDRESS) if with_addresses else b""
                return own + frame, answer_bytes
            is_last = number == 1 and struct.unpack("<q", told[-8:])[0] == self._count
            if is_last and with_addresses:
                gatherer.append(place)
                return gather
            number -= place in gatherer
            if number == 1:
                frame, answer_bytes = raw.tcpstore_wait(last)
                is_setting = is_last or place in gatherer
                return (raw.tcpstore_set(last, together) if is_setting else b"") + frame, answer_bytes
            return raw.tcpstore_get(last, len(together)) if number == 2 and with_addresses else None

        return self._clients.play(step)

    def close(self) -> None:
        self._clients.close()


@contextmanager
def closing(*parts: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for part in parts:
            part.close()


def row(name: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "name": name, "ours": 1000 * statistics.median(ours), "theirs": 1000 * statistics.median(theirs),
        "ratio": ratio, "unit": "ms", "target": f"ratio ≤ {TARGET_RATIO:g}", "ok": ratio <= TARGET_RATIO,
    }  # fmt: skip


def measure(size: int, ports: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    ours, theirs = Ours(ports[0], size), Theirs(ports[1], size)
    kinds: dict[str, Callable[[], float]] = {
        "bare": lambda: ours.round(b""),
        "their bare": lambda: theirs.round(with_addresses=False),
        "full": lambda: ours.round(ADDRESS),
        "their full": lambda: theirs.round(with_addresses=True),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with closing(ours, theirs):
        kinds["bare"](), kinds["their bare"]()  # warm
        for _ in range(rounds):
            for kind, play in kinds.items():
                found[kind].append(play())
    clients = f"{size:,} clients"
    return [
        row(f"barrier: {clients}", found["bare"], found["their bare"]),
        row(f"barrier: {clients}, with all addresses", found["full"], found["their full"]),
        row(
            f"barrier: {clients}, ours with all addresses, theirs without", found["full"], found["their bare"]
        ),
    ]


def take_rows(quick: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    raw.allow_sockets(2 * max(SIZES))  # TCPStore does not raise its own limit: before the servers are forked
    for size in SIZES:
        with sb.process(sb.serve_ours) as our_port, sb.process(sb.serve_theirs) as their_port:
            rows += measure(size, (our_port, their_port), 3 if quick else 7)
    return rows


def run(quick: bool) -> list[dict[str, Any]]:
    """Every row of this benchmark, in a process of its own (see `store_bench.forbid_name_lookups`)."""
    return sb.in_own_process(lambda: take_rows(quick))
