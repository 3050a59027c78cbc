"""One rank's checkpoints: its state directory, the real core of `agents.core.checkpointing`, and its reports.

What `agents.checkpoint` and `agents.member_checkpoints` do around that core, as plainly as can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from agents.core import checkpoint_events as ce
from agents.core.checkpointing import Checkpointing
from agents.member_checkpoints import REPEAT_FIRST_S, REPEAT_MAX_S, REPORT_LIMIT_S
from mesh.checkpoint_format import step_of_folder
from mesh.messages import (
    CheckpointOrder,
    CheckpointPartAnswered,
    CheckpointPartStored,
    CheckpointTroubled,
    MemberReport,
)

if TYPE_CHECKING:
    from tests.sim.member import SimMember
    from tests.sim.process import SimProcess

LOOK_COST_S = 0.04
"""So the core looks every four seconds: as at a directory of some ten thousand files."""
STEPS_PER_SAVE = 100
KEPT_SAVES = 2
SAVES_TAKE_S = (1.0, 1.0, 1.0, 10.0)
"""At most."""
UPLOAD_AGAIN_S = 1.0
HUNG_AGAIN_S = 0.5


class Style(StrEnum):
    """How a run's command saves."""

    HELPER = "mesh.checkpoint"
    NAMED = "a file per step"
    UNNAMED = "one file, written again and again"
    FIRST = "rank 0 only"


@dataclass(frozen=True, slots=True)
class Saving:
    """What all ranks of a run do."""

    style: Style
    period_s: float


class StateDirectory:
    """A rank's, on its machine: who comes after a life finds what it has left, unless it is restored."""

    def __init__(self, entries: tuple[ce.Entry, ...] = ()) -> None:
        self.files = {entry.path: entry for entry in entries}
        self.half: set[str] = set()
        """Files that were begun, and never finished yet."""
        self.is_saving = False

    @property
    def entries(self) -> tuple[ce.Entry, ...]:
        return tuple(self.files[path] for path in sorted(self.files))

    @property
    def marked_steps(self) -> tuple[int, ...]:
        steps = (step_of_folder(path) for path in sorted(self.files))
        return tuple(step for step in steps if step is not None)


