"""What a machine gets ready for a member before the barrier."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from agents.preparation import Folders, prepare
from mesh.errors import ConflictError
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunUid

ME = Incarnation(run_uid=RunUid("run"), epoch=Epoch(1), rank=Rank(1), token=IncarnationToken("t"))


def test_an_incarnation_is_prepared_once_on_its_machine(tmp_path: Path) -> None:
    """Its actor died when its command ran; ordered again, it would start a second one."""
    first = prepare(ME, machine_dir=tmp_path, address="127.0.0.1")
    command = subprocess.Popen(["sleep", "600"], env={**os.environ, "NODUS_INCARNATION": str(ME)})
    with pytest.raises(ConflictError, match="before"):
        prepare(ME, machine_dir=tmp_path, address="127.0.0.1")
    assert command.wait(20) == -signal.SIGKILL
    first.release(keep_output=True)
    assert Folders.of(ME, machine_dir=tmp_path).spool.is_dir()


def test_what_a_command_put_in_the_place_of_its_state_directory_refuses_no_machine(tmp_path: Path) -> None:
    """The restore after this replaces it; without one, the command finds what the life before it has left."""
    state = Folders.of(ME, machine_dir=tmp_path).state
    state.parent.mkdir(parents=True)
    state.symlink_to(tmp_path / "nowhere")
    prepare(ME, machine_dir=tmp_path, address="127.0.0.1").release(keep_output=False)
    assert state.is_symlink()
