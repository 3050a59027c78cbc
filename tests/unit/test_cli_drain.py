"""`mesh drain` of a relay: what keeps it from going is said."""

from __future__ import annotations

from typing import cast

import pytest

from mesh.cli.machines import _remove_relay
from mesh.client import MeshClient
from mesh.errors import DeploymentError
from mesh.reasons import Reason


class Client:
    async def remove_relay(self, name: str) -> None:
        raise DeploymentError("The state folder cannot be used.", reason=Reason.STATE_NOT_WRITABLE)


async def test_a_relay_that_could_not_be_removed_is_not_said_to_be_unknown() -> None:
    with pytest.raises(DeploymentError, match="state folder"):
        await _remove_relay(cast(MeshClient, Client()), "x")
