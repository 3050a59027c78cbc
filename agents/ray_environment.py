"""The environment of the head, of a machine's agent, and of every Ray process. Pure.

Nothing of the user's goes there but what the processes need: not their RAY_ADDRESS, not their PYTHONPATH, not a
megabyte of variables. The user's own environment is kept apart and handed to the users' commands (`user_environment`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from agents.machine_folder import FOLDER_VARIABLE
from agents.raylet import RAY_SETTINGS
from mesh.joining import JOIN_TOKEN_VARIABLE

MARK = "GANGMESH_DEPLOYMENT"
"""On every process of a deployment: its id. See `coordinator.leftovers`."""
KEPT_VARIABLES = frozenset({"HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER"})
STORE_PREFIXES = ("AWS_", "AZURE_", "FSSPEC_", "GOOGLE_")
"""Where the packages behind a checkpoint store read their credentials and endpoints: members and coordinator ask it."""
KEPT_PREFIXES = ("GANGMESH_", "LC_", *STORE_PREFIXES)
NEVER_KEPT = frozenset(
    {
        "GANGMESH_TOKEN",
        JOIN_TOKEN_VARIABLE,
        "GANGMESH_URL",
        "GANGMESH_DB",
        "GANGMESH_GATEWAY",
        FOLDER_VARIABLE,
    }
)


def ray_environment(
    user: Mapping[str, str], *, token_file: Path, deployment_id: str, source: Path | None
) -> dict[str, str]:
    """The environment of every Ray process and of the head.

    Args:
        user: the environment that the head was started with.
        token_file: Ray's authentication token.
        deployment_id: the mark by which the deployment's processes are found.
        source: see `mesh.own_source.source_folder`.
    """
    kept = {
        name: value
        for name, value in user.items()
        if (name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)) and name not in NEVER_KEPT
    }
    return {
        **kept,
        **RAY_SETTINGS,
        **({"PYTHONPATH": str(source)} if source else {}),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        MARK: deployment_id,
    }


def user_environment(given: Mapping[str, str], *, source: Path | None) -> dict[str, str]:
    """The snapshot for the users' commands: as the head was started, without the PYTHONPATH entry that is ours."""
    user = dict(given)
    if source is not None and "PYTHONPATH" in user:
        theirs = [part for part in user["PYTHONPATH"].split(os.pathsep) if part != str(source)]
        if theirs:
            user["PYTHONPATH"] = os.pathsep.join(theirs)
        else:
            del user["PYTHONPATH"]
    return user
