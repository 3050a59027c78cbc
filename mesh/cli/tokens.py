"""`mesh token create|list|revoke`."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.guard import execute
from mesh.cli.options import OutputFormat, OutputOption, StateOption, UrlOption, client_for, duration

if TYPE_CHECKING:
    from mesh.cli.terminal import Terminal


class TokenVerb(StrEnum):
    """What is done."""

    CREATE = "create"
    LIST = "list"
    REVOKE = "revoke"


def token(
    verb: Annotated[TokenVerb, typer.Argument(metavar="create|list|revoke")],
    token_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Of the token to revoke, as `list` shows it.")
    ] = None,
    ttl: Annotated[
        float | None,
        typer.Option(
            "--ttl",
            parser=duration,
            metavar="TIME",
            help="For how long a new one is good; 15m when left out, at most 24h.",
        ),
    ] = None,
    relay: Annotated[
        bool, typer.Option("--relay", help="For `mesh relay` instead: nobody joins with it as a machine.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
    state: StateOption = None,
    url: UrlOption = None,
) -> None:
    """Makes, lists or revokes the tokens that machines join with (`mesh join`). One is good for one machine.

    `create` prints the token and nothing else, so that a script can take it.
    """
    if (verb is TokenVerb.REVOKE) != (token_id is not None):
        raise typer.BadParameter(
            "revoke takes the ID of a token" if token_id is None else f"{verb} takes no ID", param_hint="ID"
        )
    if ttl is not None and verb is not TokenVerb.CREATE:
        raise typer.BadParameter(f"{verb} takes no --ttl", param_hint="--ttl")
    if relay and verb is not TokenVerb.CREATE:
        raise typer.BadParameter(f"{verb} takes no --relay", param_hint="--relay")
    execute(lambda: _token(verb, token_id or "", ttl, relay, output, state, url), state=state)


async def _token(
    verb: TokenVerb,
    token_id: str,
    ttl_s: float | None,
    relay: bool,
    output: OutputFormat,
    state: Any,
    url: str | None,
) -> None:
    from mesh.cli.terminal import Terminal

    terminal = Terminal()
    is_document = output in (OutputFormat.JSON, OutputFormat.YAML)
    async with client_for(state, url) as client, terminal.working("Asking"):
        if verb is TokenVerb.CREATE:
            made = await client.create_token(ttl_s=ttl_s, relay=relay)
        elif verb is TokenVerb.REVOKE:
            revoked = await client.revoke_token(token_id)
        else:
            listed = await client.list_tokens()
    if verb is TokenVerb.CREATE:
        if is_document:
            _document(terminal, made, output)
        else:
            terminal.out(made["token"])
    elif verb is TokenVerb.REVOKE:
        if is_document:
            _document(terminal, revoked, output)
        else:
            terminal.note(f"Nobody joins with {token_id} any more.")
    elif is_document:
        _document(terminal, {"tokens": listed}, output)
    else:
        _table(terminal, listed, wide=output is OutputFormat.WIDE)


def _document(terminal: Terminal, data: Any, output: OutputFormat) -> None:
    from mesh.cli.output import print_document

    print_document(terminal, data, output)


def _table(terminal: Terminal, listed: list[Any], *, wide: bool) -> None:
    from mesh.cli.output import Column, print_table, span

    now = time.time()
    columns = (
        Column(title="ID", text=lambda item: str(item["id"])),
        Column(title="STATE", text=lambda item: str(item["state"])),
        Column(title="FOR", text=lambda item: str(item["purpose"])),
        Column(
            title="EXPIRES IN",
            text=lambda item: span(item["expiresAt"] - now) if item["state"] == "Open" else "-",
        ),
    )
    print_table(
        terminal, columns, listed, wide=wide, nothing="There are no tokens. Make one: mesh token create"
    )
