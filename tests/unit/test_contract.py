"""The environment of a rank, variable by variable, and the cleaning of what it stands on."""

from __future__ import annotations

from typing import Any

import pytest

from mesh.contract import clean_base_environment, is_reserved, rank_environment
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunName, RunUid
from mesh.plan import RunPlan
from mesh.states import LauncherKind, Transport

ADDRESSES = ("10.77.0.3", "10.77.0.20")


def incarnation(rank: int = 1, epoch: int = 4) -> Incarnation:
    return Incarnation(
        run_uid=RunUid("a" * 16), epoch=Epoch(epoch), rank=Rank(rank), token=IncarnationToken("b" * 16)
    )


def plan(**fields: Any) -> RunPlan:
    return RunPlan(**{"name": RunName("demo"), "command": ("x",), "nodes": 2, **fields})


def environment(made: RunPlan, *, rank: int = 1, **fields: Any) -> dict[str, str]:
    return rank_environment(
        plan=made,
        incarnation=incarnation(rank),
        **{
            "addresses": ADDRESSES[: made.nodes],
            "master_port": 29500,
            "transport": Transport.PRIVATE,
            "state_dir": "/state",
            "interface": "eth0",
            **fields,
        },
    )


COMMON = {
    "NODUS_NODE_RANK": "1",
    "NODE_RANK": "1",
    "NODUS_NUM_NODES": "2",
    "NNODES": "2",
    "NODUS_GPUS_PER_NODE": "0",
    "NODUS_NODE_IPS": "10.77.0.3,10.77.0.20",
    "MASTER_ADDR": "10.77.0.3",
    "MASTER_PORT": "29500",
    "NODUS_GANG_EPOCH": "4",
    "NODUS_GANG_TRANSPORT": "private",
    "NODUS_RUN": "demo",
    "NODUS_STATE_DIR": "/state",
    "NODUS_INCARNATION": f"{'a' * 16}.4.1.{'b' * 16}",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "=eth0",
}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "10.77.0.3",
    "PET_MASTER_PORT": "29500",
    "PET_LOCAL_ADDR": "10.77.0.20",
    "PET_RDZV_BACKEND": "static",
    "PET_RDZV_ID": "demo-4",
    "PET_MAX_RESTARTS": "0",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30",
}


def test_plain_gets_exactly_the_contract() -> None:
    assert environment(plan()) == COMMON | PLAIN


def test_torchrun_gets_exactly_the_contract() -> None:
    assert environment(plan(launcher=LauncherKind.TORCHRUN)) == COMMON | TORCHRUN


def test_ranks_differ_only_where_they_must() -> None:
    first, second = (environment(plan(launcher=LauncherKind.TORCHRUN), rank=rank) for rank in (0, 1))
    assert {name for name in first if first[name] != second[name]} == {
        "NODUS_NODE_RANK",
        "NODE_RANK",
        "NODUS_INCARNATION",
        "PET_NODE_RANK",
        "PET_LOCAL_ADDR",
    }


def test_one_machine_under_plain_can_start_torchrun_with_one_process_per_gpu() -> None:
    found = environment(plan(nodes=1, gpus_per_node=8), rank=0, addresses=["127.0.1.1"])
    assert (found["PET_NPROC_PER_NODE"], found["PET_NNODES"], found["WORLD_SIZE"]) == ("8", "1", "1")


def test_gpus_are_torchruns_processes() -> None:
    found = environment(plan(launcher=LauncherKind.TORCHRUN, gpus_per_node=4))
    assert (found["PET_NPROC_PER_NODE"], found["NODUS_GPUS_PER_NODE"]) == ("4", "4")


def test_torchrun_lets_workers_save_for_as_long_as_the_gang_does() -> None:
    for grace_s, expected in ((5.0, "30"), (60.5, "61")):
        found = environment(plan(launcher=LauncherKind.TORCHRUN, grace_period_s=grace_s))
        assert found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == expected


def test_a_restart_from_a_checkpoint_names_it() -> None:
    assert "NODUS_RESTORE_URI" not in environment(plan())
    assert environment(plan(), restore_uri="file:///c")["NODUS_RESTORE_URI"] == "file:///c"


def test_an_interface_that_is_not_known_is_left_to_the_libraries() -> None:
    assert "GLOO_SOCKET_IFNAME" not in environment(plan(), interface=None)


def test_the_users_interface_and_nccl_settings_stay() -> None:
    chosen = {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "^lo",
        "NCCL_DEBUG": "INFO",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7",
    }
    found = environment(plan(env=tuple(chosen.items()), launcher=LauncherKind.TORCHRUN))
    assert {name: found[name] for name in chosen} == chosen


