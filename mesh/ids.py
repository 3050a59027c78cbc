"""Numbers and names that must not be mixed up.

An `Epoch` is the fencing number of a gang: it grows by one, is never reused, and is durable before
anyone hears of it. A `Rank` is a node rank (0..n-1), never a global process rank. A `RunUid` names one
run for ever; a run's name may be used again after the run has been deleted, so nothing is stored under
a name alone.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NewType

Epoch = NewType("Epoch", int)
Rank = NewType("Rank", int)
RunName = NewType("RunName", str)
RunUid = NewType("RunUid", str)
MachineName = NewType("MachineName", str)
IncarnationToken = NewType("IncarnationToken", str)

HEAD = MachineName("head")
"""The head's own on the mesh: where it has a gateway and a relay as machines have."""
NO_EPOCH = Epoch(0)
"""The epoch of a run that has never assembled; the first real one is 1."""


def new_run_uid() -> RunUid:
    """A fresh uid: 16 lower-case hex digits, safe in file names, cgroup names and actor names."""
    return RunUid(secrets.token_hex(8))


def new_token() -> IncarnationToken:
    """The random part of an incarnation: 16 lower-case hex digits."""
    return IncarnationToken(secrets.token_hex(8))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Incarnation:
    """One rank's life in one epoch on one machine: what a fence is about.

    The token makes two attempts at the same (run, epoch, rank) different, so that a process which
    outlived its machine's agent is never taken for its successor.
    """

    run_uid: RunUid
    epoch: Epoch
    rank: Rank
    token: IncarnationToken

    def __str__(self) -> str:
        return f"{self.run_uid}.{self.epoch}.{self.rank}.{self.token}"

    @classmethod
    def parse(cls, text: str) -> Incarnation:
        """The inverse of `str()`. Raises ValueError for anything else."""
        uid, epoch, rank, token = text.split(".")
        return cls(
            run_uid=RunUid(uid), epoch=Epoch(int(epoch)), rank=Rank(int(rank)), token=IncarnationToken(token)
        )
