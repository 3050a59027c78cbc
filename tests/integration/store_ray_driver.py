"""A Ray of its own with one RendezvousStore, killed once. Prints one JSON object; run as a program.

python tests/integration/store_ray_driver.py FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from coordinator.store_actor import RendezvousStore
from mesh.errors import MeshError, RendezvousError
from mesh.ids import Epoch, IncarnationToken, Rank, RunUid
from mesh.plan import Endpoint
from mesh.store.client import StoreClient
from tests.integration.small_ray import connect, small_ray

LIMIT_S = 90.0
GANG, E1, R0, TOKEN = RunUid("a" * 16), Epoch(1), Rank(0), IncarnationToken("t")


async def connected(
    store: Any, secret: str, *, on_lost: Callable[[MeshError], None] | None = None
) -> StoreClient:
    """A client of the store wherever it is now; tries again while it is being restarted."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                found = await store.endpoint.remote()
                endpoint = Endpoint(host=found["host"], port=found["port"], secret=secret)
                return await StoreClient.connect(endpoint, on_lost=on_lost)
            except (MeshError, ray.exceptions.RayActorError):
                await asyncio.sleep(0.05)


async def play() -> dict[str, Any]:
    actor = ray.remote(num_cpus=0)(RendezvousStore).options(name="store", max_restarts=-1)
    store = actor.remote(host="127.0.0.1", port=0, admin_secret="a", member_secret="m")
    lost = asyncio.Event()
    before = await connected(store, "m", on_lost=lambda _: lost.set())
    admin = await connected(store, "a")
    await admin.set_floor(GANG, E1, 1)
    await before.grant_lease(GANG, E1, R0, TOKEN, ttl_s=30.0, guard_s=0.3)
    health = await store.health.remote()
    ray.kill(store, no_restart=False)
    async with asyncio.timeout(LIMIT_S):
        await lost.wait()
    after = await connected(store, "m")
    try:
        await after.grant_lease(GANG, E1, R0, TOKEN, ttl_s=30.0, guard_s=0.3)
        reason = "none"
    except RendezvousError as error:
        reason = str(error.reason)
    admin = await connected(store, "a")
    await admin.set_floor(GANG, E1, 1)
    await after.grant_lease(GANG, E1, R0, TOKEN, ttl_s=30.0, guard_s=0.3)
    payloads = await after.arrive(GANG, E1, R0, TOKEN, payload=b"me", timeout_s=LIMIT_S)
    return {
        "gangs": health["gangs"],
        "is_another_instance": before.instance != after.instance,
        "reason": reason,
        "payloads": [payload.decode() for payload in payloads],
    }


async def main(folder: Path) -> None:
    async with small_ray(folder, cpus=1) as address:
        connect(address)
        try:
            print(json.dumps(await play()))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
