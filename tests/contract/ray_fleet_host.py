"""A small real deployment with a `RayFleet` and no coordinator, in a process of its own: `python -m … STATE MACHINES`.

Requests come on stdin and answers go to stdout, each a line of base64 over a pickle: `(id, target, method, args,
kwargs)`, and `(id, kind, value)` with a kind of `waiting`, `done` or `failed`. Target is the fleet, or this process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import itertools
import logging
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

from mesh.errors import MeshError
from mesh.ids import MachineName, RunUid

LINE_BYTES_MAX = 1 << 20
NAMESPACE = "gangmesh"


def encode(message: Any) -> bytes:
    return base64.b64encode(pickle.dumps(message)) + b"\n"


def decode(line: bytes) -> Any:
    return pickle.loads(base64.b64decode(line))


class Host:
    """The deployment, and what a test does to it."""

    def __init__(self, state: Any, ray_processes: Any, provider: Any) -> None:
        self._state = state
        self._ray = ray_processes
        self._provider = provider
        self._answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # Ray prints
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._uses = itertools.count()
        self.fleet = self._new_fleet()

    def _new_fleet(self) -> Any:
        from coordinator.ray_fleet import RayFleet

        config = {
            "machines_dir": str(self._state.machines),
            "environment": dict(os.environ),
            "namespace": NAMESPACE,
        }
        return RayFleet(namespace=NAMESPACE, member_config=config, used_by=dict)

    # ---- what a test does ---------------------------------------------------------------------------

    async def crash_coordinator(self) -> None:
        """Everything that was being asked is forgotten, and a fleet that knows nothing takes its place."""
        me = asyncio.current_task()
        for task in self._calls.values():
            if task is not me:
                task.cancel()
        for task in asyncio.all_tasks():
            if task.get_name().startswith(("groups of", "reservations", "spare workers", "workers of")):
                task.cancel()
        self.fleet = self._new_fleet()

    async def ensure(self, count: int) -> None:
        """So many machines are there and answer."""
        await self._provider.grow(count)

    async def kill_machine(self, machine: str) -> None:
        self._signal(machine, signal.SIGKILL)

    async def freeze_machine(self, machine: str) -> None:
        self._signal(machine, signal.SIGSTOP)

    async def thaw_machine(self, machine: str) -> None:
        self._signal(machine, signal.SIGCONT)

    def _signal(self, machine: str, number: signal.Signals) -> None:
        pid = self._ray.pid_of(machine)
        assert pid is not None
        os.kill(pid, number)

    async def machine_dir(self, machine: str) -> Path:
        return Path(self._state.machines) / machine

    async def idle_workers(self, machine: str) -> int:
        """How many wait there to become an actor, as its raylet tells."""
        return await asyncio.to_thread(_idle_workers, machine)

    async def use_worker(self, machine: str) -> None:
        """One of the machine's worker processes becomes an actor, and ends with it. The fleet knows, as of a member."""
        self.fleet._workers.used(_node(machine)["NodeID"], f"member {next(self._uses)}")
        await asyncio.to_thread(_use_worker, machine)

    async def used_slots(self) -> dict[str, float]:
        """What Ray itself says is held, by machine: 1 where somebody has the slot."""
        return await asyncio.to_thread(_used_slots)

    async def take_slot(self, machine: str) -> None:
        """Somebody else in the cluster takes the machine."""
        await asyncio.to_thread(_take_slot, machine)

    async def free_slot(self, machine: str) -> None:
        await asyncio.to_thread(_free_slot, machine)

    async def reserve_half(self, uid: RunUid, reservation: int, machine: MachineName) -> None:
        """As a coordinator that died in the middle left it."""
        from agents.raylet import SLOT_RESOURCE
        from coordinator import ray_groups

        key = ray_groups.Key(uid, reservation)
        await asyncio.to_thread(ray_groups.create_all, key, [machine], {SLOT_RESOURCE: 1})

    # ---- calls --------------------------------------------------------------------------------------

    async def serve(self, requests: asyncio.StreamReader) -> None:
        while line := await requests.readline():
            number, target, method, args, kwargs = decode(line)
            if method == "cancel":
                if (running := self._calls.get(args[0])) is not None:
                    running.cancel()
                continue
            who = self.fleet if target == "fleet" else self
            if method == "reserve":
                kwargs["on_waiting"] = functools.partial(self._tell, number, "waiting")
            task = asyncio.create_task(self._call(number, getattr(who, method), args, kwargs))
            self._calls[number] = task
            task.add_done_callback(functools.partial(self._forget, number))

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        self._calls.pop(number, None)

    async def _call(self, number: int, method: Any, args: Any, kwargs: Any) -> None:
        try:
            self._tell(number, "done", await method(*args, **kwargs))
        except MeshError as error:
            self._tell(number, "failed", error)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever it is, the test wants to know
            self._tell(number, "failed", RuntimeError(repr(error)))

    def _tell(self, number: int, kind: str, value: Any) -> None:
        self._answers.write(encode((number, kind, value)))
        self._answers.flush()


