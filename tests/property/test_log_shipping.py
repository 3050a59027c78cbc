"""Whatever happens to the connection between shipper and sink, every byte arrives once, in order."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.logs import LogShipper
from agents.spool import SpoolWriter
from coordinator.logs.reader import LogReader
from coordinator.logs.sink import LogSink
from coordinator.logs.store import LogStore
from mesh.plan import Endpoint
from tests.fakes.log_stream import UID, incarnation

LIMIT_S = 60.0
SECRET = "s"


class CuttingProxy:
    """Passes bytes on, and cuts each connection in turn after a number of them (both directions count)."""

    def __init__(self, target: Endpoint, cuts: list[int]) -> None:
        self._target = target
        self._cuts = iter(cuts)
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> Endpoint:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return Endpoint(host="127.0.0.1", port=self._server.sockets[0].getsockname()[1], secret=SECRET)

    async def stop(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = next(self._cuts, 1 << 60)
        there, back = await asyncio.open_connection(self._target.host, self._target.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            while left > 0 and (data := await source.read(65_536)):
                sink.write(data[:left])
                left -= len(data)
                await sink.drain()

        pumps = [asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(there, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.wait(pumps)
            for end in (back, writer):
                end.transport.abort()


async def ship(folder: Path, sizes: list[int], cuts: list[int]) -> tuple[bytes, bytes]:
    """What was printed, and what the head has of it."""
    store = LogStore(folder / "logs")
    sink = LogSink(store, secret=SECRET, host="127.0.0.1")
    proxy = CuttingProxy(await sink.start(), cuts)
    spool = SpoolWriter(str(folder / "spool"))
    shipper = LogShipper(folder / "spool", await proxy.start(), incarnation(), on_acked=spool.acknowledge)
    shipper.start()
    printed = bytearray()
    try:
        for index, size in enumerate(sizes):
            data = bytes([index % 251]) * size
            spool.append(1 + index % 2, data, now=float(index))
            printed += data
            shipper.wake()
            await asyncio.sleep(0)
        spool.finish(now=0.0)
        assert await shipper.drain(LIMIT_S)
    finally:
        await shipper.stop()
        await proxy.stop()
        await sink.stop()

    async def is_ended(uid: str) -> bool:
        return True

    arrived = bytearray()
    if printed:
        with contextlib.suppress(StopAsyncIteration):
            async for part in LogReader(store, is_ended=is_ended).raw(UID, 0, 1):
                arrived += part
    store.close()
    return bytes(printed), bytes(arrived)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.one_of(st.integers(1, 200), st.integers(60_000, 65_536)), max_size=60),
    st.lists(st.one_of(st.integers(0, 300), st.integers(300, 2_000_000)), max_size=4),
)
def test_cut_connections_lose_and_repeat_nothing(sizes: list[int], cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        printed, arrived = asyncio.run(ship(Path(folder), sizes, cuts))
    assert arrived == printed
