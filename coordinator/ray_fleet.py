"""The fleet of a Ray cluster: machines are nodes, a reservation is a placement group, a member an actor.

Rules of this file:
1. All of Ray's untyped surface that the coordinator uses is here and in `coordinator.actor`.
2. Ray's calls block: each runs in a thread (`_ray`, which makes Ray's errors ours), and a reservation's creation is
   never cut in half by a cancellation (`release` waits for it).
3. Placement groups return bundle by bundle after a node's death; nothing here relies on that: a
   reservation lives for one assembly, and the core decides when it is given back.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from agents.node import MemberNode
from agents.preparation import remove_run
from coordinator.core.events import Placement
from coordinator.fleet import MachineFacts, MemberGoneError, Shape, why_waiting
from coordinator.ray_commands import ADDRESS_LABEL, GPU_TYPE_LABEL, MACHINE_LABEL, SLOT_RESOURCE
from coordinator.warm_workers import warm
from mesh.errors import MeshTimeoutError, PlacementError, TransportError
from mesh.ids import Incarnation, MachineName, RunUid
from mesh.messages import FenceOrder, JoinOrder

MEMBER_CALL_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 3.0
FORGET_TIMEOUT_S = 10.0
REMOVAL_POLL_S = 0.02
REMOVAL_TIMEOUT_S = 30.0
WAITING_NOTICE_S = 1.0
"""How long a reservation may take before its run says why it waits, and then between two looks."""
READY_POLL_FIRST_S, READY_POLL_MAX_S = 0.005, 0.5
"""Between two looks at a reservation; Ray's own wait would hold a thread for each waiting run."""

T = TypeVar("T")

_WORDS = re.compile(r"\d+|\D+")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Key:
    uid: RunUid
    reservation: int

    @property
    def name(self) -> str:
        return f"gang-{self.uid}-{self.reservation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bundle:
    """One machine's place in a placement group."""

    index: int
    facts: MachineFacts


