"""The ways in: a document's text, data that is already decoded, a command line's values. All give the same `Job`.

Every way ends in `_validated`, so a rule holds for all of them or for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from mesh.errors import SpecError
from mesh.reasons import Reason
from mesh.spec.document import Path, read_document
from mesh.spec.environment import Assignment, EnvironmentProblem, parse_env_file, parse_flag, settle
from mesh.spec.fields import parse_gpus
from mesh.spec.model import Job
from mesh.spec.names import new_run_name
from mesh.spec.problems import Problem, describe, dotted, problems_of, spec_error
from mesh.states import FailurePolicy

SERVER_PARTS: tuple[Path, ...] = (("status",), ("metadata", "uid"), ("metadata", "createdAt"))
"""What `mesh get -o json` shows and a submit ignores, so that one's output can be the other's input."""
SECOND_FORMAT_MARKS = ("task_template", "task_groups")

FLAGS: dict[Path, str] = {
    ("metadata", "name"): "--name",
    ("metadata", "labels"): "--label",
    ("spec",): "COMMAND and -e",
    ("spec", "command"): "COMMAND",
    ("spec", "env"): "-e",
    ("spec", "workingDir"): "--working-dir",
    ("spec", "image"): "--image",
    ("spec", "resources", "gpu"): "--gpu",
    ("spec", "distributed", "nodes"): "--nodes",
    ("spec", "distributed", "totalGPUs"): "--total-gpus",
    ("spec", "distributed", "gpusPerNode"): "--gpus-per-node",
    ("spec", "distributed", "launcher"): "--launcher",
    ("spec", "distributed", "network"): "--network",
    ("spec", "distributed", "transport"): "--transport",
    ("spec", "distributed", "startupTimeout"): "--startup-timeout",
    ("spec", "distributed", "maxAssemblyRetries"): "--max-assembly-retries",
    ("spec", "recovery", "maxAttempts"): "--max-attempts",
    ("spec", "recovery", "onProcessFailure"): "--on-process-failure",
    ("spec", "gracePeriod"): "--grace-period",
    ("spec", "maxCost"): "--max-cost",
}
_FAILURE_WORDS = {
    "restart": FailurePolicy.RESTART_GANG,
    "restart-gang": FailurePolicy.RESTART_GANG,
    "restart-rank": FailurePolicy.RESTART_RANK,
}


def parse_job(text: str, *, source: str) -> Job:
    """A job from a YAML or JSON document.

    Args:
        text: the document.
        source: how errors call it: a file's name, `standard input`, `request body`.

    Raises:
        SpecError: with every problem of the document, each with its field and, for YAML, its line.
    """
    document = read_document(text, source=source)
    return _validated(document.data, source=source, lines=document.lines)


def job_from_data(data: Any, *, source: str) -> Job:
    """A job from data that is already decoded. Raises SpecError as `parse_job` does."""
    if not isinstance(data, dict):
        raise spec_error([Problem("A job is a mapping.", got=describe(data))], source=source)
    return _validated(data, source=source)


@dataclass(slots=True, kw_only=True)
class _Line:
    """A command line on its way to a document: what it says, and what cannot even be put into one."""

    data: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    spelling: dict[Path, str] = field(default_factory=lambda: dict(FLAGS))

    def put(self, path: Path, value: Any) -> None:
        """Puts a value in its place; None is a flag that was not given."""
        if value is None:
            return
        place = self.data
        for part in path[:-1]:
            place = place.setdefault(str(part), {})
        place[str(path[-1])] = value

    def spell(self, path: Path) -> str:
        """The flag that a path comes from; for a part of what a flag says, the flag."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.spelling:
                return self.spelling[path[:length]]
        return dotted(path)


