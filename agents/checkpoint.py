"""Takes a rank's checkpoints while its command runs: the shell around `agents.core.checkpointing`.

Rules of this file:
1. One driver thread calls the core and looks at the directory; one part thread reads and stores. The command, and
   whoever owns this object, never waits for either.
2. What comes of it is told by callbacks, from those threads: they must return at once.
3. `stop` ends both within a moment, whatever the store does: what hangs in a store is left behind as a daemon thread.
4. A fault of ours here is told as trouble. It costs checkpoints, never the run.
"""

from __future__ import annotations

import logging
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agents.core import checkpoint_events as ce
from agents.core.checkpoint_doubt import DOUBT_S
from agents.core.checkpointing import Checkpointing
from agents.state_look import look, writers
from agents.state_part import (
    RETRY_FIRST_S,
    AbandonedError,
    Hashes,
    PartTaker,
    TornError,
    UnreadableError,
    content_of,
)
from mesh.blob_store import BlobStore, lower_priority
from mesh.errors import MeshError
from mesh.ids import RunUid

JOIN_LIMIT_S = 5.0
INBOX_MAX = 1024
TROUBLE_AGAIN_S = 300.0
TROUBLE_KINDS_MAX = 32
_CONTENT_NAME = re.compile(r"([0-9a-f]{2}/)?[0-9a-f]{16,}")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A part of this rank that is in the store."""

    number: int
    """Grows with every part of this life."""
    digest: str
    content: str
    """Equal for parts that differ in logs only."""
    steps: tuple[int, ...]
    files: int
    """Logs and folders left out."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointListener:
    """Who is told. Called from threads of the checkpointer's."""

    on_part: Callable[[StoredPart], None]
    on_answer: Callable[[int, str, bool], None]
    """A question's number, the digest it was about, and whether the directory still is that."""
    on_trouble: Callable[[str], None]


