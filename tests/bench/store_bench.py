"""The store beside torch.distributed.TCPStore (libuv backend): get, set with an answer, add; one client and 64.

Like with like:
- both servers run in a process of their own, alone in it, on 127.0.0.1;
- every client is a process with one request under way: ours is `BlockingStoreClient`, theirs TCPStore itself. All
  clients are the same processes for both, holding a connection to each;
- ours is taken as it comes: on one machine our client goes by a Unix socket, which TCPStore does not have. What it
  does over TCP, as from another machine, is in a row of its own (there the network's own time comes on top for both);
- the two take turns in short slices, so that whatever else the machine does strikes both; a figure is the median of
  its slices, a ratio the median of the ratios of neighbouring slices;
- TCPStore's plain `set` has no answer, so its set with an answer is `compare_set`. Its `get` is two round trips
  (it waits for the key first); that is how it is used.

The last rows have no counterpart in TCPStore: one client that pipelines, and heartbeats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import select
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.plan import Endpoint
from mesh.store.blocking_client import BlockingStoreClient
from mesh.store.client import StoreClient

GANG, EPOCH = RunUid("b" * 16), Epoch(1)
SECRET_ADMIN, SECRET_MEMBER = "bench-admin", "bench-member"
KEYS_PER_CLIENT = 8
VALUE = b"v" * 32
CLIENTS_MANY = 64
OPERATIONS = ("get", "set", "add")
OURS, OURS_TCP, THEIRS = "ours", "ours-over-TCP", "theirs"
TARGET_RATIO = 1.0
START_LIMIT_S = 60.0

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG = 1

Operation = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Amount:
    """How long everything takes: `slices` of `slice_s` seconds per figure and contestant."""

    slices: int
    slice_s: float


# ---- no name lookups ----------------------------------------------------------------------------------


def forbid_name_lookups() -> None:
    """TCPStore looks up the name of every peer; where a name server is slow that is all that would be measured.

    This process, and what it starts, gets a mount namespace of its own in which names come from files only. Needs
    root; without it the lookups stay.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    configuration = Path("/etc/nsswitch.conf")
    if os.geteuid() != 0 or not configuration.exists() or libc.unshare(CLONE_NEWNS) != 0:
        return
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    lines = [line for line in configuration.read_text().splitlines() if not line.startswith("hosts:")]
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as changed:
        changed.write("\n".join([*lines, "hosts: files", ""]))
        changed.flush()
        libc.mount(changed.name.encode(), str(configuration).encode(), None, MS_BIND, None)


# ---- the two servers ----------------------------------------------------------------------------------


def serve_ours(report: int) -> None:
    """Runs the store until killed; writes its port to the descriptor."""
    import uvloop

    from coordinator.store_actor import StoreServer, settle_memory

    async def serve() -> None:
        settle_memory()  # as the actor does
        server = StoreServer(host="127.0.0.1", port=0, admin_secret=SECRET_ADMIN, member_secret=SECRET_MEMBER)
        address = await server.start()
        os.write(report, str(address.port).encode())
        await asyncio.Event().wait()

    uvloop.run(serve())


