"""Who leaves its deployment for good: when `mesh leave` ends it, or from its folder where no agent runs.

What has become of it at its head is said as it is. Who could tell its head nothing ends with the exit code of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from agents.head_line import HeadUrl, head_api
from agents.machine_identity import KnownIdentity, forget_identity, read_identity
from agents.relay_folder import KnownRelay, RelayFolder
from mesh.cli.exit_codes import ExitCode, code_of_agent
from mesh.cli.terminal import printable, write_err
from mesh.errors import AuthenticationError, DeploymentError, MeshError


async def leave_head(known: KnownRelay) -> str | None:
    """Its certificate is revoked; what the head says where it believed the relay nothing any more. Raises MeshError."""
    return await _leave(known, "POST", f"/v1/relays/{known.name}/leave")


async def _leave(known: KnownRelay | KnownIdentity, method: str, path: str) -> str | None:
    head = HeadUrl.parse(known.head)
    async with head_api(head, bundle_pem=known.bundle.encode(), secret=known.secret) as api:
        try:
            await api.call(method, path, repeat_s=2.0)
        except AuthenticationError as error:
            return error.message
    return None


def leave_from_afar(path: Path) -> ExitCode | None:
    """`mesh leave` in a folder whose agent does not run; None when it is nobody's. Raises DeploymentError."""
    folder = RelayFolder(path)
    relay = folder.read_known()
    if relay is not None:
        remedy = f"There, `mesh drain {relay.name}` revokes its certificate."
        return _say(f"The relay {relay.name}", leave_head(relay), folder.forget, remedy=remedy)
    try:
        machine = read_identity(path)
    except DeploymentError as error:  # whoever it was: it is nobody now
        write_err(f"{printable(error.message)} It is removed; the head gives the machine up.\n")
        forget_identity(path)
        return ExitCode.OK
    if machine is None:
        return None
    leaving = _leave(machine, "DELETE", f"/v1/machines/{machine.name}")
    remedy = "It gives the machine up, and revokes its certificate, within two minutes of being there again."
    return _say(f"The machine {machine.name}", leaving, lambda: forget_identity(path), remedy=remedy)


def _say(
    who: str, leaving: Coroutine[Any, Any, str | None], forget: Callable[[], None], *, remedy: str
) -> ExitCode:
    code = ExitCode.OK
    try:
        had_forgotten = asyncio.run(leaving)
        if had_forgotten is None:
            write_err(f"{who} has left. To take part again it needs a token.\n")
        else:
            write_err(f"{who} is forgotten here. Its head had done so before: {printable(had_forgotten)}\n")
    except MeshError as error:
        code = code_of_agent(error)
        write_err(
            f"{who} is forgotten here, but the head was not told: {printable(error.message)} {remedy}\n"
        )
    forget()
    return code
