"""What the programs of agents have in common: their token, the word that they are ready, and how they end in failure.

Rules of this file:
1. They end with the exit codes of `mesh` (mesh/cli/exit_codes.py), and in its words: in the foreground they are
   `mesh join` and `mesh relay`.
2. A token comes from a file or the environment, which it is taken out of: everybody on the machine can read arguments,
   and nobody below an agent gets it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.told import TOLD
from mesh.cli.exit_codes import ExitCode, code_of_agent
from mesh.cli.guard import report
from mesh.cli.terminal import printable, write_err
from mesh.errors import MeshError, SpecError
from mesh.joining import JOIN_TOKEN_VARIABLE


def take_token(path: Path | None = None) -> str | None:
    """From this file, else from the environment. Raises SpecError."""
    given = os.environ.pop(JOIN_TOKEN_VARIABLE, None)  # before the environment is noted for anybody else
    if path is None:
        return given
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"The token file {path} cannot be read: {error}.", field="--token-file") from error


class ReadyLine:
    """Says one thing, once, to whoever started the agent: that it has joined, or why it has not. Until then it passes
    on what is told (`told.py`).

    Args:
        descriptor: of the other side's pipe; None when nobody listens.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            TOLD.addHandler(_PassedOn(self._pass_on))

    def joined(self, name: str) -> None:
        self._tell({"ready": True, "name": name})

    def failed(self, error: MeshError | OSError) -> int:
        """Says it, here too; the exit code."""
        if isinstance(error, MeshError):
            self._tell({"error": error.to_wire()})
            return report(error, code_of_agent)
        self._tell({"error": {"message": str(error)}})
        write_err(f"mesh: {printable(str(error))}\n")
        return ExitCode.FAILED

    def _pass_on(self, text: str) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, json.dumps({"note": text}).encode() + b"\n")

    def _tell(self, news: dict[str, Any]) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            os.write(descriptor, json.dumps(news).encode() + b"\n")
            os.close(descriptor)
        except OSError:  # a reader that has gone away is no reason to stop
            return


class _PassedOn(logging.Handler):
    def __init__(self, pass_on: Callable[[str], None]) -> None:
        super().__init__()
        self._pass_on = pass_on

    def emit(self, record: logging.LogRecord) -> None:
        self._pass_on(record.getMessage())
