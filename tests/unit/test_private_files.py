"""Files for their owner only: whole, private, and the last one asked for stays."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from coordinator.mesh_books import NAMES, MeshBooks
from mesh import private_writer
from mesh.ids import MachineName
from mesh.private_files import write_private
from mesh.private_writer import PrivateWriter


def test_a_file_is_its_owner_s_and_no_draft_is_left(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_draft_that_is_not_finished_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "secret"
    write_private(path, "old")
    monkeypatch.setattr(*((os, "fsync", full) if fails == "fsync" else (Path, "replace", full)))
    with pytest.raises(OSError, match="No space"):
        write_private(path, "new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_the_drafts_of_who_was_killed_go_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    others = {tmp_path / name for name in (".secret.more.4194999.tmp", ".secret.tmp", ".secret.x.tmp")}
    for left in (tmp_path / ".secret.4194999.tmp", *others):
        left.write_text("key")
    write_private(path, "new")
    assert set(tmp_path.iterdir()) == {path, *others}


async def test_what_was_begun_by_who_was_cancelled_does_not_overwrite_what_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, has_begun, may_end = tmp_path / "book", asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(path: Path, text: str) -> None:
        if text == "first":
            loop.call_soon_threadsafe(has_begun.set)
            assert may_end.wait(timeout=10.0)
        write_private(path, text)

    monkeypatch.setattr(private_writer, "write_private", slow)
    writer = PrivateWriter()
    first = asyncio.create_task(writer.write(path, "first"))
    async with asyncio.timeout(10.0):
        await has_begun.wait()
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(writer.write(path, "second"))
        await asyncio.sleep(0)
        may_end.set()
        await second
    assert path.read_text() == "second"


async def test_a_text_is_made_beside_the_loop_and_in_the_order_of_asking(tmp_path: Path) -> None:
    writer, path, made = PrivateWriter(), tmp_path / "book", []

    def text(number: int) -> str:
        made.append((number, threading.current_thread() is threading.main_thread()))
        return str(number)

    await asyncio.gather(*(writer.write(path, partial(text, number)) for number in range(5)))
    assert made == [(number, False) for number in range(5)]
    assert path.read_text() == "4"


async def test_a_book_is_written_as_it_was_when_that_was_asked_for(tmp_path: Path) -> None:
    books = MeshBooks(tmp_path)
    books.machines.enter(MachineName("machine-1"), "s", now=1.0)
    books.relays.enter(MachineName("relay-1"), "s", now=1.0)
    saving = [asyncio.create_task(books.save(name)) for name in NAMES]
    await asyncio.sleep(0)  # each has been asked for
    books.machines.enter(MachineName("machine-2"), "s", now=2.0)
    books.relays.leave(MachineName("relay-1"), now=2.0)
    await asyncio.gather(*saving)
    read = MeshBooks(tmp_path)
    read.load()
    assert list(read.machines.machines) == ["machine-1"]
    assert list(read.relays.present()) == ["relay-1"]
