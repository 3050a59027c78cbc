"""`mesh drain`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import OutputFormat, OutputOption, StateOption, UrlOption, client_for, duration

if TYPE_CHECKING:
    from mesh.client import MeshClient

LOOK_S = 0.5
GRACE_S_DEFAULT = 120.0


def drain(
    machine: Annotated[str, typer.Argument(metavar="MACHINE", help="The machine's name.")],
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace", parser=duration, metavar="TIME", help="When it goes away: 30s, 2m (when left out)."
        ),
    ] = None,
    message: Annotated[str, typer.Option("-m", "--message", metavar="TEXT", help="Why, for the story.")] = "",
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Say it only; do not wait until the machine is free.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Says that a machine goes away: nobody gets it any more, and the run that has it saves and gets another one.

    A relay is drained at once: nobody uses it any more, and its certificate is revoked.

    The ranks of that run get SIGTERM at once and what is left of the time, at most their own grace period, to save.
    Waits until the machine is free. Ctrl-C ends the waiting only.
    """
    execute(lambda: _drain(machine, grace, message, detach, output, state, url), state=state)


async def _drain(
    name: str,
    grace_s: float | None,
    message: str,
    detach: bool,
    output: OutputFormat,
    state: Any,
    url: str | None,
) -> int:
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal
    from mesh.errors import NotFoundError

    terminal = Terminal()
    grace_s = GRACE_S_DEFAULT if grace_s is None else grace_s
    async with client_for(state, url) as client, terminal.working(f"Draining {name}") as spinner:
        machines = await client.list_machines()
        try:
            machine = await client.reclaim(name, grace_s=grace_s, message=message)
        except NotFoundError:
            if not await _remove_relay(client, name):
                raise
            terminal.note(f"Nobody uses the relay {name} any more; its certificate is revoked.")
            return 0
        if client.is_local and any(m["name"] == name and m["state"] in ("Ready", "InUse") for m in machines):
            # whoever has it needs another one, and simulated ones come only when they are asked for
            await client.grow(sum(m["state"] != "Lost" for m in machines) + 1)
        if machine["run"] and not detach:
            terminal.note(f"{name} leaves: {machine['run']} saves there and gets another machine.")
            spinner.say(f"Waiting until {machine['run']} has left {name}")
        while machine["run"] and not detach:
            await asyncio.sleep(LOOK_S)
            present = [m for m in await client.list_machines() if m["name"] == name and m["state"] != "Lost"]
            machine = present[0] if present else {**machine, "state": "Lost", "run": None, "waitsFor": None}
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, machine, output)
        return 0
    if machine["state"] == "Lost":
        terminal.note(f"{name} is gone.")
    elif machine["run"]:
        terminal.note(f"{name} leaves; {machine['run']} has it still. See: mesh get machines")
    else:
        waits = f" It waits for {machine['waitsFor']}." if machine["waitsFor"] else ""
        terminal.note(f"{name} is free, and nobody gets it any more.{waits}")
    return 0


async def _remove_relay(client: MeshClient, name: str) -> bool:
    """False when there is no such relay."""
    from mesh.errors import ConflictError, NotFoundError

    try:
        await client.remove_relay(name)
    except (NotFoundError, ConflictError):  # or the deployment has no mesh port
        return False
    return True
