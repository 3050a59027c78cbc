"""Text to plain data: strict YAML and JSON, with the place of every fault."""

from __future__ import annotations

from typing import Any

import pytest

from mesh.errors import SpecError
from mesh.spec.document import DOCUMENT_BYTES_MAX, read_document


def read(text: str, source: str = "job.yaml") -> dict[str, Any]:
    return read_document(text, source=source).data


def refusal(text: str, source: str = "job.yaml") -> SpecError:
    with pytest.raises(SpecError) as caught:
        read_document(text, source=source)
    return caught.value


def test_yaml_and_json_of_one_job_give_the_same_data() -> None:
    expected = {"spec": {"command": ["torchrun", "a b", "3"], "nodes": 2, "deep": [{"x": None, "y": True}]}}
    as_yaml = 'spec:\n  command: [torchrun, "a b", "3"]\n  nodes: 2\n  deep:\n    - {x: ~, y: true}\n'
    as_json = '{"spec": {"command": ["torchrun", "a b", "3"], "nodes": 2, "deep": [{"x": null, "y": true}]}}'
    assert read(as_yaml) == read(as_json) == read(as_json, "standard input") == expected


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "on",
        "yes",
        "Null",
        "True",
        "1:30",
        "0777",
        "0x1F",
        "1_000",
        "1.10",
        "1e5",
        ".5",
        "+3",
        "2026-01-01",
        "<<",
        "=",
        "9" * 30,
    ],
)
def test_an_unquoted_scalar_stays_the_text_that_was_written(text: str) -> None:
    assert read(f"a: {text}\n") == {"a": text}


def test_numbers_words_and_nothing_are_read_as_such() -> None:
    assert read("a: 3\nb: -7\nc: 0\nd: 1.5\ne: false\nf: null\ng:\nh: '3'\n") == {
        "a": 3, "b": -7, "c": 0, "d": 1.5, "e": False, "f": None, "g": None, "h": "3",
    }  # fmt: skip


def test_json_numbers_that_have_no_shortest_spelling_stay_as_written() -> None:
    assert read('{"a": 1.50, "b": 1e5, "c": 2}', "x.json") == {"a": "1.50", "b": "1e5", "c": 2}


def test_flow_yaml_in_a_yaml_file_is_yaml_and_elsewhere_bad_json() -> None:
    assert read("{a: b}") == {"a": "b"}
    assert "is not valid JSON" in refusal("{a: b}", "standard input").message


def test_a_byte_order_mark_and_emoji_do_no_harm() -> None:
    assert read("\ufeffa: 🚀\n") == {"a": "🚀"}


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("a: 1\n b: 2\n", 2, 3),
        ("a: [1,\n", 2, 1),
        ("ab\n\ta: 1", 2, 3),
        ('a: "x\n', 2, 1),
        ("a: @x\n", 1, 4),
        ("ok: 1\nx: \x01\n", 2, 4),
        ("a: 1\na: 2\n", 2, 1),
        ("a: 1\n---\nb: 1\n", 2, 1),
        ("a: &x 1\n", 1, 4),
        ("a:\n  - *x\n", 2, 5),
        ("a: !!binary xx\n", 1, 4),
        ("? [a]\n: 1\n", 1, 3),
    ],
)
def test_malformed_yaml_says_line_and_column(text: str, line: int, column: int) -> None:
    error = refusal(text)
    assert (error.details["line"], error.details["column"]) == (line, column)
    assert f"line {line}, column {column}" in error.message
    assert "job.yaml" in error.message


def test_malformed_json_says_line_and_column() -> None:
    error = refusal('{"a": 1,\n "b" 2}', "x.json")
    assert error.message == "x.json is not valid JSON: Expecting ':' delimiter at line 2, column 6."
    assert (error.details["line"], error.details["column"]) == (2, 6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("  \n\n", "is empty"),
        ("# only a comment\n", "is empty"),
        ("null", "is empty"),
        ("hello", "a single value"),
        ("- a\n- b\n", "a list of 2"),
        ('[{"a": 1}]', "a list of 1"),
        ('{"a": {"b": 1, "b": 2}}', 'the key "b" twice'),
        ('{"a": NaN}', "NaN"),
        ("a: '\ud800'", "not UTF-8"),
        ("[" * 100_000, "nested more than"),
        ('{"a":' * 40 + "1" + "}" * 40, "nested more than"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than"),
        ("a: " + "[" * 100_000, "nest"),
    ],
)
def test_what_is_no_single_mapping_is_refused(text: str, words: str) -> None:
    assert words in refusal(text).message


def test_a_document_over_the_limit_is_refused_with_its_size() -> None:
    assert f"{DOCUMENT_BYTES_MAX:,}" in refusal("a: " + "x" * DOCUMENT_BYTES_MAX).message


def test_every_value_of_a_yaml_document_has_its_line() -> None:
    document = read_document("a:\n  b: 1\n  c:\n    - x\n    - y\n", source="job.yaml")
    assert document.lines == {
        (): 1,
        ("a",): 2,
        ("a", "b"): 2,
        ("a", "c"): 4,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
    }