def _used_slots() -> dict[str, float]:
    import ray
    from ray._private.state import available_resources_per_node

    left = available_resources_per_node()
    return {
        node["Labels"]["gangmesh.machine"]: 1 - left.get(node["NodeID"], {}).get("gangmesh_slot", 0.0)
        for node in ray.nodes()
        if node["Alive"] and "gangmesh.machine" in node["Labels"]
    }


def _node(machine: str) -> dict[str, Any]:
    import ray

    return next(n for n in ray.nodes() if n["Alive"] and n["Labels"].get("gangmesh.machine") == machine)


def _idle_workers(machine: str) -> int:
    from coordinator.ray_workers import GrpcRaylets

    node = _node(machine)
    return len(GrpcRaylets().idle(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"))


def _use_worker(machine: str) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Used:
        def is_there(self) -> bool:
            return True

    here = NodeAffinitySchedulingStrategy(_node(machine)["NodeID"], soft=False)
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Used)
    handle = actor.options(scheduling_strategy=here).remote()
    assert ray.get(handle.is_there.remote(), timeout=30)
    ray.kill(handle)


def _take_slot(machine: str) -> None:
    from ray.util.placement_group import placement_group

    group = placement_group(
        [{"gangmesh_slot": 1}],
        name=f"theirs-{machine}",
        bundle_label_selector=[{"gangmesh.machine": machine}],
    )
    assert group.wait(10)


def _free_slot(machine: str) -> None:
    from ray.util.placement_group import get_placement_group, remove_placement_group

    remove_placement_group(get_placement_group(f"theirs-{machine}"))


async def main(state: Any, machines: int) -> None:
    import ray

    from coordinator import leftovers
    from coordinator.providers.local import LocalProvider
    from coordinator.ray_processes import RayProcesses

    owner = leftovers.Owner(deployment_id=state.deployment_id, state=state.path, head_pid=os.getpid())
    losses: set[asyncio.Task[None]] = set()

    def on_lost(name: str, code: int, tail: str) -> None:
        losses.add(asyncio.ensure_future(provider.node_lost(name, tail)))

    processes = RayProcesses(
        folder=state.ray,
        sockets=state.make_socket_folder(),
        environment=dict(os.environ),
        on_lost=on_lost,
    )
    provider = LocalProvider(state=state, ray=processes, gpu=None)
    try:
        address = await processes.start_head()
        await provider.begin(machines)
        await asyncio.to_thread(
            lambda: ray.init(
                address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
            )
        )
        host = Host(state, processes, provider)
        requests = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
        host._tell(0, "done", "ready")
        await host.serve(requests)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.to_thread(ray.shutdown)
    finally:
        await processes.stop()
        await leftovers.end_all(owner, grace_s=1.0)
        state.remove_outside()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    from agents import ray_environment
    from agents.child import become_subreaper
    from coordinator.deployment import claim
    from mesh.own_source import source_folder

    with claim(Path(sys.argv[1])) as folder:
        folder.prepare()
        become_subreaper()
        folder.secret("ray-token")
        clean = ray_environment.ray_environment(
            os.environ,
            token_file=folder.path / "ray-token",
            deployment_id=folder.deployment_id,
            source=source_folder(),
        )
        os.environ.clear()
        os.environ.update(clean)
        os.chdir(folder.ray)
        asyncio.new_event_loop().run_until_complete(main(folder, int(sys.argv[2])))
    sys.stderr.flush()
    os._exit(0)
