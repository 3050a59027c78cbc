"""`mesh wait`, `mesh cancel`, `mesh delete`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import (
    OutputFormat,
    OutputOption,
    RunArgument,
    StateOption,
    UrlOption,
    client_for,
    duration,
)


class Milestone(StrEnum):
    """What can be waited for."""

    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDED = "ended"


def wait(
    run: RunArgument,
    for_: Annotated[Milestone, typer.Option("--for", help="What to wait for.")] = Milestone.ENDED,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", parser=duration, metavar="TIME", help="At most: 90s, 15m; exit code 124."),
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Waits until all ranks of a run run, until it is suspended, or until it has ended.

    Exits with 0 when that came, and with the run's own code when it has ended. A suspended run has not ended. Ctrl-C
    ends the waiting only.
    """
    execute(lambda: _wait(run, for_, timeout, output, state, url), state=state)


async def _wait(
    name: str, for_: Milestone, timeout_s: float | None, output: OutputFormat, state: Any, url: str | None
) -> int:
    from mesh.cli.attend import summary_of
    from mesh.cli.exit_codes import code_of_run
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal
    from mesh.states import RunState

    terminal = Terminal()
    async with (
        client_for(state, url) as client,
        terminal.working(f"Waiting until {name} is {for_}") as spinner,
    ):
        first = await client.get_run(name)
        state_now = first["status"]["state"]
        spinner.say(f"Waiting until {name} is {for_}; it is {state_now} now")
        if state_now == RunState.SUSPENDED and for_ is not Milestone.SUSPENDED:
            terminal.note(f"{name} is suspended; it goes on with: mesh resume {name}")
        run = await client.wait(name, for_.value, timeout_s=timeout_s)
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, run, output)
    if not RunState(run["status"]["state"]).is_terminal:
        terminal.note(f"{name} is {for_}.")
        return 0
    terminal.note(summary_of(run))
    return code_of_run(run)


def cancel(
    run: RunArgument,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Ask only; do not wait for its end.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Stops a run: SIGTERM to every rank, SIGKILL after its grace period. Waits until nothing of it runs any more.

    Cancelling again changes nothing. Ctrl-C ends the waiting only; the run is stopped all the same.
    """
    execute(lambda: _cancel(run, detach, output, state, url), state=state)


async def _cancel(name: str, detach: bool, output: OutputFormat, state: Any, url: str | None) -> None:
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal
    from mesh.states import RunState

    terminal = Terminal()
    async with client_for(state, url) as client, terminal.working(f"Cancelling {name}") as spinner:
        before = await client.get_run(name)
        had_ended = RunState(before["status"]["state"]).is_terminal
        run = before if had_ended else await client.cancel(name)
        if not detach and not had_ended:
            spinner.say(f"Waiting until every process of {name} is gone")
            run = await client.wait(name)
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, run, output)
        return
    status = run["status"]
    if had_ended:
        terminal.note(f"{name} had ended already: {status['state']}.")
    elif RunState(status["state"]).is_terminal:
        terminal.note(f"{name} has ended: {status['state']}.")
    else:
        terminal.note(f"{name} is being cancelled; see it with: mesh describe {name}")


def delete(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of ended runs.")],
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Forgets ended runs, with their logs. Their names are free again."""
    execute(lambda: _delete(runs, state, url), state=state)


async def _delete(names: list[str], state: Any, url: str | None) -> int:
    from mesh.cli.guard import report
    from mesh.cli.terminal import Terminal
    from mesh.errors import ConflictError, NotFoundError

    terminal = Terminal()
    code = 0
    async with client_for(state, url) as client:
        for name in names:
            try:
                await client.delete(name)
            except (NotFoundError, ConflictError) as error:
                code = code or report(error)
            else:
                terminal.note(f"{name} is deleted.")
    return code
