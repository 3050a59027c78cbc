"""The state folder: claimed by one, made whole, its secrets and machines kept, nothing of it left outside."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from coordinator.deployment import (
    GpuShape,
    Inventory,
    StateFolder,
    claim,
    fits_socket,
    machine_name,
    storage_error,
)
from mesh.errors import DeploymentError, SpecError, StorageError
from mesh.reasons import Reason


def test_a_second_head_on_the_same_folder_is_told_who_has_it(tmp_path: Path) -> None:
    with claim(tmp_path / "state"), pytest.raises(DeploymentError) as raised, claim(tmp_path / "state"):
        pass
    assert raised.value.reason is Reason.DEPLOYMENT_BUSY
    assert str(os.getpid()) in raised.value.message
    assert raised.value.details["pid"] == os.getpid()


def test_a_folder_can_be_claimed_again_when_its_head_is_gone(tmp_path: Path) -> None:
    for _ in range(2):
        with claim(tmp_path) as state:
            assert state.path == tmp_path


def test_a_folder_that_cannot_be_made_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeploymentError) as raised, claim(tmp_path / "file" / "state"):
        pass
    assert raised.value.reason is Reason.STATE_NOT_WRITABLE
    assert "--state" in raised.value.hint


@pytest.mark.root
def test_a_full_disk_is_said_before_anything_is_started(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (disk / "filler").write_bytes(b"x" * 48 * 1024)
        with pytest.raises(StorageError) as raised, claim(disk / "state"):
            pass
        assert raised.value.reason is Reason.STORAGE_FULL
        assert [p.name for p in (disk / "state").iterdir()] == ["lock"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_disk_errors_are_told_apart() -> None:
    path = Path("/somewhere")
    assert storage_error(path, OSError(errno.ENOSPC, "No space left")).reason is Reason.STORAGE_FULL
    assert storage_error(path, OSError(errno.EDQUOT, "Quota")).reason is Reason.STORAGE_FULL
    assert storage_error(path, OSError(errno.EROFS, "Read-only")).reason is Reason.STATE_NOT_WRITABLE


def test_secrets_are_made_once_and_are_the_owners_only(tmp_path: Path) -> None:
    first = StateFolder(tmp_path).secret("token")
    (tmp_path / "token").chmod(0o644)
    assert StateFolder(tmp_path).secret("token") == first
    assert len(first) >= 32
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert StateFolder(tmp_path).secret("other") != first


def test_an_empty_secret_file_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("")
    assert len(StateFolder(tmp_path).secret("token")) >= 32


def test_machines_keep_their_names_and_a_name_is_never_given_again(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    inventory = state.read_inventory().with_count(3)
    state.write_inventory(inventory.without(2))
    again = StateFolder(tmp_path).read_inventory()
    assert [machine_name(i) for i in again.indexes] == ["local-1", "local-3"]
    assert [machine_name(i) for i in again.with_count(3).indexes] == ["local-1", "local-3", "local-4"]
    assert again.with_count(1).with_count(2).indexes == (1, 4)
    assert again.subnet == inventory.subnet


def test_a_damaged_inventory_begins_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "machines.json").write_text('{"subnet": [1]}')
    assert StateFolder(tmp_path).read_inventory().indexes == ()


def test_every_machine_has_a_loopback_address_of_its_own() -> None:
    inventory = Inventory.draw().with_count(64)
    addresses = {inventory.address(i) for i in inventory.indexes}
    assert len(addresses) == 64
    assert all(a.startswith("127.") and not a.startswith("127.0.") for a in addresses)


def test_accelerators_are_read_from_type_and_count() -> None:
    assert GpuShape.parse("H100:8") == GpuShape(type="H100", count=8)
    assert GpuShape.parse("A100-80GB:1").type == "A100-80GB"


@pytest.mark.parametrize(
    "text", ["", "H100", "H100:", ":8", "H100:0", "H100:9", "H100:-1", "H 100:1", "H100:x", "a/b:1"]
)
def test_other_words_for_accelerators_are_refused(text: str) -> None:
    with pytest.raises(SpecError) as raised:
        GpuShape.parse(text)
    assert "--gpu" in raised.value.message


def test_sockets_lie_in_the_folder_when_its_path_is_short() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as short:
        state = StateFolder(Path(short))
        state.prepare()
        folder = state.make_socket_folder()
        assert folder.is_relative_to(short)
        assert fits_socket(folder)
        state.remove_outside()
        assert folder.exists()


def test_sockets_lie_outside_when_the_path_is_long_and_are_taken_away(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 25)
    path.mkdir()
    state = StateFolder(path)
    state.prepare()
    folder = state.make_socket_folder()
    try:
        assert not folder.is_relative_to(path)
        assert fits_socket(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "1.plasma").write_text("")
    finally:
        StateFolder(path).remove_outside()
    assert not folder.exists()
    StateFolder(path).remove_outside()


def test_a_note_about_a_folder_that_is_not_ours_removes_nothing(tmp_path: Path) -> None:
    theirs = tmp_path / "precious"
    theirs.mkdir()
    state = tmp_path / "state"
    state.mkdir()
    (state / "outside").write_text(str(theirs))
    StateFolder(state).remove_outside()
    assert theirs.is_dir()


def test_the_journal_is_its_owners_alone_also_in_a_folder_that_others_may_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "journal.db").touch(0o644)
    journal = StateFolder(tmp_path).make_journal()
    with contextlib.closing(sqlite3.connect(journal)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE runs (env TEXT)")
        database.commit()
        modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}
