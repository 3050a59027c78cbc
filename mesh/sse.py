"""Server-sent events, the reading side: lines in, events out. Sans-io.

The format is that of the HTML standard, section "Server-sent events": fields up to an empty line make an
event, lines that start with a colon are comments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSentEvent:
    """One event; `id` is that of the last event that had one."""

    data: str
    event: str = "message"
    id: str = ""


class EventParser:
    """Feed it one line after the other, without line ends."""

    def __init__(self) -> None:
        self._data: list[str] = []
        self._event = ""
        self._id = ""

    def feed(self, line: bytes) -> ServerSentEvent | None:
        """The event that this line completes, if it does."""
        text = line.removesuffix(b"\r").decode("utf-8", "replace")
        if not text:
            return self._complete()
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _complete(self) -> ServerSentEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        if not data:
            return None
        return ServerSentEvent(data="\n".join(data), event=event or "message", id=self._id)
