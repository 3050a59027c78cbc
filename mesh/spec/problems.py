"""What is wrong with a job, as sentences that name the field in the user's own spelling.

Rules of this file:
1. All problems of a document are reported at once. What depends on several fields (the shape, the total size) is
   looked at when each field by itself is right.
2. A problem says the field, what it got and what it takes. Values of variables are never shown: they may be secrets.
3. An unknown field is answered with the nearest known one beside it, or with the place where that name belongs.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from mesh.errors import SpecError
from mesh.reasons import Reason
from mesh.spec.document import Path

VALUE_LENGTH_SHOWN = 60
PROBLEMS_SHOWN = 20


class Problem:
    """One problem. `path` is relative to the document; `got` is already fit to be shown."""

    __slots__ = ("got", "path", "text")

    def __init__(self, text: str, *, path: Path = (), got: str | None = None) -> None:
        self.path = path
        self.got = got
        self.text = text


def refuse(text: str, *, path: Path = (), got: str | None = None) -> NoReturn:
    """Ends a pydantic validator with one problem; `path` is relative to the validated value."""
    refuse_all([Problem(text, path=path, got=got)])


def refuse_all(problems: Sequence[Problem]) -> NoReturn:
    """Ends a pydantic validator with these problems."""
    raise PydanticCustomError("mesh", "see ctx", {"problems": list(problems)})


def describe(value: Any) -> str:
    """A value as a person would write it, never longer than a line."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, str):
        shown = value if len(value) <= VALUE_LENGTH_SHOWN else f"{value[:VALUE_LENGTH_SHOWN]}…"
        quoted = json.dumps(shown, ensure_ascii=not shown.isprintable())
        return quoted if shown == value else f"{quoted} ({len(value):,} characters)"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)[:VALUE_LENGTH_SHOWN]


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that was probably meant: the same but for case, dashes and underscores, or one close to it."""
    by_key = {_key(choice): choice for choice in choices}
    if _key(word) in by_key:
        return by_key[_key(word)]
    close = difflib.get_close_matches(_key(word), by_key, n=1, cutoff=0.7)
    return by_key[close[0]] if close else None


def _key(word: str) -> str:
    return word.replace("_", "").replace("-", "").lower()


def problems_of(error: ValidationError, *, root: type[BaseModel]) -> list[Problem]:
    """pydantic's findings in our words."""
    fields = field_index(root)
    found: list[Problem] = []
    for detail in error.errors(include_url=False):
        found.extend(_translated(detail, fields))
    return found


def _translated(detail: ErrorDetails, fields: Mapping[Path, list[str]]) -> list[Problem]:
    path: Path = tuple(detail["loc"])
    match detail["type"]:
        case "mesh":
            return [
                Problem(problem.text, path=path + problem.path, got=problem.got)
                for problem in detail["ctx"]["problems"]
            ]
        case "extra_forbidden":
            return [Problem(_unknown_sentence(path, fields), path=path)]
        case "missing":
            return [Problem("It is missing, and every job has one.", path=path)]
        case "literal_error":
            takes = str(detail["ctx"]["expected"]).strip("'")
            return [Problem(f"It takes {takes}.", path=path, got=describe(detail["input"]))]
        case _:
            # The validators say everything else in their own words; what is left are wrong types of whole objects.
            return [Problem("It takes a mapping.", path=path, got=describe(detail["input"]))]


def _unknown_sentence(path: Path, fields: Mapping[Path, list[str]]) -> str:
    name, parent = str(path[-1]), path[:-1]
    beside = fields.get(parent, [])
    if near := nearest(name, beside):
        return f'There is no such field. Did you mean "{near}"?'
    for other, names in fields.items():
        for known in names:
            if _key(known) == _key(name):
                return f"There is no such field here. It belongs at {dotted((*other, known))}."
    listed = ", ".join(beside)
    return f"There is no such field; {dotted(parent) or 'a job'} has {listed}."


def field_index(root: type[BaseModel]) -> dict[Path, list[str]]:
    """The known field names under each path, as users spell them. `status` is the server's and left out."""
    index: dict[Path, list[str]] = {}
    waiting: list[tuple[Path, type[BaseModel]]] = [((), root)]
    while waiting:
        path, model = waiting.pop(0)
        names = []
        for name, field in model.model_fields.items():
            spelled = field.alias or name
            names.append(spelled)
            for candidate in (field.annotation, *get_args(field.annotation)):
                if isinstance(candidate, type) and issubclass(candidate, BaseModel) and spelled != "status":
                    waiting.append(((*path, spelled), candidate))
        index[path] = names
    return index


def dotted(path: Path) -> str:
    """`spec.distributed.nodes`, `spec.command[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def spec_error(
    problems: Sequence[Problem],
    *,
    source: str,
    spell: Callable[[Path], str] = dotted,
    lines: Mapping[Path, int] | None = None,
    reason: Reason = Reason.INVALID_SPEC,
) -> SpecError:
    """One error for all these problems; there is at least one.

    Args:
        source: what is wrong, as the user calls it (a file name); empty for a command line, whose flags name
            themselves.
        spell: a path in the user's spelling.
        lines: where in the source each path stands.
    """
    sentences = [_sentence(problem, spell, lines or {}) for problem in problems]
    shown, hidden = sentences[:PROBLEMS_SHOWN], len(sentences) - PROBLEMS_SHOWN
    if hidden > 0:
        shown.append(f"and {hidden} more")
    if len(sentences) == 1:
        message = f"{source}: {sentences[0]}" if source else sentences[0]
    else:
        head = f"{source or 'This command line'} has {len(sentences)} problems:"
        message = "\n  ".join([head, *shown])
    first = problems[0]
    return SpecError(
        message,
        reason=reason,
        field=spell(first.path) or None,
        got=first.got,
        problems=len(problems),
        source=source or None,
    )


def _sentence(problem: Problem, spell: Callable[[Path], str], lines: Mapping[Path, int]) -> str:
    line = next((lines[path] for path in _upwards(problem.path) if path in lines), None)
    place = spell(problem.path) + (f" (line {line})" if line is not None else "")
    got = f"got {problem.got}. " if problem.got is not None else ""
    return f"{place}: {got}{problem.text}" if place else f"{got}{problem.text}"


def _upwards(path: Path) -> Iterable[Path]:
    """This path, then what it is part of; the document itself is no useful place."""
    return (path[:length] for length in range(len(path), 0, -1))
