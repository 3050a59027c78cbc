"""A rank's output for tests of the logs: built in memory, put on disk as the spool or the log store would have it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agents.spool import HEADER_BYTES, STDERR, STDOUT, SpoolWriter, encode_record
from coordinator.logs.render import START, Line, LineRenderer, Position
from coordinator.logs.writer import AttemptWriter, Limits
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunUid

Piece = tuple[int, bytes]
"""(stream, bytes) as one read of a pipe gave them."""

UID = RunUid("00c0ffee00c0ffee")
FAR = 1 << 40


def incarnation(
    *, rank: int = 0, epoch: int = 1, token: str = "0123456789abcdef", uid: str = UID
) -> Incarnation:
    return Incarnation(
        run_uid=RunUid(uid), epoch=Epoch(epoch), rank=Rank(rank), token=IncarnationToken(token)
    )


def records(pieces: Iterable[Piece], *, at: float = 100.0) -> bytes:
    """The pieces as records, one second apart."""
    return b"".join(
        encode_record(at=at + index, stream=stream, data=data) for index, (stream, data) in enumerate(pieces)
    )


def out(*texts: str | bytes) -> list[Piece]:
    return [(STDOUT, text.encode() if isinstance(text, str) else text) for text in texts]


def err(*texts: str | bytes) -> list[Piece]:
    return [(STDERR, text.encode() if isinstance(text, str) else text) for text in texts]


def render(
    pieces: Iterable[Piece],
    *,
    position: Position = START,
    line_bytes_max: int | None = None,
    at: float = 100.0,
    flush: bool = True,
) -> list[Line]:
    """The lines that a reader standing at `position` gets of these pieces."""
    options = {} if line_bytes_max is None else {"line_bytes_max": line_bytes_max}
    renderer = LineRenderer(position, **options)
    lines: list[Line] = []
    offset = 0
    for index, (stream, data) in enumerate(pieces):
        end = offset + HEADER_BYTES + len(data)
        if offset >= position.scan:
            lines += renderer.feed(offset=offset, end=end, at=at + index, stream=stream, data=data)
        offset = end
    return lines + (renderer.flush() if flush else renderer.previews())


def texts(lines: Iterable[Line]) -> list[str]:
    return [line.text for line in lines]


def write_spool(directory: Path, pieces: Iterable[Piece], *, at: float = 100.0, ended: bool = True) -> None:
    """A whole spool, as a supervisor leaves it."""
    writer = SpoolWriter(str(directory))
    for index, (stream, data) in enumerate(pieces):
        writer.append(stream, data, now=at + index)
    if ended:
        writer.finish(now=at)


def write_attempt(
    run: Path,
    pieces: Iterable[Piece],
    *,
    rank: int = 0,
    epoch: int = 1,
    at: float = 100.0,
    ended: bool = True,
    limits: Limits | None = None,
) -> int:
    """An attempt's log on the head, as the sink leaves it. Goes on where an earlier call stopped; returns the end."""
    writer = AttemptWriter(run / f"{epoch}-{rank}", token="0123456789abcdef", limits=limits or Limits())
    try:
        for index, piece in enumerate(pieces):
            writer.append(writer.end, records([piece], at=at + index))
        if ended:
            writer.finish(writer.end)
        return writer.end
    finally:
        writer.close()
