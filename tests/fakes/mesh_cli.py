"""The real command line, which starts fake heads: `python -m tests.fakes.mesh_cli run …`.

$FAKE_CLI=fault makes it fail where nobody foresaw it.
"""

from __future__ import annotations

import os
import sys

import mesh.cli.head
import mesh.client
from mesh.cli import main


def fail(*_: object, **__: object) -> object:
    raise KeyError("nobody foresaw this")


if __name__ == "__main__":
    sys.argv[0] = "mesh"
    mesh.cli.head.PROGRAM = (sys.executable, "-m", "tests.fakes.head")
    if os.environ.get("FAKE_CLI") == "fault":
        mesh.client.connect = fail  # type: ignore[assignment]
    main()