def serve_theirs(report: int) -> None:
    """Runs a TCPStore server until killed."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert store.libuvBackend
    os.write(report, str(store.port).encode())
    signal.pause()


@contextlib.contextmanager
def process(serve: Callable[[int], None]) -> Iterator[int]:
    """A server in a process of its own; gives its port. Killed at the end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_as_child(lambda: serve(writer))
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], START_LIMIT_S)
        port = os.read(reader, 16) if ready else b""
        if not port:
            raise RuntimeError(f"{serve.__name__} did not start")
        yield int(port)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run_as_child(work: Callable[[], None]) -> None:
    """A forked process never returns into its parent's code, and does not outlive it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        work()
    except BaseException:  # noqa: BLE001 - the guard of a process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


# ---- the clients --------------------------------------------------------------------------------------


def operations_ours(port: int, number: int, *, prefers_local: bool) -> dict[str, Operation]:
    endpoint = Endpoint(host="127.0.0.1", port=port, secret=SECRET_MEMBER)
    client = BlockingStoreClient(endpoint, prefers_local=prefers_local)
    keys = _keys(number)
    for key in keys:
        client.set(GANG, EPOCH, key, VALUE)
    turn = _turns()
    return {
        "get": lambda: client.get(GANG, EPOCH, keys[turn()]),
        "set": lambda: client.set(GANG, EPOCH, keys[turn()], VALUE),
        "add": lambda: client.add(GANG, EPOCH, "count", 1),
    }


def operations_theirs(port: int, number: int) -> dict[str, Operation]:
    from torch.distributed import TCPStore

    client = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    keys = _keys(number)
    value = VALUE.decode()
    for key in keys:
        client.set(key, value)
    turn = _turns()
    return {
        "get": lambda: client.get(keys[turn()]),
        "set": lambda: client.compare_set(keys[turn()], value, value),
        "add": lambda: client.add("count", 1),
    }


def _keys(number: int) -> list[str]:
    return [f"client{number}/key{index}" for index in range(KEYS_PER_CLIENT)]


def _turns() -> Callable[[], int]:
    place = -1

    def turn() -> int:
        nonlocal place
        place = (place + 1) % KEYS_PER_CLIENT
        return place

    return turn


def rate(operation: Operation, seconds: float) -> float:
    """How often a second."""
    count, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        for _ in range(20):
            operation()
        count += 20
    return count / passed


class Crowd:
    """Client processes that all do the same at the same time."""

    def __init__(self, count: int, ports: dict[str, int]) -> None:
        self._orders: list[int] = []
        self._results: list[int] = []
        self._pids: list[int] = []
        for number in range(count):
            order_reader, order_writer = os.pipe()
            result_reader, result_writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                for descriptor in [*self._orders, *self._results, order_writer, result_reader]:
                    os.close(descriptor)
                _run_as_child(lambda: self._work(number, ports, order_reader, result_writer))
            os.close(order_reader)
            os.close(result_writer)
            self._pids.append(pid)
            self._orders.append(order_writer)
            self._results.append(result_reader)
        try:
            self._collect()
        except RuntimeError:
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
            self.close()
            raise

    @staticmethod
    def _work(number: int, ports: dict[str, int], orders: int, results: int) -> None:
        operations = {
            OURS: operations_ours(ports[OURS], number, prefers_local=True),
            OURS_TCP: operations_ours(ports[OURS], number, prefers_local=False),
            THEIRS: operations_theirs(ports[THEIRS], number),
        }
        os.write(results, b"0\n")
        while order := os.read(orders, 64):
            who, what, seconds = order.decode().split()
            os.write(results, f"{rate(operations[who][what], float(seconds))}\n".encode())

    def rate(self, who: str, what: str, seconds: float) -> float:
        """All clients together, a second."""
        for order in self._orders:
            os.write(order, f"{who} {what} {seconds}".encode())
        return sum(self._collect())

    def _collect(self) -> list[float]:
        found: list[float] = []
        for result in self._results:
            ready, _, _ = select.select([result], [], [], START_LIMIT_S)
            line = os.read(result, 64) if ready else b""
            if not line:
                raise RuntimeError("a client process ended or did not answer")
            found.append(float(line))
        return found

    def close(self) -> None:
        for descriptor in [*self._orders, *self._results]:
            os.close(descriptor)
        for pid in self._pids:
            os.waitpid(pid, 0)


# ---- rows ---------------------------------------------------------------------------------------------


def compare(crowd: Crowd, what: str, amount: Amount, name: str) -> list[dict[str, Any]]:
    """Two rows: ours as it comes, and ours over TCP."""
    contestants = (OURS, THEIRS, OURS_TCP)
    rates: dict[str, list[float]] = {who: [] for who in contestants}
    for who in contestants:
        crowd.rate(who, what, amount.slice_s)  # warm
    for turn in range(amount.slices):
        for who in contestants if turn % 2 else reversed(contestants):
            rates[who].append(crowd.rate(who, what, amount.slice_s))
    rows = []
    for who in (OURS, OURS_TCP):
        ratio = statistics.median(a / b for a, b in zip(rates[who], rates[THEIRS], strict=True))
        has_target = who == OURS
        rows.append(
            {
                "name": name if has_target else f"{name}, TCP",
                "ours": statistics.median(rates[who]),
                "theirs": statistics.median(rates[THEIRS]),
                "ratio": ratio,
                "unit": "1/s",
                "target": f"ratio ≥ {TARGET_RATIO:g}" if has_target else None,
                "ok": ratio >= TARGET_RATIO if has_target else None,
            }
        )
    return rows


def alone(name: str, ours: float, unit: str) -> dict[str, Any]:
    return {
        "name": name, "ours": ours, "theirs": None, "ratio": None, "unit": unit, "target": None, "ok": None,
    }  # fmt: skip


async def pipelined(port: int, seconds: float) -> float:
    """Adds a second of one asyncio client with 64 requests under way."""
    client = await StoreClient.connect(Endpoint(host="127.0.0.1", port=port, secret=SECRET_MEMBER))
    count, began = 0, time.perf_counter()

    async def worker() -> None:
        nonlocal count
        while True:  # once at least, however late this process comes to run
            await client.add(GANG, EPOCH, "pipelined")
            count += 1
            if time.perf_counter() - began >= seconds:
                return

    await asyncio.gather(*(worker() for _ in range(CLIENTS_MANY)))
    passed = time.perf_counter() - began
    await client.close()
    return count / passed


def heartbeats(port: int, seconds: float) -> float:
    """Lease renewals a second of one client."""
    client = BlockingStoreClient(Endpoint(host="127.0.0.1", port=port, secret=SECRET_MEMBER))
    token = IncarnationToken("t" * 16)
    found = rate(lambda: client.grant_lease(GANG, EPOCH, Rank(0), token, ttl_s=3.0, guard_s=0.3), seconds)
    client.close()
    return found


async def set_floor(port: int) -> None:
    admin = await StoreClient.connect(Endpoint(host="127.0.0.1", port=port, secret=SECRET_ADMIN))
    await admin.set_floor(GANG, EPOCH, 1)
    await admin.close()


def in_own_process(take: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What `take` returns, taken in a process of its own where no name is looked up (see `forbid_name_lookups`)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:

        def work() -> None:
            forbid_name_lookups()
            with os.fdopen(writer, "w") as results:
                json.dump(take(), results)

        _run_as_child(work)
    os.close(writer)
    with os.fdopen(reader) as results:
        text = results.read()
    os.waitpid(pid, 0)
    if not text:
        raise RuntimeError("it could not be measured; the reason is above")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def run(quick: bool) -> list[dict[str, Any]]:
    """Every row of this benchmark."""
    return in_own_process(lambda: take_rows(quick))


def take_rows(quick: bool) -> list[dict[str, Any]]:
    import torch.distributed  # noqa: F401 - once, before the clients are forked, not in each of them
    import uvloop

    one = Amount(slices=8 if quick else 40, slice_s=0.1)
    many = Amount(slices=3 if quick else 9, slice_s=0.5)
    rows: list[dict[str, Any]] = []
    with process(serve_ours) as our_port, process(serve_theirs) as their_port:
        asyncio.run(set_floor(our_port))
        ports = {OURS: our_port, THEIRS: their_port}
        for count, amount in ((1, one), (CLIENTS_MANY, many)):
            crowd = Crowd(count, ports)
            try:
                for what in OPERATIONS:
                    clients = "1 client" if count == 1 else f"{count} clients"
                    rows += compare(crowd, what, amount, f"store: {what}, {clients}")
            finally:
                crowd.close()
        seconds = 0.5 if quick else 2.0
        rows.append(
            alone("store: add, 1 client, 64 under way", uvloop.run(pipelined(our_port, seconds)), "1/s")
        )
        rows.append(alone("store: lease renewals, 1 client", heartbeats(our_port, seconds), "1/s"))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.store_bench", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    rows = run(parser.parse_args(arguments).quick)
    for row in rows:
        theirs = "–" if row["theirs"] is None else f"{row['theirs']:,.0f}"
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(f"{row['name']:40} {row['ours']:>10,.0f} {theirs:>10} {ratio:>6}  {row['target'] or ''}")
    return 0 if all(row["ok"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
