"""Variables: flags, env files, precedence, and the kernel's limits."""

from __future__ import annotations

import subprocess

import pytest

from mesh.spec.environment import (
    ENV_FILE_BYTES_MAX,
    STRING_BYTES_MAX,
    Assignment,
    EnvironmentProblem,
    parse_env_file,
    parse_flag,
    reserved_problem,
    settle,
    string_problem,
    total_problem,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=64(x2)", "64(x2)"),
        ("A=k=v=w", "k=v=w"),
        ("A=l1\nl2", "l1\nl2"),
        ("A=$PATH", "$PATH"),
        ("A=", ""),
        ("A=q'u\"o", "q'u\"o"),
        ("A=ünï🚀", "ünï🚀"),
        ("A= lead", " lead"),
        ("A=-x", "-x"),
        ("A", None),
    ],
)
def test_a_value_with_teeth_is_taken_exactly(text: str, value: str | None) -> None:
    assert parse_flag(text) == Assignment("A", value)


@pytest.mark.parametrize("text", ["1BAD=", "=", "A B=", " A=", "A-B=", "é="])
def test_a_bad_name_is_refused_and_the_value_is_not_shown(text: str) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        parse_flag(text + "secret")
    assert "secret" not in caught.value.text


ENV_FILE = """\
\ufeff# comment
PLAIN=value
  export SPACED =  two words  # a comment
HASH=a#b
EMPTY=
ONLY_COMMENT= # nothing
QUOTED_EMPTY=""
DOUBLE="tab\\t quote\\" slash\\\\ dollar\\$ end"   # comment
SINGLE='as it is: $ " \\n #'
MULTI="line 1
line 2"
MULTI_SINGLE='x
y'
REPEATED=1
PASSED_ON
   export PASSED_TOO  # comment

REPEATED=2"""


def test_an_env_file_is_read_as_documented() -> None:
    assert parse_env_file(ENV_FILE, source="f.env") == [
        Assignment("PLAIN", "value"),
        Assignment("SPACED", "two words"),
        Assignment("HASH", "a#b"),
        Assignment("EMPTY", ""),
        Assignment("ONLY_COMMENT", ""),
        Assignment("QUOTED_EMPTY", ""),
        Assignment("DOUBLE", 'tab\t quote" slash\\ dollar$ end'),
        Assignment("SINGLE", 'as it is: $ " \\n #'),
        Assignment("MULTI", "line 1\nline 2"),
        Assignment("MULTI_SINGLE", "x\ny"),
        Assignment("REPEATED", "1"),
        Assignment("PASSED_ON", None),
        Assignment("PASSED_TOO", None),
        Assignment("REPEATED", "2"),
    ]


def test_windows_line_ends_do_not_get_into_values() -> None:
    assert parse_env_file("A=1\r\nB='x'\r\n", source="f") == [Assignment("A", "1"), Assignment("B", "x")]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("A=1\n1B=2\n", 2, "'1B' is not a variable's name"),
        ("A=1\n\n=2\n", 3, "the name is empty"),
        ("A B=1", 1, "more after the name A"),
        ("X='y\n\nA='open", 1, "more after the closing quote"),
        ('A="open', 1, "never closed"),
        ("\nA='open\n\n", 2, "never closed"),
        ('A="x" y', 1, "more after the closing quote"),
        ('A="a\\q"', 1, "escape"),
        ("M='1\n2'\nB=\"", 3, "never closed"),
    ],
)
def test_a_fault_in_an_env_file_says_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        parse_env_file(text, source="f.env")
    assert caught.value.text.startswith(f"f.env, line {line}: ")
    assert words in caught.value.text


def test_an_env_file_over_the_limit_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="at most"):
        parse_env_file("#" * (ENV_FILE_BYTES_MAX + 1), source="f.env")


def test_the_last_assignment_wins_and_a_bare_name_takes_the_clients_value() -> None:
    written = [Assignment("A", "1"), Assignment("B", None), Assignment("A", "2"), Assignment("C", None)]
    settled, problems = settle(written, client_environment={"B": "from here", "Z": "other"})
    assert settled == {"A": "2", "B": "from here"}
    assert [problem.text.split()[0] for problem in problems] == ["C"]


def test_all_reserved_names_are_listed_in_one_sentence() -> None:
    names = ["NODUS_X", "nodus_x", "PET_NNODES", "OK", "MASTER_PORT", "NODE_RANK", "NNODES", "RANK"]
    assert reserved_problem(names) == (
        "NODUS_X, PET_NNODES, MASTER_PORT, NODE_RANK, NNODES are reserved; remove them: they are provided to every rank"
    )
    assert reserved_problem(["PET_X"]) == "PET_X is reserved; remove it: it is provided to every rank"
    assert reserved_problem(["RANK"]) is None


def test_what_no_program_can_be_given_is_refused() -> None:
    assert "NUL" in (string_problem("a\0b", what="the value") or "")
    assert "UTF-8" in (string_problem("\udcff", what="the value") or "")
    assert string_problem("x" * STRING_BYTES_MAX, what="the value") is None
    assert f"{STRING_BYTES_MAX + 1:,}" in (
        string_problem("x" * (STRING_BYTES_MAX + 1), what="the value") or ""
    )


def test_the_limit_of_one_string_is_the_kernels_own() -> None:
    fits = {"A": "x" * (STRING_BYTES_MAX - 2)}
    assert subprocess.run(["/bin/true"], env=fits, check=False).returncode == 0
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["/bin/true"], env={"A": fits["A"] + "x"}, check=False)


def test_the_limit_of_all_strings_is_below_the_kernels() -> None:
    env = {f"A{index}": "x" * 100_000 for index in range(15)}
    assert total_problem(["/bin/true"], env) is None
    assert subprocess.run(["/bin/true"], env=env, check=False).returncode == 0


def test_a_total_over_the_limit_names_the_largest_variables() -> None:
    env = {f"A{index}": "x" * 100_000 for index in range(20)} | {"BIG": "y" * 131_000}
    problem = total_problem(["a"], env) or ""
    assert "The largest: BIG 131,013, A10" in problem
    assert "largest" not in (total_problem(["x" * 131_000] * 13, {}) or "")
