"""What the names in a state directory say: which files are logs, and which step a directory has come to.

Rules of this file:
1. Pure, and by name only. Saves of `mesh.checkpoint` say their step themselves and need none of this.
2. Surer words win: a name that says `step` beats one that says `epoch`, wherever both occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mesh.checkpoint_format import step_of_folder

STEP_MAX = 10**12
"""A larger number in a name is a time or an id, no step."""
SHOWN_MAX = 200

_LOG_NAME = re.compile(r"(?i)(.*\.(log|out|err|jsonl)(\.\d+)?|events\.out\.tfevents\..*)\Z")
_STEP_WORDS = (
    re.compile(r"(?i)(?:^|[^a-z])(?:global_?)?steps?[-_=.]?(\d+)(?![0-9])"),
    re.compile(r"(?i)(?:^|[^a-z])iter(?:ation)?s?[-_=.]?(\d+)(?![0-9])"),
    re.compile(r"(?i)(?:^|[^a-z])(?:ckpt|checkpoint|chkpt)[-_=.]?(\d+)(?![0-9])"),
    re.compile(r"(?i)(?:^|[^a-z])epochs?[-_=.]?(\d+)(?![0-9])"),
)
"""Surest first; the first that occurs anywhere is the one that counts."""
_BARE_NUMBER = re.compile(r"(\d+)(?:\.[A-Za-z]+)?\Z")


def is_log_name(path: str) -> bool:
    """Whether a file is a log, written to all the time and of use however far it is written."""
    return _LOG_NAME.match(path.rpartition("/")[2]) is not None


def steps_of(paths: Iterable[str], marked: tuple[int, ...]) -> tuple[int, ...]:
    """The steps that a part of the whole directory can stand for, ascending; empty when nothing says one.

    Args:
        paths: of files and links.
        marked: the steps of the whole checkpoints of `mesh.checkpoint` in it.
    """
    all_paths = [path for path in paths if not is_log_name(path)]
    if not marked:
        found = step_from_names(all_paths)
        return () if found is None else (found,)
    is_only_marked = all(step_of_folder(path.partition("/")[0]) in marked for path in all_paths)
    return marked if is_only_marked else marked[-1:]


def step_from_names(paths: Iterable[str]) -> int | None:
    """The largest step that a name at the top, or one folder below it, speaks of.

    `step-100`, `iter_0000100`, `checkpoint-500/…`, `epoch=3-step=1200.ckpt`, `7.pt`.
    """
    names = {name for path in paths for name in path.split("/")[:2]}
    for pattern in _STEP_WORDS:
        if (found := _largest(pattern.search(name) for name in names)) is not None:
            return found
    return _largest(_BARE_NUMBER.match(path.partition("/")[0]) for path in paths)


def _largest(matches: Iterable[re.Match[str] | None]) -> int | None:
    numbers = [int(match.group(1)) for match in matches if match is not None]
    return max((number for number in numbers if number < STEP_MAX), default=None)


def shown(path: str) -> str:
    """A path for a message: bytes that are not UTF-8 as escapes, not too long."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
