"""What a command would start, as far as it can be read without running it.

Rules of this file:
1. Best effort, and silent where it is not sure: a program inside an unknown program, a script file or a here-document
   is not looked into. It must never take an argument for a program.
2. Shell lines (`bash -c "…"`) are split into their simple commands; variables are expanded from the assignments before
   them. What cannot be known is `UNKNOWN`, which is equal to nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

UNKNOWN = "\ufffd"
"""Stands in an expanded text where a value is not known before the command runs."""
NESTING_MAX = 4

SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
WRAPPERS = frozenset(
    {
        *(
            "exec",
            "env",
            "nohup",
            "time",
            "timeout",
            "nice",
            "ionice",
            "stdbuf",
            "numactl",
            "taskset",
            "setsid",
        ),
        *("sudo", "strace", "catchsegv", "xvfb-run", "nsys", "ncu", "srun"),
        *("uv", "poetry", "pipenv", "conda", "mamba", "micromamba"),
        *("command", "then", "do", "else", "if", "while", "until", "!"),
    }
)
"""Programs and shell words that start the program after their own options."""
STARTERS = frozenset({"torchrun", "accelerate", "deepspeed", "torchx", "mpirun", "mpiexec", "orterun"})
TORCHRUN_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})

_SEPARATORS = frozenset("();<>|&\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_COMMENT_LINE = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_PYTHON = re.compile(r"python[0-9.]*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\}|\$|\{[^}]*\}|$)|`[^`]*`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """One program that the command would start."""

    program: str
    """Its plain name: torchrun (also for `python -m torch.distributed.run`), python, mpirun, srun …"""
    arguments: tuple[str, ...]
    """As written; `raw` and expanded texts are the same outside a shell."""
    expanded: tuple[str, ...]
    """With known variables put in, and UNKNOWN for the others."""
    in_shell: bool


def started_programs(command: Sequence[str], *, variables: Mapping[str, str]) -> list[Started]:
    """Every known program in a command, in order, wrappers such as srun included.

    Args:
        command: argv.
        variables: what shell variables are known to be; a name that is not here is UNKNOWN.
    """
    return list(_programs(list(command), dict(variables), in_shell=False, nesting=0))


def expand(text: str, variables: Mapping[str, str]) -> str:
    """The text as a shell would expand it, as far as that is known."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, UNKNOWN) if name else UNKNOWN

    return _VARIABLE.sub(value, text)


def _programs(
    words: list[str], variables: dict[str, str], *, in_shell: bool, nesting: int
) -> Iterator[Started]:
    while words:
        words = _without_assignments(words)
        if not words:
            return
        name = PurePosixPath(words[0]).name
        if name in SHELLS:
            yield from _programs_of_shell(words[1:], variables, nesting)
            return
        if name == "srun" or name not in WRAPPERS:
            yield from _started(name, words[1:], variables, in_shell)
        if name not in WRAPPERS:
            return
        words = _after_wrapper(words[1:])


def _after_wrapper(words: list[str]) -> list[str]:
    """From the first program that is known: a wrapper's own options cannot be told from others."""
    for index, word in enumerate(words):
        name = PurePosixPath(word).name
        if name in STARTERS or name in SHELLS or name == "srun" or _PYTHON.fullmatch(name):
            return words[index:]
    return []


def _started(
    name: str, arguments: list[str], variables: Mapping[str, str], in_shell: bool
) -> Iterator[Started]:
    program = name
    if _PYTHON.fullmatch(name):
        program, arguments = _python_program(arguments)
    expanded = [expand(word, variables) for word in arguments] if in_shell else arguments
    yield Started(program=program, arguments=tuple(arguments), expanded=tuple(expanded), in_shell=in_shell)


def _python_program(arguments: list[str]) -> tuple[str, list[str]]:
    """torchrun and its arguments when this python starts it by module name or file; else python's own."""
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "-c":
        word = arguments[index]
        if word.startswith("-m"):
            module = word[2:] or next(iter(arguments[index + 1 :]), "")
            rest = arguments[index + (1 if word[2:] else 2) :]
            return ("torchrun", rest) if module in TORCHRUN_MODULES else ("python", arguments)
        index += 2 if word in ("-W", "-X") else 1
    if index < len(arguments) and arguments[index].endswith(
        ("torch/distributed/run.py", "torch/distributed/launch.py")
    ):
        return "torchrun", arguments[index + 1 :]
    return "python", arguments


def _programs_of_shell(arguments: list[str], variables: dict[str, str], nesting: int) -> Iterator[Started]:
    """What `bash -c LINE` (also `-lc`, `-e -c`) starts; a script file is not looked into."""
    has_line = False
    for word in arguments:
        if word.startswith(("-", "+")) and not word.startswith("--"):
            has_line = has_line or "c" in word[1:]
        elif not word.startswith("--"):
            if has_line and nesting < NESTING_MAX:
                yield from _programs_of_line(word, variables, nesting + 1)
            return


def _programs_of_line(line: str, variables: dict[str, str], nesting: int) -> Iterator[Started]:
    known = dict(variables)
    for words in _simple_commands(line):
        _learn(words, known)
        yield from _programs(words, known, in_shell=True, nesting=nesting)


def _simple_commands(line: str) -> list[list[str]]:
    text = _COMMENT_LINE.sub("", line.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="".join(sorted(_SEPARATORS)))
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word and set(word) <= _SEPARATORS:
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:
        return []  # An open quote: the shell will say so, and what it would start is not known.
    return [words for words in commands if words]


def _learn(words: list[str], known: dict[str, str]) -> None:
    """`A=b`, `export A=b`: what the lines after it will see."""
    names = words[1:] if words[0] in ("export", "declare", "local", "readonly") else words
    if not all(_ASSIGNMENT.fullmatch(word) for word in names):
        return
    for word in names:
        name, _, value = word.partition("=")
        known[name] = expand(value, known)


def _without_assignments(words: list[str]) -> list[str]:
    index = 0
    while index < len(words) and _ASSIGNMENT.fullmatch(words[index]):
        index += 1
    return words[index:]
