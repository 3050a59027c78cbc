"""What a member does about checkpoints: restores before the barrier, takes parts while its command runs, reports them.

Rules of this file:
1. Reports of parts have a queue of their own: the member's own reports, on which the gang waits, never wait for them.
   When too many wait (PARTS_WAITING_MAX), the newer take the place of the older; the coordinator takes each twice.
2. Nothing here holds the run up. A fence waits for what is worth it, within a limit, and not at all after a kill.
3. Two restores of one directory never overlap: the one that was called off holds a lock until it has let go.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from agents import process_tree
from agents.checkpoint import Checkpointer, CheckpointListener, StoredPart
from agents.core import events as ev
from agents.core.checkpoint_doubt import DOUBT_S
from agents.preparation import Folders
from agents.restore import Restored, restore
from mesh.errors import CheckpointError, MeshError
from mesh.ids import Incarnation
from mesh.messages import (
    CheckpointOrder,
    CheckpointPartAnswered,
    CheckpointPartStored,
    CheckpointTroubled,
    JoinOrder,
    MemberReport,
)

PARTS_WAITING_MAX = 8
REPORTS_WAITING_MAX = 32
REPORT_LIMIT_S = 8.0
REPEAT_FIRST_S, REPEAT_MAX_S = 0.2, 3.0
HAND_OVER_LIMIT_S = 20.0
"""How long a fence waits for the last part: what a rank saved in its grace period is worth that."""
HAND_OVER_AFTER_KILL_S = 1.0

PATIENCE_SHARE = 0.8
"""Of an assembly's time, for a store that does not work: another machine would not reach it either."""

_log = logging.getLogger(__name__)


