"""Flags that people bring from elsewhere: what is refused, what is warned about, what agrees."""

from __future__ import annotations

from typing import Any

import pytest

from mesh.command_check import Finding, check_command
from mesh.command_lines import started_programs
from mesh.ids import RunName
from mesh.plan import RunPlan
from mesh.states import LauncherKind


def check(command: list[str] | str, **fields: Any) -> list[Finding]:
    """The findings; a string is a line for `bash -c`, a list is argv."""
    argv = ["bash", "-c", command] if isinstance(command, str) else command
    plan = {"name": RunName("demo"), "nodes": 2, "launcher": LauncherKind.TORCHRUN, **fields}
    return check_command(RunPlan(command=tuple(argv), **plan))


def torchrun(*flags: str, **fields: Any) -> list[Finding]:
    return check(["torchrun", *flags, "ok.py", "--nnodes=1", "--standalone"], **fields)


def verdicts(findings: list[Finding]) -> list[tuple[str, bool]]:
    return [(finding.flag, finding.refuses) for finding in findings]


PLAIN = {"launcher": LauncherKind.PLAIN}

AGREEING = [
    ["--nnodes=2"],
    ["--nnodes", "2:2"],
    ["--nproc-per-node=1"],
    ["--nproc_per_node", "1"],
    ["--rdzv-backend=static"],
    ["--max-restarts=0"],
    [
        "--log-dir",
        "/tmp/l",
        "-r",
        "3",
        "-t",
        "3",
        "--role",
        "r",
        "--rdzv-conf",
        "timeout=9",
        "--local-addr",
        "10.0.0.1",
    ],
    ["-m"],
    ["--no-python"],
    ["--unknown-to-us"],
]


@pytest.mark.parametrize("flags", AGREEING, ids=" ".join)
def test_a_flag_that_agrees_or_is_none_of_ours_gives_no_finding(flags: list[str]) -> None:
    assert torchrun(*flags) == []


AGREEING_LINES = [
    "torchrun --nnodes=$NNODES --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT t.py",
    "torchrun --nnodes=$PET_NNODES --node_rank=${PET_NODE_RANK} --rdzv_id=$PET_RDZV_ID t.py",
    "torchrun --nproc_per_node=$PET_NPROC_PER_NODE --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT t.py",
    "N=2; export M=$NNODES; torchrun --nnodes=$N t.py && torchrun --nnodes=$M t.py",
    "exec torchrun train.py",
]


@pytest.mark.parametrize("line", AGREEING_LINES)
def test_the_contracts_own_variables_agree(line: str) -> None:
    assert check(line) == []


