"""Small facts about machines that outlive the coordinator, in the key-value store of Ray's directory. Blocking calls.

What is lost when the directory is lost is of no use then either: its machines are lost with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list, _internal_kv_put

from mesh.ids import MachineName

_NAMESPACE = b"gangmesh"
_CORDONED = "cordoned/"
_COMING = b"coming"


def note_cordoned(machine: MachineName) -> None:
    """Nobody gets this machine any more."""
    _internal_kv_put((_CORDONED + machine).encode(), b"1", namespace=_NAMESPACE)


def read_cordoned() -> set[MachineName]:
    keys = _internal_kv_list(_CORDONED.encode(), namespace=_NAMESPACE)
    return {MachineName(key.decode().removeprefix(_CORDONED)) for key in keys}


def note_coming(machines: Iterable[str]) -> None:
    """These are being acquired, to take the place of lost ones."""
    _internal_kv_put(_COMING, json.dumps(sorted(machines)).encode(), namespace=_NAMESPACE)


def read_coming() -> tuple[str, ...]:
    value = _internal_kv_get(_COMING, namespace=_NAMESPACE)
    return tuple(json.loads(value)) if value else ()
