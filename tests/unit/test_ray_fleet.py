"""The fleet over Ray, without Ray: what its exceptions become."""

from __future__ import annotations

import pytest
import ray
from ray.exceptions import RpcError

from coordinator.fleet import MemberGoneError
from coordinator.ray_fleet import RayFleet
from mesh.errors import TransportError
from mesh.ids import Epoch, Incarnation, IncarnationToken, Rank, RunUid
from mesh.messages import FenceOrder

FLEET = RayFleet(namespace="n", member_config={}, used_by=dict)
MEMBER = Incarnation(run_uid=RunUid("run"), epoch=Epoch(1), rank=Rank(0), token=IncarnationToken("t"))


@pytest.mark.parametrize("error", [RpcError("unavailable"), RuntimeError("not connected"), OSError("broken")])
async def test_a_ray_that_cannot_be_asked_may_be_asked_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(ray, "nodes", fail)
    with pytest.raises(TransportError, match="cannot be asked now"):
        await FLEET.machines()


async def test_an_actor_that_is_not_there_is_a_member_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", fail)
    with pytest.raises(MemberGoneError):
        await FLEET.fence(FenceOrder(incarnation=MEMBER, grace_s=1.0))
