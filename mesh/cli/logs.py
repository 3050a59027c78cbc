"""`mesh logs`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import (
    OutputFormat,
    OutputOption,
    RunArgument,
    StateOption,
    TtyFreeOption,
    UrlOption,
    client_for,
)


def logs(
    run: RunArgument,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Of this rank only.")] = None,
    epoch: Annotated[int | None, typer.Option("--epoch", min=1, help="Of this epoch only.")] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Until the run has ended or is suspended.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, metavar="N", help="Begin with the last N lines.")
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="With the time of each line (UTC).")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="The bytes of one rank exactly as it printed them; needs --rank.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
    tty_free: TtyFreeOption = False,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Shows what the ranks printed, merged by time; also after the run has ended and its machines are gone.

    With -o json every line is one JSON object. A stream that is cut (the server was restarted, the laptop slept) goes
    on by itself, with no line left out and none repeated.
    """
    if raw and rank is None:
        raise typer.BadParameter("--raw shows one rank's bytes; say which with --rank.", param_hint="--raw")
    if raw and (follow or tail is not None):
        raise typer.BadParameter("--raw does not go with --follow or --tail.", param_hint="--raw")
    where = {"rank": rank, "epoch": epoch}
    if raw:
        execute(lambda: _raw(run, where, state, url), state=state)
    view = {"timestamps": timestamps, "tty_free": tty_free, "as_json": output is OutputFormat.JSON}
    execute(lambda: _logs(run, {**where, "tail": tail}, follow, view, state, url), state=state)


async def _logs(
    name: str, which: dict[str, Any], follow: bool, how: dict[str, bool], state: Any, url: str | None
) -> int:
    from contextlib import aclosing

    from mesh.cli.exit_codes import ExitCode
    from mesh.cli.log_view import LogView, OutputPump, as_json
    from mesh.cli.terminal import Terminal
    from mesh.states import RunState

    terminal = Terminal(tty_free=how["tty_free"])
    async with client_for(state, url) as client:
        run = await client.get_run(name)
        many = run["status"]["topology"]["nodes"] > 1 and which["rank"] is None
        several_epochs = run["status"]["epoch"] > 1 and which["epoch"] is None
        view = LogView(terminal, prefixed=many, epochs=several_epochs, timestamps=how["timestamps"])
        lines = client.follow_logs(name, **which) if follow else client.logs(name, **which)
        pump = OutputPump()
        async with aclosing(lines):
            async for line in lines:
                if not how["as_json"]:
                    await pump.put(view.render(line))
                elif not line["partial"]:
                    await pump.put(as_json(line))
        await pump.put(view.finish())
        await pump.drain()
        if follow and (await client.get_run(name))["status"]["state"] == RunState.SUSPENDED:
            terminal.note(f"{name} is suspended, not ended. It goes on with: mesh resume {name}")
            return ExitCode.SUSPENDED
    return ExitCode.OK


async def _raw(name: str, which: dict[str, Any], state: Any, url: str | None) -> None:
    from contextlib import aclosing

    from mesh.cli.terminal import is_terminal, write_out

    async with client_for(state, url) as client, aclosing(client.raw_log(name, **which)) as chunks:
        async for chunk in chunks:
            write_out(chunk)
    if is_terminal(sys.stdout):
        write_out(b"\n")
