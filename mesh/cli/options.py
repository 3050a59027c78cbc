"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mesh.deployment import STATE_VARIABLE, URL_VARIABLE

if TYPE_CHECKING:
    from mesh.client import MeshClient


class OutputFormat(StrEnum):
    """How results are written."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help=f"State folder of the deployment (${STATE_VARIABLE}, else ~/.gangmesh).",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help=f"API of a deployment elsewhere (${URL_VARIABLE})."),
]
OutputOption = Annotated[OutputFormat, typer.Option("-o", "--output", help="How results are written.")]
TtyFreeOption = Annotated[
    bool, typer.Option("--tty-free", help="No colours and no moving lines, as if nobody looked.")
]


def duration(text: str) -> float:
    """Seconds, from `90s` or `15m`; a parser for options."""
    from mesh.spec.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]


def client_for(state: Path | None, url: str | None) -> MeshClient:
    """The client of the deployment that these options mean. Raises as `mesh.connect`."""
    from mesh.client import connect

    return connect(url=url, state=state)
