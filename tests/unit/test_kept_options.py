"""A machine that comes back is what it was told to be when it joined."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from agents.agent_program import ReadyLine
from agents.join_mesh_settings import MeshJoinSettings, read_settings
from agents.kept_options import keep, with_kept
from agents.machine_identity import OPTIONS_NAME, forget_identity
from agents.told import TOLD
from tests.unit.test_join_mesh_settings import GIVEN

PLACED = {
    "labels": {"provider": "aws", "region": "eu"},
    "private_network": "lan",
    "private_address": "10.0.0.2",
    "public_address": "203.0.113.7",
}
NOTHING = {"labels": {}, "private_network": "", "private_address": "", "public_address": ""}


def told(**settings: Any) -> MeshJoinSettings:
    return read_settings(**{**GIVEN, "token": None, **NOTHING, **settings})


def joined(folder: Path, **settings: Any) -> MeshJoinSettings:
    """As what it joined, once it has."""
    completed = with_kept(told(**settings), folder)
    keep(completed, folder)
    return completed


def test_who_comes_back_is_as_it_was_told_before_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = joined(tmp_path, token=GIVEN["token"], **PLACED)
    assert caplog.text == ""
    again = with_kept(told(), tmp_path)
    assert again == with_kept(told(), tmp_path)
    assert (again.labels, again.private_address) == (first.labels, first.private_address)
    assert (again.private_network, again.public_address) == ("lan", "203.0.113.7")
    assert (
        "As it was told before: --label provider=aws --label region=eu --private-network lan "
        "--private-address 10.0.0.2 --public-address 203.0.113.7" in caplog.text
    )


def test_what_is_said_now_takes_the_place_of_its_kind(tmp_path: Path) -> None:
    joined(tmp_path, token=GIVEN["token"], **PLACED)
    moved = joined(tmp_path, labels={"rack": "3"})
    assert (moved.labels, moved.private_network) == ({"rack": "3"}, "lan")
    assert with_kept(told(), tmp_path).labels == {"rack": "3"}


def test_a_token_begins_anew_and_so_does_who_has_left(tmp_path: Path) -> None:
    joined(tmp_path, token=GIVEN["token"], **PLACED)
    with_kept(told(token=GIVEN["token"]), tmp_path)  # a try that fails changes nothing
    assert with_kept(told(), tmp_path).labels == PLACED["labels"]
    joined(tmp_path, token=GIVEN["token"])
    assert with_kept(told(), tmp_path).labels == {}
    joined(tmp_path, token=GIVEN["token"], **PLACED)
    forget_identity(tmp_path)
    assert with_kept(told(), tmp_path).labels == {}


@pytest.mark.parametrize("text", ["", "[]", '{"labels": []}', '{"labels": {}}'])
def test_what_cannot_be_read_keeps_no_machine_out(tmp_path: Path, text: str) -> None:
    (tmp_path / OPTIONS_NAME).write_text(text)
    assert with_kept(told(), tmp_path) == told()


def test_what_is_told_reaches_whoever_started_the_daemon_until_it_has_joined() -> None:
    reading, writing = os.pipe()
    before = list(TOLD.handlers)
    try:
        ready = ReadyLine(writing)
        TOLD.warning("Asking again, for %g s at most.", 60)
        ready.joined("m-1")
        TOLD.warning("nobody listens any more")
    finally:
        TOLD.handlers = before
    with os.fdopen(reading) as news:
        lines = [json.loads(line) for line in news]
    assert lines == [{"note": "Asking again, for 60 s at most."}, {"ready": True, "name": "m-1"}]
