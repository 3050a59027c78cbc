"""What a machine was told on its command line when it joined last: it comes back with that where it is told nothing.

Rules of this file:
1. Whoever shows a token joins with what it says now, and with nothing else: its folder may be of another machine.
2. What is said now takes the place of what was said of its kind: the labels, the private network, the public address.
"""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import replace
from pathlib import Path

from agents.join_mesh_settings import MeshJoinSettings
from agents.machine_identity import OPTIONS_NAME
from agents.told import TOLD
from mesh.private_files import write_private

_log = logging.getLogger(__name__)


def with_kept(settings: MeshJoinSettings, folder: Path) -> MeshJoinSettings:
    """These, completed by what was said before. Blocking. Raises OSError."""
    return _completed(settings, folder / OPTIONS_NAME) if settings.token is None else settings


def keep(settings: MeshJoinSettings, folder: Path) -> None:
    """For the next time. Blocking. Raises OSError."""
    words = {
        "labels": dict(settings.labels),
        "private_network": settings.private_network,
        "private_address": settings.private_address,
        "public_address": settings.public_address,
    }
    write_private(folder / OPTIONS_NAME, json.dumps(words))


def _completed(settings: MeshJoinSettings, path: Path) -> MeshJoinSettings:
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        labels = {str(name): str(value) for name, value in words["labels"].items()}
        kept = replace(
            settings,
            labels=labels,
            private_network=str(words["private_network"]),
            private_address=str(words["private_address"]),
            public_address=str(words["public_address"]),
        )
    except FileNotFoundError:
        return settings
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("what this machine was told before cannot be read: %s: %r", path, error)
        return settings
    said: list[str] = []
    if not settings.labels and kept.labels:
        settings = replace(settings, labels=kept.labels)
        said += [word for name, value in kept.labels.items() for word in ("--label", f"{name}={value}")]
    if not settings.private_network and kept.private_network:
        settings = replace(
            settings, private_network=kept.private_network, private_address=kept.private_address
        )
        said += ["--private-network", kept.private_network, "--private-address", kept.private_address]
    if not settings.public_address and kept.public_address:
        settings = replace(settings, public_address=kept.public_address)
        said += ["--public-address", kept.public_address]
    if said:
        TOLD.info("As it was told before: %s", shlex.join(said))
    return settings
