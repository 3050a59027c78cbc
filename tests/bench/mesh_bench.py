"""Ray over the mesh beside the same cluster without it, and how soon a machine that joins can be used.

Two labs, one after the other: a head and a machine in network namespaces. In the one Ray is in the clear, in the other
everything passes two gateways; the last rows are of a machine that only dials out, through the head's relay. `theirs`
is the cluster in the clear. Needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.ray_environment import ray_environment
from tests.bench import rows
from tests.e2e.real_mesh import RealMesh
from tests.lab.deployment import PYTHON, ROOT, build_lab
from tests.lab.hosts import Host
from tests.lab.mesh_deployment import mesh_lab
from tests.lab.network import why_not

LIMIT_S = 240.0
JOIN_TARGET_S = 5.0
DRIVER = """
import json, statistics, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

gcs, own, calls, objects, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
ray.init(address=gcs, _node_ip_address=own, log_to_driver=False, logging_level="error", namespace="bench")


@ray.remote(num_cpus=0)
class Echo:
    def ping(self):
        return None

    def give(self, size):
        return bytes(size)

    def call(self, other, calls):
        for _ in range(10):
            ray.get(other.ping.remote())
        taken = []
        for _ in range(calls):
            began = time.perf_counter()
            ray.get(other.ping.remote())
            taken.append(time.perf_counter() - began)
        return taken

    def fetch(self, other, size):
        began = time.perf_counter()
        assert len(ray.get(other.give.remote(size))) == size
        return time.perf_counter() - began


def on(node):
    return Echo.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()


nodes = [node for node in ray.nodes() if node["Alive"]]
[head] = [node for node in nodes if "gangmesh_head" in node["Resources"]]
[machine] = [node for node in nodes if node is not head]
here, there = on(head), on(machine)
ray.get([here.ping.remote(), there.ping.remote()])
print(json.dumps({
    "out": ray.get(here.call.remote(there, calls)),
    "back": ray.get(there.call.remote(here, calls)),
    "object": [ray.get(here.fetch.remote(there, size)) for _ in range(objects + 1)][1:],
}))
"""


def run(quick: bool) -> list[dict[str, Any]]:
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    calls, objects = (200, 2) if quick else (1000, 5)
    joins: list[float] = []
    found: dict[str, Mapping[str, list[float]]] = {}
    folder = Path(tempfile.mkdtemp(prefix="gm-mesh-bench-"))
    try:
        (folder / "plain").mkdir()
        with build_lab(folder / "plain", hosts=1) as plain:
            found["plain"] = _measure(plain, plain.head_host, calls, objects)
        (folder / "mesh").mkdir()
        with mesh_lab(folder / "mesh", hosts=1) as lab:
            [host] = lab.hosts
            for _ in range(2 if quick else 5):
                token = lab.token()
                began = time.monotonic()
                lab.start_agent(host, token=token)
                lab.until_joined(host)
                joins.append(time.monotonic() - began)
                if not found.get("direct"):
                    found["direct"] = _measure(lab, lab.head_host, calls, objects)
                    lab.wall(host)
                elif not found.get("relayed"):
                    found["relayed"] = _measure(lab, lab.head_host, calls, objects)
                lab.stop_agent(host)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = [
        rows.bounded("mesh join: from the command to a machine that is ready", joins, at_most=JOIN_TARGET_S)
    ]
    for path in ("direct", "relayed"):
        for key, what in (("out", "actor call, head to machine"), ("back", "actor call, machine to head")):
            ours, theirs = ([took * 1000 for took in found[which][key]] for which in (path, "plain"))
            table.append(rows.beside(f"{what}, {path}", ours, theirs, unit="ms"))
        table.append(
            rows.beside(f"100 MB object, {path}", found[path]["object"], found["plain"]["object"], unit="s")
        )
    return table


def _measure(lab: RealMesh, head: Host, calls: int, objects: int) -> dict[str, list[float]]:
    [raylet] = [p for p in head.processes("raylet/raylet") if "--head" in p.cmdline()]
    words = dict(word.removeprefix("--").partition("=")[::2] for word in raylet.cmdline() if "=" in word)
    environment = ray_environment(
        os.environ, token_file=lab.state / "ray-token", deployment_id="bench", source=ROOT
    )
    done = head.run(
        *(PYTHON[0], "-P", "-c", DRIVER, words["gcs-address"], words["node_ip_address"]),
        *(str(calls), str(objects), str(100_000_000)),
        environment=environment,
        limit_s=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    result: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return result
