"""`mesh relay`: a relay for a deployment elsewhere, which is a program of another package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mesh.cli.guard import execute
from mesh.cli.join import TOKEN_VARIABLE, agent_environment, check_head, start_detached

RELAY = (sys.executable, "-P", "-m", "agents.relay_agent")
DEFAULT_STATE = Path("~/.gangmesh-relay")


def relay(
    head: Annotated[
        str,
        typer.Argument(metavar="https://HOST:PORT", help="The mesh port of the head (`mesh up --listen`)."),
    ],
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="ADDRESS:PORT", help="Where machines and the head reach it: 0.0.0.0:8472."
        ),
    ],
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            envvar=TOKEN_VARIABLE,
            help="From `mesh token create --relay`. Not needed when it is started again.",
        ),
    ] = None,
    public_address: Annotated[
        str | None,
        typer.Option(
            "--public-address",
            metavar="ADDRESS",
            help="Its address for everybody, where that is not one of this host's own (NAT, a cloud).",
        ),
    ] = None,
    name_hint: Annotated[
        str | None, typer.Option("--name-hint", metavar="NAME", help="What its name shall begin with.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Leave it running and return when machines can use it.")
    ] = False,
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="Folder of this relay; one folder is one relay.")
    ] = DEFAULT_STATE,
) -> None:
    """Runs a relay: machines of the deployment that nobody can dial are reached through it, until Ctrl-C or SIGTERM.

    It sees ciphertext, who speaks with whom, and how much. It needs no rights and no Ray. Started again from the same
    folder it is the same relay; `mesh leave --state DIR` ends that.
    """
    folder = state.expanduser().absolute()
    options: dict[str, str | None] = {
        "--head": head,
        "--listen": listen,
        "--state": str(folder),
        "--public-address": public_address,
        "--name-hint": name_hint,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, value)]

    async def work() -> int:
        check_head(head)
        command, environment = [*RELAY, *words], agent_environment(token)
        if not detach:
            os.execve(command[0], command, environment)
        return start_detached(command, environment, folder, leave=f"mesh leave --state {folder}")

    execute(work)
