"""Checkpoints that are whole or not there: `save`, `latest`, `load`, `step`. With a deployment or without.

    from mesh import checkpoint

    start = 0
    if checkpoint.latest():
        state = checkpoint.load()
        model.load_state_dict(state["model"])
        start = checkpoint.step() + 1
    for step in range(start, 1000):
        ...
        if step % 100 == 0:
            checkpoint.save({"model": model.state_dict()}, step=step)

How your script gets it: its processes see your own environment, never the deployment's. Either
`pip install --no-deps gangmesh` there (this module needs nothing else), or copy this one file beside your script.

Rules of this file:
1. Standard library only; torch is used when the state that you hand in needs it, and then it is imported already.
2. A checkpoint is a directory `step-00000100`. It is written under another name, flushed to the disk with a list of its
   files, sizes and sha256 (`checkpoint.json`), and then renamed: whoever looks sees all of it or nothing.
3. `latest` offers nothing whose files are missing or of another size than the list says.
4. A checkpoint is removed only when another one is whole: an older one when a newer one is, one of the same step when
   what replaces it is. A full disk costs the new one, never the old; a crash at any moment leaves one, if there was.
5. One process per machine saves into one directory: on several processes per machine, the one with LOCAL_RANK 0.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

FORMAT = 1
MARKER_NAME = "checkpoint.json"
"""The list inside a step's directory: its presence says that everything beside it was written before it."""
STEP_PREFIX = "step-"
TEMPORARY_PREFIX = ".tmp-step-"
STATE_DIR_VARIABLE = "NODUS_STATE_DIR"
DEFAULT_DIRECTORY = "checkpoints"
TORCH_NAME = "state.pt"
PICKLE_NAME = "state.pickle"
BYTES_NAME = "state.bin"
KEEP_DEFAULT = 3
STEP_MAX = 10**15
DIGITS_MAX = 16
FREE_BYTES_LOW = 1 << 20
"""A write that failed with less than this free is put down to the full disk, whatever the writer called it."""
CHUNK_BYTES = 1 << 20

_STEP_NAME = re.compile(rf"{STEP_PREFIX}(\d{{8,{DIGITS_MAX}}})\Z")
_TEMPORARY_NAME = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}\d+-(\d+)-[0-9a-f]+\Z")


class CheckpointSpaceError(OSError):
    """The disk is full. Nothing of the new checkpoint is left; the one before is whole."""


