"""mesh.checkpoint: a checkpoint is whole or not there, whatever the writer, the disk or a reader does."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh import checkpoint, checkpoint_format


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_found_and_read_back(tmp_path: Path) -> None:
    path = checkpoint.save({"weights": [1, 2, 3]}, step=100, directory=tmp_path)
    assert path.name == "step-00000100"
    assert checkpoint.latest(tmp_path, verify=True) == path
    assert checkpoint.step(tmp_path) == 100
    assert checkpoint.load(path) == {"weights": [1, 2, 3]}
    assert checkpoint.load(checkpoint.save(b"\0raw", step=101, directory=tmp_path)) == b"\0raw"


def test_where_there_is_none_the_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(checkpoint.STATE_DIR_VARIABLE, raising=False)
    assert checkpoint.latest() is None
    assert checkpoint.step() is None
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoint.load()


def test_a_deployment_says_where_and_without_one_it_is_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(checkpoint.STATE_DIR_VARIABLE, str(tmp_path / "state"))
    checkpoint.save(1, step=1)
    monkeypatch.delenv(checkpoint.STATE_DIR_VARIABLE)
    checkpoint.save(2, step=2)
    assert names(tmp_path / "state") == ["step-00000001"]
    assert names(tmp_path / "checkpoints") == ["step-00000002"]
    assert checkpoint.load() == 2


def test_a_function_writes_what_it_likes(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "shards").mkdir()
        (folder / "shards" / os.fsdecode(b"\xff.bin")).write_bytes(b"x" * 10)

    path = checkpoint.save(write, step=7, directory=tmp_path)
    assert checkpoint.latest(tmp_path, verify=True) == path
    with pytest.raises(FileNotFoundError, match="by a function"):
        checkpoint.load(path)


def test_the_newest_three_stay(tmp_path: Path) -> None:
    for number in range(1, 6):
        checkpoint.save(number, step=number, directory=tmp_path)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    checkpoint.save("first", step=5, directory=tmp_path)
    path = checkpoint.save("second", step=5, directory=tmp_path)
    assert checkpoint.load(path) == "second"
    assert names(tmp_path) == ["step-00000005"]


CRASHES = """
import os, pathlib, sys
from mesh import checkpoint

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")
top, step = pathlib.Path(sys.argv[1]), int(sys.argv[2])
for number in range(200):
    directory = top / str(number)
    checkpoint.save(b"before", step=5, directory=directory, keep=1)
    child = os.fork()
    if child == 0:
        left = number
        def crash(event, arguments):
            global left
            if event in CHANGES:
                left -= 1
                if left < 0:
                    os._exit(9)
        sys.addaudithook(crash)
        checkpoint.save(b"after", step=step, directory=directory, keep=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = checkpoint.latest(directory, verify=True)
    assert found is not None and checkpoint.load(found) in (b"before", b"after"), (number, os.listdir(directory))
    checkpoint.save(b"again", step=step, directory=directory, keep=1)
    assert os.listdir(directory) == [f"step-{step:08d}"] and checkpoint.load(directory / f"step-{step:08d}") == b"again"
    if status == 0:
        break
assert status == 0 and number > 5, number
"""


@pytest.mark.parametrize("step", [5, 6], ids=["the same step", "the next"])
def test_a_crash_at_any_moment_leaves_a_whole_one_however_few_are_kept(tmp_path: Path, step: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CRASHES, str(tmp_path), str(step)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


def test_what_save_returns_is_there_also_when_later_steps_are(tmp_path: Path) -> None:
    """A script that began again from an older one; what it had saved after that is still newer by its number."""
    checkpoint.save(9, step=9, directory=tmp_path, keep=1)
    assert checkpoint.load(checkpoint.save(5, step=5, directory=tmp_path, keep=1)) == 5


def test_a_writer_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    before = checkpoint.save(1, step=1, directory=tmp_path)

    def write(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checkpoint.save(write, step=2, directory=tmp_path)
    assert checkpoint.latest(tmp_path) == before
    assert names(tmp_path) == ["step-00000001"]


def test_a_full_disk_is_named_and_the_one_before_stays(tmp_path: Path) -> None:
    before = checkpoint.save(1, step=1, directory=tmp_path)

    def write(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(checkpoint.CheckpointSpaceError, match=r"step-00000001 is whole.*Free some space"):
        checkpoint.save(write, step=2, directory=tmp_path)
    assert checkpoint.latest(tmp_path) == before


@pytest.mark.parametrize(
    "damage", ["truncated", "missing", "no list", "a list of nonsense", "another step's"]
)
def test_what_is_damaged_is_not_offered(tmp_path: Path, damage: str) -> None:
    before = checkpoint.save(1, step=1, directory=tmp_path)
    path = checkpoint.save(2, step=2, directory=tmp_path)
    marker = path / checkpoint.MARKER_NAME
    (file,) = set(path.iterdir()) - {marker}  # torch's form where torch is imported already
    if damage == "truncated":
        os.truncate(file, 1)
    elif damage == "missing":
        file.unlink()
    elif damage == "no list":
        marker.unlink()
    elif damage == "a list of nonsense":
        marker.write_text("[1")
    else:
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "step": 3}))
    assert checkpoint.latest(tmp_path) == before


def test_other_bytes_of_the_same_size_are_found_when_asked(tmp_path: Path) -> None:
    before = checkpoint.save(b"aa", step=1, directory=tmp_path)
    path = checkpoint.save(b"bb", step=2, directory=tmp_path)
    (path / checkpoint.BYTES_NAME).write_bytes(b"bc")
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.latest(tmp_path, verify=True) == before


def test_what_a_killed_process_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    script = (
        "import os, pathlib; from mesh import checkpoint\n"
        "def write(folder):\n"
        "    (folder / 'half').write_bytes(b'x' * 1000)\n"
        "    os.kill(os.getpid(), 9)\n"
        f"checkpoint.save(write, step=1, directory={str(tmp_path)!r})\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert ended.returncode == -9
    (left,) = names(tmp_path)
    assert left.startswith(checkpoint.TEMPORARY_PREFIX)
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(2, step=2, directory=tmp_path)
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("step", [-1, True, 1.5, "7", 10**15])
def test_what_is_no_step_is_refused(tmp_path: Path, step: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        checkpoint.save(1, step=step, directory=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(1, step=1, directory=tmp_path, keep=0)


def test_it_is_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "checkpoint.py"
    copy.write_bytes(Path(checkpoint.__file__).read_bytes())
    script = (
        "import checkpoint, sys; checkpoint.save(3, step=3); print(checkpoint.step(), 'torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("3 False\n", "")


def test_the_agent_knows_the_same_names() -> None:
    assert checkpoint_format.STEP_MARKER == checkpoint.MARKER_NAME
    assert checkpoint_format.TEMPORARY_PREFIX == checkpoint.TEMPORARY_PREFIX
    assert checkpoint_format.step_of_folder(f"{checkpoint.STEP_PREFIX}{100:08d}") == 100
    assert checkpoint_format.step_of_folder(f"{checkpoint.STEP_PREFIX}{10**14}") == 10**14


@pytest.mark.torch
def test_torch_states_are_written_and_read_by_torch(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(3, 1)
    path = checkpoint.save({"model": model.state_dict(), "at": 4}, step=4, directory=tmp_path)
    assert names(path) == [checkpoint.MARKER_NAME, checkpoint.TORCH_NAME]
    assert torch.equal(checkpoint.load(path)["model"]["weight"], model.weight)
    with pytest.raises(TypeError, match="state_dict"):
        checkpoint.save(model, step=5, directory=tmp_path)
    assert names(tmp_path) == ["step-00000004"]
