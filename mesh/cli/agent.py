"""What `mesh join` and `mesh relay` have in common: their agents are programs of another package.

Rules of this file:
1. In the foreground this process becomes the agent. Detached, the agent is a daemon whose word is waited for.
2. A token goes to the agent in its environment: everybody on the machine can read arguments.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import typer

from mesh.joining import JOIN_TOKEN_VARIABLE, MACHINE_STATE
from mesh.own_source import with_own_source

LOG_NAME = "agent.log"
TOKEN_BYTES_MAX = 1024

HeadArgument = Annotated[
    str, typer.Argument(metavar="https://HOST:PORT", help="The mesh port of the head (`mesh up --listen`).")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="From `mesh token create`. Others on this machine see it while this command starts; they do not see "
        f"${JOIN_TOKEN_VARIABLE} and --token-file. Not needed by who comes back.",
    ),
]
TokenFileOption = Annotated[
    str | None,
    typer.Option("--token-file", metavar="FILE", help="A file with the token in it; - is standard input."),
]
NameHintOption = Annotated[
    str | None, typer.Option("--name-hint", metavar="NAME", help="What its name shall begin with.")
]


def join_environment(head: str, token: str | None, token_file: str | None) -> dict[str, str]:
    """Of an agent that shall join this head by this token. Raises SpecError."""
    from mesh.errors import SpecError

    if head.startswith("http://"):
        raise SpecError(
            f"{head[:200]} is a plain API; machines join through the mesh port of a head.",
            hint="Write https://HOST:PORT with the port of `mesh up --listen`. (In a network in which everybody may be "
            "trusted: `python -m agents join --head http://… --address …`.)",
            field="HEAD",
        )
    if token is not None and token_file is not None:
        raise SpecError("--token and --token-file exclude each other.", field="--token")
    if token is None:
        token = os.environ.get(JOIN_TOKEN_VARIABLE) if token_file is None else _read_token(token_file)
    return agent_environment(token)


def agent_environment(token: str | None = None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != JOIN_TOKEN_VARIABLE}
    return with_own_source({**environment, JOIN_TOKEN_VARIABLE: token} if token else environment)


def _read_token(path: str) -> str:
    from mesh.errors import SpecError

    try:
        if path == "-":
            text = sys.stdin.buffer.read(TOKEN_BYTES_MAX).decode("ascii")
        else:
            with Path(path).open("rb") as file:
                text = file.read(TOKEN_BYTES_MAX).decode("ascii")
        if not text.strip().isprintable():  # a zero can be in no environment
            raise ValueError(text[:1])
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SpecError(f"The token file {path} cannot be read: {why}.", field="--token-file") from error
    if not text.strip():
        raise SpecError(
            f"There is no token in {'standard input' if path == '-' else path}.", field="--token-file"
        )
    return text.strip()


def become(module: str, words: Sequence[str], environment: Mapping[str, str] | None = None) -> NoReturn:
    """This process is the agent from now on."""
    program = _program(module)
    os.execve(program[0], [*program, *words], agent_environment() if environment is None else environment)


def start_detached(module: str, words: Sequence[str], environment: Mapping[str, str], state: Path) -> int:
    """Starts the agent of this folder as a daemon; the exit code, when it has joined or has said why not."""
    from mesh.cli.exit_codes import ExitCode, code_of_agent
    from mesh.cli.guard import report
    from mesh.cli.terminal import Terminal
    from mesh.errors import MeshError

    try:
        name, pid = _start(module, words, environment, state)
    except MeshError as error:
        return report(error, code_of_agent)
    leave = ["mesh", "leave", *(() if state == MACHINE_STATE.expanduser() else ("--state", str(state)))]
    Terminal().out(
        f"Joined as {name}. Log: {state / LOG_NAME}. To stop it and start it again as the same: kill {pid}. "
        f"To leave for good: {shlex.join(leave)}"
    )
    return ExitCode.OK


def _start(module: str, words: Sequence[str], environment: Mapping[str, str], state: Path) -> tuple[str, int]:
    """The name of who has joined, and its process. Raises what it said."""
    from mesh.errors import DeploymentError, MeshError
    from mesh.reasons import Reason

    reading, writing = os.pipe()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (state / LOG_NAME).open("ab") as log:
            process = subprocess.Popen(
                [*_program(module), *words, "--ready-fd", str(writing)],
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
            told = _word_of(news)
    except BaseException:
        process.terminate()
        raise
    if "name" not in told:
        process.wait()
        raise (
            MeshError.from_wire(told["error"])
            if "error" in told
            else DeploymentError(
                "The agent ended.", hint=f"Its log is {state / LOG_NAME}.", reason=Reason.INTERNAL
            )
        )
    process.returncode = 0  # a daemon now: not ours to wait for
    return str(told["name"]), process.pid


def _word_of(news: BinaryIO) -> dict[str, Any]:
    """That it has joined, or why not; empty when it ended without a word. Passes on what it says before."""
    from mesh.cli.terminal import Terminal, printable

    for line in news:
        told: dict[str, Any] = json.loads(line)
        if "note" not in told:
            return told
        Terminal().note(printable(str(told["note"])))
    return {}


def _program(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", module]
