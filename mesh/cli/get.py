"""`mesh get runs|attempts|machines|events|paths|relays`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import OutputFormat, OutputOption, StateOption, UrlOption, client_for
from mesh.cli.terminal import Terminal


class Kind(StrEnum):
    """What can be listed; the singular is taken too."""

    RUNS = "runs"
    ATTEMPTS = "attempts"
    MACHINES = "machines"
    EVENTS = "events"
    PATHS = "paths"
    RELAYS = "relays"


_NOTHING = {
    Kind.RUNS: "There are no runs. Start one: mesh run -- COMMAND",
    Kind.ATTEMPTS: "There are no attempts.",
    Kind.MACHINES: "There are no machines.",
    Kind.EVENTS: "There are no events.",
    Kind.PATHS: "No network has been checked yet. Check it: mesh check",
    Kind.RELAYS: "There are no relays.",
}


def _kind(text: str) -> Kind:
    plural = {"run": "runs", "job": "runs", "jobs": "runs", "attempt": "attempts"} | {
        "machine": "machines",
        "node": "machines",
        "nodes": "machines",
        "event": "events",
        "path": "paths",
        "relay": "relays",
    }
    try:
        return Kind(plural.get(text.lower(), text.lower()))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(Kind)}.") from None


def get(
    kind: Annotated[Kind, typer.Argument(parser=_kind, metavar="|".join(Kind))],
    name: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Of this run only.")] = None,
    selector: Annotated[
        str,
        typer.Option(
            "-l",
            "--selector",
            metavar="CONDITIONS",
            help="key=value or key!=value, with commas between; nodus.dev/job and nodus.dev/rank work on all.",
        ),
    ] = "",
    model_size: Annotated[
        str | None,
        typer.Option(
            "--model-size",
            metavar="PARAMETERS",
            help="Of paths: how long one all-reduce of such a model's gradients takes there, such as 7B.",
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=2, max=64, metavar="N", help="Between so many machines; 2.")
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Lists runs, attempts (one rank's part in one epoch), machines, events, the paths between providers, or relays."""
    if kind is Kind.PATHS:
        if name is not None or selector:
            raise typer.BadParameter("paths are of the whole deployment: no run and no conditions.")
        execute(lambda: _get_paths(model_size, nodes, output, state, url), state=state)
        return
    if model_size is not None or nodes is not None:
        raise typer.BadParameter("--model-size and --nodes are about paths: mesh get paths.")
    if kind is Kind.RELAYS and (name is not None or selector):
        raise typer.BadParameter("relays are listed as a whole")
    execute(lambda: _get(kind, name, selector, output, state, url), state=state)


async def _get_paths(
    model_size: str | None, nodes: int | None, output: OutputFormat, state: Any, url: str | None
) -> None:
    from mesh.cli import tables
    from mesh.cli.output import print_document, print_table

    terminal = Terminal()
    async with client_for(state, url) as client, terminal.working("Asking for paths"):
        paths = await client.list_paths(model_size=model_size, nodes=nodes)
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, {"paths": paths}, output)
        return
    columns = tables.paths(with_all_reduce=model_size is not None)
    print_table(terminal, columns, paths, wide=output is OutputFormat.WIDE, nothing=_NOTHING[Kind.PATHS])


async def _get(
    kind: Kind, name: str | None, selector: str, output: OutputFormat, state: Any, url: str | None
) -> None:
    from mesh.cli import tables
    from mesh.cli.output import print_document, print_table
    from mesh.selectors import JOB_LABEL

    terminal = Terminal()
    conditions = ",".join(part for part in (selector, f"{JOB_LABEL}={name}" if name else "") if part)
    async with client_for(state, url) as client, terminal.working(f"Asking for {kind}"):
        items = await _list(client, kind, conditions)
        if name is not None and not items:
            await client.get_run(name)  # says so when there is no such run at all
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, {str(kind): items}, output)
        return
    columns = {
        Kind.RUNS: tables.RUNS,
        Kind.ATTEMPTS: tables.ATTEMPTS,
        Kind.MACHINES: tables.MACHINES,
        Kind.EVENTS: tables.EVENTS,
        Kind.RELAYS: tables.RELAYS,
    }[kind]
    print_table(terminal, columns, items, wide=output is OutputFormat.WIDE, nothing=_NOTHING[kind])


async def _list(client: Any, kind: Kind, conditions: str) -> list[Any]:
    if kind is Kind.RUNS:
        return list(await client.list_runs(conditions))
    if kind is Kind.ATTEMPTS:
        return list(await client.list_attempts(conditions))
    if kind is Kind.MACHINES:
        return list(await client.list_machines(conditions))
    if kind is Kind.RELAYS:
        return list(await client.list_relays())
    return list(await client.list_events(labels=conditions))