class MemberCheckpoints:
    """Of one member, in one epoch.

    Args:
        order: what the member takes part in.
        machine_dir: the machine's folder.
        send_report: takes a report to the coordinator; True when it was taken. May raise MeshError.
    """

    def __init__(
        self, order: JoinOrder, *, machine_dir: Path, send_report: Callable[[MemberReport], Awaitable[bool]]
    ) -> None:
        self._order = order
        self._folders = Folders.of(order.incarnation, machine_dir=machine_dir)
        self._send_report = send_report
        self._loop = asyncio.get_running_loop()
        self._call_off = threading.Event()
        self._restored: Restored | None = None
        self._checkpointer: Checkpointer | None = None
        self._exit_was_ok = False
        self._waiting: list[MemberReport] = []
        self._sender: asyncio.Task[None] | None = None

    # ---- before the barrier ------------------------------------------------------------------------

    async def restore(self) -> None:
        """Makes the state directory what the order says. Raises CheckpointError, CheckpointStoreError, StorageError."""
        order = self._order
        if order.is_clean_start:
            self._restored = await asyncio.to_thread(
                restore,
                order.restore,
                run=order.incarnation.run_uid,
                epoch=order.incarnation.epoch,
                rank=order.incarnation.rank,
                state_dir=self._folders.state,
                stop=self._call_off,
                patience_s=PATIENCE_SHARE * order.plan.startup_timeout_s,
                tell=self._told_trouble,
            )
            _log.info("The state directory is restored: %s", self._restored.words)

    def call_off(self) -> None:
        """A restore that is under way ends soon."""
        self._call_off.set()

    # ---- while the command runs --------------------------------------------------------------------

    def note(self, event: ev.MemberEvent) -> None:
        """What the launcher says of the command."""
        match event:
            case ev.CommandStarted():
                self.command_started(event.pid)
            case ev.CommandExited():
                self._exit_was_ok = event.exit.ok
            case ev.TreeEmpty():
                self.command_ended(ok=self._exit_was_ok)

    def command_started(self, pid: int) -> None:
        """Parts are taken from now on."""
        url = self._order.checkpoints
        if url is None or self._checkpointer is not None:
            return
        command = process_tree.read_process(pid)
        self._checkpointer = Checkpointer(
            state_dir=self._folders.state,
            work_dir=self._folders.checkpointing,
            store_url=url,
            run=self._order.incarnation.run_uid,
            listener=CheckpointListener(
                on_part=self._told_part, on_answer=self._told_answer, on_trouble=self._told_trouble
            ),
            root=None if command is None else command.parent,
            doubt_s=max(DOUBT_S, 2 * self._order.plan.grace_period_s + 60.0),
            is_left_behind=self._order.is_left_behind,
            hashes=None if self._restored is None else self._restored.hashes,
        )
        self._checkpointer.start()

    def command_ended(self, *, ok: bool) -> None:
        """Nothing of it runs any more."""
        if self._checkpointer is not None:
            self._checkpointer.command_ended(ok=ok)

    def about_part(self, order: CheckpointOrder) -> None:
        """The coordinator asks, or tells that a part is lost."""
        if self._checkpointer is None or order.incarnation != self._order.incarnation:
            return
        if order.question is None:
            self._checkpointer.lost(order.digest)
        else:
            self._checkpointer.question(order.question, order.digest)

    # ---- the end -----------------------------------------------------------------------------------

    async def hand_over(self, *, was_killed: bool) -> None:
        """Waits, within its limit, until what is worth it is stored and the coordinator knows of it."""
        if self._checkpointer is None:
            return
        limit_s = HAND_OVER_AFTER_KILL_S if was_killed else HAND_OVER_LIMIT_S
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.to_thread(self._checkpointer.wait_finished, limit_s)
                await asyncio.sleep(0)  # what it told from its thread is in the queue now
                while self._sender is not None:
                    await asyncio.wait([self._sender])
        except TimeoutError:
            _log.info("The last part of a checkpoint is not stored within %g s; it is left.", limit_s)

    async def close(self) -> None:
        """Ends it. Idempotent."""
        self._call_off.set()
        if self._checkpointer is not None:
            await asyncio.to_thread(self._checkpointer.stop)
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)

    # ---- reports -----------------------------------------------------------------------------------

    def _told_part(self, part: StoredPart) -> None:
        self._post(
            CheckpointPartStored(
                incarnation=self._order.incarnation,
                at=time.time(),
                number=part.number,
                digest=part.digest,
                content=part.content,
                steps=part.steps,
                files=part.files,
                size_bytes=part.size_bytes,
            )
        )

    def _told_answer(self, question: int, digest: str, holds: bool) -> None:
        self._post(
            CheckpointPartAnswered(
                incarnation=self._order.incarnation,
                at=time.time(),
                question=question,
                digest=digest,
                holds=holds,
            )
        )

    def _told_trouble(self, message: str) -> None:
        _log.warning("%s", message)
        self._post(CheckpointTroubled(incarnation=self._order.incarnation, at=time.time(), message=message))

    def _post(self, report: MemberReport) -> None:
        """From a thread of the checkpointer's."""
        try:
            self._loop.call_soon_threadsafe(self._enqueue, report)
        except RuntimeError:
            _log.info("The member has ended: %s is not told.", type(report).__name__)

    def _enqueue(self, report: MemberReport) -> None:
        parts = [one for one in self._waiting if isinstance(one, CheckpointPartStored)]
        if isinstance(report, CheckpointPartStored) and len(parts) >= PARTS_WAITING_MAX:
            self._waiting.remove(parts[0])
        if len(self._waiting) >= REPORTS_WAITING_MAX:
            return
        self._waiting.append(report)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="checkpoint reports")
            self._sender.add_done_callback(self._sent_all)

    def _sent_all(self, task: asyncio.Task[None]) -> None:
        self._sender = None
        if not task.cancelled() and task.exception() is not None:
            _log.error("Reports of checkpoints are not sent any more.", exc_info=task.exception())

    async def _send_all(self) -> None:
        pause_s = REPEAT_FIRST_S
        while self._waiting:
            report = self._waiting[0]
            try:
                async with asyncio.timeout(REPORT_LIMIT_S):
                    is_taken = await self._send_report(report)
            except (MeshError, TimeoutError) as error:
                _log.info("The coordinator did not take %s: %r", type(report).__name__, error)
                is_taken = False
            if is_taken:
                pause_s = REPEAT_FIRST_S
                if report in self._waiting:
                    self._waiting.remove(report)
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(REPEAT_MAX_S, pause_s * 2)


def preparation_failed(incarnation: Incarnation, error: MeshError) -> ev.PreparationFailed:
    """What could not be prepared, and whether a checkpoint was to blame."""
    number = error.details.get("number") if isinstance(error, CheckpointError) else None
    return ev.PreparationFailed(
        incarnation=incarnation,
        reason=error.reason,
        message=str(error),
        damaged_checkpoint=number if isinstance(number, int) else None,
    )
