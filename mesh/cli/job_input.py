"""From what was typed, or a file, to the Job that is submitted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.errors import SpecError
from mesh.spec import Job, job_from_flags, parse_job
from mesh.spec.document import DOCUMENT_BYTES_MAX
from mesh.spec.environment import ENV_FILE_BYTES_MAX

if TYPE_CHECKING:
    from mesh.cli.run import RunOptions

PASSED_ON = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH")
"""Of the calling shell, so that the programs of its virtual environment are found."""
_FLAG_OF = {"name": "--name", "gpu": "--gpu", "env": "-e", "working_dir": "--workdir", "labels": "--label"}


def read_job(options: RunOptions) -> Job:
    """The job that the options mean. Raises SpecError with everything that is wrong."""
    if options.file is not None:
        _refuse_both(options)
        text, source = _read(options.file, bytes_max=DOCUMENT_BYTES_MAX, what="a job")
        return parse_job(text, source=source)
    if not options.command:
        raise SpecError(
            "There is nothing to run.",
            hint="Say what every rank shall run: mesh run [OPTIONS] -- COMMAND, or a job: mesh run -f job.yaml",
            field="COMMAND",
        )
    env_files = [
        _read(str(path), bytes_max=ENV_FILE_BYTES_MAX, what="an env file") for path in options.env_files
    ]
    return job_from_flags(
        command=options.command,
        env_files=[(source, text) for text, source in env_files],
        client_environment=os.environ,
        **options.shape,
    )


def as_submitted(job: Job, *, local: bool) -> dict[str, Any]:
    """The job as JSON; for a deployment on this host with this directory and this shell's paths filled in."""
    data = job.to_json()
    if not local:
        return data
    spec = data["spec"]
    env = dict(spec.get("env") or {})
    for name in PASSED_ON:
        if name in os.environ:
            env.setdefault(name, os.environ[name])
    spec["env"] = env
    if not spec.get("workingDir"):
        spec["workingDir"] = _here()
    return data


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError as error:
        raise SpecError(
            f"The current directory cannot be told: {error.strerror}.",
            hint="Change into one that exists, or name one: --workdir DIR.",
        ) from error


def _refuse_both(options: RunOptions) -> None:
    given = [_FLAG_OF.get(key, "--" + key.replace("_", "-")) for key in options.shape]
    given += ["--env-file"] if options.env_files else []
    given += ["COMMAND"] if options.command else []
    if given:
        raise SpecError(
            f"A job from a file is complete; {', '.join(given)} cannot be given beside it.",
            hint="Write it into the file, or leave -f out.",
            field="--file",
        )


def _read(name: str, *, bytes_max: int, what: str) -> tuple[str, str]:
    """The text of a file (or of standard input), and how errors call it."""
    source = "standard input" if name == "-" else name
    try:
        if name == "-":
            data = sys.stdin.buffer.read(bytes_max + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(bytes_max + 1)
    except OSError as error:
        raise SpecError(f"{source} cannot be read: {error.strerror}.", field="--file") from error
    if len(data) > bytes_max:
        raise SpecError(f"{source} is larger than {what} may be ({bytes_max:,} bytes).", field="--file")
    try:
        return data.decode(), source
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SpecError(
            f"{source} is not UTF-8 text (line {line}, byte {error.start}).", field="--file"
        ) from error
