"""From a spool to the reader over a real socket: nothing lost, nothing twice, whatever breaks. Case 49 of the field."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.logs import LogShipper
from agents.spool import SEGMENT_BYTES, SpoolWriter, delete_acked, mark_end, segment_indexes
from coordinator.logs.reader import LogReader
from coordinator.logs.sink import LogSink
from coordinator.logs.store import LogStore
from mesh.errors import AuthenticationError, NotFoundError, RemoteProtocolError
from mesh.ids import Incarnation
from mesh.log_protocol import Data, FromSink, Hello, Refused, Welcome, from_sink, to_frame
from mesh.plan import Endpoint
from mesh.wire import FrameParser, encode_frame
from tests.fakes.log_stream import UID, incarnation, out, records, write_spool

SECRET = "correct horse"
LIMIT_S = 30.0


class Head:
    """Store, sink and reader, as the head process has them; can be taken away and brought back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = 0
        self.is_up = False

    async def up(self, **options: float) -> Endpoint:
        self.store = LogStore(self.root)
        self.sink = LogSink(self.store, secret=SECRET, host="127.0.0.1", port=self.port, **options)
        self.endpoint = await self.sink.start()
        self.port = self.endpoint.port
        self.reader = LogReader(self.store, is_ended=self.is_ended)
        self.is_up = True
        return self.endpoint

    async def down(self) -> None:
        if self.is_up:
            self.is_up = False
            await self.sink.stop()
            self.store.close()

    async def is_ended(self, uid: str) -> bool:
        return True

    async def texts(self, rank: int = 0) -> list[str]:
        return [line["text"] async for line in self.reader.lines(UID, rank=rank)]

    async def raw(self, rank: int = 0) -> bytes:
        return b"".join([part async for part in self.reader.raw(UID, rank, 1)])


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    head = Head(tmp_path / "head" / "logs")
    await head.up()
    yield head
    await head.down()


@contextlib.asynccontextmanager
async def shipping(
    spool: Path, endpoint: Endpoint, who: Incarnation | None = None, *, acked: list[int] | None = None
) -> AsyncIterator[LogShipper]:
    offsets = acked if acked is not None else []
    shipper = LogShipper(spool, endpoint, who or incarnation(), on_acked=offsets.append)
    shipper.start()
    try:
        yield shipper
    finally:
        await shipper.stop()


async def say(endpoint: Endpoint, *frames: bytes) -> FromSink | None:
    """Sends bytes as they are; the sink's first answer, None when it only closes."""
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        for frame in frames:
            writer.write(frame)
        parser = FrameParser()
        async with asyncio.timeout(LIMIT_S):
            while data := await reader.read(65_536):
                for answer in parser.feed(data):
                    return from_sink(answer)
        return None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def hello(secret: str = SECRET, who: Incarnation | None = None) -> bytes:
    return encode_frame(to_frame(Hello(secret=secret, incarnation=who or incarnation())))


