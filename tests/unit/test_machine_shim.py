"""A machine without the right to use nftables: when it is one, what its agent starts with, what a command is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agents import machine_shim
from mesh.errors import DeploymentError
from mesh.net.overlay import machine_overlay, member_overlay
from mesh.net.shim import library
from mesh.net.shim.library import LIBRARY, ShimPlace, read_place, shim_environment

PLACE = ShimPlace(
    gateway_folder=Path("/tmp/gangmesh-x/g"),
    device="gm0",
    addresses=(*machine_overlay(7), *member_overlay(7)),
)


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "nothing.so")


def test_the_right_is_read_from_the_kernel() -> None:
    assert machine_shim.may_administer_network("Name:\tpython\nCapEff:\t000001ffffffffff\n")
    assert not machine_shim.may_administer_network("Name:\tpython\nCapEff:\t00000000a80425fb\n"), "Docker's"
    assert not machine_shim.may_administer_network("Name:\tpython\n")


def test_what_is_lacking_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    assert machine_shim.why_no_redirect() == (
        "the agent does not run as root; not installed: nft (package nftables), ip (package iproute2)"
    )


@pytest.mark.usefixtures("no_library")
def test_a_machine_that_can_do_neither_is_told_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        DeploymentError, match="cannot carry the mesh: the agent does not run as root"
    ) as caught:
        machine_shim.check()
    assert "installed without a C compiler" in caught.value.hint


def test_an_agent_without_rights_starts_itself_again_with_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "execve", lambda *how: started.append(how))
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    machine_shim.load()
    [(program, argv, environment)] = started
    assert (program, argv) == (sys.executable, sys.orig_argv)
    assert environment["LD_PRELOAD"] == f"{LIBRARY}:libtcmalloc.so"
    # A loader that does not take it is no reason to start again and again.
    monkeypatch.setattr(machine_shim, "_is_loaded", lambda: False)
    monkeypatch.setenv("LD_PRELOAD", environment["LD_PRELOAD"])
    with pytest.raises(DeploymentError, match="loader"):
        machine_shim.load()
    # And the second time it is there: the user's own is what it was, and nothing is started again.
    monkeypatch.setattr(machine_shim, "_is_loaded", lambda: True)
    for given, left in ((environment["LD_PRELOAD"], "libtcmalloc.so"), (str(LIBRARY), None)):
        monkeypatch.setenv("LD_PRELOAD", given)
        machine_shim.load()
        assert os.environ.get("LD_PRELOAD") == left
    assert len(started) == 1


def test_a_command_is_the_member_and_not_the_machine() -> None:
    own = {"LD_PRELOAD": "libtcmalloc.so", "PATH": "/bin"}
    machine = shim_environment({}, PLACE)
    told = machine_shim.of_command(own, machine=machine, address=member_overlay(7)[0])
    assert read_place(told["GANGMESH_SHIM"]).addresses == (*member_overlay(7), *machine_overlay(7))
    assert read_place(told["GANGMESH_SHIM"]).gateway_folder == PLACE.gateway_folder
    assert told["LD_PRELOAD"] == f"{LIBRARY}:libtcmalloc.so"


def test_where_no_shim_is_needed_a_command_gets_none() -> None:
    assert machine_shim.of_command({}, machine={}, address=member_overlay(7)[0]) == {}
    machine = shim_environment({}, PLACE)
    assert machine_shim.of_command({}, machine=machine, address="10.0.0.1") == {}
    assert not machine_shim.is_in(machine_shim.NONE)
    assert machine_shim.is_in(machine)
    assert machine_shim.without({**machine, "PATH": "/bin"}) == {"PATH": "/bin", "GANGMESH_SHIM": ""}


def test_a_place_is_read_as_it_was_written() -> None:
    assert read_place(shim_environment({}, PLACE)["GANGMESH_SHIM"]) == PLACE
    for text in ("", "1;gm0", "2;gm0;198.18.0.1;/a/shim.table"):
        with pytest.raises(ValueError):
            read_place(text)
