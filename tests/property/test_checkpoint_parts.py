"""restore(snapshot(x)) == x, for any tree; what is torn is never a part; nobody's bytes get lost on the way."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.core.checkpoint_events import TakePart
from agents.restore import restore
from agents.state_look import look
from agents.state_part import Hashes, PartTaker
from mesh.blob_store import BlobStore
from mesh.checkpoint_format import (
    FileKind,
    FileRecord,
    Manifest,
    ManifestPart,
    Part,
    RestoreReference,
    is_inside,
    manifest_key,
)
from mesh.errors import CheckpointError
from mesh.ids import Epoch, Rank, RunUid

RUN = RunUid("0123456789abcdef")

NAMES = st.one_of(
    st.sampled_from(["a", "b", "model.pt", "step-00000100", "ünï", " ", "…", "-x", ".hidden"]),
    st.binary(min_size=1, max_size=8).map(os.fsdecode),
).filter(lambda name: "/" not in name and "\0" not in name and name not in (".", ".."))
CONTENT = st.binary(max_size=200)
MODES = st.sampled_from([0o600, 0o644, 0o755, 0o400])


def trees() -> st.SearchStrategy[dict[str, object]]:
    """name -> bytes (a file), str (a link's target) or a dict (a folder)."""
    leaf = st.one_of(CONTENT, st.just(b""), st.sampled_from(["a", "b/..", "./model.pt"]))
    return st.dictionaries(
        NAMES, st.recursive(leaf, lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=8), max_size=5
    )  # fmt: skip


def build(place: Path, tree: dict[str, object], mode: int) -> None:
    for name, content in tree.items():
        path = place / name
        if isinstance(content, bytes):
            path.write_bytes(content)
            path.chmod(mode)
        elif isinstance(content, str):
            os.symlink(content, path)
        else:
            assert isinstance(content, dict)
            path.mkdir()
            build(path, content, mode)


def read(place: Path) -> dict[str, object]:
    """Everything that a part holds of a tree."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(place):
        for name in [*folders, *files]:
            path = Path(folder) / name
            facts = path.lstat()
            key = os.fspath(path.relative_to(place))
            if stat.S_ISLNK(facts.st_mode):
                target = os.readlink(path)
                if is_inside(key, target):
                    found[key] = target
            elif stat.S_ISDIR(facts.st_mode):
                found[key] = stat.S_IMODE(facts.st_mode)
            else:
                found[key] = (path.read_bytes(), stat.S_IMODE(facts.st_mode))
    return found


def take(state: Path, store: BlobStore, *, copy: bool = False) -> Part:
    seen = look(state)
    entries = tuple(e for e in seen.entries if e.kind in ("file", "directory", "link"))
    taker = PartTaker(
        state_dir=state,
        work_dir=state.with_name("checkpointing"),
        store=store,
        run=RUN,
        hashes=Hashes(),
        stop=threading.Event(),
        tell=lambda message: None,
    )
    return taker.take(TakePart(number=1, steps=seen.steps, entries=entries, is_whole=True, copy=copy))


def commit(store: BlobStore, part: Part, number: int = 1) -> RestoreReference:
    manifest = Manifest(
        run=RUN, epoch=Epoch(1), number=number, step=None, created_at=0.0,
        parts=(ManifestPart(rank=Rank(0), digest=part.digest, files=part.files),),
    )  # fmt: skip
    key = manifest_key(RUN, number)
    store.put_bytes(key, manifest.encode())
    return RestoreReference(number=number, id=manifest.id, step=None, uri=store.uri(key))


@pytest.fixture(scope="module")
def place() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="gm-parts-"))
    yield folder  # type: ignore[misc]
    shutil.rmtree(folder)


@pytest.mark.timeout(300)
@given(first=trees(), second=trees(), mode=MODES, copy=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_directory_comes_back_as_it_was_whatever_is_there_meanwhile(
    place: Path, first: dict[str, object], second: dict[str, object], mode: int, copy: bool
) -> None:
    rank_dir = place / secrets.token_hex(8)
    state = rank_dir / "state"
    state.mkdir(parents=True)
    build(state, first, mode)
    before = read(state)
    store = BlobStore(f"file://{place}/store")
    reference = commit(store, take(state, store, copy=copy))
    assert read(state) == before, "a snapshot changes nothing"
    shutil.rmtree(state)
    state.mkdir()
    build(state, second, 0o640)
    had = read(state)
    done = restore(reference, run=RUN, epoch=Epoch(2), rank=Rank(0), state_dir=state)
    assert read(state) == before
    aside = {} if done.aside is None else read(done.aside)
    for key, content in had.items():  # nothing is lost: it is there again, or aside
        if not isinstance(content, int):
            assert aside.get(key) == content or _same(before.get(key), content)
    again = restore(reference, run=RUN, epoch=Epoch(3), rank=Rank(0), state_dir=state, store=store)
    assert (again.files_fetched, again.aside) == (0, None)
    assert read(state) == before
    left = {p.name for p in rank_dir.iterdir()} - {"restore.lock"}
    assert left in ({"state"}, {"state", "uncommitted"})


def _same(one: object, other: object) -> bool:
    return one == other or (isinstance(one, tuple) and isinstance(other, tuple) and one[0] == other[0])


@given(data=st.binary(max_size=300))
@settings(deadline=None)
def test_bytes_that_are_no_manifest_are_refused_by_name(data: bytes) -> None:
    for kind in (Manifest, Part):
        with pytest.raises(CheckpointError):
            kind.decode(data)


KEYS = (
    *("format", "run", "epoch", "number", "step", "steps", "world_size", "created_at", "parts"),
    *("files", "rank", "path", "path_base64", "kind", "mode", "size", "sha256", "target"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
        )
    ),
    max_leaves=20,
)


@given(data=JSON)
@settings(deadline=None)
def test_json_that_is_no_manifest_is_refused_by_name(data: object) -> None:
    if isinstance(data, dict):
        data["format"] = 1
    for kind in (Manifest, Part):
        with suppress(CheckpointError):
            kind.decode(json.dumps(data).encode())


@pytest.mark.parametrize(
    "moment",
    [10**400, math.nan, math.inf, "1", None, True],
    ids=["large", "nan", "inf", "text", "none", "true"],
)
def test_a_manifest_whose_moment_is_none_is_refused_by_name(moment: object) -> None:
    words = {**_a_manifest(), "created_at": moment}
    with pytest.raises(CheckpointError, match="created_at"):
        Manifest.decode(json.dumps(words).encode())


def _a_manifest() -> dict[str, Any]:
    made = Manifest(
        run=RUN,
        epoch=Epoch(1),
        number=1,
        step=None,
        created_at=0.0,
        parts=(ManifestPart(rank=Rank(0), digest="0" * 64, files=()),),
    )
    words: dict[str, Any] = json.loads(made.encode())
    return words


RECORDS = st.builds(
    FileRecord,
    path=NAMES,
    kind=st.just(FileKind.FILE),
    mode=st.integers(0, 0o7777),
    size=st.integers(0, 2**60),
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
)


@given(
    files=st.lists(RECORDS, unique_by=lambda f: f.path, max_size=5),
    steps=st.sets(st.integers(0, 10**9), max_size=4),
)
@settings(deadline=None)
def test_parts_and_manifests_survive_their_json(files: list[FileRecord], steps: set[int]) -> None:
    part = Part(steps=tuple(sorted(steps)), files=tuple(files))
    assert Part.decode(part.encode()) == part
    assert Part.decode(part.encode()).digest == part.digest
    manifest = Manifest(
        run=RUN, epoch=Epoch(3), number=7, step=max(steps, default=None), created_at=1.5,
        parts=tuple(ManifestPart(rank=Rank(r), digest=part.digest, files=part.files) for r in range(3)),
    )  # fmt: skip
    assert Manifest.decode(manifest.encode()) == manifest
    manifest.encode().decode("utf-8")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "", ".", "a/", "a\0b"])
def test_a_path_that_leads_out_is_refused(path: str) -> None:
    record = {"path": path, "kind": "file", "mode": 0o644, "size": 0, "sha256": "0" * 64}
    with pytest.raises(CheckpointError):
        FileRecord.from_json(record)


@pytest.mark.parametrize(
    ("link", "target", "inside"),
    [
        ("a", "b", True), ("a/b", "../c", True), ("a/b", "../../c", False), ("a", "..", False),
        ("a", "/tmp", False), ("a", "b/../../c", False), ("a", ".", True), ("a", "", False),
    ],
)  # fmt: skip
def test_links_that_lead_out(link: str, target: str, inside: bool) -> None:
    assert is_inside(link, target) is inside


def test_what_lies_in_a_link_or_a_file_is_refused() -> None:
    def record(path: str, kind: FileKind) -> FileRecord:
        return FileRecord(path=path, kind=kind, mode=0o644, sha256="0" * 64, target="x")

    for kind in (FileKind.LINK, FileKind.FILE):
        part = Part(files=(record("a", kind), record("a/b", FileKind.FILE)))
        with pytest.raises(CheckpointError, match="not in a directory"):
            Part.decode(part.encode())
    twice = Part(files=(record("a", FileKind.FILE), record("a", FileKind.FILE)))
    with pytest.raises(CheckpointError, match="twice"):
        Part.decode(twice.encode())


def test_a_part_of_several_steps_is_cut_to_the_one_that_is_committed() -> None:
    names = ["step-00000100", "step-00000200", "train.log"]
    files = tuple(FileRecord(path=n, kind=FileKind.DIRECTORY, mode=0o755) for n in names)
    part = Part(steps=(100, 200), files=files)
    assert [f.path for f in part.at_step(100)] == ["step-00000100", "train.log"]
    assert part.at_step(200) == files == part.at_step(None)