REFUSED = [
    (["--nnodes=1"], "one machine for the whole world"),
    (["--nnodes", "1:1"], "one machine for the whole world"),
    (["--nnode=1"], "one machine for the whole world"),
    (["--standalone"], "on itself"),
    (["--stand"], "on itself"),
    (["--nnodes=4"], "wait for 4 machines, and this run has 2"),
    (["--node-rank=0"], "same rank"),
    (["--node_rank", "1"], "same rank"),
    (["--master-addr=localhost"], "on itself"),
    (["--master_addr", "127.0.0.1"], "on itself"),
    (["--master-addr=[::1]"], "on itself"),
    (["--rdzv-backend=c10d"], "without an endpoint"),
    (["--rdzv-backend=static", "--rdzv-endpoint=localhost:29400"], "on itself"),
    (["--rdzv-endpoint=0.0.0.0"], "on itself"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_a_flag_that_cannot_make_one_world_is_refused(flags: list[str], words: str) -> None:
    findings = torchrun(*flags)
    assert [finding.refuses for finding in findings] == [True]
    assert words in findings[0].message
    assert findings[0].remedy


WARNED = [
    (["--nnodes=1:4"], "overrides"),
    (["--nnodes="], "no value"),
    (["--node-rank="], "no value"),
    (["--nnodes=$NNODES"], "no shell is there"),
    (["--node-rank", "x"], "overrides"),
    (["--master-addr=10.0.0.1"], "overrides"),
    (["--master-addr=gpu-01"], "overrides"),
    (["--master-port=8008"], "overrides"),
    (["--rdzv-endpoint=10.0.0.1:29500"], "overrides"),
    (["--rdzv-id=my-run"], "overrides"),
    (["--nproc-per-node=auto"], "counts what each machine has"),
    (["--nproc-per-node=gpu"], "counts what each machine has"),
    (["--nproc-per-node=some"], "overrides"),
    (["--max-restarts=3"], "owns restarts"),
    (["--nnodes"], "no value"),
]


@pytest.mark.parametrize(("flags", "words"), WARNED, ids=[" ".join(flags) for flags, _ in WARNED])
def test_a_flag_that_overrides_the_contract_is_warned_about(flags: list[str], words: str) -> None:
    argv = ["torchrun", *flags] + ([] if flags == ["--nnodes"] else ["ok.py"])
    findings = check(argv)
    assert [finding.refuses for finding in findings] == [False]
    assert words in findings[0].message


def test_the_number_of_processes_is_the_users_on_a_cpu_run_and_the_gpus_on_a_gpu_run() -> None:
    assert torchrun("--nproc-per-node=4") == []
    assert verdicts(torchrun("--nproc-per-node=4", gpus_per_node=8)) == [("--nproc-per-node=4", False)]
    assert torchrun("--nproc-per-node=gpu", gpus_per_node=8) == []
    assert torchrun("--nproc-per-node=8", gpus_per_node=8) == []


@pytest.mark.parametrize("value", ["$RANDOM", "${RANDOM}", "$$", "$HOSTNAME", "job-$SLURM_PROCID"])
def test_an_id_that_differs_from_machine_to_machine_is_refused(value: str) -> None:
    (finding,) = check(f"torchrun --rdzv_id {value} t.py")
    assert finding.refuses
    assert "another one on each machine" in finding.message


def test_an_elastic_backend_with_an_endpoint_is_warned_about() -> None:
    findings = torchrun("--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29500")
    assert verdicts(findings) == [("--rdzv-backend=c10d", False), ("--rdzv-endpoint=10.0.0.1:29500", False)]
    (finding,) = check("torchrun --rdzv-backend=$BACKEND t.py")
    assert not finding.refuses


def test_a_variable_of_the_users_own_env_is_looked_into() -> None:
    env = (("WORLDS", "1"), ("PORT", "8008"))
    assert verdicts(check("torchrun --nnodes=$WORLDS --master-port ${PORT} t.py", env=env)) == [
        ("--nnodes=$WORLDS", True),
        ("--master-port ${PORT}", False),
    ]


def test_arguments_of_the_script_are_not_torchruns() -> None:
    assert check(["torchrun", "--nnodes=2", "train.py", "--nnodes=1", "--standalone"]) == []
    assert check(["python", "-m", "torch.distributed.run", "train.py", "--standalone"]) == []


def test_the_last_of_a_repeated_flag_counts_as_in_argparse() -> None:
    assert torchrun("--nnodes=1", "--nnodes=2") == []


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "-m", "torch.distributed.run", "--nnodes=1", "t.py"],
        [
            "python3.11",
            "-u",
            "-W",
            "ignore",
            "-mtorch.distributed.launch",
            "--nnodes",
            "1",
            "--use_env",
            "t.py",
        ],
        ["/opt/venv/bin/torchrun", "--nnodes=1", "t.py"],
        ["python", "/x/torch/distributed/run.py", "--nnodes=1", "t.py"],
        ["env", "A=1", "torchrun", "--nnodes=1", "t.py"],
        ["A=1", "torchrun", "--nnodes=1", "t.py"],
        ["timeout", "-k", "5", "1h", "numactl", "-N", "0", "torchrun", "--nnodes=1", "t.py"],
        ["bash", "-lc", "cd /x && torchrun --nnodes=1 t.py"],
        ["bash", "-e", "-c", "torchrun --nnodes=1 t.py | tee log"],
        ["bash", "--login", "-c", "torchrun \\\n  --nnodes=1 t.py 2>&1"],
        ["sh", "-c", "# don't\nset -x\nif true; then torchrun --nnodes=1 t.py; fi"],
        ["sh", "-c", "bash -c 'torchrun --nnodes=1 t.py'"],
        ["uv", "run", "torchrun", "--nnodes=1", "t.py"],
    ],
    ids=lambda argv: " ".join(argv)[:50],
)
def test_torchrun_is_found_however_it_is_started(argv: list[str]) -> None:
    assert [finding.refuses for finding in check(argv)] == [True]


