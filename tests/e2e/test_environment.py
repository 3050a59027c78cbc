"""Arguments and variables arrive as they were given, and nothing else does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.real_mesh import RealMesh

pytestmark = pytest.mark.ray

TELL = "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))"
ARGUMENTS = (
    "two words", "", " lead", 'q"uo\'te', "l1\nl2", "--flag=x", "-x", "--", "$PATH", "*", "ünï→🚀", "a\\b", "\ttab",
)  # fmt: skip
VALUES = {
    "A": "64(x2)", "B": "k=v=w", "C": "l1\nl2", "D": "$PATH", "E": "", "F": "q'u\"o", "G": "ünï", "H": " lead",
    "I": "-x",
}  # fmt: skip
KEPT = {
    "nodus_x": "kept", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "RAY_ADDRESS": "kept", "CUDA_VISIBLE_DEVICES": "3",
    "GLOO_SOCKET_IFNAME": "kept0",
}  # fmt: skip
OVERRIDDEN = {"RANK": "77", "WORLD_SIZE": "77"}
RESERVED = ("NODUS_X", "PET_NNODES", "PET_MAX_RESTARTS", "MASTER_PORT", "NODE_RANK", "NNODES")


@pytest.fixture(scope="module")
def told(deployment: RealMesh) -> dict[int, Any]:
    """What each of two ranks got, of one run with everything in it; also its submit's stderr as "stderr"."""
    given = {**VALUES, **KEPT, **OVERRIDDEN}
    options = [word for name, value in given.items() for word in ("-e", f"{name}={value}")]
    megabyte = "".join(f"BIG_{number}={'x' * 100_000}\n" for number in range(11))
    deployment.script("big.env", megabyte)
    name = deployment.new_name()
    done = deployment.cli(
        "run", "--name", name, "--nodes", "2", "--gpu", "H100", "--env-file", "big.env", *options, "--",
        "python", "-c", TELL, *ARGUMENTS,
    )  # fmt: skip
    ranks: dict[Any, Any] = {rank: json.loads(deployment.printed(name, rank)) for rank in (0, 1)}
    return {**ranks, "stderr": done.stderr}


def test_arguments_with_teeth_arrive_as_they_are(told: dict[int, Any]) -> None:
    assert [tuple(told[rank]["argv"]) for rank in (0, 1)] == [ARGUMENTS, ARGUMENTS]


def test_values_with_teeth_arrive_as_they_are(told: dict[int, Any]) -> None:
    """Case 39."""
    for rank in (0, 1):
        assert {name: told[rank]["env"].get(name) for name in VALUES} == VALUES


def test_a_megabyte_of_environment_arrives(told: dict[int, Any]) -> None:
    for rank in (0, 1):
        assert sum(len(v) for k, v in told[rank]["env"].items() if k.startswith("BIG_")) == 1_100_000


def test_names_that_are_not_reserved_are_kept_and_the_ranks_own_numbers_win_with_a_warning(
    told: dict[Any, Any],
) -> None:
    """Case 41, as docs/contract.md says it."""
    for rank in (0, 1):
        env = told[rank]["env"]
        assert {name: env.get(name) for name in KEPT} == KEPT
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (
            str(rank), "2", "0", "1",
        )  # fmt: skip
    assert "RANK" in told["stderr"] and "WORLD_SIZE" in told["stderr"], told["stderr"]


def test_nothing_of_ours_or_of_rays_leaks_into_the_command(mesh: RealMesh, told: dict[int, Any]) -> None:
    """Case 29: exactly the machine's environment, the user's, and the contract."""
    machine = set(mesh.environment())
    given = {*VALUES, *KEPT, *OVERRIDDEN, "PATH", "VIRTUAL_ENV", "PWD"}
    contract = re.compile(
        r"NODUS_(NODE_RANK|NUM_NODES|GPUS_PER_NODE|NODE_IPS|GANG_EPOCH|GANG_TRANSPORT|RUN|STATE_DIR|INCARNATION)"
        r"|NODE_RANK|NNODES|MASTER_ADDR|MASTER_PORT|(LOCAL_)?(RANK|WORLD_SIZE)|(GLOO|NCCL)_SOCKET_IFNAME|BIG_\d+"
        r"|TORCHELASTIC_ERROR_FILE"
    )
    for rank in (0, 1):
        env = told[rank]["env"]
        strange = {n for n in env if n not in machine | given and not contract.fullmatch(n)}
        # python itself sets LC_CTYPE where the locale is C
        assert strange <= {"LC_CTYPE"}, strange
        ours = {n for n in env if n.startswith(("RAY_", "GANGMESH_STATE", "GANGMESH_DEPLOYMENT", "PYTHON"))}
        assert ours - machine <= {"RAY_ADDRESS"}, ours
        # the deployment declares one (simulated) accelerator a machine, so that commands for GPUs can be rehearsed
        assert env["NODUS_GPUS_PER_NODE"] == "1" and env["NODUS_NUM_NODES"] == "2"
        assert env["MASTER_ADDR"] == env["NODUS_NODE_IPS"].split(",")[0]


def test_reserved_names_are_refused_all_at_once(mesh: RealMesh) -> None:
    """Case 41."""
    options = [word for name in RESERVED for word in ("-e", f"{name}=1")]
    done = mesh.cli("run", "--nodes", "2", *options, "--", "true", code=2)
    assert [name for name in RESERVED if name not in done.stderr] == []
