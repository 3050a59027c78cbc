"""Results as JSON, YAML, or a table that fits the terminal."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh.cli.options import OutputFormat
from mesh.cli.terminal import Terminal, printable
from mesh.exits import short_exit

PIPE_COLUMNS = 10_000
"""Nothing is shortened for a program."""
Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. `wide` ones are shown with `-o wide` only; a `flexible` one gives way when room is
    short."""

    title: str
    text: Callable[[Item], str]
    wide: bool = False
    flexible: bool = False


def print_document(terminal: Terminal, document: Any, format_: OutputFormat) -> None:
    """The whole document, as JSON or YAML."""
    if format_ is OutputFormat.YAML:
        text = yaml_text(document).rstrip("\n")
    else:
        text = json.dumps(document, indent=2, ensure_ascii=False)
    terminal.out(text)


def yaml_text(document: Any) -> str:
    """The document as YAML that reads back as it is.

    PyYAML writes NEL (U+0085) as it stands where it may write Unicode, and reads it back as a line break.
    """
    import yaml

    has_nel = "\x85" in json.dumps(document, ensure_ascii=False)
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=not has_nel))


def print_table(
    terminal: Terminal, columns: Sequence[Column], items: Sequence[Item], *, wide: bool, nothing: str
) -> None:
    """A line for each item; without items the sentence `nothing`, on stderr."""
    if not items:
        terminal.note(nothing)
        return
    shown = [column for column in columns if wide or not column.wide]
    rows = [[printable(column.text(item)) for column in shown] for item in items]
    columns_max = shutil.get_terminal_size().columns if terminal.stdout_is_terminal else PIPE_COLUMNS
    flexible = [index for index, column in enumerate(shown) if column.flexible and not wide]
    for line in lay_out([[column.title for column in shown], *rows], columns_max, flexible):
        terminal.out(line)


def lay_out(rows: Sequence[Sequence[str]], columns_max: int, flexible: Sequence[int]) -> list[str]:
    """Rows as aligned lines of at most `columns_max` cells, as far as shortening flexible columns can."""
    widths = [max(_cells(row[index]) for row in rows) for index in range(len(rows[0]))]
    excess = sum(widths) + 2 * (len(widths) - 1) - columns_max
    for index in sorted(flexible, key=lambda i: -widths[i]):
        if excess <= 0:
            break
        smallest = max(8, _cells(rows[0][index]))
        cut = min(excess, max(0, widths[index] - smallest))
        widths[index] -= cut
        excess -= cut
    return [
        "  ".join(_fit(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _fit(text: str, width: int) -> str:
    """The text in exactly this many cells."""
    if _cells(text) > width:
        while text and _cells(text) > width - 1:
            text = text[:-1]
        text += "…"
    return text + " " * (width - _cells(text))


def _cells(text: str) -> int:
    """How many cells of a terminal a text takes (East Asian characters take two)."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def age(since: float | None, until: float | None = None) -> str:
    """How long it has been, roughly: `12s`, `3m4s`, `2h5m`, `3d4h`; `-` for what has not begun."""
    if since is None:
        return "-"
    return span((until if until is not None else time.time()) - since)


def span(seconds: float) -> str:
    """A length of time for people: its two largest units."""
    left = max(0, round(seconds))
    if left < 60 and seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count}{unit}")
    kept = [part for part in parts[:2] if not part.startswith("0")]
    return "".join(kept) or "0s"


def clock(at: float | None) -> str:
    """A time of day here, with the date when it is not today's."""
    if at is None:
        return "-"
    then, today = time.localtime(at), time.localtime()
    same_day = then[:3] == today[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", then)


def end_of(exit_: Mapping[str, Any] | None) -> str:
    """How a process ended: `exit 42`, `SIGKILL`."""
    if exit_ is None:
        return "-"
    return short_exit(code=exit_["code"], signal=exit_["signal"])


def stdin_is_terminal() -> bool:
    """True when a question would be answered."""
    return sys.stdin is not None and sys.stdin.isatty()