@pytest.mark.parametrize(
    "argv",
    [
        ["echo", "torchrun", "--nnodes=1"],
        ["./start.sh", "torchrun", "--standalone"],
        ["bash", "start.sh", "torchrun --standalone"],
        ["bash"],
        ["bash", "-c"],
        ["bash", "-c", "echo 'open"],
        ["bash", "-c", "export A=1; "],
        ["sh", "-c", 'sh -c "sh -c \'sh -c \\"sh -c \\\\\\"torchrun --standalone t.py\\\\\\"\\"\'"'],
        ["timeout", "5", "./own-thing", "--standalone"],
        ["A=1"],
        ["bash", "-c", "python train.py --launcher torchrun --standalone"],
    ],
    ids=lambda argv: " ".join(argv)[:50],
)
def test_what_cannot_be_read_for_sure_is_not_judged(argv: list[str]) -> None:
    assert check(argv) == []


def test_python_alone_under_torchrun_is_told_that_it_gets_no_rank() -> None:
    for argv in (
        ["python", "train.py"],
        ["python", "-c", "pass"],
        ["python", "-X", "dev", "-m", "mine"],
        ["python", "-m"],
    ):
        (finding,) = check(argv)
        assert (finding.flag, finding.refuses) == ("python", False)
        assert "torchrun" in finding.remedy
    assert check(["python", "train.py"], **PLAIN) == []


def test_torchrun_under_plain_on_several_machines_is_refused_because_nobody_tells_it_of_its_peers() -> None:
    for flags in ([], ["--nnodes=2"], ["--nproc-per-node=2"]):
        (finding,) = check(["torchrun", *flags, "t.py"], **PLAIN)
        assert (finding.refuses, finding.remedy) == (True, "Add --launcher torchrun.")


def test_torchrun_under_plain_with_the_whole_contract_as_flags_agrees() -> None:
    line = (
        "torchrun --nnodes=$WORLD_SIZE --nproc-per-node=1 --node-rank=$RANK --master-addr=$MASTER_ADDR "
        "--master-port=$MASTER_PORT t.py"
    )
    assert check(line, **PLAIN) == []


def test_a_world_for_each_machine_under_plain_is_taken_for_intended_and_warned_about() -> None:
    assert verdicts(torchrun("--standalone", **PLAIN)) == [("--standalone", False)]
    assert verdicts(torchrun("--nnodes=1", **PLAIN)) == [("--nnodes=1", False)]


@pytest.mark.parametrize("launcher", [LauncherKind.PLAIN, LauncherKind.TORCHRUN])
def test_on_one_machine_only_what_waits_for_others_is_refused(launcher: LauncherKind) -> None:
    one: dict[str, Any] = {"nodes": 1, "launcher": launcher}
    flags = [
        "--nnodes=1",
        "--standalone",
        "--rdzv-backend=c10d",
        "--master-addr=localhost",
        "--max-restarts=0",
    ]
    assert torchrun(*flags, **one) == []
    assert verdicts(torchrun("--nnodes=2:4", **one)) == [("--nnodes=2:4", True)]
    assert torchrun("--nnodes=1:4", **one) == []
    assert verdicts(torchrun("--max-restarts=2", **one)) == [("--max-restarts=2", False)]
    assert check(["mpirun", "-n", "2", "./a"], **one) == []
    assert check(["accelerate", "launch", "t.py"], **one) == []


def test_mpirun_is_refused_with_the_reason_that_the_documents_give() -> None:
    (finding,) = check("mpirun -np 16 ./train", **PLAIN)
    assert finding.refuses
    assert "no ssh and no PMI" in finding.message
    assert "PyTorch, JAX, Horovod" in finding.remedy


@pytest.mark.parametrize("program", ["accelerate", "deepspeed", "torchx"])
def test_other_launchers_are_warned_about(program: str) -> None:
    assert verdicts(check([program, "launch", "t.py"], **PLAIN)) == [(program, False)]


