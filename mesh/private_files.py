"""Files for their owner only, written whole or not at all: secrets, keys, and what must not be lost."""

from __future__ import annotations

import os
import re
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """On disk when it returns. Two writers of one file must not meet (`private_writer.py`). Raises OSError.

    A draft that is not finished is removed, by the next writer where the process has died: it may hold a key.
    """
    for left in _drafts(path):
        left.unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _drafts(path: Path) -> list[Path]:
    """Of this file, whoever has begun them."""
    draft = re.compile(rf"\.{re.escape(path.name)}\.[0-9]+\.tmp")
    return [left for left in path.parent.iterdir() if draft.fullmatch(left.name)]