def job_from_flags(
    *,
    command: Sequence[str],
    name: str | None = None,
    nodes: int | str | None = None,
    total_gpus: int | str | None = None,
    gpus_per_node: int | str | None = None,
    launcher: str | None = None,
    network: str | None = None,
    transport: str | None = None,
    gpu: Sequence[str] = (),
    env: Sequence[str] = (),
    env_files: Sequence[tuple[str, str]] = (),
    client_environment: Mapping[str, str] | None = None,
    labels: Sequence[str] = (),
    startup_timeout: str | None = None,
    max_assembly_retries: int | str | None = None,
    max_attempts: int | str | None = None,
    on_process_failure: str | None = None,
    grace_period: str | None = None,
    max_cost: str | float | None = None,
    working_dir: str | None = None,
    image: str | None = None,
) -> Job:
    """The same job that a document would give, from the values of `mesh run`'s flags as they were typed.

    Args:
        command: argv of one rank.
        gpu: `H100`, `H100:8`, several types by repetition or commas.
        env: `NAME=VALUE` or `NAME` (passed on from the client's environment), as often as `-e` was given.
        env_files: (file name, text) of each `--env-file`.
        client_environment: where a bare `NAME` is looked up; empty when None.
        labels: `name=value` each.
        others: None where the flag was not given.

    Raises:
        SpecError: with every problem at once, each named by its flag.
    """
    line = _Line()
    distributed = {
        "nodes": nodes,
        "totalGPUs": total_gpus,
        "gpusPerNode": gpus_per_node,
        "launcher": launcher,
        "network": network,
        "transport": transport,
        "startupTimeout": startup_timeout,
        "maxAssemblyRetries": max_assembly_retries,
    }
    for key, value in distributed.items():
        line.put(("spec", "distributed", key), value)
    line.put(("metadata", "name"), name)
    line.put(("spec", "command"), list(command))
    line.put(("spec", "recovery", "maxAttempts"), max_attempts)
    line.put(("spec", "recovery", "onProcessFailure"), _failure_policy(on_process_failure))
    line.put(("spec", "gracePeriod"), grace_period)
    line.put(("spec", "maxCost"), max_cost)
    line.put(("spec", "workingDir"), working_dir)
    line.put(("spec", "image"), image)
    _put_gpus(line, gpu)
    _put_labels(line, labels)
    _put_env(line, env, env_files, client_environment or {})
    return _validated(line.data, source="", spell=line.spell, problems=line.problems)


def _failure_policy(word: str | None) -> str | None:
    """As people type it: `fail`, `restart`, `restart-rank`."""
    return None if word is None else _FAILURE_WORDS.get(word.strip().lower(), word)


def _put_gpus(line: _Line, gpu: Sequence[str]) -> None:
    if not gpu:
        return
    try:
        line.put(("spec", "resources", "gpu"), parse_gpus(list(gpu)))
    except ValueError as error:
        got = describe(gpu[0] if len(gpu) == 1 else ", ".join(gpu))
        line.problems.append(Problem(str(error), path=("spec", "resources", "gpu"), got=got))


def _put_labels(line: _Line, labels: Sequence[str]) -> None:
    for text in labels:
        key, equals, value = text.partition("=")
        if equals:
            line.put(("metadata", "labels", key), value)
        else:
            line.problems.append(
                Problem("It takes name=value.", path=("metadata", "labels"), got=describe(text))
            )


def _put_env(
    line: _Line,
    env: Sequence[str],
    env_files: Sequence[tuple[str, str]],
    client_environment: Mapping[str, str],
) -> None:
    assignments: list[Assignment] = []
    for name, text in env_files:
        try:
            assignments.extend(parse_env_file(text, source=name))
        except EnvironmentProblem as problem:
            line.problems.append(Problem(f"{problem.text}.", path=("--env-file",)))
    for text in env:
        try:
            assignments.append(parse_flag(text))
        except EnvironmentProblem as problem:
            line.problems.append(Problem(f"{problem.text}.", path=("spec", "env")))
    settled, unset = settle(assignments, client_environment=client_environment)
    line.problems.extend(Problem(f"{problem.text}.", path=("spec", "env")) for problem in unset)
    if settled:
        line.put(("spec", "env"), settled)


def _validated(
    data: Mapping[str, Any],
    *,
    source: str,
    spell: Callable[[Path], str] = dotted,
    lines: Mapping[Path, int] | None = None,
    problems: Sequence[Problem] = (),
) -> Job:
    _refuse_second_format(data, source)
    found = list(problems)
    try:
        job = Job.model_validate(_as_submitted(data))
    except ValidationError as error:
        found += problems_of(error, root=Job)
    if found:
        raise spec_error(found, source=source, spell=spell, lines=lines)
    return job


def _refuse_second_format(data: Mapping[str, Any], source: str) -> None:
    spec = data.get("spec")
    marks = [mark for mark in SECOND_FORMAT_MARKS if isinstance(spec, dict) and mark in spec]
    if marks:
        raise SpecError(
            f"{source or 'This job'} is a run specification with spec.{marks[0]}; that format is not available yet.",
            hint="Write it as a Job: spec.command, spec.env, spec.distributed.",
            reason=Reason.NOT_AVAILABLE_YET,
            field=f"spec.{marks[0]}",
            source=source or None,
        )


def _as_submitted(data: Mapping[str, Any]) -> dict[str, Any]:
    """The user's half, with a name: a missing one is made up here, so that every job has one."""
    cleaned = {key: value for key, value in data.items() if (key,) not in SERVER_PARTS}
    metadata = cleaned.get("metadata", {})
    if isinstance(metadata, dict):
        metadata = {k: v for k, v in metadata.items() if ("metadata", k) not in SERVER_PARTS}
        if metadata.get("name") is None:
            metadata["name"] = new_run_name()
        cleaned["metadata"] = metadata
    return cleaned
