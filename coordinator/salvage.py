"""A run that this coordinator cannot look after: its row cannot be read, or what drives it fails again and again.

Rules of this file:
1. It has failed, and says why; everything else of the deployment goes on.
2. Its machines are what the fleet says, not what the row says: all of them are being given back, and none is clean.
   So nobody gets one before everything of the run there has been ended.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from coordinator.core.gang_state import Gang, Holding
from coordinator.fleet import HeldMachine
from coordinator.journal import RunRow
from mesh.ids import NO_EPOCH, Epoch, Rank, RunName
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.states import RunState

ROW_CHARS_SHOWN = 20_000

_log = logging.getLogger(__name__)


def salvaged_gang(
    row: RunRow, held: Sequence[HeldMachine], *, reason: Reason, message: str, now: float
) -> Gang:
    """The run as one that has failed, at `now` (wall clock). What can be read of its row is kept: plan and epoch."""
    epoch = row.record.get("epoch")
    if not isinstance(epoch, int) or epoch < 1:
        epoch = 1 if held else NO_EPOCH  # the store is to forget it, whichever it was
    lines = [
        Holding(
            machine=machine.name,
            address="",
            reservation=machine.reservation,
            rank=Rank(rank),
            since=row.created_at,
            is_leaving=True,
            is_clean=False,
        )
        for rank, machine in enumerate(held)
    ]
    return Gang(
        uid=row.uid,
        plan=_plan(row, nodes=max(1, len(lines))),
        created_at=row.created_at,
        state=RunState.FAILED,
        reason=reason,
        message=message,
        epoch=Epoch(epoch),
        reservation=max((line.reservation for line in lines), default=1),
        holdings=lines,
        ended_at=now,
    )


def _plan(row: RunRow, *, nodes: int) -> RunPlan:
    try:
        return RunPlan.from_record(row.record["plan"])
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the run has a name
        return RunPlan(name=RunName(row.name), command=(), nodes=nodes)


def log_unreadable(row: RunRow, error: Exception) -> None:
    """The row is about to be replaced: the log has the last copy of it, without the plan (its variables are secret)."""
    text = json.dumps({k: v for k, v in row.record.items() if k != "plan"}, default=repr)[:ROW_CHARS_SHOWN]
    _log.critical(
        "the journal's row of run %s (%s) cannot be read: %s", row.name, row.uid, text, exc_info=error
    )
