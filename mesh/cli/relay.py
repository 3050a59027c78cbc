"""`mesh relay`: a relay for a deployment elsewhere, which is a program of another package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mesh.cli.agent import (
    HeadArgument,
    NameHintOption,
    TokenFileOption,
    TokenOption,
    become,
    join_environment,
    start_detached,
)
from mesh.cli.guard import execute_waiting
from mesh.joining import RELAY_STATE

MODULE = "agents.relay_agent"


def relay(
    head: HeadArgument,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="ADDRESS:PORT", help="Where machines and the head reach it: 0.0.0.0:8472."
        ),
    ],
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    public_address: Annotated[
        str | None,
        typer.Option(
            "--public-address",
            metavar="ADDRESS",
            help="Its address for everybody, where that is not one of this host's own (NAT, a cloud).",
        ),
    ] = None,
    name_hint: NameHintOption = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Leave it running and return when machines can use it.")
    ] = False,
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="Folder of this relay; one folder is one relay.")
    ] = RELAY_STATE,
) -> None:
    """Runs a relay: machines of the deployment that nobody can dial are reached through it, until Ctrl-C or SIGTERM.

    It takes a token of `mesh token create --relay`, sees ciphertext, who speaks with whom, and how much. It needs no
    rights and no Ray. Started again from the same folder it is the same relay; `mesh leave --state DIR` ends that.
    """
    folder = state.expanduser().absolute()
    options = {
        "--head": head,
        "--listen": listen,
        "--state": str(folder),
        "--public-address": public_address,
        "--name-hint": name_hint,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, value)]

    def work() -> int:
        environment = join_environment(head, token, token_file)
        if not detach:
            become(MODULE, words, environment)
        return start_detached(MODULE, words, environment, folder)

    execute_waiting(work)
