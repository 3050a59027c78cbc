"""The fleet of a Ray cluster: machines are nodes, a reservation is a placement group for each, a member an actor.

Rules of this file:
1. All of Ray's untyped surface that the coordinator uses is here, in the modules `coordinator.ray_*` and in
   `coordinator.actor`.
2. A machine that is given back and not clean keeps its group until a sweep on it has proven that nothing of the run
   is left, or Ray holds it for dead. The group is in Ray: a coordinator that dies meanwhile changes nothing, and asks
   again.
3. One sweep at a time is on its way to a machine, however long it does not answer: one that came late, when the same
   run has the machine again, would find new processes. It kills what was there when it began.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from agents.chaos import HarmOrder
from agents.node import MemberNode
from agents.raylet import (
    ADDRESS_LABEL,
    CHECK_WORKERS,
    GPU_TYPE_LABEL,
    HEAD_RESOURCE,
    LOOPBACK,
    MACHINE_LABEL,
    MEMBER_WORKERS,
)
from agents.sweep import remove_run_here, sweep_here
from coordinator import ray_check, ray_harm, ray_notes
from coordinator.core.events import Placement
from coordinator.fleet import HeldMachine, Looked, MachineFacts, MemberGoneError, Shape, Waiting
from coordinator.machine_choice import WhyApart, together
from coordinator.ray_call import ask_ray
from coordinator.ray_groups import Key
from coordinator.ray_reservations import RayReservations
from coordinator.ray_workers import WorkerKeeper
from coordinator.reach import Reach
from coordinator.warm_workers import HEAD_SPARES, MAKE_UP_S, WorkerNode
from mesh.errors import MeshTimeoutError, NotFoundError, TransportError
from mesh.ids import Incarnation, MachineName, RunUid
from mesh.messages import CheckpointOrder, FenceOrder, JoinOrder
from mesh.net.paths import facts_of

MEMBER_CALL_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 3.0
FORGET_TIMEOUT_S = 10.0
SWEEP_KILL_LIMIT_S = 10.0
LOOK_S = 1.0
"""Between two looks at whether a machine that does not answer is still there."""
SWEEP_AGAIN_S = 1.0

_log = logging.getLogger(__name__)


class RayFleet:
    """A `Fleet` over the Ray cluster that this process is connected to.

    Args:
        namespace: where the members' actors are named.
        member_config: what every MemberNode is constructed with; its machine is added.
        used_by: which run holds which machine, for the sentence on why a run waits.
        why_apart: why two machines are not offered to one run; None where they are.
    """

    def __init__(
        self,
        *,
        namespace: str,
        member_config: Mapping[str, Any],
        used_by: Callable[[], dict[str, str]],
        why_apart: WhyApart = together,
    ) -> None:
        self._namespace = namespace
        self._member_config = dict(member_config)
        self._reservations = RayReservations(look=self.machines, used_by=used_by, why_apart=why_apart)
        self._cordoned: set[MachineName] | None = None
        """None until it has been read from Ray."""
        self._workers = WorkerKeeper()
        self._handles: dict[Incarnation, Any] = {}
        """Of members that were ordered here and not dismissed yet: a fence does not ask Ray's directory first."""

    async def machines(self) -> list[MachineFacts]:
        nodes = (await self._nodes()).values()
        if self._cordoned is None:
            noted = await ask_ray(ray_notes.read_cordoned)
            self._cordoned = noted | (self._cordoned or set())  # one may have been noted while we read
        return [_facts(node, is_cordoned=node["Labels"][MACHINE_LABEL] in self._cordoned) for node in nodes]

    def look_at_workers(self, node_id: str) -> None:
        """A worker that waited there has been taken."""
        self._workers.look_at(node_id)

    async def _nodes(self) -> dict[MachineName, dict[str, Any]]:
        """By machine. One that came back under its name is the node that lives."""
        found: dict[MachineName, dict[str, Any]] = {}
        nodes = await ask_ray(ray.nodes)
        self._workers.seen(_worker_nodes(nodes))
        for node in nodes:
            name = node.get("Labels", {}).get(MACHINE_LABEL)
            if name is not None and (node["Alive"] or name not in found):
                found[MachineName(name)] = node
        return found

    async def _node(self, machine: MachineName) -> dict[str, Any] | None:
        """The node of a machine that Ray does not hold for dead."""
        node = (await self._nodes()).get(machine)
        return node if node is not None and node["Alive"] else None

    async def cordon(self, machine: MachineName) -> None:
        """See `Fleet.cordon`. If Ray cannot keep it, it is forgotten when the coordinator dies."""
        if machine not in {facts.name for facts in await self.machines()}:
            raise NotFoundError(
                f"There is no machine named '{machine}'.", hint="See them all: mesh get machines"
            )
        assert self._cordoned is not None
        self._cordoned.add(machine)
        try:
            await ask_ray(ray_notes.note_cordoned, machine)
        except TransportError as error:
            _log.warning("that %s is wanted back is noted in this process only: %s", machine, error)

    # ---- harm -------------------------------------------------------------------------------------

    async def why_no_harm(self, order: HarmOrder) -> str | None:
        node = await self._node(order.machine)
        return f"{order.machine} is lost." if node is None else await ray_harm.why_not(order, node["NodeID"])

    async def harm(self, order: HarmOrder) -> None:
        node = await self._node(order.machine)
        if node is not None:
            await ray_harm.perform(order, node["NodeID"])

    async def left_of_harm(self, order: HarmOrder) -> str | None:
        node = await self._node(order.machine)
        return None if node is None else await ray_harm.left_of(order, node["NodeID"])

    # ---- the network ------------------------------------------------------------------------------

    async def look(self, machines: Mapping[int, MachineName], *, fresh: Collection[int]) -> Looked:
        nodes = await self._nodes()
        there, absent = {}, {}
        for rank, machine in machines.items():
            node = nodes.get(machine)
            if node is None or not node["Alive"]:
                absent[rank] = f"{machine} is lost."
            else:
                there[rank] = (_facts(node), node)
        looked = await ray_check.look(ray_check.spots_of(there), fresh=fresh)
        return Looked(seen=looked.seen, absent={**absent, **looked.absent})

    # ---- reservations -----------------------------------------------------------------------------

    async def reserve(
        self, uid: RunUid, reservation: int, shape: Shape, *, on_waiting: Callable[[Waiting], None]
    ) -> tuple[Placement, ...]:
        return await self._reservations.reserve(Key(uid, reservation), shape, on_waiting)

    async def withdraw(self, uid: RunUid, reservation: int) -> None:
        await self._reservations.withdraw(Key(uid, reservation))

    async def held_by(self, uid: RunUid) -> list[HeldMachine]:
        held = await self._reservations.held_by(uid)
        return [HeldMachine(name=machine, reservation=key.reservation) for machine, key in held]

    async def holders(self) -> set[RunUid]:
        return await self._reservations.holders()

    async def release(self, uid: RunUid, reservation: int, machine: MachineName, *, is_clean: bool) -> None:
        key = Key(uid, reservation)
        if not await self._reservations.holds(key, machine):
            return
        if not is_clean:
            await self._sweep(uid, machine)
        await self._reservations.give_back([machine])
        node = await self._node(machine)
        if node is not None:
            self._workers.look_at(node["NodeID"])

    # ---- sweeps -----------------------------------------------------------------------------------

    async def _sweep(self, uid: RunUid, machine: MachineName) -> None:
        """Returns when nothing of the run is left on the machine, or the machine is gone."""
        while (node := await self._node(machine)) is not None:
            remains = await self._sweep_once(uid, machine, node["NodeID"])
            if not remains:
                return
            _log.warning("%s is kept from others, the run %s is still there: %s", machine, uid, remains)
            await asyncio.sleep(SWEEP_AGAIN_S)
        _log.info("%s is gone, and what ran there of the run %s", machine, uid)

    async def _sweep_once(self, uid: RunUid, machine: MachineName, node_id: str) -> list[str]:
        """What one sweep left, in words; also when it could not be made, or the machine is gone meanwhile."""
        task: Any = ray.remote(num_cpus=0, max_retries=0)(sweep_here)
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        reference = task.options(scheduling_strategy=here).remote(
            str(self._member_config["machines_dir"]), machine, uid, SWEEP_KILL_LIMIT_S
        )
        answer = asyncio.ensure_future(_await(reference))
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=LOOK_S)
                if not answer.done() and await self._node(machine) is None:
                    return ["it is being held for dead"]
            return list(answer.result())
        except RayError as error:
            return [f"the sweep failed: {type(error).__name__}"]
        finally:
            answer.cancel()

    # ---- members ----------------------------------------------------------------------------------

    async def order(self, order: JoinOrder, reservation: int) -> None:
        incarnation = order.incarnation
        group = await self._reservations.group(Key(incarnation.run_uid, reservation), order.machine)
        if group is None:
            raise MemberGoneError(f"{order.machine} is not reserved any more.")
        node = await self._node(order.machine)
        if node is None:
            raise MemberGoneError(f"{order.machine} is lost.")
        handle = await ask_ray(self._create_member, order, group, _facts(node))
        self._handles[incarnation] = handle
        self._workers.used(node["NodeID"], str(incarnation))
        await self._while_there(order.machine, _call(handle.join.remote(order), f"rank {incarnation.rank}"))

    async def _while_there(self, machine: MachineName, call: Coroutine[Any, Any, None]) -> None:
        """Waits for the call no longer than the machine may be there. Raises MemberGoneError, and the call's.

        An actor that was to come up on a machine that is lost waits for another one that it may never have. Ray takes a
        minute to find a machine lost that says nothing at all.
        """
        answer, reach = asyncio.create_task(call, name=f"call to {machine}"), Reach()
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=LOOK_S)
                if answer.done():
                    break
                node = await self._node(machine)
                if node is None:
                    raise MemberGoneError(f"{machine} is lost.")
                is_silent = await reach.is_lost(node["NodeManagerAddress"], node["NodeManagerPort"])
                if is_silent and not answer.done():
                    raise MemberGoneError(f"{machine} does not answer: its network says nothing.")
            answer.result()
        finally:
            answer.cancel()

    def _create_member(self, order: JoinOrder, group: PlacementGroup, facts: MachineFacts) -> Any:
        config = {
            **self._member_config,
            "machine": str(order.machine),
            "address": facts.address,
            "network": facts.standing.to_payload(),
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
                placement_group=group, placement_group_bundle_index=0
            ),
        ).remote(config)

    async def fence(self, order: FenceOrder) -> None:
        handle = await self._member(order.incarnation)
        await _call(handle.fence.remote(order), f"rank {order.incarnation.rank}")

    async def tell_about_part(self, order: CheckpointOrder) -> None:
        handle = await self._member(order.incarnation)
        await _call(handle.about_part.remote(order), f"rank {order.incarnation.rank}")

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
        await ask_ray(_kill, handle)
        self._handles.pop(incarnation, None)

    async def forget_run(self, uid: RunUid) -> None:
        machines_dir = str(self._member_config["machines_dir"])
        task: Any = ray.remote(num_cpus=0, max_retries=0)(remove_run_here)
        removals = [
            task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(machines_dir, machine, uid)
            for machine, node in (await self._nodes()).items()
            if node["Alive"]
        ]
        outcomes = await asyncio.gather(*map(_removed_in_time, removals), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                _log.warning("what run %s kept on a machine may still be there: %r", uid, outcome)

    async def _member(self, incarnation: Incarnation) -> Any:
        if (handle := self._handles.get(incarnation)) is not None:
            return handle
        try:
            return await ask_ray(ray.get_actor, _actor_name(incarnation), self._namespace)
        except ValueError:
            raise MemberGoneError(f"There is no actor for rank {incarnation.rank}.") from None


async def _removed_in_time(removal: Awaitable[None]) -> None:
    async with asyncio.timeout(FORGET_TIMEOUT_S):
        await removal


async def _await(reference: Any) -> Any:
    return await reference


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


def _facts(node: Mapping[str, Any], *, is_cordoned: bool = False) -> MachineFacts:
    labels = dict(node["Labels"])
    name = MachineName(labels[MACHINE_LABEL])
    address = labels.get(ADDRESS_LABEL, node["NodeManagerAddress"])
    return MachineFacts(
        name=name,
        address=address,
        labels={k: v for k, v in labels.items() if not k.startswith(("ray.io/", "gangmesh."))},
        gpu_type=labels.get(GPU_TYPE_LABEL),
        gpu_count=int(node["Resources"].get("GPU", 0)) if node["Alive"] else 0,
        is_alive=bool(node["Alive"]),
        is_cordoned=is_cordoned,
        network=facts_of(name, address, labels),
    )


def _worker_nodes(nodes: Sequence[Mapping[str, Any]]) -> Iterator[WorkerNode]:
    """The living machines, and the head, whose spares are the next coordinator and the next store."""
    for node in nodes:
        raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        if node["Alive"] and MACHINE_LABEL in node.get("Labels", {}):
            is_checked = node["NodeManagerAddress"] != LOOPBACK
            wanted = MEMBER_WORKERS + (CHECK_WORKERS if is_checked else 0)
            yield WorkerNode(node_id=node["NodeID"], raylet=raylet, wanted=wanted)
        elif node["Alive"] and HEAD_RESOURCE in node["Resources"]:
            yield WorkerNode(
                node_id=node["NodeID"], raylet=raylet, wanted=HEAD_SPARES, first_look_s=MAKE_UP_S
            )


def _kill(handle: Any) -> None:
    ray.kill(handle, no_restart=True)
