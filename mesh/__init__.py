"""gangmesh: run one training command on several machines as a gang.

`mesh.connect()` is the way in from Python. Nothing heavy is imported before it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.client import MeshClient as MeshClient
    from mesh.client import connect as connect

__version__ = "0.1.0"
__all__ = ["MeshClient", "__version__", "connect"]


def __getattr__(name: str) -> object:
    if name in ("MeshClient", "connect"):
        from mesh import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
