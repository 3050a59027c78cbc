"""The types of single fields: what each accepts, and the sentence for what it does not.

Every validator runs before pydantic's own and settles the matter, so that a user reads our sentences and never a
library's. Numbers are also taken as decimal text, because a command line has nothing else; names of choices in any
case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from mesh.spec.durations import DURATION_TAKES, format_duration, parse_duration
from mesh.spec.environment import name_problem, reserved_problem, string_problem
from mesh.spec.names import (
    LABEL_KEY_TAKES,
    LABEL_VALUE_TAKES,
    RESERVED_LABEL_PREFIX,
    RUN_NAME_LENGTH_MAX,
    RUN_NAME_PATTERN,
    RUN_NAME_TAKES,
    is_label_key,
    is_label_value,
    is_run_name,
    suggest_run_name,
)
from mesh.spec.problems import Problem, describe, nearest, refuse, refuse_all
from mesh.states import FailurePolicy, LauncherKind, NetworkScope, TransportPolicy
from mesh.topology import GPUS_PER_NODE_CHOICES, NODES_MAX, NODES_MIN, TOTAL_GPUS_MAX, field_problem

STARTUP_TIMEOUT_S = (300.0, 3600.0)
"""First document, "The assembly bound": default 15 minutes, 5 to 60."""
GRACE_PERIOD_S = (0.0, 3600.0)
ATTEMPTS_MAX = 100
ASSEMBLY_RETRIES_MAX = 10
GPU_TYPES_MAX = 16
LABELS_MAX = 64
PATH_BYTES_MAX = 4095
MAX_COST_LIMIT = Decimal(10) ** 9

_INTEGER_TEXT = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)
_GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,62}", re.ASCII)
_IMAGE = re.compile(r"[!-~]{1,512}", re.ASCII)

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


# -- numbers and times -------------------------------------------------------------------------------------------------


def whole_number(value: Any) -> int | None:
    """The number that this is or spells; None when it is no whole number."""
    if isinstance(value, str) and _INTEGER_TEXT.fullmatch(value.strip()):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shape_number(field: str) -> Callable[[Any], int | None]:
    def validate(value: Any) -> int | None:
        if value is None:
            return None
        number = whole_number(value)
        problem = field_problem(field, number if number is not None else -1)
        if problem is not None:
            refuse(problem, got=describe(value))
        return number

    return validate


def _bounded(low: int, high: int, what: str) -> Callable[[Any], int]:
    def validate(value: Any) -> int:
        number = whole_number(value)
        if number is None or not low <= number <= high:
            refuse(f"It takes {low} to {high} {what}.", got=describe(value))
        return number

    return validate


def _duration(low_s: float, high_s: float) -> Callable[[Any], float]:
    takes = f"It takes {format_duration(low_s)} to {format_duration(high_s)}"

    def validate(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            refuse(f"{takes}, written as {DURATION_TAKES}.", got=describe(value))
        try:
            seconds = parse_duration(value) if isinstance(value, str) else round(float(value), 3)
        except (ValueError, OverflowError):
            refuse(f"{takes}, written as {DURATION_TAKES}.", got=describe(value))
        if not low_s <= seconds <= high_s:
            refuse(f"{takes}.", got=describe(value))
        return seconds

    return validate


def _money(value: Any) -> str | None:
    if value is None:
        return None
    takes = "It takes an amount in US dollars above 0, such as 2.00."
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        refuse(takes, got=describe(value))
    try:
        amount = Decimal(str(value).strip())
    except InvalidOperation:
        refuse(takes, got=describe(value))
    if not amount.is_finite() or not 0 < amount < MAX_COST_LIMIT:
        refuse(takes, got=describe(value))
    exponent = amount.as_tuple().exponent
    assert isinstance(exponent, int), "a finite number has an exponent"
    if exponent < -4:
        refuse(f"{takes} It has at most four decimals.", got=describe(value))
    return f"{amount:f}"


# -- choices -----------------------------------------------------------------------------------------------------------


def _choice(kind: type[ChoiceT]) -> Callable[[Any], ChoiceT]:
    by_word = {member.value.lower(): member for member in kind}
    *most, last = [member.value for member in kind]
    takes = f"It takes {', '.join(most)} or {last}."

    def validate(value: Any) -> ChoiceT:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word in by_word:
            return by_word[word]
        near = nearest(word, [member.value for member in kind])
        return refuse(f"{takes}{f' Did you mean {near}?' if near else ''}", got=describe(value))

    return validate


# -- names and texts ---------------------------------------------------------------------------------------------------


def _run_name(value: Any) -> str:
    if isinstance(value, str) and is_run_name(value):
        return value
    text = f"A run's name has {RUN_NAME_TAKES}."
    if isinstance(value, str):
        if len(value) > RUN_NAME_LENGTH_MAX:
            text += f" This one has {len(value)} characters."
        if suggestion := suggest_run_name(value):
            text += f' You could use "{suggestion}".'
    return refuse(text, got=describe(value))


def _labels(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        refuse("It takes a mapping of names to texts.", got=describe(value))
    problems: list[Problem] = []
    labels: dict[str, str] = {}
    if len(value) > LABELS_MAX:
        problems.append(Problem(f"It takes at most {LABELS_MAX} labels.", got=str(len(value))))
    for key, item in value.items():
        text = exact_text(item)
        if not isinstance(key, str) or not is_label_key(key):
            problems.append(Problem(f"A label's name has {LABEL_KEY_TAKES}.", got=describe(key)))
        elif key.startswith(RESERVED_LABEL_PREFIX):
            problems.append(Problem("Labels under nodus.dev/ are set by the deployment.", path=(key,)))
        elif text is None or not is_label_value(text):
            problems.append(
                Problem(f"A label's value has {LABEL_VALUE_TAKES}.", path=(key,), got=describe(item))
            )
        else:
            labels[key] = text
    if problems:
        refuse_all(problems)
    return labels


def exact_text(value: Any) -> str | None:
    """A scalar as the text that was written (see `mesh.spec.document`, rule 2); None for anything else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else None


