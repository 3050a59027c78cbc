"""`mesh join` and `mesh leave`: this machine's agent, which is a program of another package.

Rules of this file:
1. In the foreground this process becomes the agent. With --detach the agent is a daemon whose word is waited for.
2. A token goes to the agent in its environment: everybody on the machine can read arguments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from mesh.cli.guard import execute

TOKEN_VARIABLE = "GANGMESH_JOIN_TOKEN"
AGENT = (sys.executable, "-P", "-m", "agents")
LOG_NAME = "agent.log"
MachineStateOption = Annotated[
    Path,
    typer.Option("--state", metavar="DIR", help="Folder of this machine; one folder is one machine."),
]
DEFAULT_STATE = Path("~/.gangmesh-machine")


def join(
    head: Annotated[
        str,
        typer.Argument(metavar="https://HOST:PORT", help="The mesh port of the head (`mesh up --listen`)."),
    ],
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            envvar=TOKEN_VARIABLE,
            help="From `mesh token create`. Not needed by a machine that comes back.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="KEY=VALUE", help="Such as provider=, region=, rack=; may be repeated."
        ),
    ] = None,
    name_hint: Annotated[
        str | None, typer.Option("--name-hint", metavar="NAME", help="What its name shall begin with.")
    ] = None,
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
    state: MachineStateOption = DEFAULT_STATE,
) -> None:
    """Lets this machine join a deployment elsewhere, through one port of its head, until Ctrl-C or SIGTERM.

    Only outbound connections are needed. As root, with nftables, every program reaches its peers; without, only one
    that is linked dynamically with the GNU C library. A machine that has joined before comes back without a token;
    `mesh leave` ends that.
    """
    options: dict[str, str | None] = {
        "--head": head,
        "--state": str(state.expanduser().absolute()),
        "--name-hint": name_hint,
        "--listen": listen,
        "--private-network": private_network,
        "--private-address": private_address,
        "--public-address": public_address,
        "--grace": None if grace is None else str(grace),
    }
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    words += [word for pair in label or [] for word in ("--label", pair)]
    environment = agent_environment(token)

    async def work() -> int:
        check_head(head)
        if not detach:
            os.execve(AGENT[0], [*AGENT, "join", *words], environment)
        return start_detached([*AGENT, "join", *words], environment, state.expanduser().absolute())

    execute(work)


def leave(state: MachineStateOption = DEFAULT_STATE) -> None:
    """Lets this machine leave its deployment: its run saves and gets another machine, its certificate is revoked."""
    command = [*AGENT, "leave", "--state", str(state.expanduser().absolute())]

    async def work() -> int:
        os.execve(AGENT[0], command, agent_environment(None))

    execute(work)


def check_head(head: str) -> None:
    from mesh.errors import SpecError

    if head.startswith("http://"):
        raise SpecError(
            f"{head[:200]} is a plain API; machines join through the mesh port of a head.",
            hint="Write https://HOST:PORT with the port of `mesh up --listen`. (In a network in which everybody may be "
            "trusted: `python -m agents join --head http://… --address …`.)",
            field="HEAD",
        )


def agent_environment(token: str | None) -> dict[str, str]:
    """Ours, so that the agent imports the same packages, installed or not."""
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    if token:
        environment[TOKEN_VARIABLE] = token
    source = Path(__file__).resolve().parents[2]
    if source.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{source}{os.pathsep}{known}" if known else str(source)
    return environment


def start_detached(
    command: list[str], environment: dict[str, str], state: Path, *, leave: str = "mesh leave"
) -> int:
    """Returns when the agent has joined, or raises what it said."""
    from mesh.cli.terminal import Terminal
    from mesh.errors import DeploymentError, MeshError
    from mesh.reasons import Reason

    reading, writing = os.pipe()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (state / LOG_NAME).open("ab") as log:
            process = subprocess.Popen(
                [*command, "--ready-fd", str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(writing,),
                start_new_session=True,
            )
    except OSError as error:
        os.close(reading)
        raise DeploymentError(
            f"The agent cannot be started: {error}.", reason=Reason.STATE_NOT_WRITABLE
        ) from error
    finally:
        os.close(writing)
    try:
        with os.fdopen(reading, "rb") as news:
            line = news.readline()
    except BaseException:
        process.terminate()
        raise
    told = json.loads(line) if line else {}
    if "name" not in told:
        process.wait()
        raise MeshError.from_wire(
            told.get("error")
            or {
                "error": "DeploymentError",
                "message": "The agent ended.",
                "hint": f"Its log is {state / LOG_NAME}.",
            }
        )
    process.returncode = 0  # a daemon now: not ours to wait for
    Terminal().out(f"Joined as {told['name']}. Log: {state / LOG_NAME}. It ends with: {leave}")
    return 0
