"""What real commands print, from their own mouths to the reader: cases 34 and 37 of the field."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agents.core import events as ev
from agents.launcher.base import LaunchSpec
from agents.launcher.launcher import Launcher
from coordinator.api import service
from coordinator.logs.reader import LogReader
from coordinator.logs.sink import LogSink
from coordinator.logs.store import LogStore
from mesh.ids import Epoch, Incarnation, Rank, new_run_uid, new_token
from mesh.plan import Endpoint
from mesh.states import LauncherKind

LIMIT_S = 60.0


class Stage:
    """A head's logs and the launchers of one run on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uid = new_run_uid()
        self.ended = False
        self.store = LogStore(folder / "logs")
        self.sink = LogSink(self.store, secret="s", host="127.0.0.1")
        self.reader: service.LogReader = LogReader(self.store, is_ended=self.is_ended)
        self.endpoint: Endpoint | None = None

    async def is_ended(self, uid: str) -> bool:
        return self.ended

    async def run(self, program: str, *, rank: int = 0, epoch: int = 1) -> ev.MemberEvent:
        """Runs a Python program as a rank's command, to its end and until its output is handed over."""
        incarnation = Incarnation(run_uid=self.uid, epoch=Epoch(epoch), rank=Rank(rank), token=new_token())
        home = self.folder / str(incarnation)
        home.mkdir()
        launcher = Launcher()
        try:
            await launcher.launch(
                LaunchSpec(
                    incarnation=incarnation,
                    launcher=LauncherKind.PLAIN,
                    argv=(sys.executable, "-I", "-S", "-c", program),
                    env={"PATH": "/usr/bin:/bin"},
                    working_dir=str(home),
                    spool_dir=str(home / "spool"),
                    error_file=str(home / "error.json"),
                    logs=self.endpoint,
                )
            )
            async with asyncio.timeout(LIMIT_S):
                while not isinstance(
                    event := await launcher.next_event(), ev.TreeEmpty | ev.CommandStartFailed
                ):
                    pass
            assert await launcher.hand_over_logs(stall_s=LIMIT_S)
            return event
        finally:
            await launcher.close()

    async def lines(self, **options: Any) -> list[dict[str, Any]]:
        every: dict[str, Any] = dict.fromkeys(("rank", "epoch", "tail", "cursor"))
        async with asyncio.timeout(LIMIT_S):
            return [
                dict(x) async for x in self.reader.lines(self.uid, **{**every, "follow": False, **options})
            ]

    async def raw(self, *, rank: int = 0, epoch: int = 1) -> bytes:
        return b"".join([part async for part in self.reader.raw(self.uid, rank, epoch)])


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    stage.endpoint = await stage.sink.start()
    yield stage
    await stage.sink.stop()
    stage.store.close()


def of(lines: list[dict[str, Any]], stream: str) -> list[str]:
    return [line["text"] for line in lines if line["stream"] == stream and not line["partial"]]


BYTES = (
    b"a" * 4095
    + "é€🚀".encode()
    + b"\n"
    + b"b" * 65_535
    + "é€🚀".encode()
    + b"\n\xff\xfe\n\x00\n\x1b[31mred\x1b[0m\r\nend\r\n"
)


async def test_bytes_that_are_not_text_come_out_sensibly_and_raw_as_they_were(stage: Stage) -> None:
    await stage.run(
        f"import os\ndata = {BYTES!r}\nwhile data: data = data[os.write(1, data):]\nos.write(1, b'tail')"
    )
    assert of(await stage.lines(), "stdout") == [
        "a" * 4095 + "é€🚀",
        "b" * 65_535 + "é€🚀",
        "\\xff\\xfe",
        "\\x00",
        "\x1b[31mred\x1b[0m",
        "end",
        "tail",
    ]
    assert await stage.raw() == BYTES + b"tail"


async def test_a_progress_bar_is_seen_while_it_runs_and_is_one_line_afterwards(stage: Stage) -> None:
    program = (
        "import os, time\n"
        "for n in range(10):\n"
        "    os.write(2, b'\\rstep %d of 9' % n)\n"
        "    time.sleep(0.15)\n"
    )
    seen: list[dict[str, Any]] = []

    async def follow() -> None:
        async for line in stage.reader.lines(
            stage.uid, rank=None, epoch=None, tail=None, cursor=None, follow=True
        ):
            seen.append({**line, "seen_at": time.monotonic()})

    following = asyncio.create_task(follow())
    await stage.run(program)
    ended_at = time.monotonic()
    stage.ended = True
    async with asyncio.timeout(LIMIT_S):
        await following
    assert any(line["partial"] and line["seen_at"] < ended_at for line in seen)
    assert of(seen, "stderr") == of(await stage.lines(), "stderr") == ["step 9 of 9"]


async def test_the_last_words_are_kept_and_told_with_the_failure(stage: Stage) -> None:
    event = await stage.run("import os\nos.write(2, b'FATAL xyz')\nos.kill(os.getpid(), 9)", rank=1)
    assert isinstance(event, ev.TreeEmpty)
    assert event.last_lines[-1:] == ("FATAL xyz",)
    assert of(await stage.lines(), "stderr") == ["FATAL xyz"]


async def test_a_follower_of_two_epochs_sees_what_a_fetch_sees_afterwards(stage: Stage) -> None:
    async def follow() -> list[dict[str, Any]]:
        return await stage.lines(follow=True)

    following = asyncio.create_task(follow())
    await stage.run("import os\nos.write(2, b'FATAL xyz')\nos.kill(os.getpid(), 9)", rank=1, epoch=1)
    await stage.run("print('banner of the replacement')", rank=1, epoch=2)
    stage.ended = True
    followed = [line for line in await following if not line["partial"]]
    fetched = await stage.lines()
    wanted = [(1, "FATAL xyz"), (2, "banner of the replacement")]
    assert [(x["epoch"], x["text"]) for x in followed] == [(x["epoch"], x["text"]) for x in fetched] == wanted
    assert await stage.raw(rank=1, epoch=2) == b"banner of the replacement\n"


async def test_ten_megabytes_without_a_newline_arrive(stage: Stage) -> None:
    size = 10 * 1024 * 1024
    await stage.run(f"import os\nleft = {size}\nwhile left: left -= os.write(1, b'x' * min(left, 1 << 20))")
    lines = await stage.lines()
    assert sum(len(line["text"]) for line in lines) == size
    assert [line["continued"] for line in lines] == [True] * 9 + [False]