def _command(value: Any) -> tuple[str, ...]:
    takes = "It takes a list with the program and its arguments, such as [torchrun, train.py]"
    if isinstance(value, str):
        refuse(f'{takes}; for a shell\'s line write [bash, -c, "…"].', got=describe(value))
    if not isinstance(value, list | tuple):
        refuse(f"{takes}.", got=describe(value))
    if not value or value[0] == "":
        refuse(f"{takes}; there is no program in it.", got=describe(value))
    problems: list[Problem] = []
    arguments: list[str] = []
    for index, item in enumerate(value):
        text = exact_text(item)
        if text is None:
            problems.append(Problem("It takes a text.", path=(index,), got=describe(item)))
        elif problem := string_problem(text, what="the argument"):
            problems.append(Problem(_as_sentence(problem), path=(index,)))
        else:
            arguments.append(text)
    if problems:
        refuse_all(problems)
    return tuple(arguments)


def _env(value: Any) -> dict[str, str]:
    pairs, problems = _env_pairs(value)
    names = [name for name, _ in pairs]
    if reserved := reserved_problem(names):
        problems.append(Problem(_as_sentence(reserved)))
    env: dict[str, str] = {}
    for name, item in pairs:
        text = exact_text(item)
        if name in env:
            problems.append(Problem("It stands there twice.", path=(name,)))
        elif problem := name_problem(name):
            problems.append(Problem(_as_sentence(problem)))
        elif text is None:
            empty = (
                f'; for an empty value write {name}: ""; one that the API hid is needed again'
                if item is None
                else ""
            )
            problems.append(Problem(f"It takes a text or a number{empty}.", path=(name,), got=describe(item)))
        elif problem := string_problem(f"{name}={text}", what=f"{name} with its value"):
            problems.append(Problem(_as_sentence(problem), path=(name,)))
        else:
            env[name] = text
    if problems:
        refuse_all(problems)
    return env


def _env_pairs(value: Any) -> tuple[list[tuple[str, Any]], list[Problem]]:
    """A mapping, or the list forms that other systems use: `NAME=VALUE`, or `{name: …, value: …}`."""
    if isinstance(value, dict):
        return [(str(name), item) for name, item in value.items()], []
    if not isinstance(value, list | tuple):
        refuse("It takes a mapping of names to values.", got=describe(value))
    pairs: list[tuple[str, Any]] = []
    problems: list[Problem] = []
    for index, item in enumerate(value):
        if isinstance(item, str) and "=" in item:
            name, _, text = item.partition("=")
            pairs.append((name, text))
        elif isinstance(item, dict) and item.keys() == {"name", "value"} and isinstance(item["name"], str):
            pairs.append((item["name"], item["value"]))
        elif isinstance(item, str) and name_problem(item) is None:
            problems.append(
                Problem(f"{item} has no value; pass it on from here with -e {item}.", path=(index,))
            )
        else:
            problems.append(Problem("It takes NAME=VALUE, or {name: NAME, value: VALUE}.", path=(index,)))
    return pairs, problems


