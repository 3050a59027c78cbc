"""What is still to be removed of a run that was deleted."""

from __future__ import annotations

import asyncio
import logging
from itertools import chain, repeat

from coordinator.checkpoint_store import CheckpointStore
from coordinator.journal import Journal
from mesh.errors import MeshError
from mesh.ids import RunUid

FORGET_CHECKPOINTS_AGAIN_S = (1.0, 10.0, 60.0, 600.0)
"""Pauses between the tries to remove a deleted run's checkpoints; the last one again and again."""

_log = logging.getLogger(__name__)


async def forget_checkpoints(store: CheckpointStore | None, journal: Journal, uid: RunUid) -> None:
    """In the background: a store that is away holds no delete up. The journal has it until it is done."""
    delays_s = chain(FORGET_CHECKPOINTS_AGAIN_S, repeat(FORGET_CHECKPOINTS_AGAIN_S[-1]))
    for delay_s in delays_s:
        try:
            if store is not None:
                await store.delete_run(uid)
            await journal.cleared(uid)
            return
        except MeshError as error:
            _log.warning("the checkpoints of the deleted run %s are still there: %s", uid, error)
        await asyncio.sleep(delay_s)
