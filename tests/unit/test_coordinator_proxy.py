"""What the API hears when Ray brings an exception instead of the coordinator's answer."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from coordinator.actor import RayCoordinator
from mesh.errors import InternalError, MeshError, StorageError, TransportError


class _Method:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def remote(self, *_: Any) -> Any:
        raise self._error


class _Handle:
    def __init__(self, error: Exception) -> None:
        self.serve = self.ping = _Method(error)


def _raised_there(cause: Exception) -> Exception:
    error: Exception = RayTaskError("serve", "the traceback", cause).as_instanceof_cause()
    return error


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (_raised_there(KeyError("rank")), InternalError),
        (_raised_there(TimeoutError("of its own")), InternalError),
        # Not `_raised_there`: its class would be one more in the tree of errors, for the tests that walk it.
        (RayTaskError("serve", "the traceback", StorageError("The journal is full.")), StorageError),
        (ActorUnavailableError("restarting", b"0" * 16), TransportError),
    ],
)
async def test_a_fault_of_the_coordinator_is_not_taken_for_a_restart(
    error: Exception, becomes: type[MeshError]
) -> None:
    with pytest.raises(becomes) as raised:
        await RayCoordinator(_Handle(error)).status()
    assert type(raised.value) is becomes
