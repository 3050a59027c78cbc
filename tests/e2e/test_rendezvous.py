"""Members find each other, whatever the machines' names, ports and the user's old flags say."""

from __future__ import annotations

import re

import pytest

from tests.e2e.real_mesh import RealMesh

pytestmark = pytest.mark.ray

OK = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(250_000)
dist.all_reduce(x)
print(f"ok world={int(x[0])} mesh={os.environ.get('NODUS_NODE_RANK','?')} rank={dist.get_rank()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""

STRANGE_NAMES = """
set -e
if [ $NODE_RANK = 0 ]; then
    hostname nobody-knows-me.invalid
else
    hostname trap
    printf '127.0.0.1 localhost\\n127.0.1.1 trap\\n' > $NODUS_STATE_DIR/hosts
    mount --bind $NODUS_STATE_DIR/hosts /etc/hosts
fi
"""
"""Rank 0's host name resolves to nothing, rank 1's to a loopback address of its own, as on Debian."""


def assert_one_world(output: str, *, nodes: int = 2) -> None:
    found = sorted(re.findall(r"ok world=(\d+) mesh=(\d+) rank=(\d+)", output))
    assert found == [(str(nodes), str(rank), str(rank)) for rank in range(nodes)], output


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.parametrize("launcher", ["torchrun", "plain"])
def test_host_names_that_resolve_to_nothing_or_to_loopback_do_not_matter(
    mesh: RealMesh, launcher: str
) -> None:
    """Cases 1 and 2: nobody thinks that it is the host; peers advertise 127.0.1.1."""
    mesh.script("ok.py", OK)
    program = "torchrun ok.py" if launcher == "torchrun" else "python ok.py"
    done = mesh.cli(
        "run", "--nodes", "2", "--launcher", launcher, "--",
        "unshare", "--uts", "--mount", "bash", "-c", f"{STRANGE_NAMES}\nexec {program}",
    )  # fmt: skip
    assert_one_world(done.stdout)


@pytest.mark.torch
def test_two_gangs_at_once_both_wanting_port_29500_are_two_worlds(mesh: RealMesh) -> None:
    mesh.script("ok.py", OK)
    clients = [
        mesh.client("run", "--nodes", "2", "--launcher", "torchrun", "--",
                    "bash", "-c", "echo port $MASTER_PORT; exec torchrun ok.py")
        for _ in range(2)
    ]  # fmt: skip
    ports = []
    for client in clients:
        assert client.wait() == 0, client.stderr + client.stdout
        assert_one_world(client.stdout)
        told = set(re.findall(r"port (\d+)", client.stdout))
        assert len(told) == 1, "every rank is told the same port"
        ports.append(told.pop())
    assert ports[0] != ports[1]


@pytest.mark.torch
def test_flags_that_make_each_rank_a_world_of_its_own_never_pass_in_silence(mesh: RealMesh) -> None:
    """Case 5: the command still carries its old flags; `--nnodes=1` makes two worlds of one."""
    mesh.script("ok.py", OK)
    command = ("torchrun", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "ok.py")
    done = mesh.cli("run", "--nodes", "2", "--launcher", "torchrun", "--", *command, code=None)
    assert "--nnodes" in done.stderr, done.stderr
    assert done.returncode != 0 or "world=2" not in done.stdout


def test_an_endpoint_at_which_nobody_meets_is_refused_by_name(mesh: RealMesh) -> None:
    """Case 5, before anything is started."""
    command = ("torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400", "ok.py")
    done = mesh.cli("run", "--dry-run", "--nodes", "2", "--launcher", "torchrun", "--", *command, code=2)
    assert "--rdzv-endpoint=localhost:29400" in done.stderr, done.stderr
