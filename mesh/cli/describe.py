"""`mesh describe` and `mesh status RUN`: the story of one run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mesh.cli.guard import execute
from mesh.cli.options import OutputFormat, OutputOption, RunArgument, StateOption, UrlOption, client_for

if TYPE_CHECKING:
    from mesh.client import MeshClient

EVENTS_SHOWN = 30
LAST_LINES_SHOWN = 20


_PATHS_ACCEPTED = {"Direct": "all but relayed ones", "Auto": "all, relayed ones too"}
"""What `distributed.transport` allows."""


def describe(
    run: RunArgument,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Tells the story of a run: what was asked for, its ranks, why it failed with the evidence, its events."""
    execute(lambda: _describe(run, output, state, url), state=state)


async def _describe(name: str, output: OutputFormat, state: Any, url: str | None) -> None:
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal

    terminal = Terminal()
    async with client_for(state, url) as client, terminal.working(f"Asking for {name}"):
        run = await client.get_run(name)
        events = await client.list_events(run=run["metadata"]["uid"])
        relayed = await _relayed(client, run["metadata"]["uid"])
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, {**run, "events": events, "relayed": relayed}, output)
        return
    for line in [*describe_run(run, events), *describe_relayed(relayed), *describe_events(events)]:
        terminal.out(line)


async def _relayed(client: MeshClient, uid: str) -> list[Any]:
    from mesh.errors import ConflictError

    try:
        return list(await client.list_relayed(uid))
    except ConflictError:  # a deployment without a mesh port has no relays
        return []


def describe_relayed(relayed: Sequence[Mapping[str, Any]]) -> list[str]:
    """What relays have carried between ranks' machines, as lines."""
    from mesh.cli.story import size
    from mesh.cli.terminal import printable

    lines = [
        printable(f"  {row['dialler']} and {row['target']} through {row['relay']}: {size(row['bytes'])}")
        for row in relayed
    ]
    total = size(sum(row["bytes"] for row in relayed))
    return [_row("Relayed", total), *lines] if relayed else []