class RayFleet:
    """A `Fleet` over the Ray cluster that this process is connected to.

    Args:
        namespace: where the members' actors are named.
        member_config: what every MemberNode is constructed with; its machine is added.
        used_by: which run holds which machine, for the sentence on why a run waits.
    """

    def __init__(
        self, *, namespace: str, member_config: Mapping[str, Any], used_by: Callable[[], dict[str, str]]
    ) -> None:
        self._namespace = namespace
        self._member_config = dict(member_config)
        self._used_by = used_by
        self._seen: list[MachineFacts] = []
        self._seen_at = float("-inf")
        self._warming: asyncio.Task[None] | None = None
        """Kept, so that it is not collected while it runs; nobody waits for it."""
        self._creating: dict[_Key, asyncio.Task[PlacementGroup]] = {}

    async def machines(self) -> list[MachineFacts]:
        nodes = await _ray(ray.nodes)
        return [_facts(node) for node in nodes if MACHINE_LABEL in node.get("Labels", {})]

    async def _machines_lately(self) -> list[MachineFacts]:
        """As they were at most a second ago: many runs may wait, and Ray is asked once for all of them."""
        if time.monotonic() - self._seen_at >= WAITING_NOTICE_S:
            self._seen_at = time.monotonic()
            self._seen = await self.machines()
        return self._seen

    # ---- reservations -----------------------------------------------------------------------------

    async def reserve(
        self, uid: RunUid, reservation: int, shape: Shape, *, on_waiting: Callable[[str], None]
    ) -> tuple[Placement, ...]:
        key = _Key(uid, reservation)
        creation = self._creating.get(key)
        if creation is None:
            creation = asyncio.create_task(_ray(_find_or_create_group, key, shape))
            self._creating[key] = creation
            creation.add_done_callback(lambda _: self._creating.pop(key, None))
        group = await asyncio.shield(creation)
        pause_s, told_at = READY_POLL_FIRST_S, time.monotonic()
        while not await _ray(_is_ready, group):
            if time.monotonic() - told_at >= WAITING_NOTICE_S:
                told_at = time.monotonic()
                on_waiting(why_waiting(shape, await self._machines_lately(), self._used_by()))
            await asyncio.sleep(pause_s)
            pause_s = min(READY_POLL_MAX_S, pause_s * 2)
        return await self._placements(group)

    async def _placements(self, group: PlacementGroup) -> tuple[Placement, ...]:
        """In the order of the machines' names, numbers in them counted as numbers."""
        bundles = await _ray(_bundles, group)
        ordered = sorted(
            bundles, key=lambda name: [int(n) if n.isdigit() else n for n in _WORDS.findall(name)]
        )
        return tuple(Placement(machine=name, address=bundles[name].facts.address) for name in ordered)

    async def release(self, uid: RunUid, reservation: int) -> None:
        key = _Key(uid, reservation)
        creation = self._creating.get(key)
        if creation is not None:
            await asyncio.wait([creation])
        group = await _ray(_find_group, key)
        if group is None:
            return
        node_ids = await _ray(_node_ids, group)
        await _ray(remove_placement_group, group)
        try:
            async with asyncio.timeout(REMOVAL_TIMEOUT_S):
                while not await _ray(_is_removed, group):  # noqa: ASYNC110 - Ray cannot wait
                    await asyncio.sleep(REMOVAL_POLL_S)
        except TimeoutError:
            raise MeshTimeoutError(
                f"Ray has not confirmed the release of {key.name}.", timeout_s=REMOVAL_TIMEOUT_S
            ) from None
        self._warming = asyncio.create_task(asyncio.to_thread(warm, node_ids), name="warm workers")

    # ---- members ----------------------------------------------------------------------------------

    async def order(self, order: JoinOrder, reservation: int) -> None:
        incarnation = order.incarnation
        group = await _ray(_find_group, _Key(incarnation.run_uid, reservation))
        if group is None:
            raise MemberGoneError(f"The reservation of {order.machine} is gone.")
        handle = await _ray(self._create_member, order, group)
        await _call(handle.join.remote(order), f"rank {incarnation.rank} on {order.machine}")

    def _create_member(self, order: JoinOrder, group: PlacementGroup) -> Any:
        bundle = _bundles(group).get(order.machine)
        if bundle is None:
            raise MemberGoneError(f"{order.machine} is not in its reservation any more.")
        config = {
            **self._member_config,
            "machine": str(order.machine),
            "address": bundle.facts.address,
            "namespace": self._namespace,
        }
        return MemberNode.options(
            name=_actor_name(order.incarnation),
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle.index
            ),
        ).remote(config)

    async def fence(self, order: FenceOrder) -> None:
        handle = await self._member(order.incarnation)
        await _call(handle.fence.remote(order), f"rank {order.incarnation.rank}")

    async def dismiss(self, incarnation: Incarnation) -> None:
        try:
            handle = await self._member(incarnation)
        except MemberGoneError:
            return
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await handle.leave.remote()
        except (TimeoutError, RayError) as error:
            _log.info("rank %s did not leave by itself: %s", incarnation.rank, type(error).__name__)
        await _ray(_kill, handle)

    async def forget_run(self, uid: RunUid) -> None:
        machines_dir = str(self._member_config["machines_dir"])
        nodes = await _ray(ray.nodes)
        task: Any = ray.remote(num_cpus=0, max_retries=0)(_remove_run)
        removals = [
            task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(machines_dir, _facts(node).name, uid)
            for node in nodes
            if node["Alive"] and MACHINE_LABEL in node["Labels"]
        ]
        outcomes = await asyncio.gather(*map(_removed_in_time, removals), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                _log.warning("what run %s kept on a machine may still be there: %r", uid, outcome)

    async def _member(self, incarnation: Incarnation) -> Any:
        try:
            return await _ray(ray.get_actor, _actor_name(incarnation), self._namespace)
        except ValueError:
            raise MemberGoneError(f"There is no actor for rank {incarnation.rank}.") from None


async def _removed_in_time(removal: Awaitable[None]) -> None:
    async with asyncio.timeout(FORGET_TIMEOUT_S):
        await removal


async def _ray(call: Callable[..., T], *arguments: Any) -> T:
    """A blocking call into Ray. What Ray cannot do now may be asked again. ValueError: no such thing."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except ValueError:
        raise
    except (RayError, RuntimeError, OSError) as error:
        raise TransportError(f"Ray cannot be asked now: {error}.") from error


def _remove_run(machines_dir: str, machine: str, uid: RunUid) -> None:
    remove_run(uid, machine_dir=Path(machines_dir) / machine)


def _actor_name(incarnation: Incarnation) -> str:
    return f"member-{incarnation}"


async def _call(reference: Any, who: str) -> Any:
    """Awaits a member's answer; Ray's exceptions become ours."""
    try:
        async with asyncio.timeout(MEMBER_CALL_TIMEOUT_S):
            return await reference
    except ActorUnavailableError as error:
        raise TransportError(f"{who} cannot be reached: {error}.", rank=who) from error
    except (ActorDiedError, RayActorError) as error:
        raise MemberGoneError(f"The agent of {who} is dead.", rank=who) from error
    except (TimeoutError, GetTimeoutError) as error:
        raise MeshTimeoutError(
            f"The agent of {who} did not answer.", timeout_s=MEMBER_CALL_TIMEOUT_S
        ) from error


def _facts(node: Mapping[str, Any]) -> MachineFacts:
    labels = dict(node["Labels"])
    return MachineFacts(
        name=MachineName(labels[MACHINE_LABEL]),
        address=labels.get(ADDRESS_LABEL, node["NodeManagerAddress"]),
        labels={k: v for k, v in labels.items() if not k.startswith(("ray.io/", "gangmesh."))},
        gpu_type=labels.get(GPU_TYPE_LABEL),
        gpu_count=int(node["Resources"].get("GPU", 0)) if node["Alive"] else 0,
        is_alive=bool(node["Alive"]),
    )


def _bundles(group: PlacementGroup) -> dict[MachineName, _Bundle]:
    """Where a group that is ready lies. Raises PlacementError when a machine of it is lost already."""
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    found = {}
    for index, node_id in placement_group_table(group)["bundles_to_node_id"].items():
        node = nodes.get(node_id)
        if node is None or not node["Alive"]:
            raise PlacementError("A machine was lost while it was being reserved.")
        facts = _facts(node)
        found[facts.name] = _Bundle(index=int(index), facts=facts)
    return found


def _node_ids(group: PlacementGroup) -> list[str]:
    """Of the machines of a group; none for one that never got any."""
    return [node_id for node_id in placement_group_table(group)["bundles_to_node_id"].values() if node_id]


def _find_group(key: _Key) -> PlacementGroup | None:
    try:
        group = get_placement_group(key.name)
    except ValueError:
        return None
    return None if _is_removed(group) else group


def _is_ready(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def _is_removed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state", "REMOVED") == "REMOVED")


def _find_or_create_group(key: _Key, shape: Shape) -> PlacementGroup:
    found = _find_group(key)
    if found is not None:
        return found
    bundle: dict[str, float] = {SLOT_RESOURCE: 1}
    if shape.gpus_per_node:
        bundle["GPU"] = shape.gpus_per_node
    selector: list[dict[str, str]] | None = None
    if shape.gpus_per_node and shape.gpu_types:
        selector = [{GPU_TYPE_LABEL: f"in({','.join(shape.gpu_types)})"} for _ in range(shape.nodes)]
    return placement_group(
        [dict(bundle) for _ in range(shape.nodes)],
        strategy="STRICT_SPREAD",
        name=key.name,
        lifetime="detached",
        bundle_label_selector=selector,
    )


def _kill(handle: Any) -> None:
    ray.kill(handle, no_restart=True)
