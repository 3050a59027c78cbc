"""Who this machine is to its head, over restarts: one file in the agent's folder, for its owner only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mesh.errors import DeploymentError
from mesh.joining import IDENTITY_NAME
from mesh.private_files import write_private
from mesh.reasons import Reason

FILE_NAME = IDENTITY_NAME
OPTIONS_NAME = "join-options.json"
"""See `kept_options.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIdentity:
    """As what this machine was taken in last."""

    head: str
    """Where it found the head."""
    name: str
    secret: str = field(repr=False)
    bundle: str
    """Whom it trusts, PEM."""


def read_identity(folder: Path) -> KnownIdentity | None:
    """None when this machine has never joined, or has left. Raises DeploymentError when it cannot be read."""
    path = folder / FILE_NAME
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        return KnownIdentity(**{name: str(words[name]) for name in ("head", "name", "secret", "bundle")})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeploymentError(
            f"This machine's identity {path} cannot be read: {error!r}.",
            hint="Remove it, and join with a new token.",
            reason=Reason.UNREADABLE,
            path=str(path),
        ) from error


def is_known(folder: Path) -> bool:
    """Whether there is an identity, readable or not."""
    return (folder / FILE_NAME).exists()


def write_identity(folder: Path, identity: KnownIdentity) -> None:
    """Whole or not at all; on disk when it returns. Raises OSError."""
    write_private(folder / FILE_NAME, json.dumps(asdict(identity)))


def forget_identity(folder: Path) -> None:
    """And what it was told when it joined. Raises OSError."""
    for name in (FILE_NAME, OPTIONS_NAME):
        (folder / name).unlink(missing_ok=True)
