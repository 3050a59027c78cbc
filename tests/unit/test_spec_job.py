"""The three ways to a Job, and what each field says about what it does not take."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mesh.errors import SpecError
from mesh.plan import RunPlan
from mesh.reasons import Reason
from mesh.spec import Job, job_from_data, job_from_flags, parse_job, resolve
from mesh.spec.problems import describe
from mesh.states import FailurePolicy, LauncherKind, NetworkScope, TransportPolicy

DOCUMENT = """\
apiVersion: nodus.dev/v1
kind: Job
metadata:
  name: torchrun-2-node
  labels: {team: vision}
spec:
  command: [torchrun, train.py, --epochs, 3, --lr, 1e-4, --note, "two words"]
  env:
    TOKEN: s3cret
    EMPTY: ""
    NUMBER: 3
    FLAG: true
  workingDir: /data/code
  resources:
    gpu: {type: [H100, a100], count: 8}
  distributed:
    nodes: 2
    launcher: torchrun
    network: global
    transport: AUTO
    startupTimeout: 20m
    maxAssemblyRetries: 1
  recovery: {maxAttempts: 5, onProcessFailure: Fail}
  gracePeriod: 60
  maxCost: 2.00
"""


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": {"command": ["true"], **fields}}


def refusal(data: dict[str, Any] | str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_job(data, source="job.yaml") if isinstance(data, str) else job_from_data(data, source="")
    return caught.value


def flag_refusal(**flags: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        job_from_flags(**{"command": ["true"], **flags})
    return caught.value


def test_a_document_comes_to_a_plan() -> None:
    plan = resolve(parse_job(DOCUMENT, source="job.yaml"))
    assert plan == RunPlan(
        name="torchrun-2-node",  # type: ignore[arg-type]
        command=("torchrun", "train.py", "--epochs", "3", "--lr", "1e-4", "--note", "two words"),
        env=(("TOKEN", "s3cret"), ("EMPTY", ""), ("NUMBER", "3"), ("FLAG", "true")),
        working_dir="/data/code",
        labels=(("team", "vision"),),
        launcher=LauncherKind.TORCHRUN,
        nodes=2,
        gpus_per_node=8,
        gpu_types=("H100", "A100"),
        network=NetworkScope.GLOBAL,
        transport_policy=TransportPolicy.AUTO,
        startup_timeout_s=1200.0,
        max_assembly_retries=1,
        max_restarts=5,
        on_process_failure=FailurePolicy.FAIL,
        grace_period_s=60.0,
    )
    assert RunPlan.from_record(json.loads(json.dumps(plan.to_record()))) == plan


def test_the_json_of_a_job_has_every_default_and_the_documents_keys() -> None:
    job = parse_job("metadata: {name: a}\nspec: {command: [x], distributed: {nodes: 2}}", source="job.yaml")
    assert job.to_json() == {
        "apiVersion": "nodus.dev/v1",
        "kind": "Job",
        "metadata": {"name": "a", "labels": {}},
        "spec": {
            "command": ["x"],
            "env": {},
            "resources": {},
            "distributed": {
                "nodes": 2,
                "launcher": "Plain",
                "network": "Colocated",
                "transport": "Direct",
                "startupTimeout": "15m",
                "maxAssemblyRetries": 2,
            },
            "recovery": {"maxAttempts": 3, "onProcessFailure": "Fail"},
            "gracePeriod": "30s",
        },
    }


def test_the_json_of_a_job_reads_back_as_the_same_job() -> None:
    job = parse_job(DOCUMENT, source="job.yaml")
    assert job_from_data(json.loads(json.dumps(job.to_json())), source="") == job
    assert job.to_json()["spec"]["maxCost"] == "2.00"
    assert job.to_json()["spec"]["gracePeriod"] == "1m"


def test_flags_give_the_same_job_as_the_document() -> None:
    job = job_from_flags(
        command=["torchrun", "train.py", "--epochs", "3", "--lr", "1e-4", "--note", "two words"],
        name="torchrun-2-node",
        nodes="2",
        launcher="Torchrun",
        network="Global",
        transport="auto",
        gpu=["H100:8", "A100:8"],
        env=["TOKEN", "EMPTY=", "NUMBER=3", "FLAG=no", "FLAG=true"],
        client_environment={"TOKEN": "s3cret"},
        labels=["team=vision"],
        startup_timeout="1200s",
        max_assembly_retries=1,
        max_attempts="5",
        on_process_failure="fail",
        grace_period="1m",
        max_cost="2.00",
        working_dir="/data/code",
    )
    assert job == parse_job(DOCUMENT, source="job.yaml")


def test_the_documented_command_lines_are_jobs() -> None:
    first = job_from_flags(
        command=["torchrun", "train.py"],
        name="torchrun-2-node",
        gpu=["H100"],
        nodes=2,
        launcher="torchrun",
        max_cost="2.00",
    )
    assert (resolve(first).nodes, resolve(first).gpus_per_node) == (2, 1)
    total = job_from_flags(command=["torchrun", "train.py"], gpu=["H100"], total_gpus=16, launcher="torchrun")
    assert (resolve(total).nodes, resolve(total).gpus_per_node) == (2, 8)
    single = job_from_flags(command=["torchrun", "train.py"], gpu=["H100:8"], max_cost=250)
    assert (resolve(single).nodes, resolve(single).gpus_per_node) == (1, 8)


def test_a_job_without_a_name_gets_one() -> None:
    one, two = (job_from_data(spec(), source="") for _ in range(2))
    assert one.metadata.name != two.metadata.name
    assert job_from_flags(command=["x"], name=None).metadata.name


def test_env_files_come_first_and_minus_e_wins() -> None:
    job = job_from_flags(
        command=["x"], env_files=[("a.env", "A=1\nB=1\nC=1"), ("b.env", "B=2\nC=2")], env=["C=3"]
    )
    assert job.spec.env == {"A": "1", "B": "2", "C": "3"}


def test_an_env_list_as_other_systems_write_it_is_taken() -> None:
    job = job_from_data(spec(env=["A=1=2", {"name": "B", "value": "x"}]), source="")
    assert job.spec.env == {"A": "1=2", "B": "x"}


def test_what_the_server_shows_can_be_submitted_again() -> None:
    shown = {
        "apiVersion": "nodus.dev/v1",
        "kind": "Job",
        "metadata": {"name": "a", "uid": "0123", "createdAt": 12.5},
        **spec(),
        "status": {"state": "Succeeded"},
    }
    job = job_from_data(shown, source="")
    assert (job.metadata.name, job.metadata.uid, job.metadata.created_at, job.status) == (
        "a",
        None,
        None,
        None,
    )


def test_the_short_form_of_a_gpu_is_taken_in_documents_too() -> None:
    job = job_from_data(spec(resources={"gpu": "h100:4"}), source="")
    assert job.spec.resources.gpu is not None
    assert (job.spec.resources.gpu.type, job.spec.resources.gpu.count) == (("H100",), 4)
    assert resolve(job_from_data(spec(resources={"gpu": {"count": 2}}), source="")).gpus_per_node == 2
    assert refusal(spec(resources={"gpu": "H100:x:y"})).details["field"] == "spec.resources.gpu.count"
    assert refusal(spec(resources={"gpu": "-"})).details["field"] == "spec.resources.gpu"
    assert "mapping" in refusal(spec(resources=[])).message


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"command": []}, "spec.command", "no program"),
        ({"command": [""]}, "spec.command", "no program"),
        ({"command": "torchrun train.py"}, "spec.command", "bash, -c"),
        ({"command": 3}, "spec.command", "a list"),
        ({"command": ["a", ["b"]]}, "spec.command[1]", "takes a text"),
        ({"command": ["a", "b\0"]}, "spec.command[1]", "NUL"),
        ({"command": ["a", "\udcff"]}, "spec.command[1]", "UTF-8"),
        ({"env": "A=1"}, "spec.env", "a mapping"),
        ({"env": {"A": None}}, "spec.env.A", 'write A: ""'),
        ({"env": {"A": ["x"]}}, "spec.env.A", "a text or a number"),
        ({"env": {"A": "x" * 131_072}}, "spec.env.A", "A with its value has 131,074 bytes"),
        ({"env": {"1BAD": "x"}}, "spec.env", "'1BAD'"),
        ({"env": ["A=1", "A=2"]}, "spec.env.A", "twice"),
        ({"env": ["TOKEN"]}, "spec.env[0]", "-e TOKEN"),
        ({"env": [3]}, "spec.env[0]", "NAME=VALUE"),
        ({"env": {f"A{n}": "x" * 100_000 for n in range(16)}}, "spec", "at most 1,572,864"),
        ({"workingDir": "code"}, "spec.workingDir", "absolute"),
        ({"workingDir": 3}, "spec.workingDir", "absolute"),
        ({"workingDir": "/a\0"}, "spec.workingDir", "absolute"),
        ({"workingDir": "/" + "x" * 5000}, "spec.workingDir", "4095"),
        ({"image": "a b"}, "spec.image", "container image"),
        ({"image": 3}, "spec.image", "container image"),
        ({"gracePeriod": "2h"}, "spec.gracePeriod", "0s to 1h"),
        ({"gracePeriod": 10**400}, "spec.gracePeriod", "written as"),
        ({"gracePeriod": True}, "spec.gracePeriod", "written as"),
        ({"gracePeriod": float("nan")}, "spec.gracePeriod", "0s to 1h"),
        ({"distributed": {"startupTimeout": []}}, "spec.distributed.startupTimeout", "written as"),
        ({"image": None, "maxCost": "-1"}, "spec.maxCost", "above 0"),
        ({"maxCost": True}, "spec.maxCost", "US dollars"),
        ({"maxCost": "$2"}, "spec.maxCost", "US dollars"),
        ({"maxCost": "nan"}, "spec.maxCost", "US dollars"),
        ({"maxCost": 0}, "spec.maxCost", "above 0"),
        ({"maxCost": "1.00001"}, "spec.maxCost", "four decimals"),
        ({"resources": {"gpu": {"type": []}}}, "spec.resources.gpu.type", "H100"),
        ({"resources": {"gpu": {"type": ["H100", "x y"]}}}, "spec.resources.gpu.type", '"x y"'),
        ({"resources": {"gpu": {"count": 3}}}, "spec.resources.gpu.count", "1, 2, 4 or 8"),
        ({"distributed": {"nodes": 0}}, "spec.distributed.nodes", "2 to 8"),
        ({"distributed": {"nodes": True}}, "spec.distributed.nodes", "2 to 8"),
        ({"distributed": {"nodes": 2.0}}, "spec.distributed.nodes", "2 to 8"),
        ({"distributed": {"totalGPUs": "many"}}, "spec.distributed.totalGPUs", "1 to 64"),
        ({"distributed": {"nodes": 2, "totalGPUs": 16}}, "spec.distributed.nodes", "exactly one"),
        ({"distributed": {"totalGPUs": 12, "gpusPerNode": 8}}, "spec.distributed.totalGPUs", "12 = 1 × 8 + 4"),
        ({"distributed": {"launcher": "slurm"}}, "spec.distributed.launcher", "Plain, Torchrun, Ray, Verl"),
        ({"distributed": {"launcher": "torchrunn"}}, "spec.distributed.launcher", "Did you mean Torchrun?"),
        ({"distributed": {"launcher": None}}, "spec.distributed.launcher", "got nothing"),
        ({"distributed": {"network": "wan"}}, "spec.distributed.network", "Colocated, Regional or Global"),
        ({"distributed": {"transport": "x"}}, "spec.distributed.transport", "Direct or Auto"),
        ({"distributed": {"startupTimeout": "4m"}}, "spec.distributed.startupTimeout", "5m to 1h"),
        ({"distributed": {"startupTimeout": "soon"}}, "spec.distributed.startupTimeout", '"15m"'),
        ({"distributed": {"maxAssemblyRetries": 11}}, "spec.distributed.maxAssemblyRetries", "0 to 10"),
        ({"distributed": None}, "spec.distributed", "a mapping"),
        ({"recovery": {"maxAttempts": -1}}, "spec.recovery.maxAttempts", "0 to 100"),
        ({"recovery": {"maxAttempts": "lots"}}, "spec.recovery.maxAttempts", "0 to 100"),
        ({"recovery": {"onProcessFailure": "retry"}}, "spec.recovery.onProcessFailure", "Fail, RestartGang"),
    ],
)  # fmt: skip
def test_a_field_says_what_it_got_and_what_it_takes(fields: dict[str, Any], field: str, words: str) -> None:
    error = refusal(spec(**fields))
    assert error.reason is Reason.INVALID_SPEC
    assert error.details["field"] == field
    assert words in error.message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({**spec(), "kind": "PyTorchJob"}, 'kind: got "PyTorchJob". It takes Job.'),
        ({**spec(), "apiVersion": "v1"}, "It takes nodus.dev/v1."),
        ({}, "spec: It is missing"),
        ({"spec": {}}, "spec.command: It is missing"),
        ({"spec": None}, "spec: got nothing. It takes a mapping."),
        ({**spec(), "metadata": 3}, "metadata: got 3. It takes a mapping."),
        ({**spec(comand=[])}, 'spec.comand: There is no such field. Did you mean "command"?'),
        ({**spec(distributed={"gpus_per_node": 2})}, 'Did you mean "gpusPerNode"?'),
        ({**spec(nodes=2)}, "It belongs at spec.distributed.nodes."),
        ({**spec(), "command": ["x"]}, "It belongs at spec.command."),
        ({**spec(), "zzzz": 1}, "There is no such field; a job has apiVersion, kind, metadata, spec, status."),
        ({**spec(recovery={"zzzz": 1})}, "spec.recovery has maxAttempts, onProcessFailure."),
        ({**spec(), "metadata": {"labels": [1]}}, "metadata.labels: got a list of 1."),
        ({**spec(), "metadata": {"labels": {"a b": "x"}}}, 'got "a b". A label\'s name has'),
        ({**spec(), "metadata": {"labels": {"nodus.dev/job": "x"}}}, "set by the deployment"),
        ({**spec(), "metadata": {"labels": {"a": "x y"}}}, "metadata.labels.a: got \"x y\"."),
        ({**spec(), "metadata": {"labels": {"a": None}}}, "metadata.labels.a: got nothing."),
        ({**spec(), "metadata": {"labels": {f"l{n}": "x" for n in range(65)}}}, "at most 64 labels"),
        ({**spec(), "metadata": {"name": 7}}, "metadata.name: got 7."),
    ],
)  # fmt: skip
def test_a_document_of_another_shape_is_told_what_a_job_looks_like(data: dict[str, Any], words: str) -> None:
    assert words in refusal(data).message


def test_a_job_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(SpecError, match="got a list of 1"):
        job_from_data([1], source="request body")


def test_all_problems_are_reported_at_once_with_their_lines() -> None:
    error = refusal("metadata:\n  name: A B\nspec:\n  distributed:\n    nodes: 9\n    lancher: x\nextra: 1\n")
    assert error.message.splitlines() == [
        "job.yaml has 5 problems:",
        '  metadata.name (line 2): got "A B". A run\'s name has 1 to 53 lower-case letters, digits and dashes, '
        'a letter or digit at both ends. You could use "a-b".',
        "  spec.command (line 4): It is missing, and every job has one.",
        "  spec.distributed.nodes (line 5): got 9. It takes 2 to 8 machines; a gang has at most 8 members.",
        '  spec.distributed.lancher (line 6): There is no such field. Did you mean "launcher"?',
        "  extra (line 7): There is no such field; a job has apiVersion, kind, metadata, spec, status.",
    ]
    assert error.details["problems"] == 5


def test_a_flood_of_problems_is_cut() -> None:
    error = refusal(spec(env={f"{n}X": "x" for n in range(50)}))
    assert error.message.splitlines()[-1] == "  and 30 more"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (0, "--nodes: got 0. It takes 2 to 8 machines."),
        (1, "--nodes: got 1. It takes 2 to 8 machines; for one machine leave it out."),
        (9, "--nodes: got 9. It takes 2 to 8 machines; a gang has at most 8 members."),
        (-2, "--nodes: got -2. It takes 2 to 8 machines."),
        ("two", '--nodes: got "two". It takes 2 to 8 machines.'),
    ],
)
def test_the_number_of_nodes_is_2_to_8(nodes: int | str, words: str) -> None:
    assert flag_refusal(nodes=nodes).message == words


def test_problems_of_a_command_line_are_spelled_as_flags_and_reported_at_once() -> None:
    error = flag_refusal(
        command=[],
        name="../x",
        gpu=["H100:4", "A100:8"],
        labels=["team"],
        env=["1BAD=s3cret", "GONE", "NODUS_X=1", "PET_NNODES=s3cret"],
        env_files=[("f.env", "MASTER_PORT=1\n")],
        max_cost="a lot",
    )
    lines = error.message.splitlines()
    assert lines[0] == "This command line has 8 problems:"
    starts = ["--gpu:", "--label:", "-e: '1BAD'", "-e: GONE", "--name:", "COMMAND:", "-e:", "--max-cost:"]
    assert [line.strip().startswith(start) for line, start in zip(lines[1:], starts, strict=True)] == [
        True
    ] * 8
    assert "MASTER_PORT, NODUS_X, PET_NNODES are reserved" in error.message
    assert "s3cret" not in error.message


def test_a_fault_in_an_env_file_is_named_by_file_and_line() -> None:
    assert "--env-file: f.env, line 2: " in flag_refusal(env_files=[("f.env", "A=1\n=x")]).message


def test_a_gpu_flag_that_is_none_shows_what_was_written() -> None:
    assert '--gpu: got "H100:". It takes TYPE or TYPE:COUNT' in flag_refusal(gpu=["H100:"]).message
    assert "--total-gpus: got 12." in flag_refusal(total_gpus=12, gpus_per_node="8").message
    assert "--gpus-per-node: got 4." in flag_refusal(gpu=["H100:8"], gpus_per_node=4).message


def test_nothing_is_what_was_not_said_where_that_has_a_meaning() -> None:
    said_nothing = spec(
        workingDir=None,
        image=None,
        maxCost=None,
        distributed={"nodes": None, "totalGPUs": None, "gpusPerNode": None},
    )
    job = job_from_data({**said_nothing, "metadata": {"name": "a"}}, source="")
    assert job == job_from_data({**spec(), "metadata": {"name": "a"}}, source="")


def test_a_name_of_which_nothing_is_left_gets_no_suggestion() -> None:
    assert "You could use" not in flag_refusal(name="日本").message
    assert "This one has 300 characters." in flag_refusal(name="-" * 300).message


def test_a_type_that_is_named_twice_counts_once() -> None:
    job = job_from_data(spec(resources={"gpu": {"type": ["H100", "h100"]}}), source="")
    assert job.spec.resources.gpu is not None
    assert job.spec.resources.gpu.type == ("H100",)


def test_the_second_format_is_not_available_yet() -> None:
    error = refusal({"spec": {"start": "Gang", "task_template": {"command": "bash"}}})
    assert error.reason is Reason.NOT_AVAILABLE_YET
    assert refusal("spec: {task_groups: []}").details["field"] == "spec.task_groups"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "nothing"),
        ({}, "an empty mapping"),
        ({1: 2}, "a mapping"),
        ([], "an empty list"),
        ((1, 2), "a list of 2"),
        (True, "true"),
        (False, "false"),
        (2.5, "2.5"),
        ("ä", '"ä"'),
        ("a\n", '"a\\n"'),
        ("x" * 61, '"' + "x" * 60 + '…" (61 characters)'),
    ],
)
def test_a_value_is_described_in_one_line(value: Any, shown: str) -> None:
    assert describe(value) == shown


def test_a_job_has_a_json_schema_for_the_api_document() -> None:
    schema = Job.model_json_schema()
    distributed = schema["$defs"]["Distributed"]["properties"]
    assert distributed["nodes"]["maximum"] == 8
    assert {"type": "string"} in distributed["startupTimeout"]["anyOf"]
