"""The supervisor: the process between a launcher and a rank's command. Whatever dies first, no orphan survives.

    python -I -S agents/supervisor.py

What it is told and what it says: `supervisor_protocol`. What it does: `supervision`. This file is the entry
alone, because Python compiles the file that it is given at every start, and only what that imports once.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from agents import supervision
else:
    # Appended, and for this import only, so that no file beside us can stand in for a library.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import supervision

    sys.path.pop()

EXIT_OWN_FAULT = 2


def close_all_files_but_the_standard_ones() -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                continue  # the listing's own, closed by now


def main() -> int:
    # Whatever our launcher leaked to us, other supervisors' pipes among it, must not live in us or in the command.
    close_all_files_but_the_standard_ones()
    if os.getpgrp() != os.getpid():
        os.setsid()  # the terminal's Ctrl-C is for our launcher to judge
    supervisor = supervision.Supervisor(commands=0, events=1)
    try:
        return supervisor.run()
    except Exception as error:  # noqa: BLE001 - the guard: whatever is wrong with us, the command must not outlive us
        supervision.complain(f"internal fault, the command is killed: {type(error).__name__}: {error}")
        supervisor.kill_all()
        return EXIT_OWN_FAULT


if __name__ == "__main__":
    sys.exit(main())
