"""What a launcher and its supervisor say to each other: one JSON object a line.

Commands (the supervisor's stdin)
    {"op":"start","argv":[…],"env":{…},"cwd":…|null,"spool":DIR,"incarnation":"uid.epoch.rank.token",
     "spool_unacked_max":bytes,"grace_s":seconds}       once; the last two have defaults
    {"op":"stop","grace_s":x}   SIGTERM now, SIGKILL of the whole tree after x seconds; another can only shorten that
    {"op":"kill"}               SIGKILL of the whole tree now
    {"op":"acked","offset":n}   the head has the output before spool offset n
    end of file                 the launcher is dead: kill
Events (its stdout)
    {"ev":"started","pid":n}
    {"ev":"start_failed","reason":…,"message":…}
    {"ev":"exited","code":n|null,"signal":n|null}    the main process ended; what it left behind may still run
    {"ev":"output_lost","message":…}                 the spool refuses output; the command runs on
    {"ev":"fence_failed","pids":[…]}                 SIGKILL did not end them within the limit; we keep trying
    {"ev":"empty","leftover":[…],"lost":bytes}       nothing is left, all output is in the spool: always the last one

Rules of this file
- Standard library only, and nothing heavy: the supervisor loads this module by path. So it reads with the C
  scanner behind `json` (importing that package costs its start 6 ms); where a Python lacks the scanner, `json`
  itself serves.
- Writing knows only what an event holds: text, whole numbers, None, and lists of whole numbers.
"""

from __future__ import annotations

try:
    from _json import encode_basestring_ascii, make_scanner
except ImportError:
    make_scanner = None  # type: ignore[assignment,misc]

TYPE_CHECKING = False
if TYPE_CHECKING:
    EventValue = str | int | list[int] | None

GRACE_S_DEFAULT = 30.0
SPOOL_UNACKED_BYTES_DEFAULT = 32 * 1024 * 1024
INCARNATION_VARIABLE = "NODUS_INCARNATION"


class ProtocolError(ValueError):
    """A command that no launcher of ours sends."""


class StartOrder:
    """The `start` command, checked."""

    __slots__ = (
        "arguments",
        "directory",
        "environment",
        "grace_s",
        "incarnation",
        "spool",
        "unacked_bytes_max",
    )

    def __init__(self, command: dict[str, object]) -> None:
        self.arguments = [checked(str, word, "argv") for word in checked(list, command.get("argv"), "argv")]
        environment = checked(dict, command.get("env"), "env")
        self.environment = {
            str(name): checked(str, value, f"env {name}") for name, value in environment.items()
        }
        directory = command.get("cwd")
        self.directory = None if directory is None else checked(str, directory, "cwd")
        self.spool = checked(str, command.get("spool"), "spool")
        self.incarnation = checked(str, command.get("incarnation"), "incarnation")
        if not self.incarnation or "/" in self.incarnation or "\0" in self.incarnation:
            raise ProtocolError(f"the incarnation {self.incarnation!r} cannot be a name")
        self.unacked_bytes_max = checked(
            int, command.get("spool_unacked_max", SPOOL_UNACKED_BYTES_DEFAULT), "spool_unacked_max"
        )
        self.grace_s = float(checked((int, float), command.get("grace_s", GRACE_S_DEFAULT), "grace_s"))
        self.environment[INCARNATION_VARIABLE] = self.incarnation


class _Rules:
    """What `json.JSONDecoder` tells its scanner."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def decode(line: bytes) -> object:
    """The value that the line holds. Raises ValueError for what is not JSON."""
    text = line.decode("utf-8", "surrogatepass").strip()
    if make_scanner is None:
        import json

        return json.loads(text)
    try:
        value, end = make_scanner(_Rules)(text, 0)  # type: ignore[arg-type]
    except (StopIteration, SystemError):
        # The scanner alone cannot name a fault (its error class lives in `json`): on this road speed does not matter.
        import json

        return json.loads(text)
    if end != len(text):
        raise ValueError(f"more than one JSON value, from character {end} on")
    return value


def encode(event: dict[str, EventValue]) -> bytes:
    """The event as one line."""
    return ("{" + ",".join(f"{_text(key)}:{_value(value)}" for key, value in event.items()) + "}\n").encode()


def _value(value: EventValue) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return _text(value)
    return str(value)


def _text(text: str) -> str:
    if make_scanner is None:
        import json

        return json.dumps(text)
    return encode_basestring_ascii(text)


def checked(kind: type | tuple[type, ...], value: object, name: str):  # type: ignore[no-untyped-def]
    """The value, if it is of that kind. Raises ProtocolError, with its name."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProtocolError(f"{name} is {type(value).__name__}")
    return value
