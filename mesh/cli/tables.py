"""The columns of runs, attempts, machines and events."""

from __future__ import annotations

from typing import Any

from mesh.cli.output import Column, Item, age, clock, end_of, span


def _status(run: Item) -> Any:
    return run["status"]


def _shape(run: Item) -> str:
    topology = _status(run)["topology"]
    gpus = topology["gpusPerNode"]
    return f"{topology['nodes']}x{gpus}GPU" if gpus else str(topology["nodes"])


def _took(item: Item) -> str:
    times = item.get("status", item)
    if times["startedAt"] is None:
        return "-"
    return age(times["startedAt"], times["endedAt"])


def _state(run: Item) -> str:
    status = _status(run)
    barrier = status["barrier"]
    if status["state"] in ("Assembling", "Starting"):
        return f"{status['state']} ({barrier['arrived']} of {barrier['of']})"
    if status["state"] == "Running":
        finished = sum(rank["exit"] is not None for rank in status["ranks"])
        return f"Running ({finished} of {barrier['of']} ended)" if finished else "Running"
    return str(status["state"])


def _exit_code(run: Item) -> str:
    code = _status(run)["exitCode"]
    return "-" if code is None else str(code)


def _optional(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def _labels(item: Item) -> str:
    labels = item["metadata"]["labels"] if "metadata" in item else item["labels"]
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "-"


def _gpus(machine: Item) -> str:
    gpus = machine["gpus"]
    return f"{gpus.get('type') or 'GPU'}:{gpus['count']}" if gpus.get("count") else "-"


def _boot(attempt: Item) -> str:
    return "-" if attempt["bootSeconds"] is None else span(attempt["bootSeconds"])


def _assembly(attempt: Item) -> str:
    """How long it waited for the others at the barrier, and for its command to start."""
    if attempt["startedAt"] is None or attempt["arrivedAt"] is None:
        return "-"
    return span(attempt["startedAt"] - attempt["arrivedAt"])


def _from(item: Item) -> str:
    """What it went on from."""
    if item["restored"] is None:
        return "-"
    return str(item["restored"]) if item["restoredStep"] is None else f"step {item['restoredStep']}"


def _cost(attempt: Item) -> str:
    return "-" if attempt["cost"] is None else f"{attempt['cost']:.2f}"


RUNS = (
    Column(title="NAME", text=lambda run: str(run["metadata"]["name"]), flexible=True),
    Column(title="STATE", text=_state),
    Column(title="NODES", text=_shape),
    Column(title="EPOCH", text=lambda run: str(_status(run)["epoch"])),
    Column(title="RESTARTS", text=lambda run: str(_status(run)["restarts"]["total"]), wide=True),
    Column(title="EXIT", text=_exit_code),
    Column(title="TOOK", text=_took),
    Column(title="AGE", text=lambda run: age(run["metadata"]["createdAt"])),
    Column(title="REASON", text=lambda run: _optional(_status(run)["reason"]), flexible=True),
    Column(
        title="LAUNCHER", text=lambda run: str(run["spec"].get("distributed", {}).get("launcher")), wide=True
    ),
    Column(title="UID", text=lambda run: str(run["metadata"]["uid"]), wide=True),
    Column(title="LABELS", text=_labels, wide=True),
    Column(title="MESSAGE", text=lambda run: _optional(_status(run)["message"]), wide=True),
)

ATTEMPTS = (
    Column(title="RUN", text=lambda attempt: str(attempt["run"]), flexible=True),
    Column(title="RANK", text=lambda attempt: str(attempt["rank"])),
    Column(title="EPOCH", text=lambda attempt: str(attempt["epoch"])),
    Column(title="MACHINE", text=lambda attempt: _optional(attempt["machine"]), flexible=True),
    Column(title="STATE", text=lambda attempt: str(attempt["state"])),
    Column(title="EXIT", text=lambda attempt: end_of(attempt["exit"])),
    Column(title="BOOT", text=_boot),
    Column(title="FROM", text=_from),
    Column(title="TOOK", text=_took),
    Column(title="COST", text=_cost),
    Column(title="REASON", text=lambda attempt: _optional(attempt["reason"]), flexible=True),
    Column(title="ORDERED", text=lambda attempt: clock(attempt["createdAt"]), wide=True),
    Column(title="WAITED", text=_assembly, wide=True),
    Column(title="ENDED", text=lambda attempt: clock(attempt["endedAt"]), wide=True),
    Column(title="ADDRESS", text=lambda a: _optional(a["placement"].get("address")), wide=True),
    Column(title="MESSAGE", text=lambda attempt: _optional(attempt["message"]), wide=True),
    Column(title="UID", text=lambda attempt: str(attempt["uid"]), wide=True),
    Column(title="LABELS", text=_labels, wide=True),
)

MACHINES = (
    Column(title="NAME", text=lambda machine: str(machine["name"]), flexible=True),
    Column(title="STATE", text=lambda machine: str(machine["state"])),
    Column(title="GPUS", text=_gpus),
    Column(title="ADDRESS", text=lambda machine: str(machine["address"])),
    Column(title="RUN", text=lambda machine: _optional(machine["run"]), flexible=True),
    Column(title="WAITS FOR", text=lambda machine: _optional(machine["waitsFor"]), flexible=True),
    Column(title="LABELS", text=_labels, wide=True),
)

EVENTS = (
    Column(title="TIME", text=lambda event: clock(event["at"])),
    Column(title="RUN", text=lambda event: _optional(event["run"]), flexible=True),
    Column(title="EPOCH", text=lambda event: _optional(event["epoch"]), wide=True),
    Column(title="RANK", text=lambda event: _optional(event["rank"])),
    Column(title="KIND", text=lambda event: str(event["kind"])),
    Column(title="REASON", text=lambda event: _optional(event["reason"])),
    Column(title="MESSAGE", text=lambda event: str(event["message"]), flexible=True),
    Column(title="SEQ", text=lambda event: str(event["seq"]), wide=True),
)
