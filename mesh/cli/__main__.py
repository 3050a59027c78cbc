"""`python -m mesh.cli`: the command line without an installed script."""

from __future__ import annotations

from mesh.cli import main

main()