def save(
    state: Any, *, step: int, directory: str | os.PathLike[str] | None = None, keep: int = KEEP_DEFAULT
) -> Path:
    """Writes the checkpoint of this step and returns its directory. When it returns, the checkpoint is on the disk.

    Args:
        state: bytes; or a function that is given an empty directory (a `Path`) and writes what it likes into it; or
            anything else, which torch.save writes when torch is imported, and pickle when it is not.
        step: 0 or more. A checkpoint of the same step is replaced.
        directory: where checkpoints are kept; by default $NODUS_STATE_DIR, and without a deployment ./checkpoints.
        keep: how many of the newest stay.

    Raises:
        CheckpointSpaceError: the disk is full.
        OSError: it cannot be written for another reason.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < STEP_MAX:
        raise ValueError(f"A step is a whole number from 0 up; {step!r} is none.")
    if keep < 1:
        raise ValueError(f"keep={keep} would remove the checkpoint that was just saved; the least is 1.")
    parent = _directory(directory)
    temporary = parent / f"{TEMPORARY_PREFIX}{step}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(parent)
        temporary.mkdir()
        _write_state(state, temporary)
        _write_marker(temporary, step)
        final = _put_in_place(temporary, parent / f"{STEP_PREFIX}{step:08d}")
    except BaseException as error:
        full = _is_disk_full(error, parent)  # before the half-written one makes room
        shutil.rmtree(temporary, ignore_errors=True)
        if full:
            raise _space_error(parent, step) from error
        raise
    for old in _complete(parent)[keep:]:
        if old != final:  # of an earlier step than what lies there: its caller is given it
            _remove(old)
    return final


def latest(directory: str | os.PathLike[str] | None = None, *, verify: bool = False) -> Path | None:
    """The newest whole checkpoint's directory, or None.

    Args:
        directory: as for `save`.
        verify: read every file and compare its sha256 too.
    """
    for found in _complete(_directory(directory)):
        if not verify or _is_intact(found):
            return found
    return None


def step(directory: str | os.PathLike[str] | None = None) -> int | None:
    """The step of the newest whole checkpoint, or None."""
    found = latest(directory)
    return None if found is None else int(found.name.removeprefix(STEP_PREFIX))


def load(path: str | os.PathLike[str] | None = None, **torch_options: Any) -> Any:
    """What `save` was given, from the newest whole checkpoint or the one at `path`.

    Args:
        path: a checkpoint's directory, as `latest` returns it.
        torch_options: for torch.load; `map_location="cpu"` and `weights_only=True` unless you say otherwise.

    Raises:
        FileNotFoundError: there is none, or your own function wrote it: then read its files yourself.
    """
    found = latest() if path is None else Path(path)
    if found is None:
        raise FileNotFoundError(f"There is no checkpoint in {_directory(None)}.")
    if (found / TORCH_NAME).exists():
        import importlib

        options = {"map_location": "cpu", "weights_only": True, **torch_options}
        return importlib.import_module("torch").load(found / TORCH_NAME, **options)
    if (found / PICKLE_NAME).exists():
        return pickle.loads((found / PICKLE_NAME).read_bytes())  # the script's own file
    if (found / BYTES_NAME).exists():
        return (found / BYTES_NAME).read_bytes()
    raise FileNotFoundError(
        f"{found} was not written from a state but by a function: read its files yourself."
    )


def _directory(given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        return Path(given)
    return Path(os.environ.get(STATE_DIR_VARIABLE) or DEFAULT_DIRECTORY)


# ---- writing ----------------------------------------------------------------------------------------


def _write_state(state: Any, folder: Path) -> None:
    torch = sys.modules.get("torch")  # a state of torch's cannot exist without it
    if isinstance(state, bytes | bytearray | memoryview):
        (folder / BYTES_NAME).write_bytes(state)
    elif torch is not None and hasattr(torch, "nn") and isinstance(state, torch.nn.Module):
        raise TypeError("Hand over the model's state, not the model: model.state_dict().")
    elif callable(state):
        state(folder)
    elif torch is not None and hasattr(torch, "save"):
        with (folder / TORCH_NAME).open("wb") as file:
            torch.save(state, file)
    else:
        with (folder / PICKLE_NAME).open("wb") as file:
            pickle.dump(state, file)


def _write_marker(folder: Path, step: int) -> None:
    """Lists every file with its size and hash, and flushes all of it. The list is written last."""
    files: dict[str, dict[str, Any]] = {}
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(place) / name
            if path.is_symlink() or not path.is_file():
                continue
            files[os.fspath(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": _hash(path)}
            _flush(path)
        _flush(Path(place))
    marker = {"format": FORMAT, "step": step, "saved_at": time.time(), "files": files}
    path = folder / MARKER_NAME
    path.write_text(json.dumps(marker, indent=1), encoding="utf-8")
    _flush(path)
    _flush(folder)


def _put_in_place(temporary: Path, final: Path) -> Path:
    if final.exists():  # of an earlier life: what comes now replaces it, and is there before that goes
        beside = _same_step_beside(final)
        temporary.rename(beside)
        _flush(final.parent)
        _remove(final)
        temporary = beside
    temporary.rename(final)
    _flush(final.parent)
    return final


def _same_step_beside(final: Path) -> Path:
    """Another name that says the same step: with more zeros before it."""
    digits = final.name.removeprefix(STEP_PREFIX)
    names = (f"{STEP_PREFIX}{digits:0>{width}}" for width in range(len(digits) + 1, DIGITS_MAX + 1))
    return next(path for name in names if not (path := final.with_name(name)).exists())


def _remove(checkpoint: Path) -> None:
    """Takes it out of sight first, so that no half-removed one can be taken for whole."""
    trash = checkpoint.with_name(f"{TEMPORARY_PREFIX}0-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        checkpoint.rename(trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    """What processes that have ended left half-written."""
    for path in parent.glob(f"{TEMPORARY_PREFIX}*"):
        match = _TEMPORARY_NAME.match(path.name)
        if match is not None and not _is_alive(int(match.group(1))):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without it
            raise
    finally:
        os.close(descriptor)


def _is_disk_full(error: BaseException, parent: Path) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if not isinstance(error, OSError | RuntimeError):  # torch makes a RuntimeError of a failed write
        return False
    try:
        return shutil.disk_usage(parent).free < FREE_BYTES_LOW
    except OSError:
        return False


def _space_error(parent: Path, step: int) -> CheckpointSpaceError:
    before = latest(parent)
    kept = "There is no earlier one." if before is None else f"{before.name} is whole and stays the newest."
    free = shutil.disk_usage(parent).free if parent.exists() else 0
    return CheckpointSpaceError(
        errno.ENOSPC,
        f"The disk of {parent} is full ({free / 2**20:.1f} MiB free): nothing of step {step} was kept. {kept} "
        "Free some space, or keep fewer checkpoints (keep=1 needs room for two).",
    )


# ---- reading ----------------------------------------------------------------------------------------


def _complete(parent: Path) -> list[Path]:
    """Every whole checkpoint, newest first."""
    if not parent.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in parent.iterdir() if (m := _STEP_NAME.match(p.name))]
    return [path for number, path in sorted(found, reverse=True) if _has_all_files(path, number)]


def _has_all_files(path: Path, number: int) -> bool:
    files = _marked_files(path, number)
    if files is None:
        return False
    try:
        return all((path / name).stat().st_size == fact["size"] for name, fact in files.items())
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _is_intact(path: Path) -> bool:
    files = _marked_files(path, int(path.name.removeprefix(STEP_PREFIX))) or {}
    try:
        return all(_hash(path / name) == fact["sha256"] for name, fact in files.items())
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _marked_files(path: Path, number: int) -> dict[str, Any] | None:
    try:
        marker = json.loads((path / MARKER_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(marker, dict) or marker.get("format") != FORMAT or marker.get("step") != number:
        return None
    files = marker.get("files")
    return files if isinstance(files, dict) else None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
