"""Which torchrun is run by `agents.launcher.torchrun_program`, so that it ends as soon as it has nothing more to do.

Rules of this file:
1. Only the entry script that pip and uv write for `torch.distributed.run` is taken over, run by the interpreter that
   its first line names. All else (a wrapper, another program of that name, a relative path) is run as it is.
2. A user's variable turns it off: GANGMESH_TORCHRUN_AS_IT_IS, set to anything but the empty text.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from agents.launcher import torchrun_program

OFF_VARIABLE = "GANGMESH_TORCHRUN_AS_IT_IS"
SCRIPT_BYTES_MAX = 1024
_ENTRY_SCRIPT = re.compile(
    r"#!(?P<interpreter>/[^\s]+)\n"
    r"(?:# -\*- coding: utf-8 -\*-\n)?"
    r"(?:import re\n)?import sys\n(?:import re\n)?"
    r"from torch\.distributed\.run import main\n+"
    r"if __name__ == ['\"]__main__['\"]:\n"
    r"(?:    [^\n]*sys\.argv\[0\][^\n]*\n)*"
    r"    sys\.exit\(main\(\)\)\n*"
)


def with_quick_end(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The command line to start in place of this one, or the same. Blocking."""
    if env.get(OFF_VARIABLE) or not argv or PurePath(argv[0]).name != "torchrun":
        return tuple(argv)
    script = argv[0] if Path(argv[0]).is_absolute() else _found_on_path(argv[0], env)
    interpreter = None if script is None else _interpreter_of(script)
    if script is None or interpreter is None:
        return tuple(argv)
    return (interpreter, torchrun_program.__file__, script, *argv[1:])


def _found_on_path(name: str, env: Mapping[str, str]) -> str | None:
    if os.sep in name:
        return None
    found = shutil.which(name, path=env.get("PATH", ""))
    return found if found is not None and Path(found).is_absolute() else None


def _interpreter_of(script: str) -> str | None:
    """What its first line names, when it is torchrun's own entry script."""
    try:
        with Path(script).open("rb") as file:
            text = file.read(SCRIPT_BYTES_MAX + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    match = _ENTRY_SCRIPT.fullmatch(text)
    return match["interpreter"] if match is not None and os.access(match["interpreter"], os.X_OK) else None
