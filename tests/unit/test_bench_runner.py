"""The benchmark runner: what it prints, what it refuses, what its exit code says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench import __main__ as bench

GOOD: dict[str, Any] = {
    "name": "store get",
    "ours": 12000.0,
    "theirs": 8000,
    "ratio": 1.5,
    "unit": "1/s",
    "target": ">= 1",
    "ok": True,
}


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Benchmarks under invented names, in place of those in the folder: name -> run."""
    known: dict[str, Any] = {}
    monkeypatch.setattr(bench, "available", lambda: sorted(known))
    monkeypatch.setattr(bench, "load", known.__getitem__)
    return known


def test_every_row_of_every_benchmark_is_in_one_table(benchmarks: dict[str, Any], capsys: Any) -> None:
    benchmarks["a"] = lambda quick: [GOOD]
    benchmarks["b"] = lambda quick: [{**GOOD, "name": "lives", "theirs": None, "ok": None}]
    assert bench.main([]) == 0
    printed = capsys.readouterr().out
    assert "store get" in printed
    assert "12,000" in printed
    assert "lives" in printed


def test_a_missed_target_is_the_exit_code_one(benchmarks: dict[str, Any]) -> None:
    benchmarks["a"] = lambda quick: [{**GOOD, "ok": False}]
    assert bench.main([]) == 1


def test_a_benchmark_that_cannot_run_is_named_and_the_others_still_run(
    benchmarks: dict[str, Any], capsys: Any
) -> None:
    benchmarks["broken"] = lambda quick: 1 / 0
    benchmarks["good"] = lambda quick: [GOOD]
    assert bench.main(["--json"]) == 2
    printed = capsys.readouterr()
    assert "broken could not be run" in printed.err
    assert "ZeroDivisionError" in printed.err
    assert json.loads(printed.out) == [{**GOOD, "n": None, "worst": None}]


def test_a_row_of_another_shape_is_refused(benchmarks: dict[str, Any], capsys: Any) -> None:
    benchmarks["a"] = lambda quick: [{"name": "x"}]
    assert bench.main([]) == 2
    assert "a row has" in capsys.readouterr().err


def test_only_and_quick_reach_the_benchmark(benchmarks: dict[str, Any]) -> None:
    asked: list[tuple[str, bool]] = []
    for name in ("a", "b"):
        benchmarks[name] = lambda quick, name=name: asked.append((name, quick)) or []
    assert bench.main(["--only", "b", "--quick"]) == 0
    assert asked == [("b", True)]


def test_an_unknown_name_is_answered_with_the_known_ones(benchmarks: dict[str, Any], capsys: Any) -> None:
    benchmarks["store"] = lambda quick: []
    with pytest.raises(SystemExit):
        bench.main(["--only", "stroe"])
    assert "there are: store" in capsys.readouterr().err


def test_every_benchmark_in_the_folder_can_be_found() -> None:
    files = {path.stem for path in Path(bench.__file__).parent.glob("*_bench.py")}
    assert {f"{name}_bench" for name in bench.available()} == files
    assert sys.modules["tests.bench.__main__"] is bench
