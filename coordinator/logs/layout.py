"""Where the logs lie, and the names that are allowed there.

    <root>/<run uid>/<epoch>-<rank>/token             the incarnation whose output this is
                                    <offset>.seg      records (`agents.spool`), the first one at this offset
                                    end               the output is complete; holds its final offset
                                    trimmed           holds the offset before which retention dropped segments
    <root>/<run uid>/<epoch>-<rank>.1/ …              a second incarnation of the same rank in the same epoch

Rules of this file:
1. A path is built from a checked uid and from integers, never from what a peer or a user wrote.
2. What is missing between two segments was lost; there is no other record of a loss.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from agents.spool import HEADER_BYTES, RECORD_DATA_BYTES_MAX, SEGMENT_BYTES
from mesh.errors import NotFoundError

TOKEN_NAME = "token"
END_NAME = "end"
TRIMMED_NAME = "trimmed"
RANK_MAX = 65_535
EPOCH_MAX = 2**31

_UID = re.compile(r"[0-9a-f]{1,64}", re.ASCII)
_ATTEMPT = re.compile(r"([0-9]{1,10})-([0-9]{1,5})(?:\.([0-9]{1,5}))?", re.ASCII)
_SEGMENT = re.compile(r"([0-9]{20})\.seg", re.ASCII)


class AttemptKey(NamedTuple):
    """One incarnation's output. `again` counts the incarnations of a rank in one epoch; mostly there is one."""

    epoch: int
    rank: int
    again: int = 0

    def directory_name(self) -> str:
        return f"{self.epoch}-{self.rank}" + (f".{self.again}" if self.again else "")


class Segment(NamedTuple):
    """A file of records: where it begins in the stream, and how many bytes it has."""

    base: int
    size: int
    path: Path


def run_directory(root: Path, uid: str) -> Path:
    """Raises NotFoundError for what is not a run uid (16 hex digits; any number up to 64 is taken)."""
    if not _UID.fullmatch(uid):
        raise NotFoundError("There are no logs under that name: it is not the uid of a run.")
    return root / uid


def attempts(run: Path) -> list[AttemptKey]:
    """What there is of a run, by epoch and rank; empty when nothing has arrived yet."""
    try:
        found = [match for path in run.iterdir() if (match := _ATTEMPT.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    return sorted(AttemptKey(int(m[1]), int(m[2]), int(m[3] or 0)) for m in found)


def segments(directory: Path) -> list[Segment]:
    """The segments of an attempt, in order."""
    found: list[Segment] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if match := _SEGMENT.fullmatch(entry.name):
                    # One that retention drops just now is not there for the caller either.
                    with contextlib.suppress(FileNotFoundError):
                        found.append(Segment(int(match[1]), entry.stat().st_size, Path(entry.path)))
    except FileNotFoundError:
        return []
    return sorted(found)


def segment_path(directory: Path, base: int) -> Path:
    return directory / f"{base:020d}.seg"


def read_number(path: Path) -> int | None:
    """The number that a file holds; None when it is not there or holds none (it was never written in full)."""
    try:
        return int(path.read_text("ascii"))
    except (FileNotFoundError, ValueError):
        return None


def read_token(directory: Path) -> str | None:
    """The token of the incarnation whose folder this is; None when there is no such folder."""
    try:
        return (directory / TOKEN_NAME).read_text("ascii")
    except FileNotFoundError:
        return None


def meets(before: int, base: int) -> bool:
    """Whether records that begin at `base` go on, without a loss, from records that ended at `before`.

    The spool leaves less than a record's room unused at the end of each of its segments.
    """
    if base == before:
        return True
    return base % SEGMENT_BYTES == 0 and 0 < base - before < HEADER_BYTES + RECORD_DATA_BYTES_MAX