# -- the migration set: launch shapes as people bring them -------------------------------------------------------------


def test_m1_an_sbatch_script_with_c10d() -> None:
    script = """\
    HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
    export NCCL_DEBUG=WARN
    srun --kill-on-bad-exit=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 --rdzv-id=$SLURM_JOB_ID \\
         --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 train.py --ckpt "$PWD/ck"
    """
    found = check(script, gpus_per_node=4)
    assert [finding.flag for finding in found] == [
        "scontrol",
        "srun",
        "--nnodes=$SLURM_NNODES",
        "--rdzv-id=$SLURM_JOB_ID",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=$HEAD:29500",
    ]
    assert not any(finding.refuses for finding in found)
    assert check(["torchrun", "train.py", "--ckpt", "ck"], gpus_per_node=4) == []


def test_m2_the_mis_shaped_sbatch_is_refused() -> None:
    line = (
        "srun torchrun --nnodes 4 --nproc_per_node 1 --rdzv_id $RANDOM --rdzv_backend c10d "
        "--rdzv_endpoint $ip:29500 t.py"
    )
    refused = [finding.flag for finding in check(line) if finding.refuses]
    assert refused == ["--nnodes 4", "--rdzv_id $RANDOM"]


def test_m3_an_accelerate_command_in_a_string_under_srun() -> None:
    line = (
        'L="accelerate launch --num_machines $SLURM_NNODES"; srun bash -c "$L tune.py --note \'two words\'"'
    )
    assert verdicts(check(line, **PLAIN)) == [("srun", False)]


def test_m6_a_skypilot_task() -> None:
    line = (
        'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n1)\n'
        "torchrun --nnodes=$SKYPILOT_NUM_NODES --node_rank=$SKYPILOT_NODE_RANK "
        "--nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE --master_addr=$HEAD --master_port=8008 train.py"
    )
    found = check(line, gpus_per_node=8)
    assert len(found) == 5
    assert not any(finding.refuses for finding in found)


def test_m7_a_dstack_task_whose_variables_were_expanded_to_nothing() -> None:
    found = check(
        ["torchrun", "--nnodes=", "--node-rank=", "--master-addr=", "--master-port=12345", "train.py", "50"]
    )
    assert [finding.flag for finding in found] == [
        "--nnodes=",
        "--node-rank=",
        "--master-addr=",
        "--master-port=12345",
    ]


def test_m9_bare_torchrun_of_a_pytorchjob_needs_nothing() -> None:
    assert check(["torchrun", "train.py"], nodes=4) == []
    assert verdicts(check(["torchrun", "--nproc-per-node=auto", "train.py"], nodes=4)) == [
        ("--nproc-per-node=auto", False)
    ]


def test_m10_a_jobset_worker() -> None:
    line = (
        "torchrun --nnodes=2 --nproc_per_node=1 --node_rank=$JOB_COMPLETION_INDEX "
        "--master_addr=$MASTER_ADDR --master_port=$MASTER_PORT t.py"
    )
    assert verdicts(check(["bash", "-xc", line])) == [("--node_rank=$JOB_COMPLETION_INDEX", False)]


def test_an_old_launcher_reads_the_same_variables_and_needs_no_flags() -> None:
    assert check(["python", "-m", "torch.distributed.launch", "--use_env", "t.py"]) == []


def test_case_5_both_of_its_commands_are_refused() -> None:
    c10d = torchrun("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400")
    assert ("--rdzv-endpoint=localhost:29400", True) in verdicts(c10d)
    worlds = torchrun("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400")
    assert ("--nnodes=1", True) in verdicts(worlds)


def test_a_program_knows_whether_a_shell_expanded_its_arguments() -> None:
    variables = {"NNODES": "2"}
    (bare,) = started_programs(["torchrun", "--nnodes=$NNODES"], variables=variables)
    (shell,) = started_programs(["bash", "-c", "torchrun --nnodes=$NNODES"], variables=variables)
    assert (bare.in_shell, bare.expanded) == (False, ("--nnodes=$NNODES",))
    assert (shell.in_shell, shell.expanded) == (True, ("--nnodes=2",))