class SimSaver:
    """Of one member, from the start of its command."""

    def __init__(self, member: SimMember, directory: StateDirectory, saving: Saving) -> None:
        self.member = member
        self.world = member.world
        self.machine = member.machine
        self.directory = directory
        self.saving = saving
        self.is_closed = False
        self.core = Checkpointing(is_left_behind=member.order.is_left_behind)
        self._saves = 0
        self._open: str | None = None
        """The file that the command writes now."""
        self._is_writing = member.incarnation.rank == 0 or saving.style is not Style.FIRST
        self._base = max(directory.marked_steps, default=_named_step(directory))
        self._reports: list[MemberReport] = []
        self._attempt = 0
        self._pause_s = REPEAT_FIRST_S
        self._alarm_at: float | None = None
        self.world.truth.checkpoints.directory_is(member.incarnation, self.digest(directory.entries))

    def start(self, process: SimProcess) -> None:
        """The command runs: it saves, and its directory is looked at."""
        if self._is_writing:
            self.machine.after(self._until_save_s(), self._begin_save, process)
        if self.directory.half:
            self.machine.after(self.core.doubt_s, self._outlive, frozenset(self.directory.half), process)
        self._perform_all(self.core.begin(self.machine.clock()))

    def digest(self, entries: tuple[ce.Entry, ...]) -> str:
        """Of the content: nobody writes the same twice."""
        rank = self.member.incarnation.rank
        return f"{rank}:" + ",".join(f"{e.path}@{e.mtime_ns}" for e in entries)

    def _after(self, delay_s: float, act: Callable[..., object], *arguments: Any) -> None:
        """On its machine, when its agent does not stand still."""

        def go_on() -> None:
            if self.member.is_hung and not self.is_closed:
                self.machine.after(HUNG_AGAIN_S, go_on)
            else:
                act(*arguments)

        self.machine.after(delay_s, go_on)

    # ---- what the command does --------------------------------------------------------------------

    def _until_save_s(self) -> float:
        return self.saving.period_s + self.world.random.uniform(-0.5, 0.5)

    def _begin_save(self, process: SimProcess) -> None:
        if not process.is_alive or self.is_closed:
            return
        if process.is_tree_frozen:
            self.machine.after(0.5, self._begin_save, process)
            return
        self._saves += 1
        if self.saving.style is Style.HELPER:
            self.directory.is_saving = True
        else:
            self._write(self._path(), 1)
            self._open = self._path()
            self.directory.half.add(self._open)
        self.machine.after(
            self.world.random.uniform(0.0, self.world.random.choice(SAVES_TAKE_S)), self._end_save, process
        )

    def _end_save(self, process: SimProcess) -> None:
        if not process.is_alive or self.is_closed:
            return
        if process.is_tree_frozen:
            self.machine.after(0.5, self._end_save, process)
            return
        self._finish_save()
        self.machine.after(self._until_save_s(), self._begin_save, process)

    def _finish_save(self) -> None:
        self._open = None
        self.directory.half.discard(self._path())
        self.directory.is_saving = False
        self._write(self._path(), 2)
        for path in sorted(self.directory.files)[:-KEPT_SAVES]:
            del self.directory.files[path]
            self.directory.half.discard(path)
        self._note_change()

    def _path(self) -> str:
        step = self._base + self._saves * STEPS_PER_SAVE
        match self.saving.style:
            case Style.HELPER:
                return f"step-{step:08d}"
            case Style.UNNAMED:
                return "model.pt"
            case _:
                return f"iter_{step:08d}.pt"

    def _write(self, path: str, size: int) -> None:
        is_helper = self.saving.style is Style.HELPER
        kind = ce.EntryKind.DIRECTORY if is_helper else ce.EntryKind.FILE
        stamp = self.world.stamp()
        self.directory.files[path] = ce.Entry(path=path, kind=kind, mode=0o644, size=size, mtime_ns=stamp)
        self._note_change()

    def _note_change(self) -> None:
        digest = self.digest(self.directory.entries)
        self.world.truth.checkpoints.directory_is(self.member.incarnation, digest)

    def _outlive(self, left: frozenset[str], process: SimProcess) -> None:
        """A command that has gone on for so long does not need what it found half-written."""
        if process.is_alive:
            self.directory.half -= left

    def command_ended(self, *, ok: bool) -> None:
        """Nothing of it runs any more. Who ends well has written what it began, and needs nothing else."""
        if ok:
            if self._open is not None or self.directory.is_saving:
                self._finish_save()
            self.directory.half.clear()
        self.directory.is_saving = False
        self._handle(ce.CommandEnded(ok=ok))

    # ---- what it is told --------------------------------------------------------------------------

    def about_part(self, order: CheckpointOrder) -> None:
        if order.question is None:
            self._handle(ce.PartLost(digest=order.digest))
        else:
            self._handle(ce.Questioned(question=order.question, digest=order.digest))

    @property
    def is_done(self) -> bool:
        """What was worth it is stored, and told."""
        return self.core.is_finished and not self._reports

    def close(self) -> None:
        self.is_closed = True
        self._reports.clear()

    # ---- the core ---------------------------------------------------------------------------------

    def _handle(self, event: ce.CheckpointingEvent) -> None:
        if not self.is_closed:
            self._perform_all(self.core.handle(event, self.machine.clock()))

    def _perform_all(self, effects: list[ce.CheckpointingEffect]) -> None:
        for effect in effects:
            self._perform(effect)
        deadline = self.core.next_deadline()
        if deadline != self._alarm_at:
            self._alarm_at = deadline
            if deadline is not None:
                delay_s = max(0.0, deadline - self.machine.clock()) + 1e-6
                self._after(delay_s, self._alarm, deadline)

    def _alarm(self, deadline: float) -> None:
        if deadline == self._alarm_at:
            self._alarm_at = None
            self._handle(ce.TimePassed())

    def _perform(self, effect: ce.CheckpointingEffect) -> None:
        after = self._after
        me, at = self.member.incarnation, self.machine.wall()
        match effect:
            case ce.LookAtState():
                after(LOOK_COST_S, self._look)
            case ce.LookForWriters():
                after(0.01, self._handle, ce.WritersSeen(paths=self._open_now()))
            case ce.TakePart():
                after(self.world.random.uniform(0.01, 0.3), self._read, effect)
            case ce.AnswerQuestion():
                self._report(
                    CheckpointPartAnswered(
                        incarnation=me, at=at, question=effect.question, digest=effect.digest,
                        holds=effect.holds,
                    )
                )  # fmt: skip
            case ce.TellTrouble():
                self._report(CheckpointTroubled(incarnation=me, at=at, message=effect.message))
            case ce.FinishTaking():
                pass

    def _process_is_alive(self) -> bool:
        process = self.member.process
        return process is not None and process.is_alive

    def _open_now(self) -> tuple[str, ...]:
        return (self._open,) if self._open is not None and self._process_is_alive() else ()

    def _look(self) -> None:
        directory = self.directory
        key = (1000, 1)
        is_alive = self._process_is_alive()
        entries = directory.entries
        look = ce.Look(
            entries=entries,
            steps=directory.marked_steps,
            is_saving=directory.is_saving,
            writers=tuple((path, key) for path in self._open_now()),
            processes=frozenset({key} if is_alive else ()),
            cost_s=LOOK_COST_S,
        )
        self._handle(ce.StateSeen(look=look))

    # ---- a part -----------------------------------------------------------------------------------

    def _read(self, part: ce.TakePart) -> None:
        """Everything is held still, and as it was seen; or it is torn."""
        if self.is_closed:
            return
        now = {entry.path: entry for entry in self.directory.entries}
        seen = {entry.path: entry for entry in part.entries}
        changed = [path for path, entry in seen.items() if now.get(path) != entry]
        changed += [path for path in now if part.is_whole and path not in seen]
        if changed:
            self._handle(ce.PartTorn(number=part.number, path=changed[0]))
            return
        has_half = not self.directory.half.isdisjoint(seen)
        self._after(self._upload_s(), self._upload, part, has_half)

    def _upload_s(self) -> float:
        world = self.world
        return world.random.expovariate(0.1 if world.roll(world.faults.upload_late) else 4.0)

    def _upload(self, part: ce.TakePart, has_half: bool) -> None:
        world, store = self.world, self.world.checkpoint_store
        if self.is_closed and world.random.random() < 0.5:
            return  # cut short with its member; else the last of it was under way
        if store.is_away:
            if not self.is_closed:
                self._after(UPLOAD_AGAIN_S, self._upload, part, has_half)
            return
        digest = self.digest(part.entries)
        me = self.member.incarnation
        world.truth.checkpoints.part_stored(me, digest, part.entries, has_half=has_half)
        store.put(me.run_uid, digest, part.entries)
        if self.is_closed:
            return
        self._report(
            CheckpointPartStored(
                incarnation=me, at=self.machine.wall(), number=part.number, digest=digest, content=digest,
                steps=part.steps, files=len(part.entries), size_bytes=1,
            )
        )  # fmt: skip
        self._handle(ce.PartStored(number=part.number, digest=digest))

    # ---- reports ----------------------------------------------------------------------------------

    def _report(self, report: MemberReport) -> None:
        """A queue of their own, one at a time, each until it is taken."""
        self._reports.append(report)
        if len(self._reports) == 1:
            self._send()

    def _send(self) -> None:
        if self.is_closed or not self._reports:
            return
        self._attempt += 1
        attempt = self._attempt

        def answered(is_taken: bool) -> None:
            if attempt == self._attempt and not self.is_closed:
                self._answered(is_taken)

        self._after(REPORT_LIMIT_S, answered, False)
        self.world.network.report(self.machine, self._reports[0], answered)

    def _answered(self, is_taken: bool) -> None:
        self._attempt += 1
        if is_taken:
            del self._reports[0]
            self._pause_s = REPEAT_FIRST_S
            self._send()
        else:
            self._after(self._pause_s, self._send)
            self._pause_s = min(REPEAT_MAX_S, self._pause_s * 2)


def _named_step(directory: StateDirectory) -> int:
    """Where a command that was restored goes on from."""
    names = [path.removeprefix("iter_").removesuffix(".pt") for path in directory.files]
    return max((int(name) for name in names if name.isdecimal()), default=0)
