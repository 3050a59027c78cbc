"""What can happen to a keeper of a lease, and what it must do. Frozen data; `agents.core.lease` decides."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.reasons import Reason

# --- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEvent:
    """Base of what can happen to the keeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected(LeaseEvent):
    """The store has accepted this connection and the secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost(LeaseEvent):
    """The connection, or the try to make one, failed.

    `is_final` when the store refused this secret: no other try can do better.
    """

    message: str = ""
    is_final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed(LeaseEvent):
    """The store granted or renewed the lease, or took it back on request."""

    request_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied(LeaseEvent):
    """The store said no. `is_final` when asking again cannot help."""

    request_id: int
    reason: Reason
    message: str
    is_final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStoodStill(LeaseEvent):
    """What was sent at `since` lay unread on this machine at `seen_at`: the store's process has not run between.

    Time in which the machine was suspended is left out: `since` is later by it.
    """

    since: float
    seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGone(LeaseEvent):
    """The store ran on this machine; at `seen_at` its process was dead, and nobody listened in its place."""

    seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAsked(LeaseEvent):
    """The member has nothing running any more and gives the lease back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentDied(LeaseEvent):
    """Nobody answers for the command any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Woke(LeaseEvent):
    """A deadline has passed."""


# --- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEffect:
    """Base of what the keeper must do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect(LeaseEffect):
    """Drop any connection and make a new one. Answers: Connected or ConnectionLost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(LeaseEffect):
    """Send `op` (grant, renew or release). Answers: Confirmed or Denied with this id."""

    op: str
    request_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell(LeaseEffect):
    """One line for the parent: `word` is granted, refused, lost, released, frozen or thawed."""

    word: str
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeTree(LeaseEffect):
    """Stop every process of the incarnation, without ending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThawTree(LeaseEffect):
    """Let the frozen processes go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTree(LeaseEffect):
    """SIGKILL every process of the incarnation, frozen or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End(LeaseEffect):
    """The keeper's work is done."""