@pytest.mark.parametrize(
    ("transport", "is_decided"),
    [
        (Transport.PRIVATE, False),
        (Transport.PUBLIC, False),
        (Transport.DIRECT, True),
        (Transport.RELAYED, True),
    ],
)
def test_an_encrypted_path_decides_the_interface_since_another_leads_past_it(
    transport: Transport, is_decided: bool
) -> None:
    chosen = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "INFO"}
    found = environment(plan(env=tuple(chosen.items())), transport=transport, interface="gm0")
    decided = {"GLOO_SOCKET_IFNAME": "gm0", "NCCL_SOCKET_IFNAME": "=gm0"} if is_decided else {}
    assert {name: found[name] for name in chosen} == {**chosen, **decided}
    assert found.get("NCCL_IB_DISABLE") == (None if transport is Transport.PRIVATE else "1")


@pytest.mark.parametrize(
    ("name", "plain", "torchrun"),
    [
        ("RANK", "1", "user"),
        ("WORLD_SIZE", "2", "user"),
        ("LOCAL_RANK", "0", "user"),
        ("LOCAL_WORLD_SIZE", "1", "user"),
        ("nodus_x", "user", "user"),
        ("SLURM_JOB_ID", "user", "user"),
        ("RAY_ADDRESS", "user", "user"),
        ("LD_PRELOAD", "user", "user"),
        ("CUDA_VISIBLE_DEVICES", "user", "user"),
        ("TORCHELASTIC_RUN_ID", "user", "user"),
    ],
)
def test_the_fate_of_a_users_variable_is_the_documented_one(name: str, plain: str, torchrun: str) -> None:
    env = ((name, "user"),)
    assert environment(plan(env=env))[name] == plain
    assert environment(plan(env=env, launcher=LauncherKind.TORCHRUN))[name] == torchrun


@pytest.mark.parametrize("value", ["64(x2)", "k=v=w", "l1\nl2", "$PATH", "", "q'u\"o", "ünï", " lead", "-x"])
def test_values_with_teeth_arrive_exactly(value: str) -> None:
    assert environment(plan(env=(("A", value),)))["A"] == value


def test_ipv6_addresses_stand_without_brackets() -> None:
    found = environment(plan(launcher=LauncherKind.TORCHRUN), addresses=["fd77::3", "fd77::20"])
    assert (found["MASTER_ADDR"], found["PET_MASTER_ADDR"]) == ("fd77::3", "fd77::3")
    assert found["NODUS_NODE_IPS"] == "fd77::3,fd77::20"


@pytest.mark.parametrize(
    "fields",
    [
        {"addresses": ["10.0.0.1"]},
        {"addresses": ["10.0.0.1", "gpu-01"]},
        {"addresses": ["[fd77::1]", "fd77::2"]},
        {"addresses": ["fe80::1%eth0", "fe80::2%eth0"]},
        {"master_port": 0},
        {"master_port": 65536},
        {"rank": 2},
    ],
)
def test_facts_that_do_not_fit_the_plan_are_a_fault_of_the_caller(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        environment(plan(), **fields)


def test_a_launcher_without_a_contract_has_no_environment() -> None:
    with pytest.raises(ValueError, match="Ray"):
        environment(plan(launcher=LauncherKind.RAY))


def test_reserved_names_are_the_documented_ones_in_their_exact_case() -> None:
    names = ["NODUS_X", "PET_", "MASTER_PORT", "NODE_RANK", "NNODES"]
    others = ["nodus_x", "RANK", "WORLD_SIZE", "NCCL_DEBUG", "NODE_RANKS", "MASTER", "X_PET_Y"]
    assert all(is_reserved(name) for name in names)
    assert not any(is_reserved(name) for name in others)


OWN = {
    "PATH": "/bin",
    "HOME": "/home/u",
    "OMP_NUM_THREADS": "4",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "PYTHONPATH": "/code",
    "PYTHONBREAKPOINT": "ipdb.set_trace",
    "AWS_ROLE_ARN": "arn",
    "GROUP": "staff",
}


def test_a_snapshot_from_before_ray_keeps_what_the_owner_set() -> None:
    assert clean_base_environment(OWN) == OWN


def test_no_name_of_the_control_plane_or_of_another_launcher_reaches_the_command() -> None:
    foreign = [
        *("RAY_ADDRESS", "RAY_CLIENT_MODE", "GANGMESH_STATE", "GANGMESH_TOKEN"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME"),
        *(
            "NODE_RANK",
            "NNODES",
            "MASTER_ADDR",
            "MASTER_PORT",
            "PET_NNODES",
            "NODUS_RUN",
            "NODUS_INCARNATION",
        ),
        *("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
    ]
    assert clean_base_environment({**OWN, **dict.fromkeys(foreign, "x")}) == OWN


def test_rays_breakpoint_hook_goes_wherever_it_is_found() -> None:
    assert clean_base_environment({"PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}) == {}


def test_inside_a_ray_worker_what_ray_sets_by_itself_goes_too() -> None:
    worker = {
        "PATH": "/bin",
        "RAY_RAYLET_PID": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONBREAKPOINT": "anything",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "0",
    }
    assert clean_base_environment(worker) == {"PATH": "/bin", "HIP_VISIBLE_DEVICES": "0"}
