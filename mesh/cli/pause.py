"""`mesh suspend` and `mesh resume`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import OutputFormat, OutputOption, RunArgument, StateOption, UrlOption, client_for

DetachOption = Annotated[bool, typer.Option("-d", "--detach", help="Ask only; do not wait for it.")]


def suspend(
    run: RunArgument,
    detach: DetachOption = False,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Stops a run for now: its ranks get SIGTERM and their grace period to save, its machines are given back.

    Waits until nothing of it runs. `mesh resume` lets it go on, in a new epoch, from the last committed checkpoint.
    Suspending again changes nothing. Ctrl-C ends the waiting only.
    """
    execute(lambda: _suspend(run, detach, output, state, url), state=state)


async def _suspend(name: str, detach: bool, output: OutputFormat, state: Any, url: str | None) -> int:
    from mesh.cli.attend import summary_of
    from mesh.cli.exit_codes import ExitCode
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal
    from mesh.states import RunState

    terminal = Terminal()
    async with client_for(state, url) as client, terminal.working(f"Suspending {name}") as spinner:
        run = await client.suspend(name)
        if not detach:
            spinner.say(f"Waiting until every process of {name} is gone")
            run = await client.wait(name, "suspended")
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, run, output)
    reached = RunState(run["status"]["state"])
    if reached is RunState.SUSPENDED:
        terminal.note(f"{name} is suspended. It goes on with: mesh resume {name}")
    elif reached.is_terminal:  # it ended by itself, or somebody cancelled it meanwhile
        terminal.note(summary_of(run))
        return ExitCode.CONFLICT
    else:
        terminal.note(f"{name} is being suspended; wait for it with: mesh wait {name} --for suspended")
    return ExitCode.OK


def resume(
    run: RunArgument,
    detach: DetachOption = False,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Lets a suspended run go on: machines for every rank, a new epoch, the last committed checkpoint.

    Waits until all of its ranks run. Ctrl-C ends the waiting only.
    """
    execute(lambda: _resume(run, detach, output, state, url), state=state)


async def _resume(name: str, detach: bool, output: OutputFormat, state: Any, url: str | None) -> int:
    from contextlib import aclosing

    from mesh.cli.attend import StoryTeller, summary_of
    from mesh.cli.exit_codes import ExitCode, code_of_run
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal
    from mesh.states import RunState

    terminal = Terminal()
    teller = StoryTeller()
    async with client_for(state, url) as client, terminal.working(f"Resuming {name}") as spinner:
        before = await client.list_events(run=name)
        run = await client.resume(name)
        told_before = before[-1]["seq"] if before else 0
        if not detach:
            async with aclosing(client.watch_run(name)) as states:
                async for run, events in states:
                    for sentence in teller.tell(run, [e for e in events if e["seq"] > told_before]):
                        terminal.note(f"{name}: {sentence}")
                        spinner.say(f"{name}: {sentence}")
                    reached = RunState(run["status"]["state"])
                    if reached is RunState.RUNNING or reached is RunState.SUSPENDED:
                        break
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, run, output)
    reached = RunState(run["status"]["state"])
    if reached.is_terminal or reached is RunState.SUSPENDED:
        terminal.note(summary_of(run))
        return code_of_run(run)
    verb = "runs" if reached is RunState.RUNNING else "is resumed"
    terminal.note(f"{name} {verb}. Follow it: mesh logs -f {name}")
    return ExitCode.OK
