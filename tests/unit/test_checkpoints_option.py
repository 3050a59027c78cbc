"""`mesh up --checkpoints`: from the command line to the head, tried before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator import __main__ as program
from mesh.cli.deployment import _store_url
from mesh.cli.head import HeadOptions, head_environment
from mesh.deployment import CHECKPOINTS_VARIABLE
from mesh.errors import CheckpointStoreError


def test_a_relative_folder_is_that_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CHECKPOINTS_VARIABLE, raising=False)
    url = _store_url("kept/here/")
    assert url == f"file://{tmp_path}/kept/here"
    options = HeadOptions(state=tmp_path, machines=1, checkpoints=url)
    assert head_environment(options)[CHECKPOINTS_VARIABLE] == url
    assert CHECKPOINTS_VARIABLE not in head_environment(HeadOptions(state=tmp_path, machines=1))


def test_what_was_asked_for_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    assert program._checkpoints_url(f"{tmp_path}/s", default="file:///unused") == f"file://{tmp_path}/s"
    assert [path for path in (tmp_path / "s").rglob("*") if path.is_file()] == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointStoreError, match="could not create"):
        program._checkpoints_url(f"{tmp_path}/file", default=None)
    with pytest.raises(CheckpointStoreError, match="install what it needs"):
        program._checkpoints_url("nonsense://bucket", default=None)


@pytest.mark.parametrize("url", ["s3://", "s3:///", "file://", "file://data/checkpoints", "file://./here"])
def test_a_url_that_names_no_place_makes_no_folder_of_its_own(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointStoreError, match="names no place"):
        program._checkpoints_url(url, default=None)
    assert list(tmp_path.iterdir()) == []


def test_without_a_word_it_is_the_default() -> None:
    assert program._checkpoints_url(None, default="file:///d") == "file:///d"
    assert program._checkpoints_url(None, default=None) is None


def test_the_head_takes_the_option() -> None:
    assert program.build_parser().parse_args(["serve", "--checkpoints", "s3://b/p"]).checkpoints == "s3://b/p"
