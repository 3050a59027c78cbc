"""The job: what a user may write, what it means, and what it comes to.

The way in: `parse_job` (YAML or JSON), `job_from_data` (decoded JSON), `job_from_flags` (a command line), all to one
`Job`. Then `admit` says what a deployment cannot do or should be warned about, and `resolve` gives the `RunPlan` that
is run. Everything that a user can get wrong is a `SpecError` that names the field, what it got and what it takes.

| file           | what it knows                                                      |
|----------------|--------------------------------------------------------------------|
| document.py    | text to plain data, strictly, with lines and columns               |
| reading.py     | the three ways in                                                  |
| model.py       | the Job resource                                                   |
| fields.py      | what each field accepts                                            |
| environment.py | variables: flags, env files, reserved names, limits                |
| names.py       | names of runs, variables and labels                                |
| durations.py   | lengths of time                                                    |
| problems.py    | from a finding to a sentence                                       |
| admission.py   | what is available, with the table of rules                         |
| resolution.py  | Job to RunPlan                                                     |
"""

from __future__ import annotations

from mesh.spec.admission import DeploymentFacts, JobWarning, admit
from mesh.spec.durations import format_duration, parse_duration
from mesh.spec.fields import parse_gpus
from mesh.spec.model import API_VERSION, KIND, Job, JobSpec
from mesh.spec.names import is_run_name, new_run_name, suggest_run_name
from mesh.spec.reading import job_from_data, job_from_flags, parse_job
from mesh.spec.resolution import resolve

__all__ = [
    "API_VERSION",
    "KIND",
    "DeploymentFacts",
    "Job",
    "JobSpec",
    "JobWarning",
    "admit",
    "format_duration",
    "is_run_name",
    "job_from_data",
    "job_from_flags",
    "new_run_name",
    "parse_duration",
    "parse_gpus",
    "parse_job",
    "resolve",
    "suggest_run_name",
]
