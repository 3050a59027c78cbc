"""Names of runs, variables and labels."""

from __future__ import annotations

import pytest

from mesh.spec.names import (
    RUN_NAME_LENGTH_MAX,
    is_label_key,
    is_label_value,
    is_run_name,
    is_variable_name,
    new_run_name,
    suggest_run_name,
)


@pytest.mark.parametrize("name", ["a", "7", "torchrun-2-node", "twin-0", "x" * 53])
def test_a_dns_label_with_room_for_suffixes_is_a_run_name(name: str) -> None:
    assert is_run_name(name)


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", "A", "a b", "../x", "a/b", "a_b", "a.b", "Ünï", "x" * 54, "a\n", "ａ", "٣"]
)
def test_anything_else_is_not_a_run_name(name: str) -> None:
    assert not is_run_name(name)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("../x", "x"),
        ("a b", "a-b"),
        ("Ünï", "uni"),
        ("Twin", "twin"),
        ("x" * 300, "x" * 53),
        ("日本", None),
        ("", None),
    ],
)
def test_a_refused_name_comes_with_the_nearest_allowed_one(name: str, suggestion: str | None) -> None:
    assert suggest_run_name(name) == suggestion


def test_a_cut_suggestion_never_ends_with_a_dash() -> None:
    suggestion = suggest_run_name("a" * 52 + "  b")
    assert suggestion == "a" * 52
    assert is_run_name(suggestion)


def test_generated_names_are_short_valid_and_pronounceable() -> None:
    assert new_run_name(lambda count: b"\0" * count) == "baba-baba"
    names = {new_run_name() for _ in range(200)}
    assert len(names) > 190
    assert all(is_run_name(name) and len(name) == 9 <= RUN_NAME_LENGTH_MAX for name in names)


@pytest.mark.parametrize(
    ("name", "good"),
    [("A", True), ("_a1", True), ("1BAD", False), ("", False), ("a b", False), ("a-b", False), ("é", False)],
)
def test_a_variable_has_a_name_that_every_shell_can_export(name: str, good: bool) -> None:
    assert is_variable_name(name) is good


@pytest.mark.parametrize(
    ("key", "good"),
    [
        ("team", True),
        ("example.com/Team_1", True),
        ("", False),
        ("/x", False),
        ("a/b/c", False),
        ("-x", False),
        ("x" * 64, False),
        ("UPPER.com/x", False),
    ],
)
def test_a_label_has_a_name_with_an_optional_dns_prefix(key: str, good: bool) -> None:
    assert is_label_key(key) is good


@pytest.mark.parametrize(
    ("value", "good"), [("", True), ("v1.2_x-y", True), ("a b", False), ("x" * 64, False), ("-", False)]
)
def test_a_label_value_is_short_plain_text(value: str, good: bool) -> None:
    assert is_label_value(value) is good
