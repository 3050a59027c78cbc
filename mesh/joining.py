"""What the command line and the agents that it starts agree on."""

from __future__ import annotations

from pathlib import Path

MACHINE_STATE = Path("~/.gangmesh-machine")
RELAY_STATE = Path("~/.gangmesh-relay")
IDENTITY_NAME = "identity.json"
"""In the folder of a machine: who it is, and its head."""
JOIN_TOKEN_VARIABLE = "GANGMESH_JOIN_TOKEN"
"""A join token: `mesh join` takes it from there, and hands it over so."""
