"""`mesh check`: is the network between the machines well?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import OutputFormat, OutputOption, StateOption, UrlOption, client_for


def check(
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", min=2, max=64, metavar="N", help="So many of the free machines; all of them."
        ),
    ] = None,
    machines: Annotated[
        list[str] | None,
        typer.Option("--machine", metavar="NAME", help="This one, and others that are named so."),
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Measures the network between free machines, every pair, both directions: ports, round trip, throughput, packets.

    Takes seconds, and no run. Exits with 0 when all is well (warnings too), with 1 when a pair is at fault or was not
    measured. A gang's machines are checked in the same way before its members are ordered there.
    """
    execute(lambda: _check(nodes, machines or [], output, state, url), state=state)


async def _check(
    nodes: int | None, machines: list[str], output: OutputFormat, state: Any, url: str | None
) -> int:
    from mesh.cli import tables
    from mesh.cli.exit_codes import ExitCode
    from mesh.cli.output import print_document, print_table
    from mesh.cli.terminal import Terminal

    terminal = Terminal()
    async with client_for(state, url) as client, terminal.working("Checking the network"):
        report = await client.check_network(machines=machines, nodes=nodes)
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, report, output)
    else:
        wide = output is OutputFormat.WIDE
        print_table(terminal, tables.WAYS, report["ways"], wide=wide, nothing="No two machines answered.")
        for line in conclusion(report):
            terminal.out(line)
    return ExitCode.OK if report["passed"] else ExitCode.FAILED


def conclusion(report: Mapping[str, Any]) -> list[str]:
    """What is wrong, each with its remedy, and the verdict."""
    from mesh.cli.terminal import printable

    lines = []
    for finding in report["findings"]:
        word = "Fault" if finding["isFault"] else "Warning"
        lines += [printable(f"{word}: {finding['message']}"), printable(f"  {finding['hint']}")]
    lines += [printable(f"Not checked: {why}") for why in report["notChecked"].values()]
    faults = sum(finding["isFault"] for finding in report["findings"])
    count, seconds = len(report["machines"]), report["seconds"]
    if report["passed"]:
        return [*lines, f"{count} machines reach each other. ({seconds:.1f} s)"]
    verdict = f"{faults} fault{'s' if faults != 1 else ''}" if faults else "not everything was measured"
    return [*lines, f"{count} machines checked: {verdict}. ({seconds:.1f} s)"]