def describe_run(run: Mapping[str, Any], events: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Everything but the events, as lines. The events say which faults were rehearsed."""
    from mesh.cli.story import describe_epochs, describe_progress

    return [
        *_head(run),
        *_spec(run["spec"]),
        *describe_progress(run),
        *_ranks(run),
        *_path(run),
        *_conditions(run),
        *describe_epochs(run, events),
        *_cause(run),
    ]


def _row(title: str, text: object) -> str:
    from mesh.cli.terminal import printable

    return f"{title + ':':<14}{printable(str(text))}"


def _head(run: Mapping[str, Any]) -> list[str]:
    from mesh.cli.output import age, clock

    metadata, status = run["metadata"], run["status"]
    reason = f" ({status['reason']})" if status["reason"] else ""
    lines = [
        _row("Name", metadata["name"]),
        _row("Uid", metadata["uid"]),
        _row("State", status["state"] + reason),
    ]
    if status["message"]:
        lines.append(_row("Message", status["message"]))
    if status["exitCode"] is not None:
        lines.append(_row("Exit code", status["exitCode"]))
    lines.append(_row("Epoch", status["epoch"]))
    lines.append(_row("Created", f"{clock(metadata['createdAt'])} ({age(metadata['createdAt'])} ago)"))
    if status["startedAt"] is not None:
        lines.append(
            _row("Ran", f"{age(status['startedAt'], status['endedAt'])} since {clock(status['startedAt'])}")
        )
    if status["endedAt"] is not None:
        lines.append(_row("Ended", clock(status["endedAt"])))
    if metadata["labels"]:
        lines.append(_row("Labels", ",".join(f"{k}={v}" for k, v in sorted(metadata["labels"].items()))))
    topology = status["topology"]
    nodes = "1 node" if topology["nodes"] == 1 else f"{topology['nodes']} nodes"
    gpus = f", {topology['gpusPerNode']} GPUs each" if topology["gpusPerNode"] else ""
    return [*lines, _row("Topology", f"{nodes}{gpus}, world size {topology['worldSize']}")]


def _spec(spec: Mapping[str, Any]) -> list[str]:
    distributed = spec.get("distributed") or {}
    lines = [_row("Command", shlex.join(map(str, spec.get("command") or [])))]
    for title, value in (
        ("Directory", spec.get("workingDir")),
        ("Launcher", distributed.get("launcher")),
        ("Network", distributed.get("network")),
        ("Paths", _PATHS_ACCEPTED.get(str(distributed.get("transport")))),
        ("Startup", distributed.get("startupTimeout")),
        ("Grace", spec.get("gracePeriod")),
    ):
        if value is not None:
            lines.append(_row(title, value))
    names = sorted(spec.get("env") or {})
    # names only: a value may be a secret, and this is what people paste into reports
    return [*lines, *([_row("Variables", ", ".join(names))] if names else [])]


def _ranks(run: Mapping[str, Any]) -> list[str]:
    from mesh.cli.output import PIPE_COLUMNS, age, end_of, lay_out
    from mesh.cli.terminal import printable

    ranks = run["status"]["ranks"]
    if not ranks:
        return []
    rows: list[Sequence[str]] = [["  RANK", "STATE", "MACHINE", "ADDRESS", "EXIT", "LAST OUTPUT", "ENDED"]]
    for rank in ranks:
        rows.append(
            [
                f"  {rank['rank']}",
                printable(_rank_state(rank)),
                printable(rank["machine"] or "-"),
                printable(rank["address"] or "-"),
                end_of(rank["exit"]),
                _ago(age(rank["lastOutputAt"])),
                _ago(age(rank["finishedAt"])),
            ]
        )
    return ["Ranks:", *lay_out(rows, PIPE_COLUMNS, [])]


def _path(run: Mapping[str, Any]) -> list[str]:
    """The path that is taken, and what keeps ghosts and strangers off it."""
    path = run["status"]["path"]
    if path is None:
        return []
    lines = [_row("Path", path["transport"])]
    if path["layer"] or path["lacks"]:
        lines.append(_row("Net fence", path["layer"] or "off"))
    return lines


def _rank_state(rank: Mapping[str, Any]) -> str:
    """With how often it was begun in this epoch, where that was not once."""
    return str(rank["state"]) + (f", life {rank['lives']}" if rank["lives"] > 1 else "")


def _ago(length: str) -> str:
    return length if length == "-" else f"{length} ago"


def _conditions(run: Mapping[str, Any]) -> list[str]:
    from mesh.cli.terminal import printable

    conditions = run["status"]["conditions"]
    lines = [f"  {printable(c['type'])}: {printable(c['message'])}" for c in conditions]
    return ["Conditions:", *lines] if lines else []


def _cause(run: Mapping[str, Any]) -> list[str]:
    from mesh.cli.output import clock, end_of
    from mesh.cli.terminal import printable

    cause = run["status"]["cause"]
    if cause is None:
        return []
    lines = ["Cause:"]
    if cause["message"] not in run["status"]["message"]:  # what is said above is not said again
        lines.append(f"  {printable(cause['message'])}")
    lines.append(f"  rank {cause['rank']} at {clock(cause['at'])}, {cause['reason']}")
    if cause["exit"] is not None:
        lines.append(f"  its command ended with {end_of(cause['exit'])}")
    if cause["workerExit"] not in (None, cause["exit"]):
        worker = "a worker" if cause["globalRank"] is None else f"worker {cause['globalRank']}"
        lines.append(f"  {worker} ended with {end_of(cause['workerExit'])}, says the launcher's report")
    if cause["hint"]:
        lines.append(f"  {printable(cause['hint'])}")
    if cause["lastLines"]:
        lines.append("  its last lines:")
        lines += [f"    {printable(line)}" for line in cause["lastLines"][-LAST_LINES_SHOWN:]]
    return lines


def describe_events(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The last events, as lines."""
    from mesh.cli.output import PIPE_COLUMNS, clock, lay_out
    from mesh.cli.terminal import printable

    if not events:
        return []
    shown = events[-EVENTS_SHOWN:]
    title = "Events:" if len(shown) == len(events) else f"Events (the last {len(shown)} of {len(events)}):"
    rows = [
        [
            f"  {clock(event['at'])}",
            str(event["epoch"] or "-"),
            "-" if event["rank"] is None else str(event["rank"]),
            printable(event["kind"]),
            printable(event["message"]),
        ]
        for event in shown
    ]
    return [title, *lay_out([["  TIME", "EPOCH", "RANK", "KIND", "MESSAGE"], *rows], PIPE_COLUMNS, [])]
