"""A process that speaks lines, whose start is given up or fails: nothing of it stays, on either loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import io
import os
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from agents import line_process, process_tree
from agents.line_process import LineProcess

LIMIT_S = 20.0
MARK_NAME, MARK_TEXT = "GANGMESH_TEST_LINE_PROCESS", secrets.token_hex(8)
MARK = f"{MARK_NAME}={MARK_TEXT}".encode()
TURNS = 12
RUNNERS: dict[str, Callable[[Coroutine[Any, Any, None]], None]] = {
    "asyncio": asyncio.run,
    "uvloop": uvloop.run,
}
STARTS = {"a child": LineProcess.start, "a detached process": LineProcess.start_detached}


def below() -> list[int]:
    """Of this process, or of nobody but of this test (its environment says so). Zombies too: whoever is not reaped is
    not gone.
    """
    processes = process_tree.snapshot()
    ours = process_tree.descendants(processes, {os.getpid()})
    return sorted({*ours, *(pid for pid in processes if has_mark(pid))} - {os.getpid()})


def has_mark(pid: int) -> bool:
    try:
        return MARK in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def once(start: Any) -> None:
    """What a loop opens for itself when it does this for the first time is open after it."""
    process = await start(["cat"], env={**os.environ, MARK_NAME: MARK_TEXT})
    assert await process.close()


async def nothing_is_left(before: list[int], open_before: int) -> None:
    gc.collect()  # what was forgotten warns, and a warning fails the test
    async with asyncio.timeout(LIMIT_S):
        while below() != before or descriptors() > open_before:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("start", STARTS)
def test_a_start_that_is_given_up_at_any_moment_leaves_nothing(runner: str, start: str) -> None:
    async def story() -> None:
        await once(STARTS[start])
        before, open_before = below(), descriptors()
        for turns in range(TURNS):
            task = asyncio.create_task(STARTS[start](["cat"], env={**os.environ, MARK_NAME: MARK_TEXT}))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                process = await task
                await process.close()
            del task
            await nothing_is_left(before, open_before)

    RUNNERS[runner](story())


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("start", STARTS)
def test_a_start_that_fails_halfway_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, runner: str, start: str
) -> None:
    def unreadable(pid: int) -> process_tree.Process | None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def story() -> None:
        await once(STARTS[start])
        before, open_before = below(), descriptors()
        monkeypatch.setattr(line_process.process_tree, "read_process", unreadable)
        with pytest.raises(OSError, match="Too many"):
            await STARTS[start](["cat"], env={**os.environ, MARK_NAME: MARK_TEXT})
        monkeypatch.undo()
        await nothing_is_left(before, open_before)

    RUNNERS[runner](story())


@pytest.mark.parametrize("runner", RUNNERS)
def test_no_descriptor_of_anybody_else_is_closed_with_a_process_s(
    monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """uvloop closes a pipe's descriptor and then its file object: in between the number may be another thread's."""
    others: list[int] = []

    class InThatMoment(io.FileIO):
        def close(self) -> None:
            if not self.closed:
                others.append(os.open("/dev/null", os.O_RDONLY))
            super().close()

    async def story() -> None:
        process = await LineProcess.start(["cat"], env=dict(os.environ))
        assert await process.close()
        await asyncio.sleep(0)

    monkeypatch.setattr(line_process, "FileIO", InThatMoment)
    RUNNERS[runner](story())
    assert len(others) == 2
    for descriptor in others:
        os.close(descriptor)  # raises when somebody has closed it
