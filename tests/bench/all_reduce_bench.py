"""An all-reduce of 64 MB over gloo between two members, on each path, beside the same two hosts without us.

Two hosts in network namespaces. `ours` is a run on that path, `theirs` torchrun on the bare link right before it,
by the same script: the median of the rounds, each of which the slower rank has timed. Every path has machines that
have joined for it; the walls that make the last one relayed come after the last bare rounds. Needs root.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench import rows
from tests.e2e.real_mesh import BIN
from tests.lab.hosts import Host
from tests.lab.mesh_deployment import MeshLab, mesh_lab
from tests.lab.network import why_not

LIMIT_S = 300.0
BARE_PORT = "29777"
SCRIPT = """
import json, sys, time, torch, torch.distributed as dist
rounds, out = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
numbers = torch.ones(16_000_000)
taken = []
for _ in range(rounds + 2):
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(numbers)
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    taken.append(float(took[0]))
    numbers.fill_(1.0)
if dist.get_rank() == 0:
    with open(out, "w") as file:
        json.dump(taken[2:], file)
dist.barrier()
dist.destroy_process_group()
"""
"""The first two rounds make connections and pages."""
JOINS: Mapping[str, Callable[[Host], tuple[str, ...]]] = {
    "private": lambda host: ("--private-network", "rack", "--private-address", host.address),
    "public": lambda host: ("--public-address", host.address),
    "direct": lambda host: (),
    "relayed": lambda host: (),
}
"""What machines say when they join, so that they reach each other by this path."""


def run(quick: bool) -> list[dict[str, Any]]:
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    rounds = 5 if quick else 20
    folder = Path(tempfile.mkdtemp(prefix="gm-all-reduce-bench-"))
    table = []
    every_bare: list[float] = []
    try:
        with mesh_lab(folder, hosts=2) as lab:
            script = lab.script("all_reduce.py", SCRIPT)
            for path in JOINS:
                bare = _bare(lab, script, rounds)
                _join(lab, path)
                ours = _on_path(lab, script, rounds, path)
                every_bare += bare
                table.append(rows.beside(f"all-reduce of 64 MB, {path}", _ms(ours), _ms(bare), unit="ms"))
                for host in lab.hosts:
                    lab.stop_agent(host)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [rows.told("all-reduce of 64 MB, bare link", _ms(every_bare), unit="ms"), *table]


def _join(lab: MeshLab, path: str) -> None:
    for host in lab.hosts:
        if path == "relayed":
            lab.wall(host)
        options = JOINS[path](host)
        lab.start_agent(host, *options, token=lab.token(), state=f"{host.name}-{path}")
        lab.until_joined(host)


def _bare(lab: MeshLab, script: Path, rounds: int) -> list[float]:
    """torchrun on both hosts, as somebody starts it by hand."""
    first = lab.hosts[0]
    out, said = lab.work / "bare.json", lab.work / "bare.log"
    with said.open("wb") as log:
        ranks = [
            host.start(
                *(str(BIN / "torchrun"), "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)),
                *(
                    "--master-addr",
                    first.address,
                    "--master-port",
                    BARE_PORT,
                    str(script),
                    str(rounds),
                    str(out),
                ),
                environment=lab.environment({"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}),
                stdout=log,
                stderr=log,
            )
            for rank, host in enumerate(lab.hosts)
        ]
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    assert codes == [0, 0], said.read_text(errors="replace")[-3000:]
    return _taken(out)


def _on_path(lab: MeshLab, script: Path, rounds: int, path: str) -> list[float]:
    out = lab.work / f"{path}.json"
    name = lab.submit(
        *("--nodes", "2", "--launcher", "torchrun", "--transport", "auto", "-e", "OMP_NUM_THREADS=1"),
        *("--", "torchrun", str(script), str(rounds), str(out)),
    )
    status = lab.ended(name, limit_s=LIMIT_S)["status"]
    assert (status["state"], status["path"]["transport"]) == ("Succeeded", path), status
    return _taken(out)


def _taken(out: Path) -> list[float]:
    taken: list[float] = json.loads(out.read_text())
    return taken


def _ms(taken: list[float]) -> list[float]:
    return [value * 1000 for value in taken]
