"""When worker processes are started ahead, so that a member's start does not pay for a Python start. Pure.

Theory of operation. A member takes two worker processes of its machine (its own and its launcher's), and they end with
it; so do the end of a network check before it, and on the head a coordinator or a store that died and is started again.
What is wanted is a state, not an answer to each use: on every node so many workers that have not been used for
anything. It is looked at: when a node is seen for the first time, when a machine is given back, a while after a member
has begun, and every LOOK_AGAIN_S, since workers are also taken by what nobody tells of here. What is missing is
started, once: what was asked for counts as there until it could have come up. So a coordinator that was restarted needs
to know nothing, and there are never more than were wanted when they were counted.

When not. A start takes a second of two processors, which the user's command wants for itself when it begins: nothing is
started within MAKE_UP_S after a member has.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

HEAD_SPARES = 2
"""A coordinator and a store that die together: a store that starts cold on a busy head may outlast a lease."""
MAKE_UP_S = 8.0
COME_UP_S = 60.0
"""From asking for workers until those that are not there then are taken for lost: Ray gives up on one after as long."""
CONFIRM_S = 2.0
"""Between two looks at whether they are there."""
LOOK_AGAIN_S = 30.0
UNKNOWN_AGAIN_S = 5.0
"""After a look that told nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNode:
    """A node of Ray's that lives."""

    node_id: str
    raylet: str
    """host:port of its raylet."""
    wanted: int
    """Workers that are to wait there."""
    first_look_s: float = 0.0
    """From when it is seen until it is looked at: its raylet may be starting some by itself."""


@dataclass(slots=True, kw_only=True)
class _Care:
    """What is known of one node."""

    node: WorkerNode
    due_s: float
    """When it is to be looked at."""
    latest: str | None = None
    """The member that was the last to begin there."""
    coming: int = 0
    """Workers that were asked for and not seen yet."""
    until_s: float = 0.0
    """Until when these count."""
    idle: frozenset[bytes] = frozenset()
    """Those that waited when it was last looked at."""


@dataclass(slots=True)
class SpareWorkers:
    """Times are seconds of one monotonic clock."""

    _cares: dict[str, _Care] = field(default_factory=dict)

    def seen(self, nodes: Iterable[WorkerNode], now_s: float) -> None:
        """These live now, and no others."""
        living = {node.node_id: node for node in nodes}
        for node_id in self._cares.keys() - living.keys():
            del self._cares[node_id]
        for node_id, node in living.items():
            if node_id not in self._cares:
                self._cares[node_id] = _Care(node=node, due_s=now_s + node.first_look_s)

    def used(self, node_id: str, member: str, now_s: float) -> None:
        """This member has begun there; may be told again."""
        care = self._cares.get(node_id)
        if care is not None and care.latest != member:
            care.latest = member
            care.coming = 0  # it takes those, too
            care.due_s = now_s + MAKE_UP_S

    def look_at(self, node_id: str, now_s: float) -> None:
        """Something there has changed: its machine was given back, or a worker was taken that is not a member's."""
        if (care := self._cares.get(node_id)) is not None:
            care.due_s = now_s

    def take_due(self, now_s: float, *, busy: Container[str] = ()) -> list[WorkerNode]:
        """The nodes to look at now, but those that are being looked at; each is told once, until it is due again."""
        due = [care for care in self._free_of(busy) if care.due_s <= now_s]
        for care in due:
            care.due_s = now_s + LOOK_AGAIN_S
        return [care.node for care in due]

    def counted(self, node_id: str, idle: frozenset[bytes], now_s: float) -> int:
        """These wait there. Returns how many are to be started."""
        care = self._cares.get(node_id)
        if care is None:
            return 0
        care.coming = max(0, care.coming - len(idle - care.idle)) if now_s < care.until_s else 0
        care.idle = idle
        missing = max(0, care.node.wanted - len(idle) - care.coming)
        if missing:
            care.coming += missing
            care.until_s = now_s + COME_UP_S
        if care.coming:  # what has come up and was taken since does not count as coming
            care.due_s = min(care.due_s, now_s + CONFIRM_S)
        return missing

    def no_answer(self, node_id: str, now_s: float, *, not_started: int) -> None:
        """The node could not be asked, or told to start so many."""
        if (care := self._cares.get(node_id)) is not None:
            care.coming = max(0, care.coming - not_started)
            care.due_s = min(care.due_s, now_s + UNKNOWN_AGAIN_S)

    def next_due_s(self, *, busy: Container[str] = ()) -> float | None:
        """When the next one is due that is not being looked at; None while there is none."""
        return min((care.due_s for care in self._free_of(busy)), default=None)

    def _free_of(self, busy: Container[str]) -> Iterator[_Care]:
        return (care for node_id, care in self._cares.items() if node_id not in busy)
