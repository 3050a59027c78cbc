"""`mesh authority show|rotate`."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import OutputFormat, OutputOption, StateOption, UrlOption, client_for, duration

if TYPE_CHECKING:
    from mesh.cli.terminal import Terminal
    from mesh.resources import AuthorityFacts, RotationFacts


class AuthorityVerb(StrEnum):
    """What is done."""

    SHOW = "show"
    ROTATE = "rotate"


def authority(
    verb: Annotated[AuthorityVerb, typer.Argument(metavar="show|rotate")],
    overlap: Annotated[
        float | None,
        typer.Option(
            "--overlap",
            parser=duration,
            metavar="TIME",
            help="For how long the next authority is trusted before it signs: 12h to 30d, 7d when left out.",
        ),
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Shows whom the machines of the mesh trust, or begins to replace the deployment's certificate authority.

    The rest of a rotation happens by itself, and no run notices it.
    """
    if overlap is not None and verb is not AuthorityVerb.ROTATE:
        raise typer.BadParameter(f"{verb} takes no --overlap", param_hint="--overlap")
    execute(lambda: _authority(verb, overlap, output, state, url), state=state)


async def _authority(
    verb: AuthorityVerb, overlap_s: float | None, output: OutputFormat, state: Any, url: str | None
) -> None:
    from mesh.cli.output import print_document
    from mesh.cli.terminal import Terminal

    terminal = Terminal()
    async with client_for(state, url) as client, terminal.working("Asking"):
        if verb is AuthorityVerb.ROTATE:
            facts = await client.rotate_authority(overlap_s=overlap_s)
        else:
            facts = await client.authority()
    if output in (OutputFormat.JSON, OutputFormat.YAML):
        print_document(terminal, facts, output)
        return
    _tell(terminal, facts)
    if verb is AuthorityVerb.ROTATE:
        terminal.note(
            "Before it signs, copy authority/bundle.pem from the state folder to clients elsewhere."
        )


def _tell(terminal: Terminal, facts: RotationFacts) -> None:
    terminal.out(f"signs   {_line(facts['signing'])}")
    if facts["next"] is not None:
        terminal.out(f"next    {_line(facts['next'])}; signs from {_moment(facts['signsAt'])} on")
        if facts["waitsFor"]:
            terminal.out(
                "        and not before these trust it (`mesh drain NAME` for one that does not come back): "
                f"{', '.join(facts['waitsFor'])}"
            )
    if facts["old"] is not None:
        terminal.out(f"before  {_line(facts['old'])}; trusted until {_moment(facts['forgottenAt'])}")


def _line(facts: AuthorityFacts) -> str:
    return f"{facts['fingerprint']}, ends {_moment(facts['endsAt'])}"


def _moment(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
