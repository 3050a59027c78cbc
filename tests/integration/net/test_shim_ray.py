"""Ray itself over the shim: a head and a node that know each other by overlay addresses only, without rights."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from mesh.ids import MachineName
from mesh.net.roster import MachinePlace
from tests.shim_world import NAMES, ShimWorld, ended, shim_world

ADDRESSES = {"a": ("198.18.1.1", "fd67:6d00::101"), "b": ("198.18.1.2", "fd67:6d00::102")}
BASES = {"a": 21000, "b": 21100}
"""Both hosts are this one, so their services have different ports: a hundred each."""
PORTS = (
    *("node-manager-port", "object-manager-port", "runtime-env-agent-port", "dashboard-agent-grpc-port"),
    *("dashboard-agent-listen-port", "metrics-export-port"),
)
JOB = """
import json, ray
ray.init(address="198.18.1.1:21000", _node_ip_address="198.18.1.1", log_to_driver=False)
@ray.remote(num_cpus=1, resources={"b": 0.1})
class There:
    def where(self): return ray.util.get_node_ip_address()
    def length(self, data): return len(data)
there = There.remote()
print(json.dumps([ray.get(there.where.remote(), timeout=60),
    ray.get(there.length.remote(ray.put(b"x" * 50_000_000)), timeout=60)]))
"""


def options(name: str) -> list[str]:
    base = BASES[name]
    words = [f"--{option}={base + 1 + number}" for number, option in enumerate(PORTS)]
    words += [f"--min-worker-port={base + 10}", f"--max-worker-port={base + 90}", "--disable-usage-stats"]
    words += ["--num-cpus=2", "--object-store-memory=200000000", f"--node-ip-address={ADDRESSES[name][0]}"]
    return [*words, f"--resources={json.dumps({name: 1})}"]


def end_all(mesh: ShimWorld) -> None:
    """Everything that was started here, whatever became of its parents: it carries the place of its gateway."""
    for process in psutil.process_iter():
        try:
            if str(mesh.folder) in process.environ().get("GANGMESH_SHIM", ""):
                process.kill()
        except psutil.Error:
            continue


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_an_actor_on_the_other_machine_answers_and_gets_an_object(tmp_path: Path) -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    # A folder with a short name: Ray's sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="gm") as short:
        head = ["--head", "--port=21000", "--include-dashboard=false", f"--temp-dir={short}"]
        await two_nodes(tmp_path, ray, head)


async def two_nodes(folder: Path, ray: str, head: list[str]) -> None:
    async with shim_world(folder) as mesh:
        places = {
            MachineName(name): MachinePlace(gateway=tuple(gateway.addresses), overlay=ADDRESSES[name])
            for name, gateway in mesh.gateways.items()
        }
        for name, gateway in mesh.gateways.items():
            gateway.set_machines(places)
            gateway.offer(range(BASES[name], BASES[name] + 100), deliver_to=ADDRESSES[name])
        try:
            for name, how in (("a", head), ("b", ["--address=198.18.1.1:21000"])):
                starter = await mesh.start(
                    name, ray, "start", *how, *options(name), addresses=ADDRESSES[name]
                )
                await ended(starter, limit_s=90)
            job = await mesh.start("a", sys.executable, "-c", JOB, addresses=ADDRESSES["a"])
            assert json.loads(await ended(job, limit_s=90)) == ["198.18.1.2", 50_000_000]
            assert all(mesh.gateways[name].counters()["streams"] > 0 for name in NAMES)
        finally:
            end_all(mesh)
