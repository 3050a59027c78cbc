"""Where a machine keeps what is its own, and its owner's environment.

On a deployment's own host the head says both in the member's configuration. A machine that joined from elsewhere has
its own folder and its own owner: its agent tells them to everything below it, by one variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

FOLDER_VARIABLE = "GANGMESH_MACHINE_FOLDER"
GATEWAY_VARIABLE = "GANGMESH_GATEWAY"
"""On a machine of the mesh: where its gateway's control socket is."""
ENVIRONMENT_NAME = "environment.json"


def machine_folder(machines_dir: str, machine: str) -> Path:
    """The folder for everything that members keep on this machine.

    Args:
        machines_dir: the head's word: where the simulated machines on its host have their folders.
        machine: this machine's name.
    """
    own = os.environ.get(FOLDER_VARIABLE)
    return Path(own or machines_dir) / machine


def owner_environment(told: Mapping[str, str]) -> dict[str, str]:
    """The environment that commands start from: as this machine's agent was started, else as the head was.

    Raises OSError, ValueError when the agent's own note cannot be read.
    """
    own = os.environ.get(FOLDER_VARIABLE)
    if not own:
        return dict(told)
    noted = json.loads((Path(own) / ENVIRONMENT_NAME).read_text(encoding="utf-8"))
    return {str(name): str(value) for name, value in noted.items()}


def note_environment(folder: Path, environment: Mapping[str, str]) -> None:
    """Keeps the owner's environment for `owner_environment`, readable by its owner only. Raises OSError."""
    path = folder / ENVIRONMENT_NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dict(environment), file)
