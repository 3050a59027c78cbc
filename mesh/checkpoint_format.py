"""What a gang checkpoint is made of, as data and as JSON: files, parts, manifests, and where each lies in the store.

Layout of a checkpoint store, below its URL:

    runs/<uid>/blobs/<aa>/<sha256>           one file's content; aa: the first two digits
    runs/<uid>/parts/<sha256>.json           one rank's part: a snapshot of its state directory
    runs/<uid>/checkpoints/<number>.json     one gang checkpoint: the manifest; what is here is committed

A manifest, which NODUS_RESTORE_URI names, is JSON in UTF-8:

    {"format": 1, "id": "e2-c000007", "run": "<uid>", "epoch": 2, "number": 7, "step": 1200 or null,
     "world_size": 2, "created_at": 1764450000.0, "blobs": "../blobs",
     "parts": [{"rank": 0, "part": "<sha256>", "bytes": 1048576,
                "files": [{"path": "step-00001200/state.pt", "kind": "file", "mode": 420,
                           "size": 1048576, "sha256": "…"},
                          {"path": "empty", "kind": "directory", "mode": 493},
                          {"path": "newest", "kind": "link", "mode": 511, "target": "step-00001200"}]}]}

The content of a file is at <manifest's folder>/<blobs>/<first two digits of sha256>/<sha256>. A path that is not UTF-8
has "path_base64" (and a target "target_base64") instead: its bytes. Unknown keys are to be skipped.

Rules of this file:
1. Pure. What is read was written by someone else: `from_json` refuses what is not the format, with CheckpointError.
2. A path never leads out of the state directory: relative, no `..`, no empty part.
3. A digest is of the canonical JSON, so equal parts have equal digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mesh.errors import CheckpointError
from mesh.ids import Epoch, Rank, RunUid

FORMAT = 1
MANIFEST_BYTES_MAX = 256 << 20
PATH_BYTES_MAX = 4096
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class FileKind(StrEnum):
    """What an entry of a state directory is."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"


