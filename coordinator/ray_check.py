"""The network check's ends on the machines of a Ray cluster: an actor on each, for the time of one check.

Rules of this file:
1. A machine on which no end comes up is named with the reason, and the others are measured without it.
2. An end that does not answer is an `EndGoneError`: what it was to measure is missing, and nobody is blamed for it.
3. Whatever happens, the actors are ended, their ports first. They also end with this process, which owns them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agents.mesh_ports import CHECK_PORTS
from agents.probe_node import ProbeNode
from agents.probing import CONNECT_LIMIT_S, ECHO_LIMIT_S, KEY_BYTES, PATIENT_LIMIT_S
from coordinator.fleet import Looked, MachineFacts
from coordinator.network_check import EndGoneError, check
from coordinator.ray_call import ask_ray
from mesh.errors import MeshError
from mesh.ids import MachineName
from mesh.net.paths import Path, choose_path
from mesh.netcheck.limits import START_LIMIT_S
from mesh.netcheck.measurements import MemberFacts, Reach
from mesh.states import NetworkScope, Transport, TransportPolicy

CALL_SLACK_S = 2.0
"""Over what a measurement takes at most: the way to its end and back, and a busy machine."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A machine, and the node that it is now. `ports`: where it may listen for others; None for any."""

    name: MachineName
    node_id: str
    address: str
    place: str
    path: Transport = Transport.PRIVATE
    ports: tuple[int, int] | None = None


def spots_of(machines: Mapping[int, tuple[MachineFacts, Mapping[str, Any]]]) -> dict[int, Spot]:
    """Living machines with their nodes, by rank: where a gang of them would speak.

    That is at their private or public addresses where all have such ones in common (`mesh.net.paths`), else through
    their gateways, whose own addresses their nodes have.
    """
    if not machines:
        return {}
    standings = [facts.standing for facts, _ in machines.values()]
    path = choose_path(standings, policy=TransportPolicy.AUTO, scope=NetworkScope.GLOBAL)
    is_open = isinstance(path, Path) and path.transport in (Transport.PRIVATE, Transport.PUBLIC)
    spots = {}
    for place, (rank, (facts, node)) in enumerate(machines.items()):
        where = "/".join(facts.labels.get(word, "") for word in ("provider", "region"))
        spot = Spot(name=facts.name, node_id=node["NodeID"], address=node["NodeManagerAddress"], place=where)
        if is_open:
            assert isinstance(path, Path)
            spots[rank] = replace(spot, address=path.addresses[place], path=path.transport)
        else:
            reached = Transport.DIRECT if facts.standing.is_dialable else Transport.RELAYED
            spots[rank] = replace(spot, path=reached, ports=CHECK_PORTS)
    return spots


class RayEnd:
    """A `coordinator.network_check.Probing` in an actor."""

    def __init__(self, machine: MachineName, handle: Any) -> None:
        self._machine, self._handle = machine, handle

    async def start(self) -> MemberFacts:
        facts: MemberFacts = await self._answer(self._handle.start.remote(), START_LIMIT_S)
        return facts

    async def reach(self, others: Sequence[MemberFacts], *, is_patient: bool = False) -> Mapping[int, Reach]:
        limit_s = CONNECT_LIMIT_S + (PATIENT_LIMIT_S if is_patient else ECHO_LIMIT_S) + CALL_SLACK_S
        asked = self._handle.reach.remote(list(others), is_patient)
        found: Mapping[int, Reach] = await self._answer(asked, limit_s)
        return found

    async def heard(self) -> Collection[int]:
        found: Collection[int] = await self._answer(self._handle.heard.remote(), CALL_SLACK_S)
        return found

    async def push(
        self, other: MemberFacts, *, seconds: float, limit_s: float, segment_bytes: int | None = None
    ) -> float | None:
        asked = self._handle.push.remote(other, seconds, limit_s, segment_bytes)
        rate: float | None = await self._answer(asked, limit_s + CALL_SLACK_S)
        return rate

    async def _answer(self, reference: Any, limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await reference
        except (TimeoutError, GetTimeoutError):
            raise EndGoneError(f"{self._machine} did not answer within {limit_s:g} s.") from None
        except RayTaskError as error:
            what = error.cause.message if isinstance(error.cause, MeshError) else repr(error.cause)
            raise EndGoneError(f"{self._machine}: {what}") from error
        except RayError as error:
            raise EndGoneError(f"{self._machine} does not answer ({type(error).__name__}).") from error


async def look(spots: Mapping[int, Spot], *, fresh: Collection[int]) -> Looked:
    """See `Fleet.look`. Raises TransportError while Ray cannot be asked."""
    key = secrets.token_bytes(KEY_BYTES)
    handles: dict[int, Any] = {}
    try:
        for rank, spot in spots.items():
            handles[rank] = await ask_ray(_create, rank, spot, key)
        ends = {rank: RayEnd(spots[rank].name, handle) for rank, handle in handles.items()}
        begun = await asyncio.gather(*(end.start() for end in ends.values()), return_exceptions=True)
        members: dict[int, tuple[MemberFacts, RayEnd]] = {}
        absent: dict[int, str] = {}
        for (rank, end), facts in zip(ends.items(), begun, strict=True):
            if isinstance(facts, MemberFacts):
                members[rank] = (replace(facts, path=spots[rank].path), end)
            elif isinstance(facts, EndGoneError):
                absent[rank] = facts.message
            else:
                raise facts
        return Looked(seen=await check(members, fresh=fresh), absent=absent)
    finally:
        await _end(list(handles.values()))


async def _end(handles: Sequence[Any]) -> None:
    try:
        async with asyncio.timeout(CALL_SLACK_S):
            await asyncio.gather(
                *(_await(handle.stop.remote()) for handle in handles), return_exceptions=True
            )
    except TimeoutError:
        _log.info("an end of a network check did not stop by itself")
    finally:
        for handle in handles:
            with contextlib.suppress(RayError, RuntimeError):
                ray.kill(handle, no_restart=True)


async def _await(reference: Any) -> None:
    await reference


def _create(rank: int, spot: Spot, key: bytes) -> Any:
    config = {
        "rank": rank,
        "name": str(spot.name),
        "address": spot.address,
        "key": key,
        "place": spot.place,
        "ports": spot.ports,
    }
    here = NodeAffinitySchedulingStrategy(spot.node_id, soft=False)
    return ProbeNode.options(scheduling_strategy=here).remote(config)
