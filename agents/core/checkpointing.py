"""When a rank's state directory is worth a part of a gang checkpoint, decided from looks at it.

Rules of this file:
1. Pure. `handle(event, now)` is the only door; it never raises for what a directory can look like.
2. A torn file is never part of a part. While the command runs the whole directory is taken only when it is *settled*:
   nothing changed for SETTLE_S, nobody has a file of it open for writing, and `mesh.checkpoint` is not saving.
   Nor while a file may be half of what it should be, because its writer died (`agents.core.checkpoint_doubt`).
3. Whole checkpoints of `mesh.checkpoint` say so themselves, so they are taken without that wait, alone when the rest
   of the directory does not come to rest; and they are the only thing that is taken after a command that failed.
4. Logs (by their names) are copied as far as they are written. They keep nothing waiting and cause no part.
5. One part at a time. Each part is dropped by the shell when something of it changed while it was read; the next try
   copies the files aside first instead of linking them.
6. Parts take at most half of the time (`rest` below), so a store that is slow costs the run no more than that.
7. Nobody waits in silence: a directory that does not come to rest is told of, once, with a file that keeps it from it.

Theory of operation. The shell looks when asked (`LookAtState`), and says what it saw (`StateSeen`): every entry with
size, time and mode. Two looks in a row that differ restart the quiet time. A settled directory that differs from the
part taken last leads to `LookForWriters`, and an answer of nobody to `TakePart`. What step a part stands for comes from
the helper's own checkpoints, else from names (`agents.core.checkpoint_names`), else it has none; then the coordinator
asks every rank whether it still looks the same (`Questioned`), since parts without a step belong together only when
all directories were at rest at one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.core.checkpoint_doubt import DOUBT_S, Doubts, firm
from agents.core.checkpoint_events import (
    KEPT,
    AnswerQuestion,
    CheckpointingEffect,
    CheckpointingEvent,
    CommandEnded,
    Entry,
    EntryKind,
    FinishTaking,
    Look,
    LookAtState,
    LookForWriters,
    PartFailed,
    PartLost,
    PartStored,
    PartTorn,
    Questioned,
    StateSeen,
    TakePart,
    TellTrouble,
    TimePassed,
    WritersSeen,
)
from agents.core.checkpoint_names import shown, steps_of
from mesh.checkpoint_format import step_of_folder

SETTLE_S = 2.0
LOOK_MIN_S = 0.5
LOOK_MAX_S = 10.0
LOOK_SHARE = 100
"""A look that took t seconds is followed by this many times t without one, but for the hurried ones."""
HURRIED_MAX = 2
"""So many looks in a row that saw a change are followed by one SETTLE_S later: else a directory that changes at least
once in every pause would never be seen at rest. Two find every rest between saves that are 2 * SETTLE_S apart."""
HURRIED_COST_MAX_S = 0.2
"""A look that takes longer is never hurried: it would cost the command too much."""
REST_MAX_S = 60.0
DOUBT_TOLD_S = 10.0
RESTLESS_S = 600.0
"""After so long without a part because the directory never came to rest, the user is told."""
BYTES_MAX = 4 << 40
TORN_AT_END_MAX = 3


@dataclass(slots=True, kw_only=True)
class _InFlight:
    part: TakePart
    began_at: float


@dataclass(slots=True)
class Checkpointing:
    """Decides for one rank in one epoch, from the start of its command. Starts with `begin`."""

    doubt_s: float = DOUBT_S
    is_left_behind: bool = False
    """The directory is as a life of the rank before this one has left it, which did not end well."""
    _seen: Look | None = None
    _doubts: Doubts = field(default_factory=Doubts)
    _quiet_since: float = 0.0
    _restless_since: float = 0.0
    _last_change: str = ""
    """A path that differed between the last two looks that differed."""
    _look_at: float | None = None
    """When to look next; None while a look is under way or none is wanted."""
    _hurried: int = 0
    """How many looks in a row were followed by a hurried one."""
    _is_looking: bool = False
    _looks_again: bool = False
    """The look under way began too early for what has happened since: another one follows it, and counts."""
    _is_asking_writers: bool = False
    _in_flight: _InFlight | None = None
    _taken: tuple[Entry, ...] | None = None
    """The entries, without logs, of the whole directory's part that was stored last."""
    _digest: str = ""
    _digest_entries: tuple[Entry, ...] = ()
    _covered_step: int = -1
    """The newest checkpoint of the helper's that is in a stored part."""
    _step_seen_at: tuple[int, float] | None = None
    _next_part_at: float = 0.0
    _torn: int = 0
    """How often in a row a part was torn."""
    _numbers: int = 0
    _ended: bool | None = None
    """None while the command runs; else whether it ended well."""
    _question: Questioned | None = None
    _told: set[str] = field(default_factory=set)
    is_finished: bool = False
    _out: list[CheckpointingEffect] = field(default_factory=list)

    def begin(self, now: float) -> list[CheckpointingEffect]:
        """The command starts."""
        self._quiet_since = self._restless_since = now
        self._doubts = Doubts(doubt_s=self.doubt_s, is_left_behind=self.is_left_behind, begun_at=now)
        self._look()
        return self._flush()

    def handle(self, event: CheckpointingEvent, now: float) -> list[CheckpointingEffect]:
        """Takes one event and returns what to do."""
        if not self.is_finished or isinstance(event, Questioned):
            _HANDLERS[type(event)](self, event, now)
        return self._flush()

    def next_deadline(self) -> float | None:
        """When `TimePassed` is wanted."""
        return self._look_at

    @property
    def lag_since(self) -> float | None:
        """Since when a part is on its way to the store."""
        return None if self._in_flight is None else self._in_flight.began_at

    def _flush(self) -> list[CheckpointingEffect]:
        out, self._out = self._out, []
        return out

    # ---- looking ------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._look_at = None
        if self._is_looking:
            self._looks_again = True
        else:
            self._is_looking = True
            seen = self._seen if self._doubts.is_sure else None
            self._out.append(LookAtState(sure=None if seen is None else firm(seen.entries)))

    def _on_time_passed(self, event: TimePassed, now: float) -> None:
        if self._look_at is not None and now >= self._look_at:
            self._look()

    def _on_state_seen(self, event: StateSeen, now: float) -> None:
        look = event.look
        looks_again, self._looks_again, self._is_looking = self._looks_again, False, False
        pause = min(LOOK_MAX_S, max(LOOK_MIN_S, LOOK_SHARE * look.cost_s))
        self._look_at = now + pause
        trouble = look.trouble or _over_limit(look)
        if trouble:
            self._tell(trouble)
            self._seen = None
            self._quiet_since = now
            self._answer(False)
            self._finish_if_over(now)
            return
        for entry in look.entries:
            if entry.kind not in KEPT:
                self._tell(
                    f"'{shown(entry.path)}' is not in the checkpoints of this run: it is {entry.kind}."
                )
        before, self._seen = self._seen, look
        changed = None if before is None else first_difference(firm(before.entries), firm(look.entries))
        if before is None or changed is not None:
            self._quiet_since = now
            self._last_change = changed or ""
            self._hurried += 1
            if self._hurried > HURRIED_MAX or look.cost_s > HURRIED_COST_MAX_S:
                self._hurried = 0
            else:
                self._look_at = now + min(pause, SETTLE_S)
        else:
            self._hurried = 0
        self._doubts.judge(before, look, now)
        self._tell_doubts(now)
        newest = look.steps[-1] if look.steps else -1
        if newest > self._covered_step and (self._step_seen_at is None or self._step_seen_at[0] > newest):
            self._step_seen_at = (newest, now)
        if looks_again:
            self._look()
            return
        self._answer(self._holds())
        self._consider(now)

    def _on_writers_seen(self, event: WritersSeen, now: float) -> None:
        if not self._is_asking_writers:
            return
        self._is_asking_writers = False
        if event.paths:
            self._last_change = event.paths[0]
            self._consider_marked(now)
            self._complain_if_restless(now)
        elif self._may_take(now) and self._is_settled(now):
            self._take_whole(now)

    # ---- deciding -----------------------------------------------------------------------------------

    def _consider(self, now: float) -> None:
        if self._in_flight is not None or self._seen is None:
            return
        if self._ended is not None:
            self._consider_last(now)
            return
        if not self._may_take(now):
            return
        if self._is_settled(now):
            if self._is_new() and not self._is_asking_writers:
                self._is_asking_writers = True
                self._out.append(LookForWriters())
            elif not self._is_new():
                self._restless_since = now
            return
        self._consider_marked(now)
        self._complain_if_restless(now)

    def _may_take(self, now: float) -> bool:
        return self._ended is None and self._in_flight is None and now >= self._next_part_at

    def _is_settled(self, now: float) -> bool:
        assert self._seen is not None
        if self._seen.is_saving or not self._doubts.is_whole:
            return False
        return now - self._quiet_since >= SETTLE_S

    def _is_new(self) -> bool:
        assert self._seen is not None
        return self._taken is None or firm(self._seen.entries) != self._taken

    def _consider_marked(self, now: float) -> None:
        """The rest does not come to rest: the helper's own checkpoints are whole all the same."""
        assert self._seen is not None
        if self._step_seen_at is None or now - self._step_seen_at[1] < SETTLE_S:
            return
        self._take_marked(now)

    def _consider_last(self, now: float) -> None:
        assert self._seen is not None and self._ended is not None
        newest = self._seen.steps[-1] if self._seen.steps else -1
        if self._torn > TORN_AT_END_MAX:
            self._finish()
        elif self._ended and self._is_new() and firm(self._seen.entries):
            self._take_whole(now)
        elif not self._ended and newest > self._covered_step:
            self._take_marked(now)
        else:
            self._finish()

    def _take_whole(self, now: float) -> None:
        assert self._seen is not None
        entries = tuple(entry for entry in self._seen.entries if entry.kind in KEPT)
        paths = [entry.path for entry in entries if entry.kind is not EntryKind.DIRECTORY]
        self._take(now, steps=steps_of(paths, self._seen.steps), entries=entries, is_whole=True)

    def _take_marked(self, now: float) -> None:
        assert self._seen is not None
        steps = self._seen.steps
        if not steps or steps[-1] <= self._covered_step:
            return
        if self._torn:  # the older ones go while they are read: the newest stays longest
            steps = steps[-1:]
        entries = tuple(
            entry
            for entry in self._seen.entries
            if entry.kind in KEPT and step_of_folder(entry.path.partition("/")[0]) in steps
        )
        self._take(now, steps=steps, entries=entries, is_whole=False)

    def _take(
        self, now: float, *, steps: tuple[int, ...], entries: tuple[Entry, ...], is_whole: bool
    ) -> None:
        self._numbers += 1
        part = TakePart(
            number=self._numbers,
            steps=steps,
            entries=entries,
            is_whole=is_whole,
            copy=is_whole and self._torn > 0,
        )
        self._in_flight = _InFlight(part=part, began_at=now)
        self._out.append(part)

    # ---- what became of a part ----------------------------------------------------------------------

    def _landed(self, number: int, now: float) -> TakePart | None:
        if self._in_flight is None or self._in_flight.part.number != number:
            return None
        flight, self._in_flight = self._in_flight, None
        self._next_part_at = now + min(REST_MAX_S, now - flight.began_at)
        return flight.part

    def _on_part_stored(self, event: PartStored, now: float) -> None:
        part = self._landed(event.number, now)
        if part is None:
            return
        self._torn = 0
        self._restless_since = now
        self._digest, self._digest_entries = event.digest, part.entries
        if part.is_whole:
            self._taken = firm(part.entries)
        if marked := _marked_steps(part):
            self._covered_step = max(self._covered_step, *marked)
            self._step_seen_at = None
        if self._ended is not None:
            self._look()

    def _on_part_torn(self, event: PartTorn, now: float) -> None:
        if self._landed(event.number, now) is None:
            return
        self._torn += 1
        self._quiet_since = now
        self._last_change = event.path
        if self._ended is not None:
            self._look()

    def _on_part_failed(self, event: PartFailed, now: float) -> None:
        part = self._landed(event.number, now)
        if part is None:
            return
        self._tell(event.message)
        if part.is_whole:  # not again before something changes
            self._taken = firm(part.entries)
        self._covered_step = max([self._covered_step, *_marked_steps(part)])
        self._finish_if_over(now)

    def _on_part_lost(self, event: PartLost, now: float) -> None:
        """Taken again, whatever it was; what the store still has is not sent again."""
        if event.digest == self._digest:
            self._digest = ""
            self._taken = None
            self._covered_step = -1
            self._look()

    # ---- the end ------------------------------------------------------------------------------------

    def _on_command_ended(self, event: CommandEnded, now: float) -> None:
        if self._ended is None:
            self._ended = event.ok
            self._is_asking_writers = False
            self._look()

    def _finish_if_over(self, now: float) -> None:
        if self._ended is not None and self._in_flight is None:
            self._finish()

    def _finish(self) -> None:
        self.is_finished = True
        self._look_at = None
        self._answer(self._holds())
        self._out.append(FinishTaking())

    # ---- questions ----------------------------------------------------------------------------------

    def _on_questioned(self, event: Questioned, now: float) -> None:
        self._question = event
        if self.is_finished or event.digest != self._digest:  # nobody changes anything, or it has changed
            self._answer(self._holds())
        else:
            self._look()

    def _holds(self) -> bool:
        """The directory, looked at last, was what the part is that is asked about; it is the one stored last."""
        seen, question = self._seen, self._question
        if seen is None or question is None or question.digest != self._digest:
            return False
        return not seen.is_saving and firm(seen.entries) == firm(self._digest_entries)

    def _answer(self, holds: bool) -> None:
        question, self._question = self._question, None
        if question is not None:
            self._out.append(AnswerQuestion(question=question.question, digest=question.digest, holds=holds))

    # ---- telling ------------------------------------------------------------------------------------

    def _complain_if_restless(self, now: float) -> None:
        if now - self._restless_since >= RESTLESS_S:
            self._last_change = self._doubts.unsure_path or self._last_change
            self._tell(
                f"No checkpoint is taken of this rank: its state directory has not been at rest for {SETTLE_S:g} s in "
                f"the last {RESTLESS_S / 60:g} minutes, '{shown(self._last_change)}' kept changing or open. Save with "
                "mesh.checkpoint, or keep such files elsewhere."
            )

    def _tell_doubts(self, now: float) -> None:
        if self._ended is not None:
            return  # it is in doubt at every end of a command
        for path, length_s in self._doubts.doubtful(older_than_s=DOUBT_TOLD_S, now=now):
            self._tell(
                f"'{shown(path)}' may be half-written: a process that may have written it has ended. It is in no "
                f"checkpoint before it is written again, or the command has run on for {length_s:g} s."
            )

    def _tell(self, message: str) -> None:
        if message not in self._told and len(self._told) < 100:
            self._told.add(message)
            self._out.append(TellTrouble(message=message))


