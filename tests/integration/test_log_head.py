"""The head's log part as a process: killed -9 at any moment, and flooded. Figures are printed, bounds are generous."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agents.logs import LogShipper
from agents.spool import SpoolWriter
from coordinator.logs.reader import LogReader
from coordinator.logs.store import LogStore
from mesh.plan import Endpoint
from tests.fakes.log_stream import UID, incarnation

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024


class HeadProcess:
    """`tests.integration.log_head` and what to ask it."""

    def __init__(self, root: Path, **options: Any) -> None:
        self._options = {
            "port": 0,
            "retention_bytes": 1024 * MIB,
            "rate_bytes_per_s": 1e12,
            "follow": False,
            **options,
        }
        self._options["root"] = str(root)

    async def start(self) -> Endpoint:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.log_head",
            json.dumps(self._options),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        port = (await self._read())["port"]
        self._options["port"] = port
        return Endpoint(host="127.0.0.1", port=port, secret="s")

    async def ask(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            answer: dict[str, Any] = json.loads(await self._process.stdout.readline())
            return answer

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(LIMIT_S):
            await self._process.wait()


class Rank:
    """A rank and its supervisor: prints from a thread, and waits when its spool is full, as the supervisor does."""

    UNACKED_BYTES_MAX = 8 * MIB

    def __init__(self, spool: Path, endpoint: Endpoint, *, rank: int) -> None:
        self._writer = SpoolWriter(str(spool))
        self._room = threading.Event()
        self._acked = 0
        self.shipper = LogShipper(spool, endpoint, incarnation(rank=rank), on_acked=self._on_acked)
        self.shipper.start()

    def _on_acked(self, offset: int) -> None:
        self._acked = offset
        self._room.set()

    def print(self, data: bytes) -> None:
        """Blocking."""
        self._writer.append(1, data, now=time.time())
        self._writer.acknowledge(self._acked)
        while self._writer.unacked() > self.UNACKED_BYTES_MAX:
            assert self._room.wait(LIMIT_S), "the spool never got room"
            self._room.clear()
            self._writer.acknowledge(self._acked)

    def finish(self) -> None:
        self._writer.finish(now=time.time())


@pytest.mark.parametrize("seed", range(2))
async def test_a_head_killed_at_any_moment_loses_and_repeats_nothing(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    head = HeadProcess(tmp_path / "logs")
    endpoint = await head.start()
    rank = Rank(tmp_path / "spool", endpoint, rank=0)
    printed = bytearray()

    def print_much() -> None:
        for index in range(600):
            data = bytes([index % 251]) * dice.choice([10, 1000, 65_536])
            rank.print(data)
            printed.extend(data)
        rank.finish()

    printing = asyncio.create_task(asyncio.to_thread(print_much))
    for _ in range(3):
        acked = rank.shipper.acked
        async with asyncio.timeout(LIMIT_S):
            while rank.shipper.acked < acked + dice.randrange(3 * MIB) and not printing.done():
                await asyncio.sleep(0.001)
        await head.kill()
        await head.start()
    await printing
    assert await rank.shipper.drain(LIMIT_S)
    await rank.shipper.stop()
    await head.stop()

    store = LogStore(tmp_path / "logs")

    async def is_ended(uid: str) -> bool:
        return True

    arrived = b"".join([part async for part in LogReader(store, is_ended=is_ended).raw(UID, 0, 1)])
    store.close()
    assert arrived == bytes(printed)


async def test_a_flood_is_bounded_on_the_head_and_hides_nobody(tmp_path: Path) -> None:
    """One rank prints as fast as it can (well over 100 MB/s into its spool), another whispers; both are followed."""
    head = HeadProcess(tmp_path / "logs", retention_bytes=64 * MIB, rate_bytes_per_s=16.0 * MIB, follow=True)
    endpoint = await head.start()
    idle = (await head.ask())["rss_peak_bytes"]
    loud = Rank(tmp_path / "loud", endpoint, rank=0)
    quiet = Rank(tmp_path / "quiet", endpoint, rank=1)
    block = (b"loss=0.123456 step=%d " + b"x" * 60 + b"\n") * 1000
    block = block[: 64 * 1024 - 1] + b"\n"
    stop = threading.Event()
    flooded = 0

    def flood() -> None:
        nonlocal flooded
        while not stop.is_set():
            loud.print(block)
            flooded += len(block)
        loud.finish()

    began = time.monotonic()
    flooding = asyncio.create_task(asyncio.to_thread(flood))
    heard = 0
    try:
        async with asyncio.timeout(LIMIT_S):
            # The burst (32 MiB) is behind, the retention has trimmed, and every whisper was heard while the flood ran.
            for whisper in range(1, 9):
                await asyncio.to_thread(quiet.print, b"psst %d\n" % whisper)
                while heard < whisper or (whisper == 8 and flooded < 80 * MIB):
                    await asyncio.sleep(0.02)
                    answer = await head.ask()
                    heard = answer["quiet"]
        assert not flooding.done()
    finally:
        stop.set()
        await flooding
        took = time.monotonic() - began
        await loud.shipper.stop()
        await quiet.shipper.stop()
        await head.stop()
    grown = answer["rss_peak_bytes"] - idle
    kept = sum(path.stat().st_size for path in (tmp_path / "logs").rglob("*.seg"))
    print(
        f"flood: {flooded / MIB:.0f} MiB in {took:.1f} s, {answer['lines']} lines followed, head grew by "
        f"{grown / MIB:.1f} MiB, {kept / MIB:.0f} MiB kept"
    )
    assert heard == 8
    assert grown < 64 * MIB
    assert kept <= 64 * MIB + MIB
