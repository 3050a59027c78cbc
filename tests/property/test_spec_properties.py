"""What holds for every job, every environment and every text."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from mesh.cli.output import yaml_text
from mesh.command_check import check_command
from mesh.contract import rank_environment
from mesh.errors import SpecError
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunName, RunUid
from mesh.plan import RunPlan
from mesh.spec import (
    format_duration,
    is_run_name,
    job_from_data,
    job_from_flags,
    parse_duration,
    parse_job,
    resolve,
    suggest_run_name,
)
from mesh.spec.document import read_document, scalar
from mesh.spec.environment import Assignment, EnvironmentProblem, parse_env_file
from mesh.states import LauncherKind, Transport
from mesh.topology import ShapeError, resolve_topology

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True).filter(
    lambda name: not name.startswith(("NODUS_", "PET_", "MASTER_")) and name not in ("NODE_RANK", "NNODES")
)
envs = st.dictionaries(names, texts, max_size=6)
commands = st.lists(texts, min_size=1, max_size=6).filter(lambda command: command[0] != "")
sizes = st.sampled_from([1, 2, 4, 8])
shapes = st.one_of(
    st.fixed_dictionaries({}, optional={"nodes": st.integers(2, 8), "gpusPerNode": sizes}),
    st.fixed_dictionaries({"totalGPUs": sizes}),
)
jobs = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries({"name": st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True)}),
        "spec": st.fixed_dictionaries(
            {"command": commands},
            optional={
                "env": envs,
                "distributed": st.builds(
                    lambda shape, launcher, minutes: {
                        **shape,
                        "launcher": launcher,
                        "startupTimeout": f"{minutes}m",
                    },
                    shapes,
                    st.sampled_from([kind.value for kind in LauncherKind]),
                    st.integers(5, 60),
                ),
                "recovery": st.fixed_dictionaries({"maxAttempts": st.integers(0, 100)}),
                "gracePeriod": st.floats(0, 3600),
                "maxCost": st.decimals(min_value="0.01", max_value=10_000, places=2).map(str),
            },
        ),
    }
)


@given(jobs)
@example({"metadata": {"name": "nel"}, "spec": {"command": ["\x85"]}})
def test_a_job_survives_its_own_json_and_yaml(data: dict[str, Any]) -> None:
    job = job_from_data(data, source="")
    shown = job.to_json()
    assert parse_job(json.dumps(shown), source="job.json") == job
    assert parse_job(yaml_text(shown), source="job.yaml") == job
    assert job_from_data(shown, source="").to_json() == shown
    plan = resolve(job)
    assert RunPlan.from_record(json.loads(json.dumps(plan.to_record()))) == plan


@given(envs, st.lists(texts, max_size=5))
def test_flags_give_every_value_and_argument_exactly(env: dict[str, str], arguments: list[str]) -> None:
    job = job_from_flags(command=["x", *arguments], env=[f"{name}={value}" for name, value in env.items()])
    assert job.spec.env == env
    assert job.spec.command == ("x", *arguments)


@given(st.dictionaries(names, texts.filter(lambda text: "'" not in text and "\r" not in text), max_size=5))
def test_single_quotes_in_an_env_file_keep_everything(env: dict[str, str]) -> None:
    text = "".join(f"{name}='{value}'\n" for name, value in env.items())
    assert parse_env_file(text, source="f") == [Assignment(*pair) for pair in env.items()]


@given(st.text(max_size=200))
def test_no_env_file_raises_anything_but_its_problem(text: str) -> None:
    try:
        parse_env_file(text, source="f")
    except EnvironmentProblem as problem:
        assert problem.text.startswith("f, line ")


@given(st.text(max_size=200), st.sampled_from(["job.yaml", "job.json", "standard input"]))
def test_no_document_raises_anything_but_a_spec_error(text: str, source: str) -> None:
    try:
        parse_job(text, source=source)
    except SpecError as error:
        assert error.message


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
known_fields = st.sampled_from(
    [
        "command",
        "env",
        "workingDir",
        "image",
        "resources",
        "distributed",
        "recovery",
        "gracePeriod",
        "maxCost",
        "x",
    ]
)


@given(json_like, json_like, st.dictionaries(known_fields, json_like, max_size=6))
def test_no_data_raises_anything_but_a_spec_error(metadata: Any, kind: Any, spec: dict[str, Any]) -> None:
    for data in (
        {"metadata": metadata, "spec": {"command": ["x"], **spec}},
        {"kind": kind, "spec": spec},
        metadata,
    ):
        try:
            job_from_data(data, source="")
        except SpecError as error:
            assert error.message


@given(st.text(max_size=30))
def test_a_scalar_written_back_is_the_text_that_was_read(text: str) -> None:
    value = scalar(text)
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert str(value) == text


@given(texts.filter(lambda text: text.isprintable()))
def test_a_quoted_yaml_scalar_is_its_text(text: str) -> None:
    quoted = "'" + text.replace("'", "''") + "'"
    assert read_document(f"a: {quoted}", source="job.yaml").data == {"a": text}


@given(st.integers(0, 10**10))
def test_a_duration_reads_back_to_the_millisecond(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.text(max_size=80))
def test_a_suggested_name_is_always_allowed(text: str) -> None:
    suggestion = suggest_run_name(text)
    assert suggestion is None or is_run_name(suggestion)


optional = st.none() | st.integers(-1, 70)


@given(optional, optional, optional, optional, st.booleans())
def test_a_shape_is_within_its_bounds_or_refused(
    nodes: int | None, total: int | None, per_node: int | None, count: int | None, wanted: bool
) -> None:
    try:
        shape = resolve_topology(
            nodes=nodes, total_gpus=total, gpus_per_node=per_node, gpu_count=count, gpu_wanted=wanted
        )
    except ShapeError as error:
        assert error.text
        return
    assert 1 <= shape.nodes <= 8
    assert shape.gpus_per_node in (0, 1, 2, 4, 8)
    assert total is None or shape.nodes * shape.gpus_per_node == total
    assert nodes is None or shape.nodes == nodes


@given(envs, st.integers(1, 8), st.sampled_from([LauncherKind.PLAIN, LauncherKind.TORCHRUN]), st.data())
def test_the_contract_is_the_same_whatever_the_user_sets(
    env: dict[str, str], nodes: int, launcher: LauncherKind, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, nodes - 1))

    def environment(pairs: dict[str, str]) -> dict[str, str]:
        return rank_environment(
            plan=RunPlan(
                name=RunName("a"), command=("x",), nodes=nodes, launcher=launcher, env=tuple(pairs.items())
            ),
            incarnation=Incarnation(
                run_uid=RunUid("u"), epoch=Epoch(1), rank=Rank(rank), token=IncarnationToken("t")
            ),
            addresses=[f"10.0.0.{number + 1}" for number in range(nodes)],
            master_port=29500,
            transport=Transport.PRIVATE,
            state_dir="/s",
        )

    bare, full = environment({}), environment(env)
    overridden = (
        {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} if launcher is LauncherKind.PLAIN else set()
    )
    users = {name: value for name, value in env.items() if name not in overridden}
    assert full == {**bare, **users}


words = st.sampled_from(
    ["torchrun", "bash", "-c", "-lc", "python", "-m", "torch.distributed.run", "--nnodes", "--nnodes=1", "$X"]
)


@given(st.lists(words | texts, min_size=1, max_size=8), st.integers(1, 8))
def test_no_command_breaks_the_check(command: list[str], nodes: int) -> None:
    for argv in (command, ["bash", "-c", " ".join(command)]):
        plan = RunPlan(name=RunName("a"), command=tuple(argv), nodes=nodes, launcher=LauncherKind.TORCHRUN)
        for finding in check_command(plan):
            assert finding.message
            assert finding.remedy
