"""The environment of a program with the shim, and the file that it shares with its gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.errors import DeploymentError
from mesh.net.shim import library
from mesh.net.shim.library import ShimPlace, shim_environment
from mesh.net.shim.table import MAGIC, TABLE_BYTES, ShimTable
from mesh.reasons import Reason

PLACE = ShimPlace(
    gateway_folder=Path("/var/lib/gangmesh/gateway"), device="gm0", addresses=("198.19.0.3", "fd67:6d00:1::3")
)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "shim.so")
    (tmp_path / "shim.so").touch()
    return tmp_path / "shim.so"


def test_what_a_program_is_told(built: Path) -> None:
    assert shim_environment({}, PLACE) == {
        "GANGMESH_SHIM": "1;gm0;198.19.0.3,fd67:6d00:1::3;/var/lib/gangmesh/gateway/shim.table",
        "LD_PRELOAD": str(built),
    }


def test_what_the_user_preloads_stays_behind_the_shim_and_the_shim_is_there_once(built: Path) -> None:
    for given in (
        "libtcmalloc.so libjemalloc.so",
        "libtcmalloc.so:libjemalloc.so",
        f"{built}:libtcmalloc.so: libjemalloc.so",
    ):
        made = shim_environment({"LD_PRELOAD": given}, PLACE)
        assert made["LD_PRELOAD"] == f"{built}:libtcmalloc.so:libjemalloc.so"


def test_without_a_compiler_the_word_is_clear(built: Path) -> None:
    built.unlink()
    with pytest.raises(
        DeploymentError, match=r"installed without a C compiler.*apt-get install gcc"
    ) as caught:
        shim_environment({}, PLACE)
    assert caught.value.reason is Reason.SHIM_NOT_LOADED


@pytest.mark.parametrize("folder", ["with space", "with:colon"])
def test_a_path_that_the_loader_cannot_take_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(library, "LIBRARY", tmp_path / folder / "shim.so")
    library.LIBRARY.touch()
    with pytest.raises(DeploymentError, match="a space or a colon"):
        shim_environment({}, PLACE)


@pytest.mark.parametrize(
    "place",
    [
        ShimPlace(gateway_folder=PLACE.gateway_folder, device="gm0", addresses=()),
        ShimPlace(gateway_folder=PLACE.gateway_folder, device="gm0", addresses=("10.0.0.1",)),
        ShimPlace(gateway_folder=PLACE.gateway_folder, device="gm;0", addresses=PLACE.addresses),
        ShimPlace(gateway_folder=PLACE.gateway_folder, device="gm0123456789abcd", addresses=PLACE.addresses),
        ShimPlace(gateway_folder=Path("gateway"), device="gm0", addresses=PLACE.addresses),
    ],
)
def test_a_place_that_cannot_be_is_a_fault_of_the_caller(place: ShimPlace, built: Path) -> None:
    with pytest.raises(ValueError, match="no place for the shim"):
        shim_environment({}, place)


def test_the_table_stays_over_restarts_and_garbage_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "shim.table"
    ShimTable(path).close()
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (TABLE_BYTES, 0o600)
    inode = path.stat().st_ino
    table = ShimTable(path)
    table.serve(4711)
    table.close()
    assert path.stat().st_ino == inode, "programs that run have this one"
    assert path.read_bytes()[: len(MAGIC) + 2] == MAGIC + (4711).to_bytes(2, "big")
    path.write_bytes(b"garbage")
    ShimTable(path).close()
    assert path.read_bytes() == MAGIC + bytes(TABLE_BYTES - len(MAGIC))


def test_a_table_is_no_link_to_somewhere_else(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "shim.table").symlink_to(tmp_path / "victim")
    with pytest.raises(DeploymentError, match="cannot be shared with programs"):
        ShimTable(tmp_path / "shim.table")
    assert (tmp_path / "victim").read_bytes() == b"precious"
