"""How a member comes to its gang's path: the seam, and what it is on a trusted network.

Rules of this file:
1. `prepare` before the barrier, `open` after it and before the command, `close` when nothing of the life runs any more.
2. Every member chooses the path from what all of them brought to the barrier (mesh/net/paths.py).
3. What goes wrong before the command is a MeshError with a reason. What breaks later is told to `on_lost`, which ends
   the member's part, or explains its command's end (`explain`); it is never silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agents.core.events import Arrival
from agents.machine import interface_for
from mesh.errors import PlacementError
from mesh.ids import MachineName
from mesh.messages import CauseEvidence, JoinOrder, PathTaken
from mesh.net.paths import NetworkFacts, NoPath, Path, choose_path
from mesh.reasons import Reason

OnLost = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPath:
    """A path on which the command may be started."""

    addresses: tuple[str, ...]
    """Of all members, in rank order."""
    taken: PathTaken

    @property
    def interface(self) -> str | None:
        """This machine's network interface towards its peers."""
        return interface_for(self.taken.address)


class MemberNetwork(Protocol):
    """One member's way to its peers."""

    async def prepare(self, order: JoinOrder) -> NetworkFacts | None:
        """What its peers have to know of its machine. Raises MeshError."""
        ...

    async def open(self, order: JoinOrder, arrivals: Sequence[Arrival], *, on_lost: OnLost) -> OpenPath:
        """Peers may come, and be dialled, when it returns. Raises MeshError.

        `on_lost` is called once, with why, when the path cannot be had back while the command runs.
        """
        ...

    async def explain(self, evidence: CauseEvidence) -> CauseEvidence:
        """Why a command ended, with what happened to its path meanwhile."""
        ...

    async def close(self) -> None:
        """Nobody of this life speaks any more. May be called again; also when it was never opened."""
        ...


class TrustedNetwork:
    """Machines on one network in which everybody may be trusted: nothing has to be opened."""

    async def prepare(self, order: JoinOrder) -> NetworkFacts | None:
        return None

    async def open(self, order: JoinOrder, arrivals: Sequence[Arrival], *, on_lost: OnLost) -> OpenPath:
        path = path_of(order, arrivals)
        return open_path(order, path)

    async def explain(self, evidence: CauseEvidence) -> CauseEvidence:
        return evidence

    async def close(self) -> None:
        return


def path_of(order: JoinOrder, arrivals: Sequence[Arrival]) -> Path:
    """The gang's path. Raises PlacementError when it has none: then its machines are not what they were granted as."""
    machines = [
        arrival.network or NetworkFacts(machine=MachineName(f"rank {rank}"), address=arrival.address)
        for rank, arrival in enumerate(arrivals)
    ]
    path = choose_path(machines, policy=order.plan.transport_policy, scope=order.plan.network)
    if isinstance(path, NoPath):
        raise PlacementError(f"The members have no allowed path: {path.why}.", reason=Reason.NETWORK_FAILED)
    return path


def open_path(order: JoinOrder, path: Path, *, layer: str = "", lacks: str = "") -> OpenPath:
    """The path as this rank has taken it."""
    address = path.addresses[order.incarnation.rank]
    taken = PathTaken(transport=path.transport, address=address, layer=layer, lacks=lacks)
    return OpenPath(addresses=path.addresses, taken=taken)