def _marked_steps(part: TakePart) -> list[int]:
    """Those of the helper's checkpoints in it; a step that names only speak of is none."""
    found = [step_of_folder(entry.path) for entry in part.entries]
    return [step for step in found if step is not None and step in part.steps]


def _over_limit(look: Look) -> str:
    size = sum(entry.size for entry in look.entries)
    if size > BYTES_MAX:
        return (
            f"No checkpoint is taken of this rank: its state directory holds {size / 2**40:.1f} TiB, and "
            f"{BYTES_MAX / 2**40:g} TiB is the most. Remove old checkpoints, or keep other files elsewhere."
        )
    return ""


def first_difference(old: tuple[Entry, ...], new: tuple[Entry, ...]) -> str | None:
    """A path at which two looks differ; None when they do not."""
    if old == new:
        return None
    before = {entry.path: entry for entry in old}
    after = {entry.path: entry for entry in new}
    paths = sorted(before.keys() | after.keys())
    return next(path for path in paths if before.get(path) != after.get(path))


_HANDLERS: Mapping[type[Any], Callable[[Checkpointing, Any, float], None]] = {
    StateSeen: Checkpointing._on_state_seen,
    WritersSeen: Checkpointing._on_writers_seen,
    CommandEnded: Checkpointing._on_command_ended,
    PartStored: Checkpointing._on_part_stored,
    PartTorn: Checkpointing._on_part_torn,
    PartFailed: Checkpointing._on_part_failed,
    PartLost: Checkpointing._on_part_lost,
    Questioned: Checkpointing._on_questioned,
    TimePassed: Checkpointing._on_time_passed,
}
