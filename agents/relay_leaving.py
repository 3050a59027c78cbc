"""A relay leaves its deployment for good: when `mesh leave` ends it, or from its folder where it does not run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agents.head_line import HeadUrl, head_api
from agents.relay_folder import KnownRelay, RelayFolder
from mesh.cli.exit_codes import ExitCode, code_of_agent
from mesh.cli.terminal import printable, write_err
from mesh.errors import MeshError


async def leave_head(known: KnownRelay) -> None:
    """Its certificate is revoked. Raises MeshError."""
    async with head_api(
        HeadUrl.parse(known.head), bundle_pem=known.bundle.encode(), secret=known.secret
    ) as api:
        await api.call("POST", f"/v1/relays/{known.name}/leave", repeat_s=2.0)


def leave_from_afar(path: Path) -> ExitCode | None:
    """`mesh leave` in the folder of a relay that does not run; None when it is no relay's. Raises DeploymentError."""
    folder = RelayFolder(path)
    known = folder.read_known()
    if known is None:
        return None
    code = ExitCode.OK
    try:
        asyncio.run(leave_head(known))
        write_err(f"The relay {known.name} has left. To take part again it needs a token.\n")
    except MeshError as error:
        code = code_of_agent(error)
        write_err(
            f"The relay {known.name} does not run and is forgotten here, but the head was not told: "
            f"{printable(error.message)} There, `mesh drain {known.name}` revokes its certificate.\n"
        )
    folder.forget()
    return code
