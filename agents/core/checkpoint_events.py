"""What happens to the taking of checkpoints on a machine, and what is to be done about it. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agents.core.checkpoint_names import is_log_name

ProcessKey = tuple[int, int]
"""A process: its pid, and when it was started (its pid may be another's later)."""


class EntryKind(StrEnum):
    """What a look found."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    OUTSIDE_LINK = "a link out of the state directory"
    OTHER = "no file (a socket, a pipe or a device)"


KEPT = frozenset({EntryKind.FILE, EntryKind.DIRECTORY, EntryKind.LINK})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the state directory. Two looks at an unchanged one are equal."""

    path: str
    kind: EntryKind
    mode: int
    size: int = 0
    mtime_ns: int = 0
    inode: int = 0
    target: str = ""

    @property
    def is_log(self) -> bool:
        return self.kind is EntryKind.FILE and is_log_name(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at the state directory found."""

    entries: tuple[Entry, ...]
    """By path. Without what `mesh.checkpoint` is writing; a directory without size and time."""
    steps: tuple[int, ...] = ()
    """Of the whole checkpoints that `mesh.checkpoint` made, ascending."""
    is_saving: bool = False
    """`mesh.checkpoint` is writing one."""
    writers: tuple[tuple[str, ProcessKey], ...] = ()
    """Who has which file open for writing; looked at after the entries, and only when some file is not sure."""
    processes: frozenset[ProcessKey] = frozenset()
    """Those of the command, listed last."""
    trouble: str = ""
    """Why the directory cannot be taken (too many entries, not readable); then the rest counts for nothing."""
    cost_s: float = 0.0


# ---- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSeen:
    """The answer to LookAtState."""

    look: Look


@dataclass(frozen=True, slots=True, kw_only=True)
class WritersSeen:
    """The answer to LookForWriters: files of the directory that somebody has open for writing, logs left out."""

    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnded:
    """Nothing of the command runs any more."""

    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStored:
    """All of the part is in the store."""

    number: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTorn:
    """Something of it changed while it was read; nothing of it counts."""

    number: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFailed:
    """It cannot be stored, now or later (a file cannot be read)."""

    number: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Questioned:
    """The coordinator asks whether the directory still is what it was when this part was taken."""

    question: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLost:
    """The store does not have this part whole any more."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """A deadline came."""


CheckpointingEvent = (
    StateSeen
    | WritersSeen
    | CommandEnded
    | PartStored
    | PartTorn
    | PartFailed
    | PartLost
    | Questioned
    | TimePassed
)

# ---- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtState:
    """Look, and say what was seen."""

    sure: tuple[Entry, ...] | None
    """While the directory is exactly this, nobody needs to look for writers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookForWriters:
    """See who has a file of the directory open for writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakePart:
    """Read these entries, make sure that they did not change meanwhile, and store them."""

    number: int
    steps: tuple[int, ...]
    entries: tuple[Entry, ...]
    is_whole: bool
    """The whole directory: another entry that turns up meanwhile tears it too."""
    copy: bool
    """Copy the files aside first: linking them did not hold them still last time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerQuestion:
    """Tell the coordinator."""

    question: int
    digest: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TellTrouble:
    """Something that the user should know; each text once."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishTaking:
    """The command has ended, and what there is to take is stored. Comes once."""


CheckpointingEffect = LookAtState | LookForWriters | TakePart | AnswerQuestion | TellTrouble | FinishTaking
