"""`mesh join` and `mesh leave`: this machine's agent, which is a program of another package."""

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
from mesh.joining import MACHINE_STATE

MODULE = "agents"
MachineStateOption = Annotated[
    Path,
    typer.Option("--state", metavar="DIR", help="Folder of this machine; one folder is one machine."),
]


def join(
    head: HeadArgument,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="KEY=VALUE", help="Such as provider=, region=, rack=; may be repeated."
        ),
    ] = None,
    name_hint: NameHintOption = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="ADDRESS:PORT",
            help="Where its own mesh port is: 0.0.0.0:8471. It need not be reachable: then a relay is used.",
        ),
    ] = None,
    private_network: Annotated[
        str | None,
        typer.Option(
            "--private-network",
            metavar="NAME",
            help="A network that it shares with others of the same NAME, which trust each other: members speak in the "
            "clear there.",
        ),
    ] = None,
    private_address: Annotated[
        str | None,
        typer.Option("--private-address", metavar="ADDRESS", help="Its address in that network."),
    ] = None,
    public_address: Annotated[
        str | None,
        typer.Option(
            "--public-address",
            metavar="ADDRESS",
            help="Its address for everybody. Says also that members may speak in the clear between such addresses.",
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace", metavar="SECONDS", help="For its run to save and leave, when it is told to stop."
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Leave the agent running and return when it has joined.")
    ] = False,
    state: MachineStateOption = MACHINE_STATE,
) -> None:
    """Lets this machine join a deployment elsewhere, through one port of its head, until Ctrl-C or SIGTERM.

    Only outbound connections are needed. As root, with nftables, every program reaches its peers; without, only one
    that is linked dynamically with the GNU C library. A machine that has joined before comes back without a token;
    `mesh leave` ends that.
    """
    folder = state.expanduser().absolute()
    options = {
        "--head": head,
        "--state": str(folder),
        "--name-hint": name_hint,
        "--listen": listen,
        "--private-network": private_network,
        "--private-address": private_address,
        "--public-address": public_address,
        "--grace": None if grace is None else str(grace),
    }
    words = [
        "join",
        *(word for name, value in options.items() if value is not None for word in (name, value)),
    ]
    words += [word for pair in label or [] for word in ("--label", pair)]

    def work() -> int:
        environment = join_environment(head, token, token_file)
        if not detach:
            become(MODULE, words, environment)
        return start_detached(MODULE, words, environment, folder)

    execute_waiting(work)


def leave(state: MachineStateOption = MACHINE_STATE) -> None:
    """Lets this machine leave its deployment: its run saves and gets another machine, its certificate is revoked."""

    def work() -> int:
        become(MODULE, ["leave", "--state", str(state.expanduser().absolute())])

    execute_waiting(work)
