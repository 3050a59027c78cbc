"""The user's variables: where they come from, what they may be called, how large they may be.

Rules of this file:
1. A value is exact: nothing is expanded, trimmed or unescaped unless the env file's quoting says so. `$PATH` is five
   characters. Empty is set and empty.
2. `NAME` without `=` takes the value from the client's own environment, and is an error when it is not set there.
3. Later wins: `--env-file` files in the order given, then `-e` in the order given. In a job document a name that
   stands there twice is refused, because a document is written once and read by others.
4. What the kernel would refuse is refused here, by name and with its size.

The env file is UTF-8 text, one variable a line:

    # a comment, also after a value that is not quoted, when a blank stands before the #
    NAME=value                 blanks around name and value do not count
    export NAME=value          so that a shell can read the same file
    NAME='as it is: $ " \\ #'    may go over several lines; there is no escape inside
    NAME="tab\\tquote\\"end"      escapes: \\n \\t \\r \\\\ \\" \\$; may go over several lines
    NAME=                      set and empty
    NAME                       taken from the client's environment
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mesh.contract import is_reserved
from mesh.spec.names import is_variable_name

STRING_BYTES_MAX = 128 * 1024 - 1
"""The kernel's MAX_ARG_STRLEN is 32 pages, the final zero byte included: one `NAME=value`, or one argument."""
TOTAL_BYTES_MAX = 1536 * 1024
"""For command and variables together. The kernel gives all strings of an exec a quarter of the stack's limit, 2 MiB by
default; the rest is for the machine's own environment and the contract."""
ENV_FILE_BYTES_MAX = 4 * 1024 * 1024
POINTER_BYTES = 8
"""Each string also costs a pointer on the new program's stack."""

NAME_TAKES = "letters, digits and _, not starting with a digit"

_ASSIGNMENT = re.compile(r"[ \t]*(?:export[ \t]+)?([^=\s#]*)[ \t]*(=?)[ \t]*")
_REST = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|$)")
_SINGLE = re.compile(r"'([^']*)'")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "$": "$"}


class EnvironmentProblem(ValueError):
    """One thing that is wrong with a variable. The text names it and never shows its value, which may be a secret."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Assignment(NamedTuple):
    """One variable as it was written; `value` is None for a bare name."""

    name: str
    value: str | None


def parse_flag(text: str) -> Assignment:
    """One `-e NAME=VALUE` or `-e NAME`. Raises EnvironmentProblem for a bad name."""
    name, equals, value = text.partition("=")
    if problem := name_problem(name):
        raise EnvironmentProblem(problem)
    return Assignment(name, value if equals else None)


def parse_env_file(text: str, *, source: str) -> list[Assignment]:
    """The variables of an env file, in order, repeats included. Raises EnvironmentProblem with the line's number."""
    if len(text) > ENV_FILE_BYTES_MAX:
        raise EnvironmentProblem(
            f"{source} has {len(text):,} characters; an env file has at most {ENV_FILE_BYTES_MAX:,}"
        )
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    found: list[Assignment] = []
    position = 0
    while position < len(text):
        end_of_line = text.find("\n", position)
        line = text[position : end_of_line if end_of_line >= 0 else len(text)]
        if not line.strip() or line.lstrip().startswith("#"):
            position += len(line) + 1
            continue
        try:
            assignment, position = _parse_line(text, position)
        except EnvironmentProblem as problem:
            number = text.count("\n", 0, position) + 1
            raise EnvironmentProblem(f"{source}, line {number}: {problem.text}") from problem
        found.append(assignment)
    return found


def _parse_line(text: str, position: int) -> tuple[Assignment, int]:
    start = _ASSIGNMENT.match(text, position)
    assert start is not None, "every part of the pattern can be empty"
    name, equals = start[1], start[2]
    if problem := name_problem(name):
        raise EnvironmentProblem(problem)
    if not equals:
        return Assignment(name, None), _end_of(text, start.end(), f"after the name {name}")
    if text[start.end() : start.end() + 1] in ("'", '"'):
        return _parse_quoted(text, start.end(), name)
    end_of_line = text.find("\n", start.end())
    line_end = end_of_line if end_of_line >= 0 else len(text)
    value = re.split(r"(?:^|[ \t])#", text[start.end() : line_end], maxsplit=1)[0].strip(" \t")
    return Assignment(name, value), line_end + 1