class Checkpointer:
    """One rank's, in one epoch. `start` it with the command.

    Args:
        state_dir: the rank's state directory.
        work_dir: a folder of its own beside it.
        store_url: the checkpoint store's.
        root: the process below which everything of the command is: its supervisor.
        doubt_s: see `agents.core.checkpoint_doubt`; longer than a command takes that gives up after a death.
        is_left_behind: see `agents.core.checkpoint_doubt`.
        hashes: what a restore knows of the files already.
    """

    def __init__(
        self,
        *,
        state_dir: Path,
        work_dir: Path,
        store_url: str,
        run: RunUid,
        listener: CheckpointListener,
        root: int | None = None,
        doubt_s: float = DOUBT_S,
        is_left_behind: bool = False,
        hashes: Hashes | None = None,
        store: BlobStore | None = None,
        retry_first_s: float = RETRY_FIRST_S,
    ) -> None:
        self._state_dir = state_dir
        self._work_dir = work_dir
        self._store_url = store_url
        self._store = store
        self._run = run
        self._listener = listener
        self._hashes = hashes or Hashes()
        self._retry_first_s = retry_first_s
        self._root = root
        self._core = Checkpointing(doubt_s=doubt_s, is_left_behind=is_left_behind)
        self._inbox: queue.Queue[ce.CheckpointingEvent | None] = queue.Queue(INBOX_MAX)
        self._stop = threading.Event()
        self._finished = threading.Event()
        self._driver: threading.Thread | None = None
        self._part_thread: threading.Thread | None = None
        self._told_until: dict[str, float] = {}
        """Until when this kind of trouble need not be told again, in seconds of the monotonic clock."""
        self._seen = ce.Look(entries=())

    def start(self) -> None:
        """Begins to look."""
        self._driver = threading.Thread(target=self._drive, name="checkpoints", daemon=True)
        self._driver.start()

    def command_ended(self, *, ok: bool) -> None:
        """Nothing of the command runs any more: what is worth it is taken, and then it is finished."""
        self._post(ce.CommandEnded(ok=ok))

    def question(self, number: int, digest: str) -> None:
        """Answered by `on_answer`."""
        self._post(ce.Questioned(question=number, digest=digest))

    def lost(self, digest: str) -> None:
        """The store has lost this part: it is taken again."""
        self._post(ce.PartLost(digest=digest))

    def wait_finished(self, limit_s: float) -> bool:
        """After `command_ended`: whether what was worth it is stored. Blocking."""
        return self._finished.wait(limit_s)

    @property
    def lag_s(self) -> float | None:
        """For how long the newest part has been on its way to the store; None when nothing is."""
        since = self._core.lag_since
        return None if since is None else time.monotonic() - since

    def stop(self) -> None:
        """Ends it. Idempotent; blocks for a moment at most."""
        self._stop.set()
        with suppress(queue.Full):  # then the driver sees that it is to stop
            self._inbox.put_nowait(None)
        for thread in (self._driver, self._part_thread):
            if thread is not None and thread is not threading.current_thread():
                thread.join(JOIN_LIMIT_S)
        shutil.rmtree(self._work_dir, ignore_errors=True)

    def _post(self, event: ce.CheckpointingEvent) -> None:
        try:
            self._inbox.put_nowait(event)
        except queue.Full:
            _log.warning("The checkpoints' inbox is full; %s is dropped.", type(event).__name__)

    # ---- the driver --------------------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            lower_priority()
            self._perform_all(self._core.begin(time.monotonic()))
            while not self._stop.is_set():
                event = self._next_event()
                if event is None:
                    return
                self._perform_all(self._core.handle(event, time.monotonic()))
        except Exception as error:  # noqa: BLE001 - the guard of rule 4
            _log.exception("The taking of checkpoints failed.")
            self._trouble(f"No more checkpoints are taken of this rank: {type(error).__name__}: {error}")
        finally:
            self._finished.set()

    def _next_event(self) -> ce.CheckpointingEvent | None:
        deadline = self._core.next_deadline()
        limit_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._inbox.get(timeout=limit_s)
        except queue.Empty:
            return ce.TimePassed()

    def _perform_all(self, effects: list[ce.CheckpointingEffect]) -> None:
        waiting = list(effects)
        while waiting:
            event = self._perform(waiting.pop(0))
            if event is not None:
                waiting += self._core.handle(event, time.monotonic())

    def _perform(self, effect: ce.CheckpointingEffect) -> ce.CheckpointingEvent | None:
        match effect:
            case ce.LookAtState():
                self._seen = look(self._state_dir, sure=effect.sure, root=self._root)
                return ce.StateSeen(look=self._seen)
            case ce.LookForWriters():
                return ce.WritersSeen(paths=writers(self._state_dir, self._seen.entries, root=self._root))
            case ce.TakePart():
                self._part_thread = threading.Thread(
                    target=self._take, args=(effect,), name="checkpoint part", daemon=True
                )
                self._part_thread.start()
            case ce.AnswerQuestion():
                self._listener.on_answer(effect.question, effect.digest, effect.holds)
            case ce.TellTrouble():
                self._trouble(effect.message)
            case ce.FinishTaking():
                self._finished.set()
        return None

    # ---- parts -------------------------------------------------------------------------------------

    def _take(self, wanted: ce.TakePart) -> None:
        try:
            lower_priority()
            part = self._taker().take(wanted)
        except TornError as error:
            self._post(ce.PartTorn(number=wanted.number, path=error.path))
        except AbandonedError:
            pass
        except (UnreadableError, MeshError) as error:
            self._post(ce.PartFailed(number=wanted.number, message=str(error)))
        except Exception as error:  # noqa: BLE001 - the guard of rule 4
            _log.exception("A part could not be taken.")
            why = f"A checkpoint of this rank could not be taken: {type(error).__name__}: {error}"
            self._post(ce.PartFailed(number=wanted.number, message=why))
        else:
            content, files = content_of(part)
            self._listener.on_part(
                StoredPart(
                    number=wanted.number,
                    digest=part.digest,
                    content=content,
                    steps=part.steps,
                    files=files,
                    size_bytes=part.size_bytes,
                )
            )
            self._post(ce.PartStored(number=wanted.number, digest=part.digest))

    def _taker(self) -> PartTaker:
        if self._store is None:
            self._store = BlobStore(self._store_url)
        return PartTaker(
            state_dir=self._state_dir,
            work_dir=self._work_dir,
            store=self._store,
            run=self._run,
            hashes=self._hashes,
            stop=self._stop,
            tell=self._trouble,
            retry_first_s=self._retry_first_s,
        )

    def _trouble(self, message: str) -> None:
        """One kind of trouble is told once in a while: a full store says the same of every content it is given."""
        kind, now = _CONTENT_NAME.sub("", message), time.monotonic()
        if self._stop.is_set() or now < self._told_until.get(kind, now):
            return
        if len(self._told_until) >= TROUBLE_KINDS_MAX:
            self._told_until.clear()
        self._told_until[kind] = now + TROUBLE_AGAIN_S
        self._listener.on_trouble(message)
