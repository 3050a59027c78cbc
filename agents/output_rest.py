"""Which of a command's pipes is left alone for a moment, since it is read too often. Pure; standard library only.

A command that prints fifty lines a second wakes its supervisor for each, which costs a percent of a processor. So a
pipe that was read OFTEN times within WINDOW_S rests for REST_S: what gathers in it meanwhile is read at once then.

Rules of this file
- Only one pipe rests at a time, and is read before any other: what a command writes to both stays in order.
- A pipe that is read now and then never rests, and none out of which much comes: it would hold up its writer.
"""

from __future__ import annotations

OFTEN = 8
WINDOW_S = 2.0
REST_S = 0.2
MUCH_BYTES = 16 * 1024
"""In one read; a pipe may hold no more than 64 KiB."""
NEVER = float("inf")
NOBODY = -1


class OutputRest:
    """Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.file = NOBODY
        """The pipe that rests."""
        self.until = NEVER
        self._reads: dict[int, list[float]] = {}
        """By pipe: when it was read, the last OFTEN times."""

    def begins(self, file: int, *, size: int, now: float) -> bool:
        """So many bytes were read from the pipe. Returns whether it rests from now on."""
        if not 0 < size < MUCH_BYTES:
            return False
        reads = self._reads.setdefault(file, [])
        reads.append(now)
        if len(reads) < OFTEN:
            return False
        if now - reads.pop(0) > WINDOW_S or self.file != NOBODY:
            return False
        self.file, self.until = file, now + REST_S
        return True

    def end(self) -> int:
        """Nobody rests any more. Returns who did."""
        file, self.file, self.until = self.file, NOBODY, NEVER
        return file
