"""Somebody else's Ray on this host: started here, its address on stdout, `nodes` on stdin asks how many it has.

It is its directory server and one raylet, without a token; `ray.init` starts four Python processes beside them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from coordinator import ray_processes


def on_lost(name: str, code: int, tail: str) -> None:
    sys.exit(f"{name} ended with {code}: {tail}")


async def main(folder: Path) -> None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    ray_processes.HEAD_WORKERS_READY = 0
    foreign = ray_processes.RayProcesses(
        folder=folder / "ray", sockets=folder, environment=os.environ, on_lost=on_lost
    )
    address = await foreign.start_head()
    print(address, flush=True)
    client = GcsClient(address=address)
    while await asyncio.to_thread(sys.stdin.readline):
        print(len(client.get_all_node_info()), flush=True)
    await foreign.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
