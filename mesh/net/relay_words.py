"""What is said to a relay, inside TLS, before a stream is joined. Pure.

    anybody → relay    {v, do: listen}                    this machine takes streams; the line stays open
                       {v, do: dial, machine}             join me with that machine
                       {v, do: accept, ticket}            I am here for that ticket
    relay → anybody    {v, refusal, message}              as the answer of a gateway (preface.py)
    relay → listener   {v, ticket}                        somebody dials this machine: come for it

Rules of this file:
1. Frames are those of preface.py: small, one at a time.
2. After an answer without refusal to `dial` and `accept` both sides end TLS in order, and what follows is the inner
   stream as it is, which is TLS again, between the two machines. The relay sees nothing but that.
3. Nothing that a peer sends raises anything but RemoteProtocolError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mesh.errors import RemoteProtocolError
from mesh.ids import MachineName
from mesh.net.preface import PREFACE_BYTES_MAX, VERSION, read_name, read_words
from mesh.wire import encode_frame

TICKET_DIGITS = 32
_TICKET = re.compile(rf"[0-9a-f]{{{TICKET_DIGITS}}}")


@dataclass(frozen=True, slots=True)
class Listen:
    pass


@dataclass(frozen=True, slots=True)
class Dial:
    machine: MachineName


@dataclass(frozen=True, slots=True)
class Accept:
    ticket: str


@dataclass(frozen=True, slots=True)
class Incoming:
    ticket: str


def encode_words(words: Listen | Dial | Accept | Incoming) -> bytes:
    """As a frame."""
    said: dict[str, Any] = {"v": VERSION}
    match words:
        case Listen():
            said["do"] = "listen"
        case Dial():
            said |= {"do": "dial", "machine": words.machine}
        case Accept():
            said |= {"do": "accept", "ticket": words.ticket}
        case Incoming():
            said["ticket"] = words.ticket
    return encode_frame(said, bytes_max=PREFACE_BYTES_MAX)


def is_request(body: bytes) -> bool:
    """Whether this frame is for a relay, where a gateway and a relay have one port. Raises RemoteProtocolError."""
    return "do" in read_words(body)


def decode_request(body: bytes) -> Listen | Dial | Accept:
    """Raises RemoteProtocolError, VersionError among them."""
    words = read_words(body)
    match words.get("do"):
        case "listen":
            return Listen()
        case "dial":
            return Dial(MachineName(read_name(words, "machine")))
        case "accept":
            return Accept(_ticket(words))
    raise RemoteProtocolError("The peer asks a relay for something that there is not.")


def decode_incoming(body: bytes) -> Incoming:
    """Raises RemoteProtocolError, VersionError among them."""
    return Incoming(_ticket(read_words(body)))


def _ticket(words: dict[Any, Any]) -> str:
    ticket = words.get("ticket")
    if not isinstance(ticket, str) or _TICKET.fullmatch(ticket) is None:
        raise RemoteProtocolError("The peer's ticket is none.")
    return ticket
