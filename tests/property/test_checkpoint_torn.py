"""Whatever is written when, killed when and looked at when: no part ever holds a file that was not whole.

Real files, the real taker, and a clock that only the test moves. Every write sets a time of its own (as two seconds of
rest do in life), so that a change is visible as such.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agents.core import checkpoint_events as ce
from agents.core.checkpointing import Checkpointing
from agents.state_look import look
from agents.state_part import AbandonedError, Hashes, PartTaker, TornError
from mesh.blob_store import BlobStore
from mesh.checkpoint_format import FileKind, Part, blob_key
from mesh.ids import RunUid

RUN = RunUid("0123456789abcdef")
NAMES = ["ckpt-1.pt", "ckpt-2.pt", "model.pt"]


class World:
    """A command that writes, and a checkpointer that looks on."""

    def __init__(self, place: Path) -> None:
        self.state = place / "state"
        self.state.mkdir(parents=True)
        self.store = Meddled(f"memory://{secrets.token_hex(8)}")
        self.core = Checkpointing()
        self.now = 0.0
        self.tick = 0
        self.is_alive = True
        self.is_written: dict[str, bytes] = {}
        """What is being written in place, and by how much."""
        self.whole: dict[str, set[bytes]] = {}
        """What a file may hold: contents that were complete at some moment."""
        self.parts: list[Part] = []
        self.meddle: list[tuple[str, str]] = []
        """What the command does while a part is stored."""
        self.store.on_put = self.meddling
        self.perform(self.core.begin(self.now))

    def do(self, kind: str, name: str) -> None:
        path = self.state / name
        self.tick += 1
        content = f"{name}:{self.tick}:".encode() + b"x" * 20
        if kind in ("wait", "pause"):
            self.wait(3.0 if kind == "wait" else 0.4)
        elif not self.is_alive:
            return
        elif kind == "begin":
            self.is_written[name] = content
            self.write(
                path, content[:10].ljust(len(content), b"\0")
            )  # of full length already, as some writers do
        elif kind == "end" and name in self.is_written:
            self.write(path, self.is_written.pop(name))
            self.whole.setdefault(name, set()).add(path.read_bytes())
        elif kind == "rename":
            other = path.with_name(f"{name}.tmp")
            self.write(other, content)
            self.whole.setdefault(name, set()).add(content)
            self.whole.setdefault(other.name, set()).add(content)
            self.is_written.pop(name, None)
            other.rename(path)
        elif kind == "remove":
            path.unlink(missing_ok=True)
            self.is_written.pop(name, None)
        elif kind == "kill":
            self.is_alive = False  # the launcher lives on, and takes its time to notice

    def end(self) -> None:
        self.perform(self.core.handle(ce.CommandEnded(ok=False), self.now))

    def write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        os.utime(path, ns=(self.tick * 10**9, self.tick * 10**9))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = due
            self.perform(self.core.handle(ce.TimePassed(), self.now))
        self.now = end

    def meddling(self) -> None:
        if self.meddle:
            kind, name = self.meddle.pop(0)
            if kind not in ("wait", "pause", "kill"):
                self.do(kind, name)

    def perform(self, effects: list[ce.CheckpointingEffect]) -> None:
        for effect in effects:
            event = self.answer(effect)
            if event is not None:
                self.perform(self.core.handle(event, self.now))

    def answer(self, effect: ce.CheckpointingEffect) -> ce.CheckpointingEvent | None:
        match effect:
            case ce.LookAtState():
                seen = look(self.state, root=0)
                open_now = self.is_written if self.is_alive else {}
                writers = tuple((name, (2, 1)) for name in open_now)
                alive = frozenset({(1, 1), (2, 1)} if self.is_alive else {(1, 1)})
                return ce.StateSeen(look=replace(seen, writers=writers, processes=alive, cost_s=0.0))
            case ce.LookForWriters():
                return ce.WritersSeen(paths=tuple(self.is_written) if self.is_alive else ())
            case ce.TakePart():
                return self.take(effect)
        return None

    def take(self, wanted: ce.TakePart) -> ce.CheckpointingEvent:
        taker = PartTaker(
            state_dir=self.state, work_dir=self.state.with_name("work"), store=self.store, run=RUN,
            hashes=Meddling(self.meddling), stop=threading.Event(), tell=lambda message: None,
        )  # fmt: skip
        self.meddling()
        try:
            part = taker.take(wanted)
        except TornError as error:
            return ce.PartTorn(number=wanted.number, path=error.path)
        except AbandonedError:
            raise AssertionError from None
        self.parts.append(part)
        return ce.PartStored(number=wanted.number, digest=part.digest)

    def check(self) -> None:
        for part in self.parts:
            for file in part.files:
                if file.kind is FileKind.FILE:
                    content = self.store.get_bytes(blob_key(RUN, file.sha256), bytes_max=1000)
                    assert content in self.whole[file.path], f"{file.path} is torn: {content!r}"


class Meddling(Hashes):
    """Something happens before a file is read for its hash."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        super().__init__()
        self._meddle = meddle
        self._one = threading.Lock()

    def of(self, entry: ce.Entry) -> str | None:
        with self._one:
            self._meddle()
        return super().of(entry)


class Meddled(BlobStore):
    """A store during whose writes something happens."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.on_put = lambda: None
        self._one = threading.Lock()

    def put_stream(self, key: str, chunks: Iterator[bytes]) -> None:
        with self._one:
            self.on_put()
        super().put_stream(key, chunks)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gm-torn-"))
    yield folder
    shutil.rmtree(folder)


ACTIONS = st.tuples(
    st.sampled_from(["begin", "end", "rename", "remove", "wait", "wait", "pause", "kill"]),
    st.sampled_from(NAMES),
)


@pytest.mark.timeout(300)
@given(
    story=st.lists(ACTIONS, max_size=20),
    meddle=st.lists(ACTIONS, max_size=6),
    death_before_end_s=st.sampled_from([0.0, 0.4, 3.0, 10.0, 60.0]),
)
@example(
    story=[("rename", "model.pt"), ("wait", "model.pt")],
    meddle=[("pause", "model.pt"), ("begin", "model.pt")],  # written in place while it is read for its hash
    death_before_end_s=0.0,
)
@example(
    story=[("begin", "ckpt-1.pt"), ("wait", "ckpt-1.pt")],  # killed in the middle; its launcher notices late
    meddle=[],
    death_before_end_s=10.0,
)
@settings(max_examples=60, deadline=None)
def test_no_part_holds_a_torn_file(
    place: Path, story: list[tuple[str, str]], meddle: list[tuple[str, str]], death_before_end_s: float
) -> None:
    world = World(place / secrets.token_hex(8))
    world.meddle = list(meddle)
    for kind, name in story:
        world.do(kind, name)
    world.do("kill", NAMES[0])
    world.wait(death_before_end_s)
    world.end()
    world.wait(10)
    world.check()
    world.store.remove_below("")


def test_the_world_does_take_parts(place: Path) -> None:
    """Else the property above would hold for nothing."""
    world = World(place / "sure")
    for kind, name in [("begin", "model.pt"), ("wait", ""), ("end", "model.pt"), ("wait", ""), ("wait", "")]:
        world.do(kind, name or "model.pt")
    assert [[file.path for file in part.files] for part in world.parts] == [["model.pt"]]
    world.check()
