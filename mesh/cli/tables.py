"""The columns of runs, attempts, machines, events, paths, relays, and of a network check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesh.cli.output import Column, Item, age, clock, end_of, span
from mesh.cli.story import size
from mesh.netcheck.words import length, rate, round_trip


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


def _dialable(machine: Item) -> str:
    if machine["network"] is None:
        return "-"
    return "yes" if machine["network"]["dialable"] else "no, by a relay"


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
    Column(title="DIALABLE", text=_dialable, wide=True),
    Column(
        title="PRIVATE NETWORK",
        text=lambda machine: _optional((machine["network"] or {}).get("privateNetwork")),
        wide=True,
    ),
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


def _known(value: float | None, words: Callable[[float], str]) -> str:
    return "-" if value is None else words(value)


def _last_check(path: Item) -> str:
    return clock(max(path["passedAt"] or 0.0, path["failedAt"] or 0.0))


def paths(*, with_all_reduce: bool) -> tuple[Column, ...]:
    """With the length of an all-reduce, when one was asked for."""
    takes = Column(title="ALL-REDUCE", text=lambda path: _known(path["allReduceSeconds"], length))
    return (
        Column(
            title="PROVIDERS",
            text=lambda path: " - ".join(p or "?" for p in path["providers"]),
            flexible=True,
        ),
        Column(title="PATH", text=lambda path: str(path["path"])),
        Column(title="PASSED", text=lambda path: str(path["passed"])),
        Column(title="FAILED", text=lambda path: str(path["failed"])),
        Column(title="OFFERED", text=lambda path: "yes" if path["offered"] else "no"),
        Column(title="ROUND TRIP", text=lambda path: _known(path["roundTripSeconds"], round_trip)),
        Column(title="THROUGHPUT", text=lambda path: _known(path["bytesPerSecond"], rate)),
        *((takes,) if with_all_reduce else ()),
        Column(title="CHECKED", text=_last_check),
        Column(title="LAST FAULT", text=lambda path: _optional(path["fault"]), wide=True),
    )


def _ports(way: Item) -> str:
    if way["rendezvous"] is None:
        return "not measured"
    if way["rendezvous"] == way["ephemeral"]:
        return str(way["rendezvous"])
    return f"{way['rendezvous']}/{way['ephemeral']}"


def _throughput(way: Item) -> str:
    if way["bytesPerSecond"] is None and way["segmentBytesMax"] is not None:
        return f"lost over {way['segmentBytesMax']} B"
    is_lost = way["bytesPerSecond"] is None and way["rendezvous"] == way["ephemeral"] == "answered"
    return "lost" if is_lost else _known(way["bytesPerSecond"], rate)


WAYS = (
    Column(title="FROM", text=lambda way: str(way["sender"]), flexible=True),
    Column(title="TO", text=lambda way: str(way["receiver"]), flexible=True),
    Column(title="PATH", text=lambda way: str(way["path"]), wide=True),
    Column(title="PORTS", text=_ports),
    Column(title="ROUND TRIP", text=lambda way: _known(way["roundTripSeconds"], round_trip)),
    Column(title="THROUGHPUT", text=_throughput),
    Column(title="CLOCK", text=lambda way: _known(way["clockOffsetSeconds"], _offset), wide=True),
)


def _offset(seconds: float) -> str:
    return f"{seconds * 1e3:+.3g} ms" if abs(seconds) < 1 else f"{seconds:+.3g} s"


RELAYS = (
    Column(title="NAME", text=lambda relay: str(relay["name"]), flexible=True),
    Column(title="STATE", text=lambda relay: str(relay["state"])),
    Column(title="ADDRESS", text=lambda relay: _optional(next(iter(relay["addresses"]), None))),
    Column(title="SINCE", text=lambda relay: clock(relay["since"])),
    Column(title="MACHINES", text=lambda relay: str(relay["lines"])),
    Column(title="STREAMS", text=lambda relay: str(relay["streams"])),
    Column(title="CARRIED", text=lambda relay: size(relay["bytes"])),
    Column(title="BYTES", text=lambda relay: str(relay["bytes"]), wide=True),
)
