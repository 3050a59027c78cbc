"""What the command prints: byte by byte, to the last word, in bounded memory, whatever the disk or the head do."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents.spool import SEGMENT_BYTES, STDERR, STDOUT, SpoolReader
from tests.integration.supervised import (
    LIMIT_S,
    supervised_fixture,  # noqa: F401
    wait_until,
)

MIB = 1024 * 1024
FLOOD = """
import os, sys
piece = bytes(range(256)) * 256
for _ in range(int(sys.argv[1])):
    left = memoryview(piece)
    while left:
        left = left[os.write(1, left):]
"""


def memory_peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # it has just ended


def test_bytes_that_are_no_text_come_out_as_they_went_in(supervised) -> None:
    odd = b"a" * 4095 + "é€🚀".encode() + b"\xff\xfe\n\0\0\x1b[31mred\x1b[0m\r\nend without newline"
    one = supervised()
    one.start_python(
        f"import os; os.write(1, {odd!r}); os.write(2, {odd[::-1]!r}); os.write(1, b'x' * 61440 + {odd!r})"
    )
    one.end()
    assert one.output(STDOUT) == odd + b"x" * 61440 + odd
    assert one.output(STDERR) == odd[::-1]


def test_the_last_words_of_a_command_that_kills_itself_are_kept(supervised) -> None:
    one = supervised()
    one.start_python("import os; os.write(2, b'FATAL xyz'); os.kill(os.getpid(), 9)")
    assert one.end()["signal"] == signal.SIGKILL
    assert one.output(STDERR) == b"FATAL xyz"


def test_a_line_of_ten_megabytes_is_kept_whole(supervised) -> None:
    one = supervised()
    one.start_python("import sys; sys.stdout.write('y' * 10_000_000 + '\\n')")
    one.end()
    assert one.output() == b"y" * 10_000_000 + b"\n"
    assert len(list(one.spool.glob("*.seg"))) == 2


def test_progress_is_seen_before_its_line_ends(supervised) -> None:
    one = supervised()
    one.start_python("import os, time; os.write(1, b'\\rstep 3 of 9'); time.sleep(600)")
    one.wait_for_output(b"\rstep 3 of 9")
    one.send(op="kill")
    one.end()


def test_both_streams_come_in_the_order_in_which_they_were_read(supervised) -> None:
    one = supervised()
    one.start_python(
        "import os, sys\n"
        "for i in range(20):\n"
        "    os.write(1 + i % 2, f'{i} '.encode())\n"
        "    while not os.path.exists(f'seen-{i}'): pass\n"
    )
    for i in range(20):
        one.wait_for_output(f"{i} ".encode())
        (one.folder / f"seen-{i}").touch()
    one.end()
    assert [(r.stream, r.data) for r in one.records()] == [(1 + i % 2, f"{i} ".encode()) for i in range(20)]
    times = [record.at for record in one.records()]
    assert times == sorted(times)


def test_a_pipe_that_rests_is_read_before_the_other_one_and_to_its_end(supervised) -> None:
    one = supervised()
    one.start_python(
        "import os, time\n"
        "for number in range(60):\n"
        "    os.write(1, b'%d\\n' % number)\n"
        "    if number % 20 == 19: os.write(2, b'after %d\\n' % number)\n"
        "    time.sleep(0.01)\n"
    )
    one.end()
    records = one.records()
    everything = b"".join(record.data for record in records).decode().split()
    expected = []
    for number in range(60):
        expected += [str(number)] + (["after", str(number)] if number % 20 == 19 else [])
    assert everything == expected
    assert len(records) < 60, "it never rested"


def test_a_flood_waits_for_the_head_in_bounded_memory_and_loses_nothing(supervised) -> None:
    pieces, most = 1024, 4 * MIB
    one = supervised()
    one.start_python(FLOOD, str(pieces), spool_unacked_max=most)
    digest, seen, acked, peak = hashlib.sha256(), 0, 0, 0
    reader = SpoolReader(str(one.spool))
    while seen < pieces * 65536:
        records = reader.read()
        for record in records:
            digest.update(record.data)
            seen += len(record.data)
            # Never much more than allowed lies unacknowledged: what one look reads, and a record's header.
            assert record.offset - acked <= most + MIB
        if records:
            acked = records[-1].offset
            with contextlib.suppress(BrokenPipeError):  # it may have ended since: all of it is in the spool
                one.send(op="acked", offset=acked)
            if one.process.poll() is None:
                peak = max(peak, memory_peak_bytes(one.process.pid))
    one.end()
    assert digest.digest() == hashlib.sha256(bytes(range(256)) * 256 * pieces).digest()
    assert peak < 64 * MIB
    assert len(list(one.spool.glob("*.seg"))) <= 2, "acknowledged segments were deleted"


def test_a_flood_that_nobody_acknowledges_stands_still(supervised) -> None:
    one = supervised()
    one.start_python(FLOOD, "1024", spool_unacked_max=2 * MIB)

    def spooled() -> int:
        return sum(path.stat().st_size for path in one.spool.glob("*.seg"))

    wait_until(lambda: spooled() > 2 * MIB, "the limit is reached")
    pid = one.event("started")["pid"]
    wait_until(lambda: "pipe" in Path(f"/proc/{pid}/wchan").read_text() or spooled() > 4 * MIB, "it waits")
    assert spooled() <= 2 * MIB + 2 * (65536 + 13)
    one.send(op="stop", grace_s=0)
    assert one.end()["signal"] in (signal.SIGTERM, signal.SIGKILL)
    assert SEGMENT_BYTES > 4 * MIB


def test_a_command_that_waits_for_the_head_can_still_save_when_it_is_stopped(supervised) -> None:
    one = supervised()
    one.start_python(
        "import os, signal, sys\n"
        "def save(*_):\n"
        "    os.write(1, b'z' * 3_000_000)\n"
        "    os.write(2, b'saved')\n"
        "    os._exit(0)\n"
        "signal.signal(15, save)\n" + FLOOD,
        "1024",
        spool_unacked_max=MIB,
    )
    wait_until(lambda: sum(path.stat().st_size for path in one.spool.glob("*.seg")) > MIB, "the limit")
    one.send(op="stop", grace_s=300)
    assert one.end()["code"] == 0
    assert one.output(STDERR) == b"saved"


def test_a_stranger_who_holds_the_pipe_does_not_hold_us(supervised) -> None:
    one = supervised()
    one.start("sh", "-c", "echo ready; exec sleep 600")
    one.wait_for_output(b"ready")
    with open(f"/proc/{one.event('started')['pid']}/fd/1", "wb") as pipe:
        waits = [sys.executable, "-I", "-S", "-c", "input()"]
        stranger = subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=pipe)
    one.send(op="kill")
    one.event("empty")
    assert one.process.wait(LIMIT_S) == 0
    assert stranger.poll() is None
    stranger.communicate(b"\n", timeout=LIMIT_S)


@pytest.mark.root
def test_a_full_disk_costs_output_and_not_the_command(supervised, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        one = supervised()
        one.spool = disk / "spool"
        one.start_python(FLOOD + "os.write(2, b'the end')\nsys.exit(3)", "64")
        assert one.end()["code"] == 3
        lost = one.event("empty")["lost"]
        assert "No space left on device" in one.event("output_lost")["message"]
        printed = sum(len(r.data) for r in one.records() if r.stream == STDOUT)
        told = one.output(STDERR)
        assert printed + lost >= 64 * 65536
        assert f"{lost} bytes of output were lost here".encode() in told
        assert b"No space left on device" in told
        assert (one.spool / "end").exists()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.root
def test_output_is_kept_again_when_a_full_disk_has_room(supervised, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        (disk / "ballast").write_bytes(b"b" * 600_000)
        one = supervised()
        one.spool = disk / "spool"
        one.start_python(
            FLOOD + "import time\n"
            "while not os.path.exists('room'): time.sleep(0.01)\n"
            "while True: os.write(1, b'.tick.'); time.sleep(0.01)",
            "16",
        )
        one.event("output_lost")
        (disk / "ballast").unlink()
        (tmp_path / "room").touch()
        one.wait_for_output(b".tick.")
        one.send(op="kill")
        one.end()
        records = one.records()
        mark = next(i for i, r in enumerate(records) if b"were lost here" in r.data)
        assert records[mark].stream == STDERR
        assert b".tick." in records[mark + 1].data
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_spool_that_cannot_be_made_costs_output_and_not_the_command(supervised, tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("")
    one = supervised()
    one.spool = tmp_path / "in the way" / "spool"
    one.start("sh", "-c", "echo hello; exit 4")
    assert one.end()["code"] == 4
    assert one.event("empty")["lost"] == 6
    assert "cannot be written" in one.event("output_lost")["message"]