def _working_dir(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.startswith("/") or string_problem(value, what="it"):
        refuse("It takes an absolute path on the machines, such as /data/code.", got=describe(value))
    if len(value.encode()) > PATH_BYTES_MAX:
        refuse(f"A path has at most {PATH_BYTES_MAX} bytes.", got=describe(value))
    return value


def _image(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not _IMAGE.fullmatch(value)):
        refuse("It takes a container image's name, such as registry/name:tag.", got=describe(value))
    return value


# -- accelerators ------------------------------------------------------------------------------------------------------


def _gpu_types(value: Any) -> tuple[str, ...]:
    takes = "It takes a type such as H100, or a list of types, best first."
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items or len(items) > GPU_TYPES_MAX:
        refuse(takes, got=describe(value))
    types: list[str] = []
    for item in items:
        if not isinstance(item, str) or not _GPU_TYPE.fullmatch(item):
            refuse(takes, got=describe(item))
        if item.upper() not in types:
            types.append(item.upper())
    return tuple(types)


def parse_gpus(texts: list[str]) -> dict[str, Any]:
    """`["H100:8"]`, `["H100", "A100"]` or `["H100:8,A100:8"]` as `{"type": […], "count": 8}`.

    Types are upper-case, so that `h100` is `H100`; `count` is absent when none is said.
    Raises ValueError with a sentence; the ranges of the values are the model's to check.
    """
    types: list[str] = []
    counts: set[str] = set()
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        name, colon, count = text.partition(":")
        if not _GPU_TYPE.fullmatch(name) or (colon and not count.strip()):
            raise ValueError("It takes TYPE or TYPE:COUNT, such as H100 or H100:8.")
        types.append(name.upper())
        if colon:
            counts.add(count.strip())
    if len(counts) > 1:
        raise ValueError(f"Every machine gets the same count, and these differ: {', '.join(sorted(counts))}.")
    return {"type": list(dict.fromkeys(types)), **({"count": counts.pop()} if counts else {})}


def gpu_mapping(text: str) -> dict[str, Any]:
    """`gpu: H100:8`, the short form, as the mapping that it stands for."""
    try:
        return parse_gpus([text])
    except ValueError as error:
        return refuse(str(error), path=("gpu",), got=describe(text))


def _as_sentence(fragment: str) -> str:
    return f"{fragment}."


# -- the types ---------------------------------------------------------------------------------------------------------


def _schema(**schema: Any) -> WithJsonSchema:
    """What the OpenAPI document says; the validators above are stricter and speak in sentences."""
    return WithJsonSchema(schema)


_text_map = _schema(type="object", additionalProperties={"type": "string"})
_duration_schema = _schema(anyOf=[{"type": "string"}, {"type": "number"}], examples=["15m", "900s", 900])
_sizes_schema = _schema(enum=list(GPUS_PER_NODE_CHOICES))
_as_duration = PlainSerializer(format_duration, return_type=str)

RunNameText = Annotated[
    str,
    BeforeValidator(_run_name),
    _schema(type="string", pattern=RUN_NAME_PATTERN, description=RUN_NAME_TAKES),
]
Labels = Annotated[dict[str, str], BeforeValidator(_labels), _text_map]
Command = Annotated[
    tuple[str, ...], BeforeValidator(_command), _schema(type="array", items={"type": "string"}, minItems=1)
]
Env = Annotated[dict[str, str], BeforeValidator(_env), _text_map]
WorkingDir = Annotated[str | None, BeforeValidator(_working_dir), _schema(type="string")]
Image = Annotated[str | None, BeforeValidator(_image), _schema(type="string")]
GpuTypes = Annotated[
    tuple[str, ...],
    BeforeValidator(_gpu_types),
    _schema(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}}]),
]
GpuCount = Annotated[int | None, BeforeValidator(_shape_number("count")), _sizes_schema]
Nodes = Annotated[
    int | None,
    BeforeValidator(_shape_number("nodes")),
    _schema(type="integer", minimum=NODES_MIN, maximum=NODES_MAX),
]
TotalGpus = Annotated[
    int | None,
    BeforeValidator(_shape_number("totalGPUs")),
    _schema(type="integer", minimum=1, maximum=TOTAL_GPUS_MAX),
]
GpusPerNode = Annotated[int | None, BeforeValidator(_shape_number("gpusPerNode")), _sizes_schema]
Launcher = Annotated[LauncherKind, BeforeValidator(_choice(LauncherKind))]
Network = Annotated[NetworkScope, BeforeValidator(_choice(NetworkScope))]
TransportChoice = Annotated[TransportPolicy, BeforeValidator(_choice(TransportPolicy))]
OnProcessFailure = Annotated[FailurePolicy, BeforeValidator(_choice(FailurePolicy))]
Attempts = Annotated[
    int,
    BeforeValidator(_bounded(0, ATTEMPTS_MAX, "restarts")),
    _schema(type="integer", minimum=0, maximum=ATTEMPTS_MAX),
]
AssemblyRetries = Annotated[
    int,
    BeforeValidator(_bounded(0, ASSEMBLY_RETRIES_MAX, "more tries")),
    _schema(type="integer", minimum=0, maximum=ASSEMBLY_RETRIES_MAX),
]
MaxCost = Annotated[str | None, BeforeValidator(_money), _schema(type="string", examples=["2.00"])]
StartupTimeout = Annotated[
    float, BeforeValidator(_duration(*STARTUP_TIMEOUT_S)), _as_duration, _duration_schema
]
GracePeriod = Annotated[float, BeforeValidator(_duration(*GRACE_PERIOD_S)), _as_duration, _duration_schema]
