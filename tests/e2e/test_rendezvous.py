"""Members find each other, whatever the machines' names, ports and the user's old flags say."""

from __future__ import annotations

import os
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


def in_strange_names(command: str) -> tuple[str, ...]:
    """Only root may rename a machine; others run the command on the names that there are."""
    if os.geteuid() != 0:
        return ("bash", "-c", command)
    return ("unshare", "--uts", "--mount", "bash", "-c", f"{STRANGE_NAMES}\n{command}")


@pytest.mark.long
@pytest.mark.torch
def test_two_gangs_at_once_on_machines_with_useless_names_are_two_worlds(mesh: RealMesh) -> None:
    """Cases 1 and 2: nobody thinks that it is the host; peers advertise 127.0.1.1. And both want port 29500."""
    mesh.script("ok.py", OK)
    clients = [
        mesh.client("run", "--nodes", "2", "--launcher", launcher, "--",
                    *in_strange_names(f"echo port $MASTER_PORT; exec {program} ok.py"))
        for launcher, program in (("torchrun", "torchrun"), ("plain", "python"))
    ]  # fmt: skip
    ports = []
    for client in clients:
        assert client.wait(90) == 0, client.stderr + client.stdout
        assert_one_world(client.stdout)
        told = set(re.findall(r"port (\d+)", client.stdout))
        assert len(told) == 1, "every rank is told the same port"
        ports.append(told.pop())
    assert ports[0] != ports[1]


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (
            ("torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400", "ok.py"),
            "--rdzv-endpoint=localhost:29400",
        ),
        (("bash", "-c", "set -e; torchrun --nnodes=1 ok.py"), "--nnodes=1"),
    ],
)
def test_flags_that_make_each_rank_a_world_of_its_own_are_refused_by_name(
    mesh: RealMesh, command: tuple[str, ...], flag: str
) -> None:
    """Case 5: the command still carries its old flags. Nothing is created; test_command_check.py has them all."""
    name = mesh.new_name()
    done = mesh.cli("run", "--name", name, "--nodes", "2", "--launcher", "torchrun", "--", *command, code=2)
    assert flag in done.stderr, done.stderr
    assert name not in mesh.cli("get", "runs").stdout
