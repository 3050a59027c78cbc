"""The spool: whole records, every byte once, whatever the disk refuses and whenever somebody looks."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import spool
from agents.spool import STDERR, STDOUT, Record, SpoolReader, SpoolWriter

SMALL_SEGMENT = 200


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "SEGMENT_BYTES", SMALL_SEGMENT)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "spool")


def read_all(reader: SpoolReader) -> list[Record]:
    found: list[Record] = []
    while records := reader.read():
        found += records
    return found


class FullDisk:
    """Stands in for os.write: takes `room` bytes more, then answers as a full disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr(spool.os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        if data and self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self._write(file, data[: self.room])
        self.room -= count
        return count


# Records


records = st.lists(
    st.tuples(st.floats(0, 2e9), st.sampled_from([STDOUT, STDERR]), st.binary(max_size=40)), max_size=8
)


@given(records, st.integers(0, 400))
def test_parsing_gives_the_whole_records_of_any_beginning(written: list, cut: int) -> None:
    encoded = [spool.encode_record(at=at, stream=stream, data=data) for at, stream, data in written]
    buffer = b"".join(encoded)[:cut]
    found, used = spool.parse_records(buffer, base=1000)
    assert [(r.at, r.stream, r.data) for r in found] == written[: len(found)]
    assert used == sum(len(piece) for piece in encoded[: len(found)])
    assert len(found) == len(encoded) or used + len(encoded[len(found)]) > len(buffer)
    assert not found or found[-1].offset == 1000 + used


@given(st.binary(max_size=100))
def test_parsing_never_dies_of_bytes_that_are_no_records(noise: bytes) -> None:
    try:
        found, used = spool.parse_records(noise)
    except spool.SpoolCorruptError:
        return
    assert used == sum(spool.HEADER_BYTES + len(r.data) for r in found)


def test_a_fault_behind_whole_records_does_not_hide_them() -> None:
    good = spool.encode_record(at=1.0, stream=STDOUT, data=b"good")
    found, used = spool.parse_records(good + bytes(50))
    assert ([r.data for r in found], used) == ([b"good"], len(good))
    with pytest.raises(spool.SpoolCorruptError):
        spool.parse_records(bytes(50))


# Writing and reading


def test_what_is_written_is_read_in_order_with_its_stream_and_time(folder: str) -> None:
    writer, reader = SpoolWriter(folder), SpoolReader(folder)
    writer.append(STDOUT, b"one\n", now=1.5)
    writer.append(STDERR, b"\xff\0two", now=2.5)
    assert [(r.at, r.stream, r.data) for r in reader.read()] == [(1.5, 1, b"one\n"), (2.5, 2, b"\xff\0two")]
    assert reader.position == writer.written
    assert reader.read() == []
    assert not reader.ended
    writer.finish(now=3)
    assert reader.read() == []
    assert reader.ended


@pytest.mark.usefixtures("small_segments")
def test_a_reader_carries_on_from_any_record_across_segments(folder: str) -> None:
    writer = SpoolWriter(folder)
    for i in range(50):
        writer.append(STDOUT, f"{i:03}".encode() * (i % 7 + 1), now=i)
    writer.finish(now=50)
    everything = read_all(SpoolReader(folder))
    assert [int(r.data[:3]) for r in everything] == list(range(50))
    assert len(spool.segment_indexes(folder)) > 3
    for i, record in enumerate(everything):
        assert read_all(SpoolReader(folder, offset=record.offset)) == everything[i + 1 :]


@pytest.mark.usefixtures("small_segments")
def test_a_reader_that_follows_misses_nothing_when_segments_roll(folder: str) -> None:
    writer, reader = SpoolWriter(folder), SpoolReader(folder)
    found: list[Record] = []
    for i in range(60):
        writer.append(STDOUT, f"{i:03}".encode() * (i % 5 + 1), now=i)
        if i % 3:
            found += reader.read()
        if found and i % 4 == 0:
            writer.acknowledge(found[-1].offset)
    found += read_all(reader)
    assert [int(r.data[:3]) for r in found] == list(range(60))
    assert (
        spool.segment_indexes(folder)[0] == found[-1].offset // SMALL_SEGMENT or writer.acked < writer.written
    )


def test_more_than_a_record_holds_is_split(folder: str) -> None:
    writer = SpoolWriter(folder)
    data = os.urandom(3 * spool.RECORD_DATA_BYTES_MAX + 1)
    writer.append(STDOUT, data, now=0)
    found = read_all(SpoolReader(folder))
    assert len(found) == 4
    assert b"".join(r.data for r in found) == data


@pytest.mark.usefixtures("small_segments")
def test_segments_that_the_head_has_are_deleted_and_others_kept(folder: str) -> None:
    writer = SpoolWriter(folder)
    for i in range(20):
        writer.append(STDOUT, b"x" * 50, now=i)
    everything = read_all(SpoolReader(folder))
    writer.acknowledge(everything[9].offset)
    assert spool.segment_indexes(folder)[0] == everything[9].offset // SMALL_SEGMENT
    assert read_all(SpoolReader(folder, offset=everything[9].offset)) == everything[10:]
    writer.acknowledge(everything[3].offset)
    assert writer.acked == everything[9].offset
    writer.acknowledge(10**12)
    assert writer.unacked() == 0


@pytest.mark.usefixtures("small_segments")
def test_deleting_after_the_writer_has_gone_keeps_what_is_not_acknowledged(folder: str) -> None:
    writer = SpoolWriter(folder)
    for i in range(20):
        writer.append(STDOUT, b"x" * 50, now=i)
    writer.finish(now=20)
    everything = read_all(SpoolReader(folder))
    spool.delete_acked(folder, everything[9].offset)
    assert read_all(SpoolReader(folder, offset=everything[9].offset)) == everything[10:]


@pytest.mark.usefixtures("small_segments")
def test_a_reader_that_comes_too_late_says_how_much_is_gone(folder: str) -> None:
    writer = SpoolWriter(folder)
    for i in range(20):
        writer.append(STDOUT, b"x" * 50, now=i)
    spool.delete_acked(folder, 2 * SMALL_SEGMENT)
    first, *rest = read_all(SpoolReader(folder))
    assert first.stream == STDERR
    assert b"200 bytes of output were lost here" in first.data
    assert first.offset == 2 * SMALL_SEGMENT
    assert all(r.data == b"x" * 50 for r in rest)


def test_a_reader_may_come_before_the_writer(folder: str) -> None:
    reader = SpoolReader(folder)
    assert reader.read() == []
    assert not reader.ended
    SpoolWriter(folder).append(STDOUT, b"first", now=0)
    assert [r.data for r in reader.read()] == [b"first"]


def test_a_look_tells_whether_there_may_be_more_to_read(folder: str) -> None:
    reader = SpoolReader(folder)
    assert reader.read() == [] and not reader.has_changed()
    writer = SpoolWriter(folder)
    writer.append(STDOUT, b"one", now=1.0)
    assert reader.has_changed()
    assert [record.data for record in reader.read()] == [b"one"]
    assert reader.read() == [] and not reader.has_changed()
    writer.append(STDOUT, b"two", now=2.0)
    assert reader.has_changed(), "more in the segment"
    assert [record.data for record in reader.read()] == [b"two"]
    assert reader.read() == []
    time.sleep(0.02)  # the folder's time has the kernel's tick
    writer.finish(now=3.0)
    assert reader.has_changed(), "the end"


def test_a_record_that_is_being_written_is_not_seen(folder: str) -> None:
    writer, reader = SpoolWriter(folder), SpoolReader(folder)
    writer.append(STDOUT, b"whole", now=0)
    encoded = spool.encode_record(at=1, stream=STDOUT, data=b"in parts")
    with open(spool.segment_path(folder, 0), "ab") as file:
        file.write(encoded[:15])
        file.flush()
        assert [r.data for r in reader.read()] == [b"whole"]
        assert reader.read() == []
        file.write(encoded[15:])
    assert [r.data for r in reader.read()] == [b"in parts"]


def test_half_a_record_of_a_dead_writer_ends_the_spool_and_is_told(folder: str) -> None:
    writer, reader = SpoolWriter(folder), SpoolReader(folder)
    writer.append(STDOUT, b"whole", now=0)
    with open(spool.segment_path(folder, 0), "ab") as file:
        file.write(spool.encode_record(at=1, stream=STDOUT, data=b"never finished")[:20])
    assert [r.data for r in reader.read()] == [b"whole"]
    assert reader.read() == []
    assert not reader.ended
    spool.mark_end(folder)
    spool.mark_end(folder)
    (mark,) = reader.read()
    assert b"20 bytes of output were lost here" in mark.data
    assert reader.read() == []
    assert reader.ended


@pytest.mark.usefixtures("small_segments")
def test_garbage_in_a_segment_is_skipped_and_told(folder: str) -> None:
    writer = SpoolWriter(folder)
    for i in range(8):
        writer.append(STDOUT, b"%03d" % i * 15, now=i)
    with open(spool.segment_path(folder, 0), "r+b") as file:
        file.seek(58)
        file.write(bytes(60))
    found = read_all(SpoolReader(folder))
    assert [r.data[:3] for r in found if r.stream == STDOUT] == [
        b"000",
        b"003",
        b"004",
        b"005",
        b"006",
        b"007",
    ]
    assert sum(b"were lost here" in r.data for r in found) == 1


def test_a_second_writer_starts_behind_the_first_and_both_are_read(folder: str) -> None:
    first = SpoolWriter(folder)
    first.append(STDOUT, b"first", now=0)
    first.finish(now=0)
    second = SpoolWriter(folder)
    second.append(STDOUT, b"second", now=1)
    reader = SpoolReader(folder)
    assert [r.data for r in read_all(reader)] == [b"first", b"second"]
    assert not reader.ended


def test_the_spool_is_for_its_owner_alone(folder: str) -> None:
    SpoolWriter(folder).append(STDOUT, b"a secret", now=0)
    assert os.stat(folder).st_mode & 0o077 == 0
    assert os.stat(spool.segment_path(folder, 0)).st_mode & 0o077 == 0


# A disk that refuses


def test_a_full_disk_is_told_with_the_bytes_it_cost(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SpoolWriter(folder)
    writer.append(STDERR, b"before", now=0)
    disk = FullDisk(monkeypatch, room=40)
    for i in range(5):
        writer.append(STDOUT, b"x" * 100, now=1 + i / 10)
    assert (writer.lost_total, writer.lost_pending) == (500, 500)
    disk.room = 10_000
    writer.append(STDOUT, b"dropped, it is too soon to ask again", now=1.5)
    writer.append(STDOUT, b"after", now=10)
    before, mark, after = read_all(SpoolReader(folder))
    assert (before.data, after.data) == (b"before", b"after")
    assert mark.stream == STDERR
    assert mark.data == (
        b"\n[gangmesh] 536 bytes of output were lost here:"
        b" the log spool could not be written (No space left on device)\n"
    )
    assert writer.lost_pending == 0


def test_a_disk_that_stays_full_still_takes_the_last_words(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpoolWriter(folder)
    disk = FullDisk(monkeypatch, room=0)
    unlink = os.unlink

    def gives_room(path: str) -> None:
        disk.room += os.path.getsize(path) if os.path.exists(path) else 0
        unlink(path)

    monkeypatch.setattr(spool.os, "unlink", gives_room)
    writer.append(STDOUT, b"x" * 100, now=0)
    writer.finish(now=0.1)
    reader = SpoolReader(folder)
    (mark,) = read_all(reader)
    assert b"100 bytes of output were lost here" in mark.data
    assert reader.ended
    assert sorted(os.listdir(folder)) == ["00000000.seg", "end"]


def test_a_disk_that_refuses_everything_stops_nobody(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FullDisk(monkeypatch, room=0)
    writer = SpoolWriter(folder)
    writer.append(STDOUT, b"x" * 100, now=0)
    writer.finish(now=0)
    assert writer.lost_total == 100
    assert writer.failure == "No space left on device"
    assert read_all(SpoolReader(folder)) == []


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 120)), max_size=30))
def test_whatever_a_disk_takes_every_byte_is_there_or_counted(pieces: list[tuple[int, int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(spool, "SEGMENT_BYTES", SMALL_SEGMENT)
        writer = SpoolWriter(folder)
        disk = FullDisk(monkeypatch, room=0)
        total = 0
        for i, (size, room) in enumerate(pieces):
            disk.room += room
            writer.append(STDOUT, b"x" * size, now=i * 2.0)
            total += size
        disk.room = 10_000
        writer.finish(now=1000)
        found = read_all(SpoolReader(folder))
    kept = sum(len(r.data) for r in found if r.stream == STDOUT)
    told = sum(int(r.data.split()[1]) for r in found if r.stream == STDERR)
    assert kept + writer.lost_total == total
    assert told == writer.lost_total
