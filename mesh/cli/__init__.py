"""The command line. `main` is what `mesh` and `nodus` start."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Runs the command that was typed and ends the process with its exit code."""
    from mesh.cli.guard import guarded, leave, open_missing_streams

    open_missing_streams()
    from mesh.cli.app import app

    def run() -> int:
        try:
            app()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        return 0

    leave(guarded(run))