def _parse_quoted(text: str, position: int, name: str) -> tuple[Assignment, int]:
    quote = text[position]
    match = (_SINGLE if quote == "'" else _DOUBLE).match(text, position)
    if match is None:
        raise EnvironmentProblem(f"the value of {name} starts with {quote} and is never closed")
    value = match[1] if quote == "'" else _ESCAPE.sub(lambda escape: _unescaped(escape, name), match[1])
    return Assignment(name, value), _end_of(text, match.end(), f"after the closing quote of {name}")


def _unescaped(escape: re.Match[str], name: str) -> str:
    if escape[1] not in _ESCAPES:
        raise EnvironmentProblem(
            f'the value of {name} has the escape {escape[0]!r}; it takes \\n \\t \\r \\\\ \\" \\$, or single quotes'
        )
    return _ESCAPES[escape[1]]


def _end_of(text: str, position: int, where: str) -> int:
    rest = _REST.match(text, position)
    if rest is None:
        raise EnvironmentProblem(f"there is more {where} than a comment")
    return rest.end()


def settle(
    assignments: Iterable[Assignment], *, client_environment: Mapping[str, str]
) -> tuple[dict[str, str], list[EnvironmentProblem]]:
    """Each name once (rule 3), bare names filled in (rule 2), with a problem for each that cannot be."""
    last: dict[str, str | None] = {}
    for name, value in assignments:
        last[name] = value
    settled: dict[str, str] = {}
    problems: list[EnvironmentProblem] = []
    for name, written in last.items():
        value = written if written is not None else client_environment.get(name)
        if value is None:
            problems.append(
                EnvironmentProblem(
                    f"{name} without = passes on the value that it has here, and it is not set here; "
                    f"write {name}=VALUE, or {name}= for an empty one"
                )
            )
        else:
            settled[name] = value
    return settled, problems


def name_problem(name: str) -> str | None:
    """Why this cannot be a variable's name; None when it can."""
    if name == "":
        return "the name is empty; it takes NAME=VALUE or NAME"
    if not is_variable_name(name):
        return f"{name[:80]!r} is not a variable's name; it takes {NAME_TAKES}"
    return None


def reserved_problem(names: Iterable[str]) -> str | None:
    """One sentence that lists every reserved name; None when there is none."""
    reserved = [name for name in names if is_reserved(name)]
    if not reserved:
        return None
    listed = ", ".join(reserved)
    if len(reserved) == 1:
        return f"{listed} is reserved; remove it: it is provided to every rank"
    return f"{listed} are reserved; remove them: they are provided to every rank"


def string_problem(text: str, *, what: str) -> str | None:
    """Why the kernel would not take this string; None when it would. `what` names it: "the value of X"."""
    if "\0" in text:
        return f"{what} contains a NUL character, which no program can be given"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return f"{what} is not valid UTF-8 text"
    if size > STRING_BYTES_MAX:
        return (
            f"{what} has {size:,} bytes; the kernel takes at most {STRING_BYTES_MAX:,} in one piece: "
            "put it into a file and pass the file's name"
        )
    return None


def total_problem(command: Iterable[str], env: Mapping[str, str]) -> str | None:
    """Why command and variables together are too large; None when they are not. Takes valid UTF-8 only."""
    command_bytes = sum(_cost(argument) for argument in command)
    costs = {name: _cost(f"{name}={value}") for name, value in env.items()}
    env_bytes = sum(costs.values())
    if command_bytes + env_bytes <= TOTAL_BYTES_MAX:
        return None
    largest = sorted(costs, key=lambda name: -costs[name])[:3]
    listed = ", ".join(f"{name} {costs[name]:,}" for name in largest)
    return (
        f"command ({command_bytes:,} bytes) and env ({env_bytes:,} bytes in {len(costs)} variables) together have "
        f"{command_bytes + env_bytes:,} bytes; at most {TOTAL_BYTES_MAX:,} can be given to a program"
        + (f". The largest: {listed}" if listed else "")
    )


def _cost(text: str) -> int:
    return len(text.encode()) + 1 + POINTER_BYTES
