"""An attempt's log on disk: kept, cut, trimmed, lost and found again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.spool import SEGMENT_BYTES
from coordinator.logs import layout
from coordinator.logs.scan import Gap, LineScanner, Records, RecordScanner, last_lines
from coordinator.logs.writer import AttemptWriter, Limits
from mesh.errors import LocalProtocolError, RemoteProtocolError
from tests.fakes.log_stream import out, records, texts

SMALL = Limits(retention_bytes=4000, segment_bytes=1000)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(
    directory: Path, *, limits: Limits | None = None, clock: Callable[[], float] | None = None
) -> AttemptWriter:
    return AttemptWriter(
        directory, token="0123456789abcdef", limits=limits or Limits(), clock=clock or Clock()
    )


def put(writer: AttemptWriter, *lines: str) -> None:
    for line in lines:
        writer.append(writer.end, records(out(line)))


def read_lines(directory: Path) -> list[str]:
    scanner = LineScanner(directory)
    found: list[str] = []
    while not scanner.caught_up:
        found += texts(scanner.read())
    found += texts(scanner.flush())
    scanner.close()
    return found


def read_gaps(directory: Path) -> list[Gap]:
    scanner = RecordScanner(directory)
    found = []
    while isinstance(part := scanner.read(), Records | Gap):
        if isinstance(part, Gap):
            found.append(part)
    scanner.close()
    return found


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Holds the bytes that still fit; empty: the disk has room."""
    room: list[int] = []
    write = os.write

    def limited(file: int, data: bytes) -> int:
        if room:
            fits = min(room[0], len(data))
            room[0] -= fits
            if not fits:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, data[:fits])
        return write(file, data)

    monkeypatch.setattr(os, "write", limited)
    return room


def test_what_was_written_is_read_and_its_end_is_known(tmp_path: Path) -> None:
    writer = opened(tmp_path / "1-0")
    put(writer, "one\n", "two\n")
    writer.finish(writer.end)
    writer.close()
    assert read_lines(tmp_path / "1-0") == ["one", "two"]
    again = opened(tmp_path / "1-0")
    assert (again.end, again.ended) == (writer.end, True)


def test_a_torn_last_record_is_cut_and_asked_for_again(tmp_path: Path) -> None:
    writer = opened(tmp_path / "1-0")
    put(writer, "one\n")
    kept = writer.end
    put(writer, "two\n")
    writer.close()
    (segment,) = layout.segments(tmp_path / "1-0")
    os.truncate(segment.path, segment.size - 3)
    again = opened(tmp_path / "1-0")
    assert again.end == kept
    put(again, "two\n", "three\n")
    again.close()
    assert read_lines(tmp_path / "1-0") == ["one", "two", "three"]


def test_zeros_that_a_power_cut_left_are_cut(tmp_path: Path) -> None:
    writer = opened(tmp_path / "1-0")
    put(writer, "one\n")
    writer.close()
    (segment,) = layout.segments(tmp_path / "1-0")
    with segment.path.open("ab") as file:
        file.write(bytes(4096))
    assert opened(tmp_path / "1-0").end == writer.end


@pytest.mark.parametrize("offset", [0, 5, 2**61])
def test_a_stale_or_absurd_offset_is_refused_and_changes_nothing(tmp_path: Path, offset: int) -> None:
    writer = opened(tmp_path / "1-0")
    put(writer, "one\n")
    end = writer.end
    with pytest.raises(RemoteProtocolError):
        writer.append(offset, records(out("again\n")))
    with pytest.raises(RemoteProtocolError):
        writer.finish(offset)
    writer.close()
    assert (writer.end, read_lines(tmp_path / "1-0")) == (end, ["one"])


@pytest.mark.parametrize("data", [b"garbage that is no record", records(out("torn\n"))[:-1], bytes(64)])
def test_what_is_no_record_is_refused_and_changes_nothing(tmp_path: Path, data: bytes) -> None:
    writer = opened(tmp_path / "1-0")
    with pytest.raises(RemoteProtocolError):
        writer.append(0, data)
    assert writer.end == 0
    assert not (tmp_path / "1-0").exists()


def test_nothing_follows_the_end(tmp_path: Path) -> None:
    writer = opened(tmp_path / "1-0")
    put(writer, "one\n")
    writer.finish(writer.end)
    writer.finish(writer.end)
    with pytest.raises(RemoteProtocolError):
        put(writer, "two\n")


def test_a_closed_writer_writes_no_more(tmp_path: Path) -> None:
    writer = opened(tmp_path / "1-0")
    put(writer, "one\n")
    writer.close()
    with pytest.raises(LocalProtocolError):
        put(writer, "two\n")


