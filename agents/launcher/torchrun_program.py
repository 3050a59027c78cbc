"""torchrun as its own entry script runs it, but for the end: `python torchrun_program.py SCRIPT [ARGUMENT …]`.

Theory of operation. When a worker has failed, torchrun says so within a tenth of a second, and then takes down an
interpreter that has torch imported: half a second on an idle machine, two to four on a busy one, in which nothing more
is done and the gang waits for its exit. So torchrun's `main` is called here as its script does (same interpreter, same
arguments, same `sys.path`), what is registered for the exit is done, and then the process ends with no interpreter
taken down. Run by the user's interpreter: the standard library and their torch, nothing of ours.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path


def main() -> None:
    script = sys.argv[1]
    sys.argv = [script, *sys.argv[2:]]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        from torch.distributed.run import main as torchrun

        sys.exit(torchrun())
    except SystemExit as error:
        code = exit_code(error.code)
    except Exception:  # noqa: BLE001 - as the interpreter does at its end
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # nobody reads it any more
    os._exit(code)


def exit_code(given: object) -> int:
    """What the interpreter makes of what `sys.exit` was given."""
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 0xFF
    sys.stderr.write(f"{given}\n")
    return 1


if __name__ == "__main__":
    main()
