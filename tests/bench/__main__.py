"""Runs the benchmarks and prints one table: `python -m tests.bench [--only NAME] [--quick] [--json]`.

A benchmark is a module `tests/bench/<name>_bench.py` with

    def run(quick: bool) -> list[dict[str, object]]

Each row has `name`, `ours`, `theirs`, `ratio`, `unit`, `target` and `ok`, and may have `n` (rounds) and `worst` (of
ours). `ours` and `theirs` are figures of the same run on the same machine (None where nothing is compared), medians
where there are rounds; `ratio` says what the target is about; `ok` is whether the target was met, None when
there is none. The exit code is 0 when every target was met, 1 when one was
missed, and 2 when a benchmark could not be run.

Figures depend on the machine; the ratios are what to look at. Nothing here is part of the tests.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
COLUMNS = ("name", "ours", "theirs", "ratio", "n", "worst", "unit", "target", "ok")
OPTIONAL = ("n", "worst")
NUMBERS = ("ours", "theirs", "ratio", "n", "worst")


def available() -> list[str]:
    """The names of the benchmarks: `store` for store_bench.py."""
    return sorted(path.name.removesuffix("_bench.py") for path in Path(__file__).parent.glob("*_bench.py"))


def load(name: str) -> Callable[[bool], list[Row]]:
    """The benchmark's `run`."""
    run: Callable[[bool], list[Row]] = importlib.import_module(f"tests.bench.{name}_bench").run
    return run


def check(row: Row, *, benchmark: str) -> Row:
    """The row with every column; ValueError when a column is missing or one too many is there."""
    row = {**dict.fromkeys(OPTIONAL), **row}
    if set(row) != set(COLUMNS):
        raise ValueError(f"{benchmark}: a row has {sorted(row)}, not {sorted(COLUMNS)}")
    return row


def figure(value: object) -> str:
    """A number with three significant digits or as thousands; a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def print_table(rows: Sequence[Row], console: Console) -> None:
    table = Table(title=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    for row in rows:
        style = "red" if row["ok"] is False else None
        table.add_row(*(figure(row[column]) for column in COLUMNS), style=style)
    console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="The figures, ours beside theirs."
    )
    parser.add_argument("--only", action="append", metavar="NAME", help=f"one of: {', '.join(available())}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: rougher figures, in seconds")
    parser.add_argument("--json", action="store_true", help="the rows as JSON on stdout, nothing else there")
    parsed = parser.parse_args(arguments)
    unknown = sorted(set(parsed.only or []) - set(available()))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are: {', '.join(available())}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    progress = Console(stderr=True)
    rows: list[Row] = []
    broken: list[str] = []
    for name in options.only or available():
        progress.print(f"{name} …", style="dim")
        try:
            rows += [check(row, benchmark=name) for row in load(name)(options.quick)]
        except Exception:  # noqa: BLE001 - the guard: one broken benchmark does not take the others' figures away
            broken.append(name)
            traceback.print_exc()
    if options.json:
        json.dump(rows, sys.stdout, indent=2)
        print()
    else:
        print_table(rows, Console())
    for name in broken:
        progress.print(f"{name} could not be run; the traceback is above.", style="red")
    if broken:
        return 2
    return 1 if any(row["ok"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