def test_a_full_disk_loses_output_visibly_and_is_written_again_when_there_is_room(
    tmp_path: Path, full_disk: list[int]
) -> None:
    clock = Clock()
    writer = opened(tmp_path / "1-0", clock=clock)
    put(writer, "one\n")
    before = writer.end
    full_disk.append(5)
    put(writer, "two\n", "three\n")
    assert writer.refused == os.strerror(errno.ENOSPC)
    full_disk.clear()
    put(writer, "four\n")  # not tried: the disk is left alone for a while
    lost_until = writer.end
    clock.now += 2.0
    put(writer, "five\n")
    writer.close()
    (gap,) = read_gaps(tmp_path / "1-0")
    assert (gap.start, gap.end, gap.trimmed) == (before, lost_until, False)
    assert read_lines(tmp_path / "1-0") == ["one", gap.notice(), "five"]
    assert f"{lost_until - before} bytes" in gap.notice()
    assert not writer.refused


def test_records_that_fitted_before_the_disk_was_full_are_kept(tmp_path: Path, full_disk: list[int]) -> None:
    clock = Clock()
    writer = opened(tmp_path / "1-0", clock=clock)
    data = records(out("one\n", "two\n", "three\n"))
    full_disk.append(len(records(out("one\n", "two\n"))) + 3)
    writer.append(0, data)
    assert writer.end == len(data)
    full_disk.clear()
    clock.now += 2.0
    put(writer, "four\n")
    writer.close()
    lines = read_lines(tmp_path / "1-0")
    assert [lines[0], lines[1], lines[-1]] == ["one", "two", "four"]
    assert len(lines) == 4


def test_a_disk_that_is_full_from_the_start_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    clock = Clock()
    writer = opened(tmp_path / "1-0", clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        put(writer, "lost\n")
    clock.now += 2.0
    put(writer, "kept\n")
    writer.finish(writer.end)
    lines = read_lines(tmp_path / "1-0")
    assert lines[1:] == ["kept"]
    assert "lost" in lines[0]


def test_a_loss_at_the_very_end_is_said_too(tmp_path: Path, full_disk: list[int]) -> None:
    writer = opened(tmp_path / "1-0")
    put(writer, "one\n")
    full_disk.append(0)
    put(writer, "last\n")
    full_disk.clear()
    writer.finish(writer.end)
    lines = read_lines(tmp_path / "1-0")
    assert lines[0] == "one"
    assert "bytes of output were lost" in lines[1]


def test_over_the_limit_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    writer = opened(tmp_path / "1-0", limits=SMALL)
    put(writer, *(f"line {n:04d}\n" for n in range(1000)))
    writer.close()
    kept = layout.segments(tmp_path / "1-0")
    assert sum(segment.size for segment in kept) <= SMALL.retention_bytes
    lines = read_lines(tmp_path / "1-0")
    assert lines[0] == "line 0000"
    assert lines[-1] == "line 0999"
    (gap,) = read_gaps(tmp_path / "1-0")
    assert gap.trimmed
    assert gap.notice() in lines
    assert "limit" in gap.notice()


def test_the_unused_end_of_a_spool_segment_is_no_loss(tmp_path: Path) -> None:
    writer = opened(tmp_path / "1-0")
    writer.append(SEGMENT_BYTES - 100, records(out("before\n")))
    writer.append(SEGMENT_BYTES, records(out("after\n")))
    writer.close()
    assert read_lines(tmp_path / "1-0")[1:] == ["before", "after"]
    assert len(read_gaps(tmp_path / "1-0")) == 1


def test_a_reader_beside_the_writer_sees_whole_records_and_no_false_loss(tmp_path: Path) -> None:
    writer = opened(tmp_path / "1-0", limits=Limits(retention_bytes=10**6, segment_bytes=100))
    scanner = LineScanner(tmp_path / "1-0")
    found: list[str] = []
    for n in range(200):
        put(writer, f"line {n}\n")
        found += texts(scanner.read())
    while not scanner.caught_up:
        found += texts(scanner.read())
    scanner.close()
    writer.close()
    assert found == [f"line {n}" for n in range(200)]


@pytest.mark.parametrize("count", [0, 1, 5, 50, 1000])
def test_the_last_lines_are_found_from_the_end(tmp_path: Path, count: int) -> None:
    writer = opened(tmp_path / "1-0", limits=Limits(retention_bytes=10**6, segment_bytes=300))
    # Ten bytes a line: the length in each record's header looks like a line feed.
    expected = [f"line {n:04d}" for n in range(200)]
    put(writer, *(f"{line}\n" for line in expected))
    writer.close()
    tail, end = last_lines(tmp_path / "1-0", count)
    assert len(tail) == min(count, 200)
    position = tail[0].before if tail else end
    scanner = LineScanner(tmp_path / "1-0", position=position)
    found: list[str] = []
    while not scanner.caught_up:
        found += texts(scanner.read())
    scanner.close()
    assert found == expected[200 - min(count, 200) :]