_KINDS = {str(kind): kind for kind in FileKind}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FileRecord:
    """One entry of a part. Paths are relative with `/`; bytes that are not UTF-8 are surrogates (`os.fsdecode`)."""

    path: str
    kind: FileKind
    mode: int
    """Permission bits."""
    size: int = 0
    sha256: str = ""
    """Of files only."""
    target: str = ""
    """Of links only; as it was written, and inside the state directory."""

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {**_text("path", self.path), "kind": str(self.kind), "mode": self.mode}
        if self.kind is FileKind.FILE:
            record |= {"size": self.size, "sha256": self.sha256}
        elif self.kind is FileKind.LINK:
            record |= _text("target", self.target)
        return record

    @classmethod
    def from_json(cls, record: Any) -> FileRecord:
        data = _mapping(record, "a file")
        kind = _KINDS.get(str(data.get("kind")))
        if kind is None:
            raise CheckpointError(f"This is no kind of file: {data.get('kind')!r}.")
        found = cls(
            path=_text_from(data, "path"),
            kind=kind,
            mode=_number(data, "mode") & 0o7777,
            size=_number(data, "size") if kind is FileKind.FILE else 0,
            sha256=str(data.get("sha256")) if kind is FileKind.FILE else "",
            target=_text_from(data, "target") if kind is FileKind.LINK else "",
        )
        check_path(found.path)
        if kind is FileKind.FILE and not _SHA256.match(found.sha256):
            raise CheckpointError(f"The hash of {found.path!r} is none.")
        if kind is FileKind.LINK and not is_inside(found.path, found.target):
            raise CheckpointError(f"The link {found.path!r} leads out of the state directory.")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A snapshot of one rank's state directory. Equal content has an equal digest, whoever took it when."""

    steps: tuple[int, ...] = ()
    """The steps that this part can stand for, ascending; empty when it names none."""
    files: tuple[FileRecord, ...] = ()
    """By path; a directory before what is in it."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self) -> bytes:
        """Canonical JSON."""
        return _encode(
            {
                "format": FORMAT,
                "steps": list(self.steps),
                "files": [file.to_json() for file in self.files],
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Part:
        record = _decode(data, "a part")
        steps = tuple(_whole(step, "a step") for step in _list(record, "steps"))
        return cls(steps=steps, files=_files_from(record))

    def at_step(self, step: int | None) -> tuple[FileRecord, ...]:
        """The files as they belong to this step: without the helper's checkpoints of later ones."""
        if step is None or not self.steps or step == self.steps[-1]:
            return self.files
        return tuple(file for file in self.files if not _is_of_later_step(file.path, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestPart:
    """One rank's content in a gang checkpoint."""

    rank: Rank
    digest: str
    files: tuple[FileRecord, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed gang checkpoint: one part of every rank."""

    run: RunUid
    epoch: Epoch
    number: int
    """Grows by one with every decision to commit, over all epochs of the run; never reused."""
    step: int | None
    created_at: float
    """Wall clock, for people."""
    parts: tuple[ManifestPart, ...]
    """In rank order, one of every rank."""

    @property
    def id(self) -> str:
        return checkpoint_id(self.epoch, self.number)

    @property
    def world_size(self) -> int:
        return len(self.parts)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def encode(self) -> bytes:
        return _encode(
            {
                "format": FORMAT,
                "id": self.id,
                "run": self.run,
                "epoch": self.epoch,
                "number": self.number,
                "step": self.step,
                "world_size": self.world_size,
                "created_at": self.created_at,
                "blobs": "../blobs",
                "parts": [
                    {
                        "rank": part.rank,
                        "part": part.digest,
                        "bytes": part.size_bytes,
                        "files": [file.to_json() for file in part.files],
                    }
                    for part in self.parts
                ],
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        record = _decode(data, "a manifest")
        parts = tuple(
            ManifestPart(
                rank=Rank(_number(part, "rank")), digest=str(part.get("part")), files=_files_from(part)
            )
            for part in (_mapping(p, "a part") for p in _list(record, "parts"))
        )
        if [part.rank for part in parts] != list(range(_number(record, "world_size"))):
            raise CheckpointError("The manifest does not have one part of every rank.")
        return cls(
            run=RunUid(str(record.get("run"))),
            epoch=Epoch(_number(record, "epoch")),
            number=_number(record, "number"),
            step=None if record.get("step") is None else _number(record, "step"),
            created_at=_moment(record.get("created_at")),
            parts=parts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReference:
    """Which committed checkpoint a rank starts from. None of it where an order carries None: an empty directory."""

    number: int
    id: str
    step: int | None
    uri: str
    """The manifest's."""

    def to_record(self) -> dict[str, Any]:
        return {"number": self.number, "id": self.id, "step": self.step, "uri": self.uri}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RestoreReference:
        return cls(number=record["number"], id=record["id"], step=record["step"], uri=record["uri"])


def checkpoint_id(epoch: Epoch, number: int) -> str:
    """What people call a gang checkpoint."""
    return f"e{epoch}-c{number:06d}"


# ---- where things lie ------------------------------------------------------------------------------


def run_key(run: RunUid) -> str:
    return f"runs/{run}"


def blobs_key(run: RunUid) -> str:
    return f"{run_key(run)}/blobs"


def blob_key(run: RunUid, sha256: str) -> str:
    return f"{blobs_key(run)}/{sha256[:2]}/{sha256}"


def parts_key(run: RunUid) -> str:
    return f"{run_key(run)}/parts"


def part_key(run: RunUid, digest: str) -> str:
    return f"{parts_key(run)}/{digest}.json"


def manifests_key(run: RunUid) -> str:
    return f"{run_key(run)}/checkpoints"


def manifest_key(run: RunUid, number: int) -> str:
    return f"{manifests_key(run)}/{number:06d}.json"


# ---- paths -----------------------------------------------------------------------------------------


def check_path(path: str) -> None:
    """Raises CheckpointError unless the path stays inside the state directory."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"The path {path!r} does not stay inside the state directory.")
    if len(path.encode("utf-8", "surrogateescape")) > PATH_BYTES_MAX:
        raise CheckpointError(f"A path is longer than {PATH_BYTES_MAX} bytes: {path[:80]!r}…")


def is_inside(link: str, target: str) -> bool:
    """Whether a link's target stays inside the state directory, judged by its text. Absolute ones do not."""
    if not target or target.startswith("/") or "\0" in target:
        return False
    depth = link.count("/")
    for part in target.split("/"):
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        if depth < 0:
            return False
    return True


_STEP_FOLDER = re.compile(r"step-(\d{8,16})\Z")
"""A checkpoint of `mesh.checkpoint`, which is a file on its own and so says it again (a test compares them)."""
STEP_MARKER = "checkpoint.json"
TEMPORARY_PREFIX = ".tmp-step-"


def step_of_folder(name: str) -> int | None:
    """The step of a directory that `mesh.checkpoint` may have made, by its name."""
    match = _STEP_FOLDER.match(name)
    return None if match is None else int(match.group(1))


def _is_of_later_step(path: str, step: int) -> bool:
    found = step_of_folder(path.partition("/")[0])
    return found is not None and found > step


# ---- JSON ------------------------------------------------------------------------------------------


def _encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8")


def _decode(data: bytes, what: str) -> Mapping[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"This is not {what}: {error}.") from error
    found = _mapping(record, what)
    if found.get("format") != FORMAT:
        raise CheckpointError(
            f"This is {what} of format {found.get('format')!r}; this version reads {FORMAT}."
        )
    return found


def _mapping(record: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise CheckpointError(f"This is not {what}.")
    return record


def _list(record: Mapping[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    if not isinstance(value, list):
        raise CheckpointError(f"The list {name!r} is missing.")
    return value


def _number(record: Mapping[str, Any], name: str) -> int:
    return _whole(record.get(name), repr(name))


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"{what} is not a whole number from 0 up: {value!r}.")
    return value


def _moment(value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"'created_at' is no time: {value!r}.")
    except OverflowError as error:
        raise CheckpointError("'created_at' is no time.") from error
    return float(value)


def _files_from(record: Mapping[str, Any]) -> tuple[FileRecord, ...]:
    files = tuple(FileRecord.from_json(file) for file in _list(record, "files"))
    _check_tree(files)
    return files


def _check_tree(files: Iterable[FileRecord]) -> None:
    """No path twice, and nothing lies inside a file or a link: it would lead out when it is restored."""
    kinds: dict[str, FileKind] = {}
    for file in files:
        if file.path in kinds:
            raise CheckpointError(f"The path {file.path!r} is there twice.")
        kinds[file.path] = file.kind
    for path in kinds:
        parent = path.rpartition("/")[0]
        if parent and kinds.get(parent) is not FileKind.DIRECTORY:
            raise CheckpointError(f"The path {path!r} is not in a directory of the part.")


def _text(name: str, text: str) -> dict[str, str]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return {f"{name}_base64": base64.b64encode(text.encode("utf-8", "surrogateescape")).decode("ascii")}
    return {name: text}


def _text_from(record: Mapping[str, Any], name: str) -> str:
    coded = record.get(f"{name}_base64")
    if coded is None:
        value = record.get(name)
        if not isinstance(value, str):
            raise CheckpointError(f"{name!r} is missing.")
        return value
    try:
        return base64.b64decode(str(coded), validate=True).decode("utf-8", "surrogateescape")
    except ValueError as error:
        raise CheckpointError(f"'{name}_base64' is not base64: {error}.") from error