async def until_acked(acked: list[int], offset: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not acked or acked[-1] < offset:
            await asyncio.sleep(0.01)


async def test_a_whole_spool_arrives_and_its_end_is_acknowledged(head: Head, tmp_path: Path) -> None:
    write_spool(tmp_path / "spool", out("one\n", "two\n"))
    acked: list[int] = []
    async with shipping(tmp_path / "spool", head.endpoint, acked=acked) as shipper:
        assert await shipper.drain(LIMIT_S)
    assert await head.texts() == ["one", "two"]
    assert acked == sorted(set(acked))


async def test_a_command_that_printed_nothing_is_drained_too(head: Head, tmp_path: Path) -> None:
    write_spool(tmp_path / "spool", [])
    async with shipping(tmp_path / "spool", head.endpoint) as shipper:
        assert await shipper.drain(LIMIT_S)
    assert await head.texts() == []


async def test_much_left_output_may_take_longer_than_a_stall(head: Head, tmp_path: Path) -> None:
    await head.down()
    await head.up(rate_bytes_per_s=500_000.0, burst_bytes=50_000.0)
    lines = [f"{number:0999d}\n" for number in range(1_500)]
    write_spool(tmp_path / "spool", out(*lines))
    async with shipping(tmp_path / "spool", head.endpoint) as shipper:
        assert await shipper.drain(2.0), "1.5 MB at 0.5 MB/s are under way for three seconds"
    assert len(await head.texts()) == 1_500


async def test_a_spool_that_appears_later_is_waited_for(head: Head, tmp_path: Path) -> None:
    async with shipping(tmp_path / "spool", head.endpoint) as shipper:
        assert not await shipper.drain(0.1)
        write_spool(tmp_path / "spool", out("late\n"))
        assert await shipper.drain(LIMIT_S)
    assert await head.texts() == ["late"]


async def test_a_supervisor_that_was_killed_ends_by_its_survivors_mark(head: Head, tmp_path: Path) -> None:
    write_spool(tmp_path / "spool", out("half"), ended=False)
    segment = tmp_path / "spool" / "00000000.seg"
    segment.write_bytes(segment.read_bytes() + b"\x00\x01torn")
    async with shipping(tmp_path / "spool", head.endpoint) as shipper:
        assert not await shipper.drain(0.2)
        mark_end(str(tmp_path / "spool"))
        assert await shipper.drain(LIMIT_S)
    texts = await head.texts()
    assert texts[0] == "half"
    assert "bytes of output were lost" in texts[1]


async def test_acknowledged_segments_can_go_and_the_shipper_can_start_again(
    head: Head, tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    writer = SpoolWriter(str(spool))
    block = b"x" * 65_535 + b"\n"
    while writer.written < 3 * SEGMENT_BYTES:
        writer.append(1, block, now=1.0)
    acked: list[int] = []
    async with shipping(spool, head.endpoint, acked=acked):
        await until_acked(acked, 2 * SEGMENT_BYTES)
    delete_acked(str(spool), acked[-1])
    assert segment_indexes(str(spool))[0] >= 2
    writer.append(1, b"the end", now=2.0)
    writer.finish(now=2.0)
    async with shipping(spool, head.endpoint) as shipper:
        assert await shipper.drain(LIMIT_S)
    raw = await head.raw()
    assert raw.endswith(b"the end")
    assert raw.count(block) * len(block) + len(b"the end") == len(raw)


async def test_a_head_that_is_away_loses_nothing(head: Head, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    writer = SpoolWriter(str(spool))
    acked: list[int] = []
    async with shipping(spool, head.endpoint, acked=acked) as shipper:
        writer.append(1, b"before\n", now=1.0)
        await until_acked(acked, writer.written)
        await head.down()
        writer.append(1, b"meanwhile\n", now=2.0)
        assert not await shipper.drain(0.3)
        await head.up()
        writer.append(1, b"after\n", now=3.0)
        writer.finish(now=3.0)
        assert await shipper.drain(LIMIT_S)
    assert await head.texts() == ["before", "meanwhile", "after"]


async def test_the_newest_shipper_of_an_incarnation_counts(head: Head, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    writer = SpoolWriter(str(spool))
    writer.append(1, b"one\n", now=1.0)
    reader, stuck = await asyncio.open_connection(head.endpoint.host, head.endpoint.port)
    stuck.write(hello())
    await reader.readexactly(4)
    writer.finish(now=1.0)
    async with shipping(spool, head.endpoint) as shipper:
        assert await shipper.drain(LIMIT_S)
    assert await head.texts() == ["one"]
    stuck.close()


async def test_a_wrong_secret_is_refused_and_nothing_is_kept(head: Head) -> None:
    answer = await say(head.endpoint, hello("wrong"))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, AuthenticationError)
    assert not list(head.root.iterdir())


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        b"\xff\xff\xff\xff",
        encode_frame(to_frame(Data(offset=0, records=records(out("x\n"))))),
        encode_frame(["hello", 1, SECRET, "../../x.1.0.t"]),
    ],
    ids=["http", "garbage", "huge", "data-first", "path"],
)
async def test_what_is_no_shipper_is_refused_and_nothing_is_kept(head: Head, frame: bytes) -> None:
    answer = await say(head.endpoint, frame)
    assert isinstance(answer, Refused)
    assert not list(head.root.iterdir())


@pytest.mark.parametrize("uid", ["..", "../x", "a/b", "UPPER", "x" * 65])
async def test_a_uid_that_is_none_makes_no_folder(head: Head, tmp_path: Path, uid: str) -> None:
    before = sorted(p.name for p in tmp_path.rglob("*"))
    answer = await say(head.endpoint, encode_frame(["hello", 1, SECRET, f"{uid}.1.0.0123456789abcdef"]))
    assert isinstance(answer, Refused)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("offset", [5, 2**61])
async def test_a_stale_or_absurd_offset_is_refused(head: Head, tmp_path: Path, offset: int) -> None:
    write_spool(tmp_path / "spool", out("one\n"), ended=False)
    acked: list[int] = []
    async with shipping(tmp_path / "spool", head.endpoint, acked=acked):
        await until_acked(acked, 1)
    reader, writer = await asyncio.open_connection(head.endpoint.host, head.endpoint.port)
    writer.write(hello() + encode_frame(to_frame(Data(offset=offset, records=records(out("x\n"))))))
    data = await reader.read()
    answers = [from_sink(frame) for frame in FrameParser().feed(data)]
    writer.close()
    assert answers[0] == Welcome(offset=acked[-1])
    assert isinstance(answers[1], Refused)
    assert isinstance(answers[1].error, RemoteProtocolError)
    assert await head.texts() == ["one"]


async def test_output_of_a_deleted_run_does_not_hold_up_the_job(head: Head, tmp_path: Path) -> None:
    await head.reader.delete(UID)
    write_spool(tmp_path / "spool", out("one\n"))
    acked: list[int] = []
    async with shipping(tmp_path / "spool", head.endpoint, acked=acked) as shipper:
        assert not await shipper.drain(LIMIT_S)
        assert isinstance(shipper.refusal, NotFoundError)
    assert acked
    assert await head.texts() == []


async def test_a_run_deleted_while_it_is_shipped_leaves_nothing(head: Head, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    writer = SpoolWriter(str(spool))
    writer.append(1, b"one\n", now=1.0)
    acked: list[int] = []
    async with shipping(spool, head.endpoint, acked=acked) as shipper:
        await until_acked(acked, writer.written)
        await head.reader.delete(UID)
        writer.append(1, b"two\n", now=1.0)
        writer.finish(now=1.0)
        assert not await shipper.drain(LIMIT_S)
        assert isinstance(shipper.refusal, NotFoundError)
    assert acked[-1] == writer.written
    assert not list(head.root.iterdir())


async def test_a_full_disk_on_the_head_marks_the_loss_and_lets_the_job_go_on(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "spool"
    writer = SpoolWriter(str(spool))
    acked: list[int] = []
    write = os.write
    folder = str(head.root)

    def full(file: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{file}").startswith(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    async with shipping(spool, head.endpoint, acked=acked) as shipper:
        writer.append(1, b"one\n", now=1.0)
        await until_acked(acked, writer.written)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            writer.append(1, b"lost\n", now=2.0)
            await until_acked(acked, writer.written)
        deadline = time.monotonic() + LIMIT_S
        while (await head.texts())[-1] != "found" and time.monotonic() < deadline:
            writer.append(1, b"found\n", now=3.0)  # the sink tries again once a second
            await until_acked(acked, writer.written)
        writer.finish(now=3.0)
        assert await shipper.drain(LIMIT_S)
    texts = await head.texts()
    assert texts[0] == "one"
    assert "bytes of output were lost" in texts[1]
    assert set(texts[2:]) == {"found"}


async def test_a_rank_over_its_rate_is_slowed_and_the_others_are_not(tmp_path: Path) -> None:
    head = Head(tmp_path / "logs")
    endpoint = await head.up(rate_bytes_per_s=1.0, burst_bytes=300_000.0)
    loud = SpoolWriter(str(tmp_path / "loud"))
    for _ in range(64):
        loud.append(1, b"x" * 65_535 + b"\n", now=1.0)
    loud.finish(now=1.0)
    write_spool(tmp_path / "quiet", out("psst\n"))
    acked: list[int] = []
    async with (
        shipping(tmp_path / "loud", endpoint, incarnation(rank=0), acked=acked),
        shipping(tmp_path / "quiet", endpoint, incarnation(rank=1)) as quiet,
    ):
        await until_acked(acked, 300_000)
        assert await quiet.drain(LIMIT_S)
        assert await head.texts(rank=1) == ["psst"]
        assert acked[-1] < loud.written, "a rank over its rate waits"
    await head.down()


async def test_a_sink_that_cannot_listen_says_so(head: Head) -> None:
    other = LogSink(head.store, secret=SECRET, host="127.0.0.1", port=head.port)
    with pytest.raises(Exception, match="cannot listen on"):
        await other.start()
    await other.stop()


async def test_a_stopped_sink_has_let_go_of_everything(head: Head, tmp_path: Path) -> None:
    write_spool(tmp_path / "spool", out("one\n"), ended=False)
    acked: list[int] = []
    async with shipping(tmp_path / "spool", head.endpoint, acked=acked):
        await until_acked(acked, 1)
        await head.sink.stop()
        await head.sink.stop()
    with socket.socket() as probe:
        assert probe.connect_ex((head.endpoint.host, head.endpoint.port)) != 0
