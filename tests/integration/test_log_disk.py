"""A head's disk that is really full, on a small file system of its own. Case 49 of the field."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.logs.scan import LineScanner
from coordinator.logs.writer import RETRY_AFTER_LOSS_S, AttemptWriter, Limits
from tests.fakes.log_stream import out, records

pytestmark = pytest.mark.root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_output_that_finds_no_room_is_lost_visibly_until_there_is_room(small_disk: Path) -> None:
    now = 0.0
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1024 * 1024))
    writer = AttemptWriter(small_disk / "1-0", token="t", limits=Limits(), clock=lambda: now)
    count = 0
    while not writer.refused:
        writer.append(writer.end, records(out(f"line {count:06d} " + "x" * 50_000 + "\n")))
        count += 1
        assert count < 100
    for _ in range(10):  # the job goes on meanwhile
        writer.append(writer.end, records(out("lost\n")))
    filler.unlink()
    now += RETRY_AFTER_LOSS_S
    writer.append(writer.end, records(out("found\n")))
    writer.finish(writer.end)
    assert not writer.refused
    writer.close()

    scanner = LineScanner(small_disk / "1-0")
    lines = []
    while not scanner.caught_up:
        lines += scanner.read()
    scanner.close()
    kept = [line.text[:11] for line in lines if line.stream == "stdout"]
    assert kept == [*(f"line {n:06d}" for n in range(count - 1)), "found"]
    assert [line.stream for line in lines[-2:]] == ["system", "stdout"]
